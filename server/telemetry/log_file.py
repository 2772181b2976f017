"""LogFile: the file that --log-file names, to which several processes may append. Used by logs.py."""

from __future__ import annotations

from contextlib import suppress
from io import FileIO


class LogFileError(Exception):
    """A log file that cannot be opened; the message is for the operator."""


class LogFile:
    """Takes whole lines, each as one write to its end: the processes of a server share it.

    Invariant: what a full disk has taken a part of is ended, once there is space again, before anything else.
    Threads: one.
    """

    def __init__(self, path: str) -> None:
        """Open it. Raises: LogFileError."""
        self.path = path
        self._rest = b""
        try:
            self._file = FileIO(path, "a")
        except OSError as error:
            raise LogFileError(f"--log-file {path}: failed to open log file: {error.strerror}") from error

    def write(self, text: str) -> None:
        """Write lines. Raises: OSError, where there is no space, and then nothing is kept of them."""
        self._finish()
        lines = text.encode("utf-8", "backslashreplace")
        self._rest = lines[self._file.write(lines) :]
        with suppress(OSError):
            self._finish()

    def _finish(self) -> None:
        while self._rest:
            self._rest = self._rest[self._file.write(self._rest) :]

    def flush(self) -> None:
        """Do nothing: each write has been one."""

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return self._file.isatty()

    def close(self) -> None:
        """Close it."""
        self._file.close()
