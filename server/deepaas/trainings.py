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
from .records import TrainingRecord, TrainingStatus, ended_json, result_of, started_json

if TYPE_CHECKING:
    from .store import Store

MAX_WAITING = 1000
"""The most trainings of a model that may wait for others to end."""
MAX_ENDED = 1000
"""The most ended trainings of a model that are kept: the oldest are dropped."""
SAVE_S = 2.0
"""How long a training's output may be in memory only."""
END_S = 5.0
"""How long a client waits for the end of a training it has cancelled; the system may take longer to end a process."""
CLOSE_LIMIT_S = 10.0
SERVER_ENDED = "the server ended while the training ran"

logger = logging.getLogger("penstock.deepaas")


class TrainerLike(Protocol):
    """A Trainer."""

    training: bool

    async def run(self, request: bytes) -> bytes: ...
    def kill(self, reason: str) -> None: ...


MakeTrainer = Callable[[str, str, Callable[[str], None]], TrainerLike]
"""Makes a Trainer from the model's name, the training's uuid, and a callback for each line. Raises InferError
(NOT_READY)."""


@dataclass(slots=True, eq=False)
class Training:
    """A training of this server process, or an ended one of an earlier process.

    `request` is the input of its Trainer: a file if it is large and had to wait. `end_reason` is why it ends early:
    its status then, and the reason. `ended` is set once it has ended, and none of it runs any more. The Store has the
    log of an ended training.
    """

    record: TrainingRecord
    started_at: datetime
    request: bytes | IO[bytes] = b""
    log: Log | None = None
    trainer: TrainerLike | None = None
    end_reason: tuple[TrainingStatus, str] | None = None
    save_timer: asyncio.TimerHandle | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def phase(self) -> str:
        """Its phase: waiting, loading (the model), training or ended."""
        if self.ended.is_set():
            return "ended"
        if self.trainer is None:
            return "waiting"
        return "training" if self.trainer.training else "loading"


@dataclass(slots=True)
class TrainingQueue:
    """The trainings of one model, by uuid in the order of their start, and those that wait."""

    trainings: dict[str, Training] = field(default_factory=dict)
    waiting: deque[Training] = field(default_factory=deque)
    running: int = 0


