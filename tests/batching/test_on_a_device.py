"""A model on a device, through the Engine: its sessions, its preparation, and that no request is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Backend
from penstock.backends.errors import Code, DeviceLost, InferError, OutOfMemory
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.devices import fallback
from penstock.batching.devices.placement import backend_groups
from penstock.batching.engine import Engine
from penstock.batching.loading import counting, opening
from penstock.batching.loading.counting import GPU_MEMORY, Split, Trials, count_instances
from penstock.batching.loading.run_sizes import SIZES_OPTION
from penstock.batching.model import Model
from penstock.batching.request import InSequence, RequestOptions
from penstock.batching.running import instance
from penstock.batching.spec import (
    BatchPolicy,
    BatchTensor,
    InstanceGroup,
    ModelSpec,
    PaddedAxis,
    Sample,
    SampleInput,
    SequenceSpec,
    State,
)
from tests.batching.ensembles import ensemble_spec, step
from tests.batching.overlapping_device import ROWS, Stream, StreamBinding
from tests.fakes import PATIENCE_S, FakeBackend

pytestmark = pytest.mark.anyio

GPU = (InstanceGroup(1, ("cuda:0",)),)
FREE = Signature(ROWS.inputs, ROWS.outputs)
SPEC = ModelSpec("m", 1, Path("m"), "fake", policy=BatchPolicy(max_batch_rows=4), instances=GPU)
GUILTY, BROKEN = -1.0, -2.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def faulty(inputs: list[Any]) -> list[Any]:
    if (inputs[0] == GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    if (inputs[0] == BROKEN).any():
        raise DeviceLost(Code.NOT_READY, "CUDA failure 700")
    return [inputs[0] + 1]


class PreparableBinding(StreamBinding):
    """Records the shapes it is prepared for, and releases memory when idle."""

    refuses: Exception | None = None
    can_trim = True

    def prepare(self, rows: int, shapes: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        assert all(array is None or not array.any() for array in self._lent)
        self.prepared.append((rows, list(shapes)))
        self._note("prepare", rows)

    def trim_memory(self) -> None:
        self.rested += 1
        self._stream.rested.release()


class Loads:
    """Loads a Stream for each session on a GPU, and a FakeBackend elsewhere. `errors` are raised, one per load."""

    def __init__(
        self, function: Any = faulty, graph: Signature = FREE, kind: type[StreamBinding] = StreamBinding
    ) -> None:
        self.function, self.graph, self.kind = function, graph, kind
        self.errors: list[InferError | None] = []
        self.loads: list[tuple[str, dict[str, str]]] = []
        self.backends: list[FakeBackend] = []

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> Backend:
        self.loads.append((device, dict(options)))
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        backend = FakeBackend(self.graph, self.function)
        if device != "cpu":
            backend = Stream(self.graph, self.function, kind=self.kind)
        self.backends.append(backend)
        return backend

    @property
    def streams(self) -> list[Stream]:
        return [backend for backend in self.backends if isinstance(backend, Stream)]


@asynccontextmanager
async def served(loads: Loads, spec: ModelSpec = SPEC) -> AsyncIterator[tuple[Engine, Model]]:
    engine = Engine(asyncio.get_running_loop(), {"fake": loads})
    try:
        yield engine, await engine.load(spec)
    finally:
        await engine.stop(PATIENCE_S)


async def infer_all(engine: Engine, model: Model, values: list[float]) -> list[float | str]:
    """Send one request for each value, all at once. Returns: the answers or error messages."""
    inputs = [np.full((1, 4), value, np.float32) for value in values]
    ends = await asyncio.gather(*(engine.infer(model, [each]) for each in inputs), return_exceptions=True)
    return [end.message if isinstance(end, InferError) else float(end[0][0, 0]) for end in ends]  # type: ignore[index]


class TestSessions:
    async def test_each_instance_on_a_gpu_has_its_own_session_and_the_configuration_is_kept(self) -> None:
        loads = Loads()
        groups = (InstanceGroup(3, ("cuda:0",)), InstanceGroup(2, ("cuda:0", "cuda:1"), number=1))
        async with served(loads, replace(SPEC, instances=groups)) as (engine, model):
            assert [device for device, _ in loads.loads] == ["cuda:0"] * 5 + ["cuda:1"] * 2
            assert [(each.count, each.devices) for each in model.spec.instances] == [
                (3, ("cuda:0",)), (2, ("cuda:0",)), (2, ("cuda:1",)),
            ]  # fmt: skip
            assert [len(stream.bindings) for stream in loads.streams] == [2] * 7
            assert len({id(thread.placement.backend) for thread in model.thread_instances}) == 7
            assert await infer_all(engine, model, [1, 2, 3]) == [2, 3, 4]
        assert all(backend.closed for backend in loads.backends)

    async def test_a_cpu_group_and_a_passive_group_have_one_session_each(self) -> None:
        groups = [InstanceGroup(3), InstanceGroup(2, ("cuda:0",), passive=True), InstanceGroup(2, ("cuda:0",))]

        assert backend_groups(groups) == [*groups[:2], *[InstanceGroup(1, ("cuda:0",))] * 2]

    async def test_a_session_that_does_not_fit_fails_the_load_and_closes_the_other_sessions(self) -> None:
        loads = Loads()
        loads.errors = [None, InferError(Code.OVERLOADED, "it does not fit the device")]
        engine = Engine(asyncio.get_running_loop(), {"fake": loads})
        with pytest.raises(InferError, match="does not fit"):
            await engine.load(replace(SPEC, instances=(InstanceGroup(2, ("cuda:0",)),)))

        assert [backend.closed for backend in loads.backends] == [True]

    async def test_the_gpu_memory_limit_of_a_model_is_divided_among_its_sessions(self) -> None:
        spec = replace(SPEC, options={GPU_MEMORY: "900"}, instances=(InstanceGroup(3, ("cuda:0",)), *GPU[:0]))

        assert opening.session_options(spec, "cuda:0") == {GPU_MEMORY: "300"}
        assert opening.session_options(replace(spec, instances=GPU), "cuda:0") == {GPU_MEMORY: "900"}
        assert opening.session_options(SPEC, "cuda:0") == {}

    async def test_instance_counting_opens_one_session_per_instance_on_a_gpu(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rates = iter([100.0, 190.0, 191.0])
        monkeypatch.setattr(counting, "run_concurrently", lambda runs: [run() for run in runs] and [next(rates)])
        loads = Loads()
        split, backends, tried = count_instances(
            SPEC, "cuda:0", lambda threads: loads(SPEC.path, "cuda:0", {}), threads=None
        )

        assert (split, [trial.split.count for trial in tried]) == (Split(2), [1, 2, 3])
        assert backends == loads.backends[:2]
        assert [backend.closed for backend in loads.backends] == [False, False, True]
        assert all(binding.under_way is None for stream in loads.streams for binding in stream.bindings)  # type: ignore[attr-defined]

    async def test_an_instance_count_whose_session_does_not_fit_is_not_chosen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loads = Loads()
        loads.errors = [None, InferError(Code.OVERLOADED, "it does not fit the device")]
        monkeypatch.setattr(counting.run_concurrently, "__defaults__", (0,))
        split, backends, _ = count_instances(SPEC, "cuda:0", lambda _: loads(SPEC.path, "cuda:0", {}), threads=None)

        assert (split, len(backends)) == (Split(1), 1)

    async def test_memory_growth_of_trials_is_the_device_memory_reported_by_sessions(self) -> None:
        loads = Loads()
        trials = Trials(SPEC, lambda _: loads(SPEC.path, "cuda:0", {}), 0, own_sessions=True)
        for stream in loads.streams:
            stream.device_bytes = 7

        assert trials._memory_growth_bytes() == 7
        trials.close()


class TestPreparation:
    async def test_each_binding_is_prepared_for_each_size_on_its_instances_thread(self) -> None:
        loads = Loads(kind=PreparableBinding)
        async with served(loads, replace(SPEC, instances=(InstanceGroup(2, ("cuda:0",)),))):
            expected = [(rows, [(rows, 4)]) for rows in (4, 3, 2, 1)]

            assert [each.prepared for stream in loads.streams for each in stream.bindings] == [expected] * 4  # type: ignore[attr-defined]
            assert [stream.threads for stream in loads.streams] == [{"m/1#0"}, {"m/1#1"}]

    @pytest.mark.parametrize(
        ("policy", "options", "sizes"),
        [
            (BatchPolicy(max_batch_rows=6, allowed_rows=(3, 6)), {}, [6, 3]),
            (BatchPolicy(max_batch_rows=6), {SIZES_OPTION: "1,5,6,8"}, [6, 5, 1]),
        ],
    )
    async def test_bindings_are_prepared_for_the_configured_sizes(
        self, policy: BatchPolicy, options: dict[str, str], sizes: list[int]
    ) -> None:
        loads = Loads(kind=PreparableBinding)
        async with served(loads, replace(SPEC, policy=policy, options=options)):
            assert [rows for rows, _ in loads.streams[0].bindings[0].prepared] == sizes  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        "error", [InferError(Code.OVERLOADED, "no room for its graphs"), ValueError("no room for")]
    )
    async def test_a_model_whose_bindings_cannot_be_prepared_is_not_loaded(
        self, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(PreparableBinding, "refuses", error)
        loads = Loads(kind=PreparableBinding)
        engine = Engine(asyncio.get_running_loop(), {"fake": loads})
        with pytest.raises(InferError, match="no room for"):
            await engine.load(SPEC)

        assert loads.backends[0].closed

    async def test_bindings_are_not_prepared_for_shapes_that_requests_choose(self) -> None:
        graph = Signature((TensorSpec("x", "FP32", (-1, -1)),), ROWS.outputs)
        loads = Loads(lambda inputs: [inputs[0] + 1], graph, kind=PreparableBinding)
        async with served(loads):
            assert [binding.prepared for binding in loads.streams[0].bindings] == [[], []]  # type: ignore[attr-defined]

    async def test_bindings_are_prepared_for_each_bucket_of_a_padded_axis(self) -> None:
        graph = Signature((TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, -1)),))
        loads = Loads(lambda inputs: [inputs[0] + 1], graph, kind=PreparableBinding)
        spec = replace(
            SPEC, policy=BatchPolicy(max_batch_rows=2), padding=(PaddedAxis("x", 0, (8, 16), outputs={"y": 0}),)
        )
        async with served(loads, spec):
            (prepared, _) = (binding.prepared for binding in loads.streams[0].bindings)  # type: ignore[attr-defined]
            expected = [[(rows, length)] for rows in (1, 2) for length in (8, 16)]

            assert sorted(shapes for _, shapes in prepared) == expected

    async def test_bindings_are_prepared_again_after_a_device_is_lost(self) -> None:
        loads = Loads(kind=PreparableBinding)
        async with served(loads) as (engine, model):
            assert await infer_all(engine, model, [BROKEN]) == ["CUDA failure 700"]
            assert await infer_all(engine, model, [1]) == [2]
            new = loads.streams[1]

            assert all(len(binding.prepared) == 4 for binding in new.bindings)  # type: ignore[attr-defined]
            assert new.threads == {"m/1#0"}

    async def test_run_times_are_learned_on_the_instances_thread(self) -> None:
        loads = Loads()
        async with served(loads) as (_, model):
            assert [known.rows for known in model.costs.run_times()] == [1, 2, 3, 4]
            assert loads.streams[0].threads == {"m/1#0"}

    async def test_samples_run_on_both_bindings_on_the_instances_thread(self) -> None:
        ran: list[tuple[str, int]] = []

        def function(inputs: list[Any]) -> list[Any]:
            if (inputs[0] > 0).any():
                ran.append((threading.current_thread().name, len(inputs[0])))
            return inputs

        sample = Sample("s", 2, 1, {"x": SampleInput("FP32", (4,), "random")})
        async with served(Loads(function), replace(SPEC, samples=(sample,))):
            assert ran == [("m/1#0", 2)] * 2

    async def test_idle_bindings_release_their_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(instance, "IDLE_RELEASE_S", 0.0)
        loads = Loads(kind=PreparableBinding)
        async with served(loads):
            (stream,) = loads.streams
            loop = asyncio.get_running_loop()

            for _ in stream.bindings:
                assert await loop.run_in_executor(None, stream.rested.acquire, True, PATIENCE_S)


class TestFallback:
    REASON = InferError(Code.UNSUPPORTED, "no driver")
    MAY = replace(SPEC, options={fallback.CPU_FALLBACK: "1"})

    async def test_a_model_with_fallback_runs_on_the_cpu_and_logs_the_reason(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        loads = Loads()
        loads.errors = [None, self.REASON]
        groups = (InstanceGroup(2, ("cuda:0", "cuda:1"), number=1), InstanceGroup(3, number=2))
        async with served(loads, replace(self.MAY, instances=groups)) as (engine, model):
            assert model.spec.fallback_reason == "no driver"
            assert [(each.count, each.devices, each.number) for each in model.spec.instances] == [
                (1, ("cpu",), 1), (3, ("cpu",), 2),
            ]  # fmt: skip
            assert await infer_all(engine, model, [1]) == [2]
            assert "model 'm' falls back to the CPU: no driver" in caplog.text
            assert loads.streams[0].closed

    @pytest.mark.parametrize(
        ("spec", "error"),
        [(SPEC, REASON), (MAY, InferError(Code.OVERLOADED, "it does not fit")),
         (replace(MAY, instances=(InstanceGroup(),)), REASON)],
    )  # fmt: skip
    async def test_a_model_that_cannot_fall_back_to_the_cpu_is_not_loaded(
        self, spec: ModelSpec, error: InferError
    ) -> None:
        loads = Loads()
        loads.errors = [error]
        engine = Engine(asyncio.get_running_loop(), {"fake": loads})
        with pytest.raises(InferError, match=error.message):
            await engine.load(spec)


class TestServing:
    async def test_every_request_ends_exactly_once_under_faults(self) -> None:
        def fits(inputs: list[Any]) -> list[Any]:
            if len(inputs[0]) > 2:
                raise OutOfMemory(Code.OVERLOADED, "CUDA failure 2", 1)
            return faulty(inputs)

        values = [float(value) for value in range(40)]
        values[7] = values[20] = GUILTY
        values[13] = BROKEN
        loads = Loads(fits)
        async with served(loads) as (engine, model):
            ends = await infer_all(engine, model, values)
            statistics = model.statistics.snapshot()

            assert ends == [
                {GUILTY: "a guilty row", BROKEN: "CUDA failure 700"}.get(value, value + 1) for value in values
            ]
            assert model.inflight == 0
            assert statistics.success.count == 37
            assert sum(statistics.failures.values()) == 3
            assert model.device_ns["cuda:0"] > 0
        assert all(backend.closed for backend in loads.backends)

    async def test_canceling_a_request_on_the_device_does_not_affect_other_requests(self) -> None:
        loads = Loads()
        async with served(loads) as (engine, model):
            (stream,) = loads.streams
            stream.held = True
            stream.begun = threading.Semaphore(0)
            first = asyncio.create_task(infer_all(engine, model, [1]))
            await asyncio.get_running_loop().run_in_executor(None, stream.wait_begun)
            canceled = asyncio.create_task(infer_all(engine, model, [2]))
            later = asyncio.create_task(infer_all(engine, model, [3]))
            await asyncio.sleep(0)
            canceled.cancel()
            stream.held = False
            stream.let_end(9)

            assert await first == [2]
            assert await later == [4]
        assert model.inflight == 0

    async def test_a_run_that_hangs_is_stopped_at_its_limit_and_later_requests_are_served(self) -> None:
        loads = Loads()
        spec = replace(SPEC, policy=BatchPolicy(max_batch_rows=1, run_limit_us=1000))
        async with served(loads, spec) as (engine, model):
            (stream,) = loads.streams
            stream.held = True
            ends = await infer_all(engine, model, [1, 2])
            stream.held = False

            assert ends == ["model 'm': run exceeded its limit of 1 ms"] * 2
            assert await infer_all(engine, model, [3]) == [4]
            assert model.event_counts["runs_stopped"] == 2

    async def test_time_that_a_batch_waits_for_the_previous_one_counts_as_device_time(self) -> None:
        loads = Loads()
        async with served(loads, replace(SPEC, policy=BatchPolicy(max_batch_rows=1))) as (engine, model):
            batches: list[Any] = []
            engine.trace = lambda model, batch, now_ns: batches.append(batch)
            await infer_all(engine, model, [1, 2, 3, 4])

            for batch in batches:
                assert batch.exec_start_ns <= batch.compute_start_ns <= batch.compute_end_ns <= batch.exec_end_ns
            for before, after in pairwise(batches):
                assert before.exec_end_ns <= after.compute_end_ns
            assert model.statistics.snapshot().compute_infer.count == 4

    async def test_answers_keep_the_order_of_their_requests_if_ordering_is_preserved(self) -> None:
        order: list[float] = []
        policy = BatchPolicy(max_batch_rows=1, preserve_ordering=True)
        async with served(Loads(), replace(SPEC, policy=policy)) as (engine, model):

            async def ask(value: float) -> None:
                await infer_all(engine, model, [value])
                order.append(value)

            await asyncio.gather(*(ask(value) for value in (1, GUILTY, 3, 4, GUILTY, 6)))

        assert order == [1, GUILTY, 3, 4, GUILTY, 6]


class TestRaggedBatches:
    async def test_each_request_gets_the_sum_of_its_own_elements_in_any_batch(self) -> None:
        def sums(inputs: list[Any]) -> list[Any]:
            flat, counts = inputs
            return [np.array([[part.sum()] for part in np.split(flat, np.cumsum(counts)[:-1])], np.float32)]

        ragged = TensorSpec("r", "FP32", (-1,), ragged=True)
        graph = Signature(
            (TensorSpec("r", "FP32", (-1,)), TensorSpec("count", "INT32", (-1,))), (TensorSpec("sum", "FP32", (-1, 1)),)
        )
        batch_tensor = BatchTensor("count", "BATCH_ELEMENT_COUNT", "INT32", ("r",))
        loads = Loads(sums, graph)
        spec = replace(SPEC, inputs=(ragged,), outputs=(TensorSpec("sum", "FP32", (1,)),), batch_inputs=(batch_tensor,))
        async with served(loads, spec) as (engine, model):
            inputs = [np.full((1, size), 2, np.float32) for size in range(1, 30)]
            ends = await asyncio.gather(*(engine.infer(model, [each]) for each in inputs))

            assert [float(sum_.item()) for (sum_,) in ends] == [2 * size for size in range(1, 30)]
        begun = [what for what, _, _ in loads.streams[0].events if what != "acquire"]
        assert ("begin", "begin") in pairwise(begun)


class TestEnsembles:
    async def test_overlapping_steps_of_an_ensemble_return_correct_answers(self) -> None:
        loads = Loads()
        steps = (step("m", "x=x", "y=z"), step("n", "x=z", "y=y"))
        one_row = BatchPolicy(max_batch_rows=1)
        async with served(loads, replace(SPEC, policy=one_row)) as (engine, _):
            await engine.load(replace(SPEC, name="n", policy=one_row))
            both = await engine.load(ensemble_spec("both", "x", "y", *steps, rows=1))

            assert await infer_all(engine, both, [1, 2, GUILTY, 4]) == [3, 4, "in ensemble 'both', a guilty row", 6]
            assert engine.inflight == 0


COLUMN = (-1, 1)
SUMS = Signature(
    (TensorSpec("x", "FP32", COLUMN), TensorSpec("in", "FP32", COLUMN)),
    (TensorSpec("y", "FP32", COLUMN), TensorSpec("out", "FP32", COLUMN)),
)


class TestSequences:
    @pytest.mark.parametrize(("direct", "rows"), [(True, 2), (False, 1), (False, 2)])
    async def test_a_sequences_next_request_never_overlaps_the_previous_one(self, direct: bool, rows: int) -> None:
        loads = Loads(lambda inputs: [inputs[0] + inputs[1]] * 2, SUMS)
        sequence = SequenceSpec(
            direct, idle_us=60_000_000, states=(State("in", "out", "FP32", (1,)),), max_candidates=8
        )
        spec = replace(SPEC, policy=BatchPolicy(max_batch_rows=rows), sequence=sequence)
        async with served(loads, spec) as (engine, model):

            async def ask(value: float, of: int, flags: str) -> float:
                terms = RequestOptions(sequence=InSequence(of, "s" in flags, "e" in flags))
                (answer,) = await engine.infer(
                    model, [np.full((1, 1), value, np.float32)], options=terms, output_positions=(0,)
                )
                return float(answer.item())

            flags = ("s", "", "", "e")
            sums = await asyncio.gather(
                *(ask(10 * of + step, of, flags[step]) for step in range(4) for of in (1, 2, 3))
            )

            assert sums == [sum(10 * of + at for at in range(step + 1)) for step in range(4) for of in (1, 2, 3)]
            assert model.inflight == 0
        begun = [what for what, _, _ in loads.streams[0].events if what != "acquire"]
        together = any(pair == ("begin", "begin") for pair in pairwise(begun))
        assert together is not direct  # all rows of a direct batch must end before any of them continues
