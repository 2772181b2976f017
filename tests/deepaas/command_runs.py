"""How a command is run, and what counts of what comes of it. Runs on Python 3.10 too."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.originals import Player, free_port, text_of

from .replay import COMPILED, MODULES, ORIGINAL, installed

COMMANDS = Path(__file__).with_name("commands.json")
_LOGGED = re.compile(r"^\S+ \S+ \d+ (?P<level>[A-Z]+) (?P<logger>\S+) (?:\[[^]]*\] )?(?P<text>.*)$")
_WITHIN_S = 60


def run(case: Mapping[str, Any], program: list[str], start: Callable[..., Any] = subprocess.Popen) -> dict[str, Any]:
    """Run a command. `start`: what starts it, as Popen does.

    Returns: {"serves": the names of its models}, or exit (the status), said (what it prints, lines of a log as their
    texts), the last line of what it says aside where it fails, and written: the files that it leaves, name -> content.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name) / "here", free_port()
        folder.mkdir()
        (Path(name) / "installed").mkdir()
        installed({"models": case.get("models", {}), "files": {}}, Path(name) / "installed")
        for file, text in case.get("files", {}).items():
            (folder / file).write_text(text)
        runs = case["program"] == "deepaas-run" and "--listen-port" not in case["words"]
        words = [*program, *(["--listen-port", str(port)] if runs else []), *case["words"]]
        environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": name,
            "OPENBLAS_NUM_THREADS": "1",  # as tests/conftest.py has it
            "PYTHONPATH": os.pathsep.join([str(MODULES), str(Path(name) / "installed")]),
            "PYTHONPYCACHEPREFIX": str(COMPILED),
            **case.get("environment", {}),
        }
        with (Path(name) / "out").open("w+b") as out, (Path(name) / "aside").open("w+b") as aside:
            child = start(
                words,
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=aside,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                if runs and (served := _served(port, child)) is not None:
                    return {"serves": served}
                child.wait(_WITHIN_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # the session that was begun for it, and nothing else
                child.wait()
            out.seek(0), aside.seek(0)
            output, beside = out.read().decode(), aside.read().decode()
        remaining = {
            path.relative_to(folder).as_posix(): text_of(path.read_bytes(), "body")
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.relative_to(folder).as_posix() not in case.get("files", {})
        }
    answer: dict[str, Any] = {"exit": child.returncode}
    if child.returncode:
        critical = [line for line in _messages(output) if line.startswith("CRITICAL")]
        answer["last"] = _masked((beside.strip().splitlines() or critical or [""])[-1])
    elif "deepaas-cli" in case["program"]:
        answer["said"] = _messages(output)
    if remaining:
        answer["written"] = {
            file: {key: _masked(text) for key, text in body.items()} for file, body in remaining.items()
        }
    return answer


def _served(port: int, child: Any) -> list[str] | None:
    """Wait until it tells of its models, or has ended. Returns: their names."""
    end = time.monotonic() + _WITHIN_S
    while child.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError, KeyError):
            answer = Player(ORIGINAL, port).play({"method": "GET", "path": "/v2/models/"})
            if answer["status"] == 200:
                return [model["links"][0]["href"].rpartition("/")[2] for model in json.loads(answer["body"])["models"]]
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.05)
    return None


def _messages(text: str) -> list[str]:
    lines = []
    for line in text.replace("\x1b[00m", "").splitlines():
        logged = _LOGGED.match(line)
        lines.append(_masked(f"{logged['level']} {logged['text']}" if logged else line))
    return [line for line in lines if line]


def _masked(text: str) -> str:
    for pattern, replacement in ORIGINAL.masks:
        text = re.sub(pattern, replacement, text)
    return re.sub(r"\b\d+:\d\d:\d\d\.\d{6}\b", "<duration>", text)
