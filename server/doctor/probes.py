"""Probes: they run in separate processes, in parallel, and are abandoned if they do not end.

A driver may hang, and its libraries may crash: the doctor must survive both.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_TEXT_CHARS = 300


class ProbeError(Exception):
    """Why a probe gave no answer."""


class ProbeProcess:
    """One process, which receives `stdin` on its standard input, and has `limit_s` from now on to answer."""

    def __init__(self, command: Sequence[str], limit_s: float, stdin: bytes = b"") -> None:
        self._command, self._limit_s, self._stdin = command, limit_s, stdin
        self._text = ""
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="doctor", daemon=True)
        self._thread.start()

    def wait_output(self) -> str:
        """Wait for its answer. Raises: ProbeError."""
        self._thread.join()
        if self._failure:
            raise ProbeError(self._failure)
        return self._text

    def _run(self) -> None:
        """Wait for the process, at most its limit. Threads: its own."""
        try:
            process = subprocess.Popen(  # noqa: S603 - the doctor's own commands
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            self._failure = str(error)
            return
        try:
            out, err = process.communicate(self._stdin, timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            self._failure = f"no answer within {self._limit_s:g} s"
            _abandon(process)
            return
        if process.returncode:
            self._failure = _describe_exit(process.returncode, err.decode("utf-8", "replace"))
        self._text = out.decode("utf-8", "replace")


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Kill it without waiting: a process that waits for a driver does not end."""
    process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    threading.Thread(target=process.wait, name="doctor left", daemon=True).start()


def start(name: str, limit_s: float, stdin: bytes = b"") -> ProbeProcess:
    """Start one of the probes of child.py."""
    return ProbeProcess([sys.executable, "-m", "penstock.server.doctor.child", name], limit_s, stdin)


def read_answer(process: ProbeProcess) -> Mapping[str, Any]:
    """Return a child's answer. Raises: ProbeError."""
    text = process.wait_output()
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ProbeError(f"the answer cannot be parsed: {text[-_MAX_TEXT_CHARS:]!r}")
    return parsed


def _describe_exit(status: int, text: str) -> str:
    lines = text.strip().splitlines()
    outcome = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"{outcome}: {lines[-1][-_MAX_TEXT_CHARS:]}" if lines else outcome
