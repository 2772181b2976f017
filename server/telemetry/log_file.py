"""LogFile: the file named by --log-file, to which several processes may append. Used by logs.py."""

from __future__ import annotations

from contextlib import suppress
from io import FileIO


class LogFileError(Exception):
    """A log file that cannot be opened; the message is for the operator."""


class LogFile:
    """Appends whole lines, each as one write: the processes of a server share the file.

    Invariant: if a full disk accepted only a part of a write, the rest is written before anything else once there is
    space.
    Threads: one.
    """

    def __init__(self, path: str) -> None:
        """Open the file. Raises: LogFileError."""
        self.path = path
        self._unwritten = b""
        try:
            self._file = FileIO(path, "a")
        except OSError as error:
            raise LogFileError(f"--log-file {path}: failed to open log file: {error.strerror}") from error

    def write(self, text: str) -> None:
        """Write lines. Raises: OSError if there is no space, and then nothing of them is kept."""
        self._write_unwritten()
        lines = text.encode("utf-8", "backslashreplace")
        self._unwritten = lines[self._file.write(lines) :]
        with suppress(OSError):
            self._write_unwritten()

    def _write_unwritten(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._file.isatty()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
