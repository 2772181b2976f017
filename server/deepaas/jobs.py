"""Jobs: the requests of clients for trainings, and their answers. Made by loading.py, called by service.py.

Every coroutine returns an answer in the form of carrying/messages.py.
Source: deepaas 2.6.0, api/v2/train.py; `log`, `progress` and `page` are Penstock's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, Protocol

from penstock.server.carrying.messages import pack_answer, read_answer

from .inside.answers import text_answer
from .live import PAGE
from .messages import CHECK, JSON, TEXT
from .pages import NO_STORE
from .progress import Meter
from .records import TrainingStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from .trainings import Trainings

SAVE_WAIT_S = 1.0
"""How long a client waits for its training to be saved to disk."""
_FRESH = b"\r\n" + NO_STORE
_PAGE_LINES = (
    b"text/html; charset=utf-8\r\ncontent-security-policy: default-src 'none'; style-src 'unsafe-inline'; "
    b"script-src 'unsafe-inline'; connect-src 'self'" + _FRESH
)


class DeskLike(Protocol):
    """A model's Desk."""

    async def call(self, kind: int, body: bytes = b"") -> bytes: ...


class Jobs:
    """The trainings of one server, as its clients see them. Threads: the event loop's.

    `desk_of` returns a model's Desk, and raises InferError (NOT_READY).
    """

    def __init__(self, desk_of: Callable[[str], DeskLike], trainings: Trainings) -> None:
        self._desk_of = desk_of
        self._trainings = trainings

    async def start(self, name: str, request: bytes) -> bytes:
        """Start a training, or queue it.

        Raises: InferError (OVERLOADED: too many wait; NOT_READY: the model is not loaded, or the server stops).
        """
        desk = self._desk_of(name)
        self._trainings.check_capacity(name)
        reply = await desk.call(CHECK, request)
        status, _, _, body = read_answer(reply)
        if status != 200:
            return reply
        document = (await self._trainings.add(name, json.loads(body), request)).record.document
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAVE_WAIT_S):
                await self._trainings.store.flush()
        return pack_answer(200, JSON, document.encode())

    async def list(self, name: str) -> bytes:
        """List the trainings of a model."""
        document = ", ".join(training.record.document for training in self._trainings.trainings_of(name))
        return pack_answer(200, JSON, f"[{document}]".encode())

    async def get(self, name: str, uuid: str) -> bytes:
        """Return one."""
        training = self._trainings.find(name, uuid)
        return pack_answer(200, JSON, training.record.document.encode()) if training is not None else _NOT_FOUND

    async def delete(self, name: str, uuid: str) -> bytes:
        """Remove one; end it first if it runs."""
        record = await self._trainings.remove(name, uuid)
        return pack_answer(200, JSON, record.document.encode()) if record is not None else _NOT_FOUND

    async def log(self, name: str, uuid: str) -> bytes:
        """Return the last lines that a training wrote."""
        training = self._trainings.find(name, uuid)
        return (
            pack_answer(200, TEXT + _FRESH, (await self._trainings.log(training)).encode())
            if training is not None
            else _NOT_FOUND
        )

    async def progress(self, name: str, uuid: str) -> bytes:
        """Return a training's progress: JSON, as in docs/deepaas.md. Times in seconds, shares from 0 to 1."""
        training = self._trainings.find(name, uuid)
        if training is None:
            return _NOT_FOUND
        if training.log is not None:
            meter = training.log.meter
        else:
            meter = Meter()
            for line in (await self._trainings.log(training)).splitlines():
                meter.read(line)
        progress: dict[str, Any] = {
            "uuid": uuid, "model": name, "status": training.record.status, "phase": training.phase,
            "elapsed": round(self._trainings.elapsed_s(training), 3),
            "progress": 1.0 if training.record.status is TrainingStatus.DONE else meter.done,
            "epoch": meter.epoch, "epochs": meter.epochs, "epoch_progress": meter.epoch_done,
            "last_line": meter.last_line or None,
        }  # fmt: skip
        return pack_answer(200, JSON + _FRESH, json.dumps(progress).encode())

    async def page(self, name: str, uuid: str) -> bytes:
        """Return a page that shows the two as they change."""
        return pack_answer(200, _PAGE_LINES, PAGE) if self._trainings.find(name, uuid) is not None else _NOT_FOUND


_NOT_FOUND = text_answer(404, "Not Found")