class Trainings:
    """All trainings of one server.

    Invariants: at most `max_running` trainings of a model run; the others wait, and start in the order in which they
    were added. A training that is added ends in exactly one TrainingStatus, and only then is `ended` set. A removed
    training is no longer found. Threads: the event loop's.
    """

    def __init__(
        self, make_trainer: MakeTrainer, store: Store, max_running: int, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.store = store
        self._make_trainer = make_trainer
        self._max_running = max_running
        self._now = now
        self._queues: dict[str, TrainingQueue] = {}
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
                    training = Training(
                        await self._mark_ended(record), datetime.fromisoformat(json.loads(record.document)["date"])
                    )
                except (ValueError, KeyError, TypeError):
                    logger.warning("the record of training %s cannot be read", record.uuid)
                    continue
                training.ended.set()
                self._queue_of(record.model).trainings[record.uuid] = training
            self._opened = True

    async def _mark_ended(self, record: TrainingRecord) -> TrainingRecord:
        """Mark a training that was running when its server ended as failed."""
        if record.status is not TrainingStatus.RUNNING:
            return record
        status, document = _failed(record, SERVER_ENDED)
        record = replace(record, status=status, document=document)
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

    async def on_unload(self, name: str) -> None:
        """End the trainings of a model that is no longer served."""
        await self._end_all([self._queue_of(name)], f"model '{name}' was unloaded while the training ran")

    # -- queries and commands ----------------------------------------------------------------------------------

    def trainings_of(self, name: str) -> list[Training]:
        """List the trainings of a model, in the order of their start."""
        return list(self._queue_of(name).trainings.values())

    def find(self, name: str, uuid: str) -> Training | None:
        """Return one."""
        return self._queue_of(name).trainings.get(uuid)

    def check_capacity(self, name: str) -> None:
        """Reject what `add` would. Raises: InferError (OVERLOADED: too many wait; NOT_READY: the server stops)."""
        if self._closed:
            raise InferError(Code.NOT_READY, "the server is stopping")
        if len(self._queue_of(name).waiting) >= MAX_WAITING:
            raise InferError(Code.OVERLOADED, f"{MAX_WAITING} trainings of model '{name}' are already waiting")

    async def add(self, name: str, args: Any, request: bytes) -> Training:
        """Start a training, or queue it. `args` are in the form for clients. Raises: as `check_capacity`."""
        queue = self._queue_of(name)
        stored: bytes | IO[bytes] = request
        if len(request) >= LARGE_BYTES and queue.running >= self._max_running:
            stored = await _to_file(request)
        self.check_capacity(name)
        started_at, uuid = self._now(), uuid4().hex
        training = queue.trainings[uuid] = Training(
            TrainingRecord(uuid, name, TrainingStatus.RUNNING, started_json(uuid, started_at, args)),
            started_at,
            stored,
            Log(),
        )
        queue.waiting.append(training)
        self.store.put(training.record)
        self._start_waiting(queue)
        return training

    async def remove(self, name: str, uuid: str) -> TrainingRecord | None:
        """Remove a training; end it first if it runs. Returns: its final record; None if there is none."""
        training = self._queue_of(name).trainings.pop(uuid, None)
        if training is None:
            return None
        self.store.drop(uuid)
        self._stop(training, TrainingStatus.CANCELLED, "the training was cancelled")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await training.ended.wait()
            return training.record
        return replace(
            training.record,
            status=TrainingStatus.CANCELLED,
            document=ended_json(training.record.document, TrainingStatus.CANCELLED),
        )

    async def log(self, training: Training) -> str:
        """Return the last lines of a training."""
        return training.log.text() if training.log is not None else await self.store.log(training.record.uuid)

    def elapsed_s(self, training: Training) -> float:
        """Return the time since a training was added, or its total time if it has ended."""
        if training.ended.is_set():
            return training.record.elapsed_s
        return max(0.0, (self._now() - training.started_at).total_seconds())

    # -- running -----------------------------------------------------------------------------------------------

    def _queue_of(self, name: str) -> TrainingQueue:
        return self._queues.setdefault(name, TrainingQueue())

    def _start_waiting(self, queue: TrainingQueue) -> None:
        while queue.waiting and queue.running < self._max_running:
            queue.running += 1
            task = asyncio.get_running_loop().create_task(self._run(queue, queue.waiting.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, queue: TrainingQueue, training: Training) -> None:
        try:
            status, document = await self._train(training)
        except InferError as error:
            status, document = _failed(training.record, error.message)
        except Exception as error:
            logger.exception("training %s failed in the server", training.record.uuid)
            status, document = _failed(training.record, f"internal error: {type(error).__name__}")
        queue.running -= 1
        self._end(training, status, document)
        self._start_waiting(queue)

    async def _train(self, training: Training) -> tuple[TrainingStatus, str]:
        record, request, training.request = training.record, training.request, b""
        training.trainer = self._make_trainer(record.model, record.uuid, lambda line: self._on_line(training, line))
        if training.end_reason is not None:  # before it began
            training.trainer.kill(training.end_reason[1])
        reply = await training.trainer.run(request if isinstance(request, bytes) else await _read_file(request))
        return await off_loop(len(reply), result_of, record.document, reply, training.started_at, self._now())

    def _stop(self, training: Training, status: TrainingStatus, reason: str) -> None:
        """End a training early, unless it has ended: `ended` is set soon."""
        if training.ended.is_set() or training.end_reason is not None:
            return
        training.end_reason = status, reason
        waiting = self._queue_of(training.record.model).waiting
        if training in waiting:
            waiting.remove(training)
            if not isinstance(training.request, bytes):
                training.request.close()
            self._end(training, status, training.record.document)
        elif training.trainer is not None:
            training.trainer.kill(reason)

    def _end(self, training: Training, status: TrainingStatus, document: str) -> None:
        if training.end_reason is not None:
            status, reason = training.end_reason
            document = ended_json(
                training.record.document, status, **({"message": reason} if status is TrainingStatus.ERROR else {})
            )
        record = replace(training.record, status=status, document=document, elapsed_s=self.elapsed_s(training))
        queue = self._queue_of(record.model)
        if record.uuid in queue.trainings:
            self.store.put(replace(record, log=training.log.text() if training.log is not None else ""))
        if training.save_timer is not None:
            training.save_timer.cancel()
        training.record, training.request = record, b""
        training.log = training.trainer = training.save_timer = None
        training.ended.set()
        ended = [uuid for uuid, each in queue.trainings.items() if each.ended.is_set()]
        for uuid in ended[: max(0, len(ended) - MAX_ENDED)]:
            del queue.trainings[uuid]
            self.store.drop(uuid)

    async def _end_all(self, queues: Iterable[TrainingQueue], reason: str) -> None:
        trainings = [training for queue in queues for training in queue.trainings.values()]
        for training in trainings:
            self._stop(training, TrainingStatus.ERROR, reason)
        for training in trainings:
            await training.ended.wait()

    # -- output ------------------------------------------------------------------------------------------------

    def _on_line(self, training: Training, line: str) -> None:
        if training.log is None:
            return
        training.log.add(line)
        if training.save_timer is None:
            training.save_timer = asyncio.get_running_loop().call_later(SAVE_S, self._save, training)

    def _save(self, training: Training) -> None:
        training.save_timer = None
        if training.log is not None and training.record.uuid in self._queue_of(training.record.model).trainings:
            self.store.put(replace(training.record, elapsed_s=self.elapsed_s(training), log=training.log.text()))


def _failed(record: TrainingRecord, message: str) -> tuple[TrainingStatus, str]:
    """Return the status and the document of a training that failed."""
    return TrainingStatus.ERROR, ended_json(record.document, TrainingStatus.ERROR, message=message)


async def _to_file(request: bytes) -> IO[bytes]:
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
        text = f"the training's request cannot be stored until its turn: {error.strerror}"
        raise InferError(Code.OVERLOADED, text) from error


async def _read_file(file: IO[bytes]) -> bytes:
    with file:
        return await asyncio.to_thread(file.read)
