"""Store: the records of trainings in a file, so that they outlive the server. Made by loading.py.

SQLite on a thread of its own. Records wait in memory until they are written: if the file cannot be written, they remain
available there, and no training fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import sqlite3
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from .records import TrainingRecord, TrainingStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.server.settings import Settings

NO_FILE = "none"
SCHEMA_VERSION = 1
"""The version of the tables: SQLite's user_version. A file of a later version is left alone."""
CLOSE_LIMIT_S = 5.0
"""How long the last records may take to be written."""
RETRY_S = 10.0
"""The delay after a failed write: a full disk may have space again."""
_BUSY_S = 1.0
_TABLE = (
    "CREATE TABLE IF NOT EXISTS trainings (number INTEGER PRIMARY KEY, uuid TEXT NOT NULL UNIQUE, model TEXT NOT NULL,"
    " status TEXT NOT NULL, shown TEXT NOT NULL, elapsed_s REAL NOT NULL, log TEXT NOT NULL)"
)
_PUT = (
    "INSERT INTO trainings (uuid, model, status, shown, elapsed_s, log) VALUES (?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (uuid) DO UPDATE SET status = excluded.status, shown = excluded.shown,"
    " elapsed_s = excluded.elapsed_s, log = excluded.log"
)

logger = logging.getLogger("penstock.deepaas")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def file_of(settings: Settings, environ: Mapping[str, str]) -> Path | None:
    """Return the file for a server's records; None for no file. Source: XDG Base Directory, "state".

    A port chosen by the system does not identify a server that could restart.
    """
    if settings.deepaas_jobs == NO_FILE or (not settings.deepaas_jobs and not settings.http_port):
        return None
    if settings.deepaas_jobs:
        return Path(settings.deepaas_jobs).absolute()
    state = Path(environ.get("XDG_STATE_HOME", ""))
    try:
        root = state if state.is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:  # the user has no home
        return None
    address = re.sub(r"[^0-9A-Za-z.]", "_", settings.http_address)
    return root / "penstock" / "deepaas" / f"{address}-{settings.http_port}.sqlite"


class Store:
    """The records of one server, in `file`, under an exclusive lock; in memory only if the file cannot be used.

    Invariants: `log` and the file have the last record that was put; the file is written in the order of the puts.
    Threads: the event loop's; the file has a thread of its own.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._database: sqlite3.Connection | None = None
        self._lock = -1
        self._pending: dict[str, TrainingRecord | None] = {}
        self._thread = ThreadPoolExecutor(1, "trainings")
        self._writing: asyncio.Task[None] | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        self._failing = False

    async def open(self) -> list[TrainingRecord]:
        """Open the file. Returns: its records, in the order of their start, without logs."""
        if self.file is None:
            return []
        try:
            return await self._on_thread(self._open, self.file)
        except (OSError, sqlite3.Error, ValueError) as error:
            logger.warning("trainings are kept in memory only: %s cannot be used: %s", self.file, error)
            await self._on_thread(self._release)
            self.file = None
            return []

    def put(self, record: TrainingRecord) -> None:
        """Store a record, replacing that of the same training."""
        self._pending[record.uuid] = record
        self._write_soon()

    def drop(self, uuid: str) -> None:
        """Remove the record of a training."""
        if self._database is None:
            self._pending.pop(uuid, None)
        else:
            self._pending[uuid] = None
            self._write_soon()

    async def log(self, uuid: str) -> str:
        """Return the log of a training, "" if there is none."""
        if uuid in self._pending:
            record = self._pending[uuid]
            return record.log if record is not None else ""
        if self._database is None:
            return ""
        try:
            return await self._on_thread(self._read_log, uuid)
        except sqlite3.Error:
            return ""

    async def flush(self) -> None:
        """Wait until pending records are in the file, or could not be written."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def close(self) -> None:
        """Write pending records, and close the file."""
        self._write_soon()  # also what could not be written before
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self.flush()
                await self._on_thread(self._release)
        except TimeoutError:
            self._thread.submit(self._release)  # after the write in progress
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._thread.shutdown(wait=False)

    def _write_soon(self) -> None:
        if self._database is not None and self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_pending())

    async def _write_pending(self) -> None:
        try:
            while batch := dict(self._pending):
                await self._on_thread(self._write, batch)
                self._failing = False
                for uuid, record in batch.items():
                    if self._pending[uuid] is record:
                        del self._pending[uuid]
        except (sqlite3.Error, OSError) as error:
            if not self._failing:
                logger.warning("trainings cannot be saved in %s: %s; they are kept in memory", self.file, error)
            self._failing = True
            if self._retry_timer is not None:
                self._retry_timer.cancel()
            self._retry_timer = asyncio.get_running_loop().call_later(RETRY_S, self._write_soon)
        finally:
            self._writing = None

    async def _on_thread(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    # -- on the thread -----------------------------------------------------------------------------------------

    def _open(self, file: Path) -> list[TrainingRecord]:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # not the file itself: closing it anywhere in this process would release SQLite's own locks
        self._lock = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(0, "another server uses it") from None
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # users' arguments are private
        database = sqlite3.connect(file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            ((version,),) = database.execute("PRAGMA user_version")
            if version > SCHEMA_VERSION:
                raise ValueError(f"it was written by a later version of Penstock ({version})")
            database.execute(_TABLE)
            database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            rows = database.execute(
                "SELECT uuid, model, status, shown, elapsed_s FROM trainings ORDER BY number"
            ).fetchall()
            records = [
                TrainingRecord(uuid, model, TrainingStatus(status), document, elapsed_s)
                for uuid, model, status, document, elapsed_s in rows
            ]
        except BaseException:
            database.close()
            raise
        self._database = database
        return records

    def _write(self, batch: Mapping[str, TrainingRecord | None]) -> None:
        if self._database is None:
            return
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for uuid, record in batch.items():
                if record is None:
                    self._database.execute("DELETE FROM trainings WHERE uuid = ?", (uuid,))
                    continue
                row = (uuid, record.model, record.status.value, record.document, record.elapsed_s, record.log)
                self._database.execute(_PUT, row)
            self._database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back itself
                self._database.execute("ROLLBACK")
            raise

    def _read_log(self, uuid: str) -> str:
        rows = (
            self._database.execute("SELECT log FROM trainings WHERE uuid = ?", (uuid,)).fetchall()
            if self._database
            else []
        )
        return str(rows[0][0]) if rows else ""

    def _release(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
