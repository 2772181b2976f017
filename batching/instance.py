"""Instance: one executor on one device: take, gather, run, scatter, deliver.

`execute` is the work itself, shared by both executors: `ThreadInstance` has a thread of its own; the event loop
acts as an Instance through `Model.run_on_loop` for batches that run in less time than a hand-over to a thread takes.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.backend import Binding
from penstock.backends.errors import Code, InferError

from .batch import Batch

if TYPE_CHECKING:
    from .model import Model

logger = logging.getLogger("penstock.batching")


def execute(model: Model, binding: Binding, batch: Batch) -> list[Batch]:
    """Run a Batch; every request in it ends with `outputs` or `error`.

    A batch that fails is halved and each half is run, until the guilty request is alone and the others are served.
    Returns: the batches that ran, the one given unless it was split.
    """
    try:
        _gather_run_scatter(model, binding, batch)
    except InferError as error:
        if len(batch.requests) > 1:
            return _halve(model, binding, batch)
        batch.requests[0].error = error
    except Exception as error:
        if len(batch.requests) > 1:
            return _halve(model, binding, batch)
        logger.exception("model %s failed", model.name, extra={"request_id": batch.requests[0].id})
        batch.requests[0].error = InferError(
            Code.INTERNAL, f"inference failed in '{model.name}': {type(error).__name__}"
        )
    return [batch]


def _halve(model: Model, binding: Binding, batch: Batch) -> list[Batch]:
    middle = len(batch.requests) // 2
    ran: list[Batch] = []
    for part in (batch.requests[:middle], batch.requests[middle:]):
        rows = sum(request.rows for request in part)
        ran += execute(model, binding, Batch(part, rows, batch.key, time.monotonic_ns()))
    return ran


def _gather_run_scatter(model: Model, binding: Binding, batch: Batch) -> None:
    requests, rows = batch.requests, batch.rows
    wanted = requests[0].wanted
    for request in requests:
        if request.wanted is not wanted and request.wanted != wanted:
            wanted = tuple(sorted({position for each in requests for position in each.wanted}))
            break
    batched = model.signature.batched
    shapes = [None if tail is None else (rows, *tail) for tail in batch.key] if batched else list(batch.key)
    for position, buffer in enumerate(binding.lend(rows, shapes)):
        if buffer is None:
            continue
        if len(requests) == 1:
            np.copyto(buffer, requests[0].inputs[position])  # type: ignore[arg-type]
        else:
            np.concatenate([request.inputs[position] for request in requests], out=buffer)  # type: ignore[misc]
    batch.compute_start_ns = time.monotonic_ns()
    outputs = binding.run(wanted)
    batch.compute_end_ns = time.monotonic_ns()
    if batched:
        _scatter(model, batch, wanted, outputs)
    else:
        requests[0].outputs = outputs
    batch.exec_end_ns = time.monotonic_ns()


def _scatter(model: Model, batch: Batch, wanted: tuple[int, ...], outputs: list[Any]) -> None:
    for position, output in zip(wanted, outputs, strict=True):
        if len(output) != batch.rows:
            name = model.signature.outputs[position].name
            text = f"model '{model.name}': output '{name}' has {len(output)} rows for a batch of {batch.rows}"
            raise InferError(Code.INTERNAL, text)
    start = 0
    for request in batch.requests:
        stop = start + request.rows
        if request.wanted == wanted:
            request.outputs = [output[start:stop] for output in outputs]
        else:
            request.outputs = [outputs[wanted.index(position)][start:stop] for position in request.wanted]
        start = stop


class ThreadInstance:
    """An Instance on a thread of its own.

    Threads: `wake` is called by others, all else happens on the Instance's thread. It takes a Batch as soon as it is
    woken or free and something is due; it sleeps only when nothing is. It is born asleep.
    """

    def __init__(self, model: Model, binding: Binding, name: str) -> None:
        self._model = model
        self._binding = binding
        self._alarm = threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.idle = True

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """End its sleep. Call with the model's lock held, when `idle` is set."""
        self.idle = False
        self._alarm.release()

    def stop(self) -> None:
        """Let the thread end once what it runs is done. Call with the model's lock held."""
        self._stopping = True
        self._alarm.release()

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def _main(self) -> None:
        model, binding = self._model, self._binding
        self._alarm.acquire()
        while not self._stopping:
            with model.lock:
                batch = model.scheduler.take(time.monotonic_ns())
                if batch is None:
                    self.idle = not self._stopping
                elif model.scheduler.live:
                    model.wake_one()
            if batch is None:
                self._alarm.acquire()
                continue
            ran = execute(model, binding, batch)
            model.finish_from_thread(ran)
