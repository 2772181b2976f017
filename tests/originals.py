"""The recorded answers of an original server: how a case is sent, played, recorded and compared.

A case is plain JSON, as in cases/*.json; one file holds what one server is sent, in order. Requests go over a bare
socket, without a library that would correct them. Runs on Python 3.10 too: an original may be recorded with its own
interpreter, by the same code that plays the cases against ours.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
JSON, URLENCODED, FORM = "application/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=edge"
_WITHIN_S, _SILENT_S = 60.0, 5.0

Deviations = Mapping[str, "tuple[str, dict[str, Any]]"]
"""`group/case` -> why we answer otherwise, and in which parts of the answer (all of it where the original hangs).
A body of None is not compared."""
Serving = Callable[[Mapping[str, Any]], "AbstractContextManager[int | Mapping[str, int]]"]
"""Runs a server as a group's `server` says, and yields its port."""


@dataclass(frozen=True)
class RecordedRequest:
    """One request.

    A name in braces in path or body is replaced by what an earlier `keep` has stored. keep: name -> a pattern whose
    group is found in the answer's body. until: sent again until the body of a 200 matches. silent: the original may
    not answer at all, which is known after 5 s. unread: the body of the answer is not compared. port: of a server with
    several, which.
    """

    name: str
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    keep: dict[str, str] = field(default_factory=dict)
    until: str = ""
    silent: bool = False
    unread: bool = False
    port: str = ""

    def written(self) -> dict[str, Any]:
        """Return the case as it stands in the file, without its answer."""
        case: dict[str, Any] = {"name": self.name, "method": self.method, "path": self.path}
        if self.body:
            case.update(text_of(self.body, "body"))
        for name in ("headers", "keep", "until", "silent", "unread", "port"):
            if getattr(self, name):
                case[name] = getattr(self, name)
        return case


@dataclass(frozen=True)
class Group:
    """The requests to one server, in order. `server`: how it is started, in the terms of its own record.py (JSON)."""

    name: str
    server: dict[str, Any]
    requests: Sequence[RecordedRequest]


def get(name: str, path: str, method: str = "GET", **options: Any) -> RecordedRequest:
    """Make a GET request."""
    return RecordedRequest(name, path, method=method, **options)


def post(name: str, path: str, value: Any = None, kind: str = JSON, **options: Any) -> RecordedRequest:
    """Make a POST request of a value as JSON, or of bytes (and text) as they are.

    `kind`: the content type, none if empty.
    """
    body = value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else _dumped(value)
    headers = {**({"Content-Type": kind} if kind and value is not None else {}), **options.pop("headers", {})}
    return RecordedRequest(name, path, body, headers=headers, **options)


def multipart(*parts: Any) -> bytes:
    """Build a multipart form: (name, content), or with a file name, or with a file name and a content type."""
    lines = []
    for name, content, *more in parts:
        filename = f'; filename="{more[0]}"' if more and more[0] is not None else ""
        kind = f"\r\nContent-Type: {more[1]}" if len(more) > 1 else ""
        head = f'--edge\r\nContent-Disposition: form-data; name="{name}"{filename}{kind}\r\n\r\n'
        lines.append(head.encode() + (content if isinstance(content, bytes) else content.encode()) + b"\r\n")
    return b"".join([*lines, b"--edge--\r\n"])


def _dumped(value: Any) -> bytes:
    return b"" if value is None else json.dumps(value).encode()


def text_of(content: bytes, name: str) -> dict[str, str]:
    """Represent bytes as text if they are text, and otherwise in base64, as `name` or `name64`."""
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {name + "64": base64.b64encode(content).decode()}


def bytes_of(case: Mapping[str, Any], name: str) -> bytes:
    """Decode what `text_of` has written."""
    return base64.b64decode(case[name + "64"]) if name + "64" in case else str(case.get(name, "")).encode()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    return port


