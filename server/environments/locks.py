"""FileLock: lets one process at a time build an environment. Used by `environments.py`."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.backends.errors import Code, InferError

logger = logging.getLogger("penstock.environments")

POLL_INTERVAL_S = 0.1
"""The polling interval: a blocking flock could not be cancelled from another thread."""


class FileLock:
    """A lock on a file, held for the duration of the block, and by every child that inherits `fileno`.

    If the server is killed while pip runs on, the lock stays held, and nothing else works in the same folder.
    Raises: InferError (NOT_READY) if `stopping` is set meanwhile; OSError.
    """

    def __init__(self, path: Path, stopping: threading.Event, label: str) -> None:
        self._path = path
        self._stopping = stopping
        self._label = label
        self._descriptor = -1

    def fileno(self) -> int:
        """Return the descriptor that holds the lock."""
        return self._descriptor

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._acquire()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def _acquire(self) -> None:
        logged = False
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in {errno.EAGAIN, errno.EACCES}:
                    raise
            else:
                return
            if not logged:
                logger.info("%s: waiting for another process that is creating its environment", self._label)
                logged = True
            if self._stopping.wait(POLL_INTERVAL_S):
                raise InferError(Code.NOT_READY, "Server is stopping")
