"""Files: uploads, stored for the duration of a call. Source: deepaas 2.6.0, model/v2/wrapper.py.

The original never removed them. Here each worker has its own folder in the system's temporary folder (TMPDIR), created
for the first upload and locked while the worker lives; a worker that opens removes the folders of killed workers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .answers import Refusal, text_answer
from .multipart import Upload

_PREFIX = "deepaas-uploads-"
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Uploads:
    """The uploads of one worker: `store` stores those of a call, `clear` removes them. Threads: one."""

    def __init__(self) -> None:
        self._folder = ""
        self._lock = -1
        self._paths: list[str] = []
        self._file_class: Any = None
        self._count = 0
        self._pid = os.getpid()
        remove_stale_folders()

    def store(self, arguments: dict[str, Any]) -> None:
        """Store the uploads among the arguments, including those in lists, and replace each by an UploadedFile.

        Raises: Refusal (507) if the disk is full, in which case nothing remains stored; OSError.
        """
        try:
            for name, value in arguments.items():
                if isinstance(value, Upload):
                    arguments[name] = self._store_one(value)
                elif isinstance(value, list) and any(isinstance(each, Upload) for each in value):
                    arguments[name] = [self._store_one(each) if isinstance(each, Upload) else each for each in value]
        except OSError as error:
            self.clear()
            if error.errno in _DISK_FULL:
                raise Refusal(text_answer(507, "Insufficient Storage")) from error
            raise

    def clear(self) -> None:
        """Remove the stored files. Ignores those that the model itself removed or moved."""
        while self._paths and os.getpid() == self._pid:  # a child that user code forked must not remove them
            with contextlib.suppress(OSError):
                os.unlink(self._paths.pop())  # noqa: PTH108 - a Path costs more than the call

    def close(self) -> None:
        """Remove everything."""
        self.clear()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _store_one(self, upload: Upload) -> Any:
        descriptor, path = self._create_file()
        self._paths.append(path)
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - it is open already
            remaining = upload.content
            while remaining.nbytes:
                remaining = remaining[file.write(remaining) :]
        if self._file_class is None:
            self._file_class = uploaded_file_class()
        return self._file_class(upload.name, path, upload.content_type, upload.filename)

    def _create_file(self) -> tuple[int, str]:
        """Create a file. Returns: its descriptor, and its path. Raises: OSError."""
        self._count += 1  # no one else writes into the folder: numbers suffice, and cost 20 us less than random names
        if self._folder:
            path = f"{self._folder}/{self._count}"
            with contextlib.suppress(FileNotFoundError):  # the folder was removed
                return os.open(path, _CREATE_FLAGS, 0o600), path
        self.close()
        self._folder, self._lock = _own_folder()
        path = f"{self._folder}/{self._count}"
        return os.open(path, _CREATE_FLAGS, 0o600), path


def uploaded_file_class() -> Any:
    """Return the class that user code may have imported: the original's if installed."""
    return importlib.import_module("deepaas.model.v2.wrapper").UploadedFile


def remove_stale_folders() -> None:
    """Remove the folders of workers that were killed, which are no longer locked; blocks."""
    for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and (descriptor := _lock_folder(str(folder))) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def _own_folder() -> tuple[str, int]:
    """Create a folder. Returns: its path, and the descriptor that locks it, or -1 if locks are not supported.

    Raises: OSError.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            descriptor = _lock_folder(folder)
        except OSError:
            return folder, -1
        if descriptor is not None:
            return folder, descriptor


def _lock_folder(folder: str) -> int | None:
    """Lock a folder. Returns: the descriptor of the lock, or None if another process has locked or removed it.

    Raises: OSError if locks are not supported.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