def await_port(port: int, running: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait until something listens on a port. Raises: RuntimeError if `running` says that nothing will."""
    end = time.monotonic() + within_s
    while True:
        with suppress(OSError), socket.create_connection((HOST, port), 1):
            return
        if not running() or time.monotonic() > end:
            raise RuntimeError("it does not serve")
        time.sleep(0.05)


@dataclass(frozen=True)
class Original:
    """A server whose answers are recorded.

    cases: the folder of the files. compared: the headers of an answer that count, in small letters; the others belong
    to the server (Date, Connection). usual: those that an answer of the files has where it names none. masks: (pattern,
    replacement) for what differs from run to run in a body or header. shaped: what counts of an answer to a case.
    """

    cases: Path
    compared: tuple[str, ...]
    usual: dict[str, str]
    masks: tuple[tuple[str, str], ...] = ()
    shaped: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]] = lambda case, answer: answer

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.cases.glob("*.json"))

    def read(self, name: str) -> dict[str, Any]:
        """Read a file: {"server": ..., "cases": [...]}."""
        group: dict[str, Any] = json.loads((self.cases / f"{name}.json").read_text("utf-8"))
        return group

    def alike(self) -> list[list[str]]:
        """List the groups, with similar servers together: starting a server takes longer than querying it."""
        servers: dict[str, list[str]] = {}
        for name in self.names():
            servers.setdefault(json.dumps(self.read(name)["server"]), []).append(name)
        return list(servers.values())

    def record(self, group: Group, serving: Serving) -> None:
        """Send the original all cases, and write the file.

        An original that stops answering is restarted for the rest.
        """
        names = [request.name for request in group.requests]
        if len(set(names)) != len(names):
            raise RuntimeError(f"{group.name}: {sorted({name for name in names if names.count(name) > 1})}")
        lines: list[str] = []
        while len(lines) < len(names):
            with serving(group.server) as port:
                player = Player(self, port)
                for request in group.requests[len(lines) :]:
                    case = request.written()
                    case["answer"] = player.play(case)
                    if case["answer"].get("headers") == self.usual:
                        del case["answer"]["headers"]
                    lines.append(json.dumps(case))
                    if "hangs" in case["answer"]:
                        break
        text = json.dumps({"server": group.server})[:-1] + ',\n"cases": [\n' + ",\n".join(lines) + "\n]}\n"
        (self.cases / f"{group.name}.json").write_text(text, "utf-8")

    def expected_of(self, group: str, case: Mapping[str, Any], deviations: Deviations) -> dict[str, Any]:
        """Return the answer required of ours: the original's, except for the listed deviations."""
        answer = dict(case["answer"])
        if "hangs" in answer:
            answer = {}
        _, otherwise = deviations.get(f"{group}/{case['name']}", ("", {}))
        answer.setdefault("headers", self.usual)
        if {"body", "body64"} & otherwise.keys():
            answer.pop("body", None), answer.pop("body64", None)
        return {**answer, **otherwise}

    def differences(self, group: str, port: int | Mapping[str, int], deviations: Deviations) -> list[str]:
        """Play the cases of a group against ours. Returns: the differences, in words."""
        player, wrong = Player(self, port), []
        for case in self.read(group)["cases"]:
            expected, answer = self.expected_of(group, case, deviations), player.play(case)
            if "body" in expected and expected["body"] is None:
                expected = {name: value for name, value in expected.items() if name != "body"}
                answer = {name: value for name, value in answer.items() if not name.startswith("body")}
            if answer != expected:
                wrong += [
                    f"{group}/{case['name']}",
                    f"  wanted {self._shown(expected)}",
                    f"  was    {self._shown(answer)}",
                ]
        return wrong

    def _shown(self, answer: Mapping[str, Any]) -> str:
        return " ".join(f"{name}={value!r}" for name, value in answer.items() if value != self.usual)


class Player:
    """Plays the cases of one group, in order. `kept` is what they have kept of each other's answers."""

    def __init__(self, original: Original, port: int | Mapping[str, int]) -> None:
        self.original = original
        self.ports = port if isinstance(port, Mapping) else {"": port}
        self.stored: dict[str, str] = {}

    def play(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer: status, headers and body (or body64); or {"hangs": true}; status 0 if there was none."""
        end = time.monotonic() + _WITHIN_S
        while True:
            answer = self._ask(case)
            if (
                answer.get("status") != 200
                or re.search(case.get("until", ""), answer.get("body", ""))
                or time.monotonic() > end
            ):
                break
            time.sleep(0.02)  # the original is polled at most 50 times a second
        for name, pattern in case.get("keep", {}).items():
            found = re.search(pattern, answer.get("body", ""))
            self.stored[name] = found.group(1) if found else "nothing"
        if case.get("unread"):
            answer = {name: value for name, value in answer.items() if not name.startswith("body")}
        return self.original.shaped(case, self._masked(answer))

    def _masked(self, answer: dict[str, Any]) -> dict[str, Any]:
        for pattern, replacement in self.original.masks:
            if "body" in answer:
                answer["body"] = re.sub(pattern, replacement, answer["body"])
            for name, value in answer.get("headers", {}).items():
                answer["headers"][name] = re.sub(pattern, replacement, value)
        return answer

    def _filled(self, text: str) -> str:
        for name, value in self.stored.items():
            text = text.replace("{" + name + "}", value)
        return text

    def _ask(self, case: Mapping[str, Any]) -> dict[str, Any]:
        body = bytes_of(case, "body")
        if "body" in case:
            body = self._filled(case["body"]).encode()
        fields = {"Host": "x", "Connection": "close", **case.get("headers", {})}
        if (body or case["method"] == "POST") and "Transfer-Encoding" not in fields:
            fields.setdefault("Content-Length", str(len(body)))
        lines = [f"{case['method']} {self._filled(case['path'])} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        within_s = _SILENT_S if case.get("silent") else _WITHIN_S
        parts = []
        with socket.create_connection((HOST, self.ports[case.get("port", "")]), timeout=within_s) as connection:
            with suppress(ConnectionError):  # it may answer and close before it has read everything
                connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
            try:
                while part := connection.recv(65536):
                    parts.append(part)
            except TimeoutError:
                return {"hangs": True}
            except ConnectionError:
                pass
        return self._answered(case["method"], b"".join(parts))

    def _answered(self, method: str, raw: bytes) -> dict[str, Any]:
        head, _, content = raw.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100"):
            head, _, content = content.partition(b"\r\n\r\n")
        line, *found = head.decode("latin-1").split("\r\n")
        named = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in found)}
        if "chunked" in named.get("transfer-encoding", ""):
            content = _joined(content)
        compared = (*self.original.compared, "content-length") if method == "HEAD" else self.original.compared
        headers = {name: named[name] for name in sorted(named) if name in compared}
        return {"status": int(line.split(" ")[1]) if line else 0, "headers": headers, **text_of(content, "body")}


def _joined(content: bytes) -> bytes:
    joined = b""
    while content:
        size, _, content = content.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        joined, content = joined + content[:length], content[length + 2 :]
    return joined
