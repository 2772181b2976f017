"""ModelCache: an Engine whose model's answers are cached, with models that wait for the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.caching import model_cache
from penstock.batching.caching.cache import ENTRY_BYTES, Cache
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy, EnsembleSpec, ModelSpec, Step
from penstock.batching.statistics import CANCELED
from tests.batching.ensembles import ensemble_spec, house, step, values_of
from tests.fakes import FakeBackend, Gate, ListSink, fake_loader, fake_request

pytestmark = pytest.mark.anyio

SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
GUILTY = -1.0
THREAD = BatchPolicy(max_batch_rows=16, executor="thread")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Serving:
    """One Engine with one cached Model, its gate, and a sink."""

    def __init__(self, engine: Engine, model: Model, gate: Gate, backend: FakeBackend, cache: Cache) -> None:
        self.engine = engine
        self.model = model
        self.gate = gate
        self.backend = backend
        self.cache = cache
        self.sink = ListSink()
        backend.runs.clear()

    def submit(self, value: float, rows: int = 1) -> Any:
        request = fake_request(self.model, rows, value=value, sink=self.sink)
        self.engine.submit(request)
        return request

    async def serve(self, value: float) -> Any:
        count = len(self.sink.requests)
        self.submit(value)
        return (await self.sink.holds(count + 1))[-1]

    def counts(self) -> tuple[int, int, int]:
        """Successes, hits and misses."""
        counted = self.model.statistics.snapshot()
        return counted.success.count, counted.cache_hit.count, counted.cache_miss.count


def plus_one(inputs: list[Any]) -> list[Any]:
    if (inputs[0] == GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    return [inputs[0] + 1]


def ten_times(inputs: list[Any]) -> list[Any]:
    return [inputs[0] * 10]


@asynccontextmanager
async def serving(policy: BatchPolicy = THREAD, size_bytes: int = 1 << 20) -> AsyncIterator[Serving]:
    gate = Gate(plus_one)
    backend = FakeBackend(SIGNATURE, gate)
    engine = Engine(asyncio.get_running_loop(), {"onnxruntime": fake_loader(backend)})
    engine.cache = cache = Cache(size_bytes)
    model = await engine.load(ModelSpec("m", 1, Path("model"), policy=policy, cached=True))
    try:
        yield Serving(engine, model, gate, backend, cache)
    finally:
        gate.open()
        await engine.stop(1)


async def test_a_repeated_request_is_answered_from_the_cache_at_once() -> None:
    async with serving() as s:
        await s.serve(1)
        again = s.submit(1)

        assert again.outputs is not None  # before the loop has turned
        assert again.outputs[0].tolist() == [[2, 2, 2, 2]]
        assert len(s.backend.runs) == 1
        assert s.counts() == (2, 1, 1)
        assert s.engine.inflight == 0


async def test_cache_hits_of_one_loop_turn_are_delivered_together() -> None:
    async with serving() as s:
        await s.serve(1)
        delivered: list[int] = []
        s.sink.deliver = lambda requests: delivered.append(len(requests))  # type: ignore[method-assign]
        s.submit(1)
        s.submit(1)
        in_this_turn = list(delivered)
        await asyncio.sleep(0)

        assert (in_this_turn, delivered) == ([], [2])
        assert s.model.hold_count == 0


async def test_with_preserved_ordering_large_requests_are_looked_up_synchronously(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_cache, "INLINE_HASH_BYTES", 0)
    async with serving(replace(THREAD, preserve_ordering=True)) as s:
        await s.serve(1)

        assert s.submit(1).outputs is not None  # before the loop has turned


async def test_two_equal_requests_at_once_both_run_and_count_as_one_miss() -> None:
    async with serving() as s:
        s.gate.close()
        s.submit(1)
        s.submit(1)
        s.gate.open()
        done = await s.sink.holds(2)

        assert [request.outputs[0].tolist() for request in done if request.outputs] == [[[2] * 4]] * 2
        assert s.counts() == (2, 0, 1)
        assert len(s.cache) == 1


async def test_a_cache_hit_is_traced_without_an_execution() -> None:
    async with serving() as s:
        await s.serve(1)
        traced: list[tuple[Any, Any, int]] = []
        s.engine.trace = lambda model, batch, end_ns: traced.append((batch.requests[0], model, batch.exec_end_ns))
        again = s.submit(1)

        assert traced == [(again, s.model, 0)]


async def test_a_failed_request_is_not_cached() -> None:
    async with serving() as s:
        for _ in range(2):
            assert (await s.serve(GUILTY)).error is not None

        assert len(s.cache) == 0
        assert s.counts() == (0, 0, 0)


async def test_a_cache_hit_is_served_despite_a_full_queue_and_a_miss_is_rejected() -> None:
    async with serving(BatchPolicy(max_batch_rows=1, executor="thread", max_queue_requests=1)) as s:
        await s.serve(1)
        s.gate.close()
        s.submit(2)
        await s.gate.entered()
        s.submit(3)

        assert s.engine.early_rejection(s.model) is None
        assert s.submit(1).outputs is not None
        with pytest.raises(InferError, match="Exceeds maximum queue size"):
            s.submit(4)


async def test_a_cache_miss_on_a_full_queue_is_served_after_a_run_on_the_loop() -> None:
    async with serving(BatchPolicy(max_batch_rows=1, executor="loop", max_queue_requests=1)) as s:
        for value in (1, 2, 3):
            s.submit(value)
        await s.sink.holds(3)

        assert s.counts() == (3, 0, 3)


async def test_cache_hits_are_delivered_in_order_if_ordering_is_preserved() -> None:
    policy = BatchPolicy(max_batch_rows=1, executor="thread", preserve_ordering=True)
    async with serving(policy) as s:
        await s.serve(1)
        s.gate.close()
        slow = s.submit(2)
        await s.gate.entered()
        found = s.submit(1)

        assert len(s.sink.requests) == 1
        s.gate.open()
        assert (await s.sink.holds(3))[1:] == [slow, found]


async def test_a_large_request_is_hashed_on_a_thread_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "INLINE_HASH_BYTES", 0)
    async with serving() as s:
        first = await s.serve(1)
        again = s.submit(1)
        assert again.outputs is None
        assert s.model.hold_count == 1
        _, found = await s.sink.holds(2)

        assert found is again
        assert found.outputs is not None
        assert first.outputs[0].tolist() == found.outputs[0].tolist()
        assert s.counts() == (2, 1, 1)
        assert s.model.hold_count == 0


async def test_a_large_request_canceled_during_its_lookup_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_cache, "INLINE_HASH_BYTES", 0)
    async with serving() as s:
        canceled = s.submit(1)
        s.engine.cancel(canceled)
        found = await s.serve(2)

        assert found.outputs[0].tolist() == [[3, 3, 3, 3]]
        assert len(s.backend.runs) == 1
        assert s.sink.requests == [found]
        assert s.model.statistics.snapshot().failures[CANCELED] == 1
        assert (s.counts(), s.engine.inflight) == ((1, 0, 1), 0)
        await s.engine.wait_released(s.model)


async def test_a_large_request_rejected_by_the_queue_receives_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "INLINE_HASH_BYTES", 0)
    async with serving(BatchPolicy(max_batch_rows=1, executor="thread", max_queue_requests=1)) as s:
        s.gate.close()
        s.submit(1)
        await s.gate.entered()
        others = [s.submit(value) for value in (2, 3)]
        (refused,) = await s.sink.holds(1)

        assert refused in others
        assert refused.error is not None
        assert refused.error.code is Code.OVERLOADED
        assert s.model.waiting_requests == 1


async def test_a_large_request_whose_key_cannot_be_computed_receives_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_key(*_: Any) -> bytes:
        raise UnicodeError("no text")

    monkeypatch.setattr(model_cache, "INLINE_HASH_BYTES", 0)
    async with serving() as s:
        assert s.model.cache is not None
        monkeypatch.setattr(s.model.cache._keys, "key_for", no_key)
        request = await s.serve(1)

        assert request.error.code is Code.INTERNAL
        assert s.model.hold_count == 0
    assert "could not be computed" in caplog.text


async def test_cached_answers_are_not_served_by_a_stopped_engine() -> None:
    async with serving() as s:
        await s.serve(1)
        await s.engine.stop(1)

        with pytest.raises(InferError, match="stopping"):
            s.submit(1)


async def test_unloading_a_model_removes_its_cached_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "_REMOVED_PER_TURN", 2)
    async with serving() as s:
        for value in range(5):
            await s.serve(value)
        assert len(s.cache) == 5
        await s.engine.unload("m", 1)

        assert (len(s.cache), s.cache.used_bytes) == (0, 0)


async def test_a_reload_of_the_same_version_finds_no_cached_answers() -> None:
    async with serving() as s:
        await s.serve(1)
        old = s.model
        s.model = await s.engine.load(old.spec)
        await s.serve(1)

        assert s.counts() == (1, 0, 1)
        assert old is not s.model


async def test_an_answer_that_does_not_fit_the_cache_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(size_bytes=ENTRY_BYTES) as s:
        for _ in range(3):
            await s.serve(1)

        assert s.counts() == (3, 0, 3)
    logged = [record.getMessage() for record in caplog.records if "Failed to insert key" in record.getMessage()]
    assert len(logged) == 1
    assert logged[0].startswith("model m: ")


async def test_an_answer_is_not_cached_if_there_is_no_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> bool:
        raise MemoryError

    async with serving() as s:
        monkeypatch.setattr(s.cache, "insert", no_memory)
        assert (await s.serve(1)).outputs is not None
        assert s.counts() == (1, 0, 1)


async def test_infer_returns_its_own_copy_of_a_cached_answer() -> None:
    async with serving() as s:
        inputs: list[Any] = [np.ones((1, 4), np.float32)]
        first = await s.engine.infer(s.model, inputs)
        second = await s.engine.infer(s.model, inputs)
        second[0][:] = 9
        third = await s.engine.infer(s.model, inputs)

        assert first[0].tolist() == third[0].tolist() == [[2, 2, 2, 2]]
        assert s.counts() == (3, 2, 1)


async def test_an_ensemble_does_not_use_cached_answers_of_steps_that_were_replaced() -> None:
    async with serving() as s:
        step = s.model
        for name, made_of in (("inner", "m"), ("whole", "inner")):
            spec = ModelSpec(
                name, 1, Path(name), inputs=(TensorSpec("x", "FP32", (4,)),), outputs=(TensorSpec("y", "FP32", (4,)),),
                ensemble=EnsembleSpec((Step(made_of, "", {"x": "x"}, {"y": "y"}),)), cached=name == "whole",
                policy=BatchPolicy(max_batch_rows=16),
            )  # fmt: skip
            s.model = await s.engine.load(spec)
        for _ in range(2):
            assert (await s.serve(1)).outputs[0].tolist() == [[2] * 4]
        assert s.counts() == (2, 1, 1)

        await s.engine.load(ModelSpec("other", 1, Path("model"), policy=THREAD))
        await s.serve(1)
        assert s.counts() == (3, 2, 1)

        await s.engine.load(replace(step.spec, version=2))
        await s.serve(1)
        assert s.counts() == (4, 2, 2)
        await s.serve(1)
        assert s.counts() == (5, 3, 2)


async def test_after_a_swap_a_request_finds_no_cached_answer_of_the_replaced_steps() -> None:
    async with house() as h:
        h.engine.cache = Cache(1 << 20)
        await h.serve("first", plus_one)
        await h.serve("second", plus_one)
        await h.engine.load(ensemble_spec("inner", "x", "y", step("second", "x=x", "y=y"), cached=True))
        outer = step("first", "x=x", "y=between"), step("inner", "x=between", "y=y")
        await h.engine.load(ensemble_spec("outer", "x", "y", *outer))
        h.gates["first"].close()
        h.submit("outer", 1)
        await h.gates["first"].entered()
        await h.serve("second", ten_times, version=2)
        h.gates["first"].open()
        await h.sink.holds(1)
        h.submit("inner", 2)

        assert values_of(await h.sink.holds(2)) == [3, 20]


async def test_an_ensemble_with_an_unloaded_step_serves_no_cached_answers() -> None:
    async with serving() as s:
        spec = ModelSpec(
            "whole", 1, Path("whole"),
            inputs=(TensorSpec("x", "FP32", (4,)),), outputs=(TensorSpec("y", "FP32", (4,)),),
            ensemble=EnsembleSpec((Step("m", "", {"x": "x"}, {"y": "y"}),)), cached=True,
            policy=BatchPolicy(max_batch_rows=16),
        )  # fmt: skip
        s.model = await s.engine.load(spec)
        await s.serve(1)
        await s.engine.unload("m", 1)

        with pytest.raises(InferError) as caught:
            s.submit(1)
        assert caught.value.code is Code.NOT_READY


async def test_a_model_caches_nothing_without_its_own_setting_or_a_server_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as s:
        for cached, cache in ((False, s.cache), (True, None)):
            s.engine.cache = cache
            spec = ModelSpec("other", 1, Path("model"), policy=THREAD, cached=cached)
            s.model = await s.engine.load(spec)
            for _ in range(2):
                await s.serve(1)

            assert s.model.cache is None
            assert not s.model.intercepts
            assert s.counts() == (2, 0, 0)
            assert ("the server has none" in caplog.text) == cached
