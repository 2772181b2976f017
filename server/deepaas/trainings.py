"""Trainings: queues, runs and ends the trainings of a server. Made by loading.py; jobs.py presents them to clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from penstock.backends.errors import Code, InferError
from penstock.server.answering import LARGE_BYTES, off_loop

from .progress import Log
from .records import TrainingRecord, TrainingStatus, begun, ended, trained

if TYPE_CHECKING:
    from .store import Store

MOST_WAITING = 1000
"""The most trainings of a model that may wait for others to end."""
MOST_KEPT = 1000
"""The most ended trainings of a model that are kept: the oldest are dropped."""
SAVE_S = 2.0
"""How long a training's output may be in memory only."""
END_S = 5.0
"""How long a client waits for the end of a training it has cancelled; the system may take longer to end a process."""
CLOSE_LIMIT_S = 10.0
SERVER_ENDED = "the server has ended while the training ran"

logger = logging.getLogger("penstock.deepaas")


class Trains(Protocol):
    """A Trainer."""

    begun: bool

    async def run(self, request: bytes) -> bytes: ...
    def kill(self, why: str) -> None: ...


Trainers = Callable[[str, str, Callable[[str], None]], Trains]
"""Makes a Trainer from the model's name, the training's uuid, and a callback for each line. Raises InferError
(NOT_READY)."""


@dataclass(slots=True, eq=False)
class Training:
    """A training of this server process, or an ended one of an earlier process.

    `request` is the input of its Trainer: a file if it is large and had to wait. `verdict` is why it ends early: its
    status then, and the reason. `over` is set once it has ended, and none of it runs any more. The Store has the log of
    an ended training.
    """

    record: TrainingRecord
    began: datetime
    request: bytes | IO[bytes] = b""
    log: Log | None = None
    trainer: Trains | None = None
    verdict: tuple[TrainingStatus, str] | None = None
    saving: asyncio.TimerHandle | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def phase(self) -> str:
        """Its phase: waiting, loading (the model), training or ended."""
        if self.over.is_set():
            return "ended"
        if self.trainer is None:
            return "waiting"
        return "training" if self.trainer.begun else "loading"


@dataclass(slots=True)
class Queue:
    """The trainings of one model, by uuid in the order of their start, and those that wait."""

    runs: dict[str, Training] = field(default_factory=dict)
    waiting: deque[Training] = field(default_factory=deque)
    running: int = 0


