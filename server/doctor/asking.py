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

_LAST = 300


class AskError(Exception):
    """Why a probe gave no answer."""


class ProbeProcess:
    """One process, which receives `words` on its standard input, and has `limit_s` from now on to answer."""

    def __init__(self, command: Sequence[str], limit_s: float, words: bytes = b"") -> None:
        self._command, self._limit_s, self._words = command, limit_s, words
        self._text = ""
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="doctor", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Wait for its answer. Raises: AskError."""
        self._thread.join()
        if self._failure:
            raise AskError(self._failure)
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
            out, err = process.communicate(self._words, timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            self._failure = f"no answer within {self._limit_s:g} s"
            _leave(process)
            return
        if process.returncode:
            self._failure = _ended(process.returncode, err.decode("utf-8", "replace"))
        self._text = out.decode("utf-8", "replace")


def _leave(process: subprocess.Popen[bytes]) -> None:
    """Kill it without waiting: a process that waits for a driver does not end."""
    process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    threading.Thread(target=process.wait, name="doctor left", daemon=True).start()


def child(word: str, limit_s: float, words: bytes = b"") -> ProbeProcess:
    """Start one of the probes of `child`."""
    return ProbeProcess([sys.executable, "-m", "penstock.server.doctor.child", word], limit_s, words)


def answer(asked: ProbeProcess) -> Mapping[str, Any]:
    """Return a child's answer. Raises: AskError."""
    text = asked.text()
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise AskError(f"the answer cannot be parsed: {text[-_LAST:]!r}")
    return found


def _ended(status: int, text: str) -> str:
    lines = text.strip().splitlines()
    how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"{how}: {lines[-1][-_LAST:]}" if lines else how
