"""A headless Chromium, driven through a pipe by the DevTools protocol: no port, no driver, one process to end."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

PATIENCE_S = 30.0
DRAWN = """new Promise((drawn) => {
  const look = () => document.documentElement.dataset.drawn ? drawn(true) : requestAnimationFrame(look);
  look();
})"""


def installed() -> str | None:
    """Where it is, if it is."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Opened:
    """A page that was opened: what it asked for, and what went wrong in it."""

    browser: Browser
    session: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    loaded: bool = False

    def record(self, event: dict[str, Any]) -> None:
        event_params = event["params"]
        match event["method"]:
            case "Page.loadEventFired":
                self.loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(event_params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(event_params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if event_params["type"] in {"error", "warning", "assert"}:
                self.complaints.append(str([each.get("value") for each in event_params["args"]]))
            case "Log.entryAdded" if event_params["entry"]["level"] in {"error", "warning"}:
                self.complaints.append(event_params["entry"]["text"])

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.ask(method, self.session, **params)

    def value(self, expression: str) -> Any:
        """What an expression comes to in the page, promises awaited."""
        answer = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")


class Browser:
    """The process. Every wait is bounded; `close` ends its whole group."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs, self._orders = os.pipe()
        self._write_end, back = os.pipe()
        words = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        nothing = os.open(os.devnull, os.O_RDWR)
        places = [(os.POSIX_SPAWN_DUP2, mine, at) for mine, at in ((nothing, 1), (nothing, 2), (theirs, 3), (back, 4))]
        self._pid = os.posix_spawn(program, words, dict(os.environ), file_actions=places, setpgroup=0)
        for each in (theirs, back, nothing):
            os.close(each)
        self._number = 0
        self._rest = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Opened] = {}

    def open(self, url: str, *, dark: bool = False) -> Opened:
        """Open a page and wait until its figures are drawn."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Opened(self, session)
        for part in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{part}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", features=[scheme])
        page.ask("Page.navigate", url=url)
        until = monotonic() + PATIENCE_S
        while not page.loaded:
            self._read(until)
        page.value(DRAWN)
        return page

    def ask(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        order = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        until = monotonic() + PATIENCE_S
        while number not in self._answers:
            self._read(until)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _read(self, until: float) -> None:
        ready, _, _ = select.select([self._write_end], [], [], max(until - monotonic(), 0))
        received = os.read(self._write_end, 1 << 16) if ready else b""
        if not received:
            raise TimeoutError("the browser says nothing")
        *messages, self._rest = (self._rest + received).split(b"\0")
        for each in map(json.loads, messages):
            if "id" in each:
                self._answers[each["id"]] = each
            elif page := self._pages.get(each.get("sessionId", "")):
                page.record(each)

    def close(self) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._orders)
        os.close(self._write_end)