class Trainings:
    """All trainings of one server.

    Invariants: at most `at_once` trainings of a model run; the others wait, and start in the order in which they were
    added. A training that is added ends in exactly one TrainingStatus, and only then is `over` set. A removed training
    is no longer found. Threads: the event loop's.
    """

    def __init__(
        self, trainers: Trainers, store: Store, at_once: int, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.store = store
        self._trainers = trainers
        self._at_once = at_once
        self._now = now
        self._queues: dict[str, Queue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._opened = self._closed = False

    async def open(self) -> None:
        """Load the records of earlier trainings, once."""
        async with self._opening:
            if self._opened:
                return
            for record in await self.store.open():
                try:
                    run = Training(
                        await self._as_ended(record), datetime.fromisoformat(json.loads(record.shown)["date"])
                    )
                except (ValueError, KeyError, TypeError):
                    logger.warning("the record of training %s cannot be read", record.uuid)
                    continue
                run.over.set()
                self._of(record.model).runs[record.uuid] = run
            self._opened = True

    async def _as_ended(self, record: TrainingRecord) -> TrainingRecord:
        """Mark a training that was running when its server ended as failed."""
        if record.status is not TrainingStatus.RUNNING:
            return record
        shown = ended(record.shown, TrainingStatus.ERROR, message=SERVER_ENDED)
        record = replace(record, status=TrainingStatus.ERROR, shown=shown)
        self.store.put(replace(record, log=await self.store.log(record.uuid)))
        return record

    async def close(self) -> None:
        """End all trainings, and save their state."""
        self._closed = True
        with contextlib.suppress(TimeoutError):  # what has not ended by then is reported by the next server as an error
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._end_all(self._queues.values(), SERVER_ENDED)
                if self._tasks:
                    await asyncio.wait(self._tasks)  # those removed
        await self.store.close()

    async def unloaded(self, name: str) -> None:
        """End the trainings of a model that is no longer served."""
        await self._end_all([self._of(name)], f"model '{name}' was unloaded while the training ran")

    # -- queries and commands ----------------------------------------------------------------------------------

    def all(self, name: str) -> list[Training]:
        """List the trainings of a model, in the order of their start."""
        return list(self._of(name).runs.values())

    def find(self, name: str, uuid: str) -> Training | None:
        """Return one."""
        return self._of(name).runs.get(uuid)

    def check_room(self, name: str) -> None:
        """Reject what `add` would. Raises: InferError (OVERLOADED: too many wait; NOT_READY: the server stops)."""
        if self._closed:
            raise InferError(Code.NOT_READY, "the server stops")
        if len(self._of(name).waiting) >= MOST_WAITING:
            raise InferError(Code.OVERLOADED, f"{MOST_WAITING} trainings of model '{name}' wait already")

    async def add(self, name: str, args: Any, request: bytes) -> Training:
        """Start a training, or queue it. `args` are in the form for clients. Raises: as `check_room`."""
        queue = self._of(name)
        kept: bytes | IO[bytes] = request
        if len(request) >= LARGE_BYTES and queue.running >= self._at_once:
            kept = await _filed(request)
        self.check_room(name)
        began, uuid = self._now(), uuid4().hex
        run = queue.runs[uuid] = Training(
            TrainingRecord(uuid, name, TrainingStatus.RUNNING, begun(uuid, began, args)), began, kept, Log()
        )
        queue.waiting.append(run)
        self.store.put(run.record)
        self._go_on(queue)
        return run

    async def remove(self, name: str, uuid: str) -> TrainingRecord | None:
        """Remove a training; end it first if it runs. Returns: its final record; None if there is none."""
        run = self._of(name).runs.pop(uuid, None)
        if run is None:
            return None
        self.store.drop(uuid)
        self._stop(run, TrainingStatus.CANCELLED, "the training is cancelled")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await run.over.wait()
            return run.record
        return replace(
            run.record, status=TrainingStatus.CANCELLED, shown=ended(run.record.shown, TrainingStatus.CANCELLED)
        )

    async def log(self, run: Training) -> str:
        """Return the last lines of a training."""
        return run.log.text() if run.log is not None else await self.store.log(run.record.uuid)

    def elapsed_s(self, run: Training) -> float:
        """Return the time since a training was added, or its total time if it has ended."""
        if run.over.is_set():
            return run.record.elapsed_s
        return max(0.0, (self._now() - run.began).total_seconds())

    # -- running -----------------------------------------------------------------------------------------------

    def _of(self, name: str) -> Queue:
        return self._queues.setdefault(name, Queue())

    def _go_on(self, queue: Queue) -> None:
        while queue.waiting and queue.running < self._at_once:
            queue.running += 1
            task = asyncio.get_running_loop().create_task(self._run(queue, queue.waiting.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, queue: Queue, run: Training) -> None:
        try:
            status, shown = await self._trained(run)
        except InferError as error:
            status, shown = TrainingStatus.ERROR, ended(run.record.shown, TrainingStatus.ERROR, message=error.message)
        except Exception as error:
            logger.exception("training %s has failed in the server", run.record.uuid)
            message = f"internal error: {type(error).__name__}"
            status, shown = TrainingStatus.ERROR, ended(run.record.shown, TrainingStatus.ERROR, message=message)
        queue.running -= 1
        self._end(run, status, shown)
        self._go_on(queue)

    async def _trained(self, run: Training) -> tuple[TrainingStatus, str]:
        record, request, run.request = run.record, run.request, b""
        run.trainer = self._trainers(record.model, record.uuid, lambda line: self._heard(run, line))
        if run.verdict is not None:  # before it began
            run.trainer.kill(run.verdict[1])
        reply = await run.trainer.run(request if isinstance(request, bytes) else await _read(request))
        return await off_loop(len(reply), trained, record.shown, reply, run.began, self._now())

    def _stop(self, run: Training, status: TrainingStatus, why: str) -> None:
        """End a training early, unless it has ended: `over` is set soon."""
        if run.over.is_set() or run.verdict is not None:
            return
        run.verdict = status, why
        waiting = self._of(run.record.model).waiting
        if run in waiting:
            waiting.remove(run)
            if not isinstance(run.request, bytes):
                run.request.close()
            self._end(run, status, run.record.shown)
        elif run.trainer is not None:
            run.trainer.kill(why)

    def _end(self, run: Training, status: TrainingStatus, shown: str) -> None:
        if run.verdict is not None:
            status, why = run.verdict
            shown = ended(run.record.shown, status, **({"message": why} if status is TrainingStatus.ERROR else {}))
        record = replace(run.record, status=status, shown=shown, elapsed_s=self.elapsed_s(run))
        queue = self._of(record.model)
        if record.uuid in queue.runs:
            self.store.put(replace(record, log=run.log.text() if run.log is not None else ""))
        if run.saving is not None:
            run.saving.cancel()
        run.record, run.log, run.trainer, run.saving, run.request = record, None, None, None, b""
        run.over.set()
        over = [uuid for uuid, each in queue.runs.items() if each.over.is_set()]
        for uuid in over[: max(0, len(over) - MOST_KEPT)]:
            del queue.runs[uuid]
            self.store.drop(uuid)

    async def _end_all(self, queues: Iterable[Queue], why: str) -> None:
        runs = [run for queue in queues for run in queue.runs.values()]
        for run in runs:
            self._stop(run, TrainingStatus.ERROR, why)
        for run in runs:
            await run.over.wait()

    # -- output ------------------------------------------------------------------------------------------------

    def _heard(self, run: Training, line: str) -> None:
        if run.log is None:
            return
        run.log.add(line)
        if run.saving is None:
            run.saving = asyncio.get_running_loop().call_later(SAVE_S, self._save, run)

    def _save(self, run: Training) -> None:
        run.saving = None
        if run.log is not None and run.record.uuid in self._of(run.record.model).runs:
            self.store.put(replace(run.record, elapsed_s=self.elapsed_s(run), log=run.log.text()))


async def _filed(request: bytes) -> IO[bytes]:
    """Keep a waiting request on disk. Raises: InferError (OVERLOADED)."""

    def write() -> IO[bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - nameless: it ends with this process
        with contextlib.ExitStack() as undo:
            undo.callback(file.close)
            file.write(request)
            file.seek(0)
            undo.pop_all()
        return file

    try:
        return await asyncio.to_thread(write)
    except OSError as error:
        text = f"the training's request cannot be kept until its turn: {error.strerror}"
        raise InferError(Code.OVERLOADED, text) from error


async def _read(file: IO[bytes]) -> bytes:
    with file:
        return await asyncio.to_thread(file.read)
