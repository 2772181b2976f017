"""Requests to a live server from many clients in parallel, over HTTP or gRPC, queued one after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from penstock.batching.model import Model
from tests.fakes import PATIENCE_S
from tests.live import Live


@dataclass
class Answer:
    """When a request was answered, in seconds from when it was sent, and with what."""

    after_s: float
    at_s: float
    value: float
    error: str


class Asking:
    """Clients of one model [N,W] that returns `x` as `y`, over `triton` (tritonclient.http or .grpc)."""

    def __init__(self, live: Live, triton: Any, model: str) -> None:
        self.live = live
        self.model = model
        self._triton = triton
        self.pool = ThreadPoolExecutor(32)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.shutdown(cancel_futures=True)

    def client(self) -> Any:
        """Make a client of one thread."""
        grpc = self._triton.__name__.endswith("grpc")
        return self._triton.InferenceServerClient(self.live.grpc_address if grpc else self.live.address)

    def ask(self, rows: int = 1, value: float = 1.0, width: int = 4, **options: Any) -> Future[Answer]:
        """Send a request of `rows` rows that are `value`."""
        return self.pool.submit(self._ask, np.full((rows, width), value, np.float32), options)

    def queue(self, *rows: int, value: float = 1.0, **options: Any) -> list[Future[Answer]]:
        """Send requests, each once the previous one is queued or running; some may be answered meanwhile."""
        sent = []
        for each in rows:
            before = self.accepted()
            sent.append(self.ask(each, value, **options))
            self.until(partial(self._more, before))
        return sent

    def accepted(self) -> int:
        """Count the requests that have entered the queue."""
        return self.live.call(self._accepted())

    def waiting(self) -> int:
        """Count the queued requests."""
        return self.live.call(self._waiting())

    def until_waiting(self, count: int) -> None:
        """Wait until exactly this many requests are queued."""
        self.until(lambda: self.waiting() == count)

    def until_in_line(self) -> None:
        """Wait until an Instance is in the rate limiter's queue: its thread may arrive there after its requests."""
        claims = [claim for placement in self._model().placements for claim in placement.claims]
        self.until(lambda: any(claim.waiter is not None for claim in claims))

    def until(self, condition: Any) -> None:
        """Poll until a condition holds; the server sends no notification."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError("the condition never held")
            time.sleep(0.001)

    def counts(self) -> tuple[dict[int, int], int, int]:
        """Read the statistics endpoint: executions by batch size, all executions, all inferences."""
        with self.client() as client:
            if self._triton.__name__.endswith("grpc"):
                (entry,) = client.get_inference_statistics(self.model, as_json=True)["model_stats"]
            else:
                (entry,) = client.get_inference_statistics(self.model)["model_stats"]
        sizes = {int(each["batch_size"]): int(each["compute_infer"]["count"]) for each in entry.get("batch_stats", ())}
        return sizes, int(entry.get("execution_count", 0)), int(entry.get("inference_count", 0))

    def _ask(self, array: Any, options: dict[str, Any]) -> Answer:
        tensor = self._triton.InferInput("x", array.shape, "FP32")
        tensor.set_data_from_numpy(array)
        error, value = "", float("nan")
        with self.client() as client:
            start_s = time.monotonic()
            try:
                found = client.infer(self.model, [tensor], **options).as_numpy("y")
                self._check(array, found)
                value = float(found.flat[0])
            except Exception as failure:  # noqa: BLE001 - it is what was answered
                error = str(failure)
            end_s = time.monotonic()
        return Answer(end_s - start_s, end_s, value, error)

    def _check(self, sent: Any, found: Any) -> None:
        """Compare an answer with the values sent."""
        np.testing.assert_array_equal(found, sent)

    def _more(self, before: int) -> bool:
        return self.accepted() > before

    async def _accepted(self) -> int:
        counted = self._model().statistics.snapshot()
        return int(self._model().inflight + counted.success.count + sum(counted.failures.values()))

    async def _waiting(self) -> int:
        await asyncio.sleep(0)
        return int(self._model().waiting_requests)

    def _model(self) -> Model:
        return self.live.server.engine.model(self.model)


def answers(sent: Sequence[Future[Answer]]) -> list[Answer]:
    """Wait for answers."""
    return [each.result(PATIENCE_S) for each in sent]
