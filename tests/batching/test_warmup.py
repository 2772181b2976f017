from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from penstock.backends.errors import Code, InferError
from penstock.backends.loading import LOADERS
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading import preparing, warmup
from penstock.batching.loading.opening import close_model, open_model
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy, ModelSpec, PaddedAxis
from tests.backends.onnx_models import ints, node, save, value
from tests.fakes import FakeBackend, Function, fake_model, fake_request

X, Y = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("y", "FP32", (-1, 4))
BATCHED = Signature((X,), (Y,), batched=True)


@contextmanager
def opened(
    function: Function, signature: Signature = BATCHED, rows: int = 6, *, allowed: tuple[int, ...] = (),
    padding: tuple[PaddedAxis, ...] = (),
) -> Iterator[tuple[Model, FakeBackend]]:  # fmt: skip
    backend = FakeBackend(signature, function)
    policy = BatchPolicy(max_batch_rows=rows, allowed_rows=allowed)
    spec = ModelSpec("m", 1, Path("model"), policy=policy, signature=signature, padding=padding)
    model = Model(spec, [backend], lambda *_: None)
    model.open()
    try:
        yield model, backend
    finally:
        model.close()


def lessons(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Sweep. Returns: the keys and rows that the Scheduler learned, each once."""
    return list(dict.fromkeys((key, rows) for key, rows, _ in all_lessons(model, monkeypatch)))


def all_lessons(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int, int]]:
    """Sweep. Returns: every run that the Scheduler learned: key, rows, nanoseconds."""
    taught: list[tuple[Any, int, int]] = []

    def learn(key: Any, rows: int, ns: int, now_ns: int) -> None:
        assert ns > 0
        taught.append((key, rows, ns))

    monkeypatch.setattr(model.scheduler, "learn", learn)
    warmup.sweep(model)
    return taught


def test_measured_sizes_double_up_to_the_maximum_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(list) as (model, backend):
        taught = lessons(model, monkeypatch)

    assert taught == [(((4,),), rows) for rows in (1, 2, 4, 6)]
    assert [run.rows for run in backend.runs] == [rows for rows in (1, 2, 4, 6) for _ in range(warmup.RUNS_PER_SIZE)]


def test_only_allowed_sizes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(list, rows=16, allowed=(2, 5, 16)) as (model, _):
        assert [rows for _, rows in lessons(model, monkeypatch)] == [2, 5, 16]


def test_a_model_with_an_output_that_is_not_a_tensor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = TensorSpec("maps", "seq(map(int64,tensor(float)))", ())
    with opened(lambda inputs: [[{0: 1.0}], *inputs], Signature((X,), (maps, Y), batched=True)) as (model, _):
        assert [rows for _, rows in lessons(model, monkeypatch)] == [1, 2, 4, 6]


class Clock:
    """A clock that advances by the next of `taking` nanoseconds in each run, and then by the last one."""

    def __init__(self, *taking: int) -> None:
        self.now_ns = 0
        self._taking = list(taking)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def run(self, inputs: list[Any]) -> list[Any]:
        self.now_ns += self._taking.pop(0) if len(self._taking) > 1 else self._taking[0]
        return list(inputs)


@pytest.mark.parametrize(
    ("taking", "taught"),
    [
        ((900, 10, 11, 12, 13, 14), [10, 11, 12, 13, 14]),
        ((900, 500, 16, 10, 40, 11), [10, 40, 11]),
        ((10, 11, 10, 11, 10, 11), [11, 10, 11, 10, 11]),
    ],
)
def test_every_run_except_slow_first_ones_is_learned(
    taking: tuple[int, ...], taught: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(*taking)
    monkeypatch.setattr(warmup, "time", clock)
    with opened(clock.run, rows=1) as (model, _):
        assert [ns for _, _, ns in all_lessons(model, monkeypatch)] == taught


def test_run_times_are_known_before_the_model_is_ready() -> None:
    with opened(list, rows=2) as (model, _):
        warmup.sweep(model)
        model.scheduler.add(fake_request(model))
        lane = model.scheduler.next_lane(1)

        assert lane is not None
        assert model.scheduler.take_from(lane, 1).cost_ns > 0


class TestPadding:
    FREE = TensorSpec("x", "FP32", (-1, -1), axes=("rows", "length"))
    MASK = TensorSpec("mask", "FP32", (-1, -1), axes=("rows", "length"))
    OTHER = TensorSpec("z", "FP32", (-1, -1, 3))

    def test_padded_axes_are_measured_at_their_buckets_starting_with_the_smallest_and_largest(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        signature = Signature((self.FREE, self.OTHER), (Y,), batched=True)
        padding = (PaddedAxis("x", 0, (8, 16, 32, 64), outputs={}),)
        with opened(lambda inputs: [inputs[0]], signature, rows=2, padding=padding) as (model, _):
            taught = lessons(model, monkeypatch)

        keys = [((length,), (1, 3)) for length in (8, 64, 16, 32)]
        assert taught == [(key, rows) for key in keys for rows in (1, 2)]

    def test_a_mask_is_as_long_as_its_padded_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        signature = Signature((self.FREE, self.MASK), (Y,), batched=True)
        padding = (PaddedAxis("x", 0, (8, 16), mask="mask", outputs={}),)
        with opened(lambda inputs: [inputs[0]], signature, rows=1, padding=padding) as (model, _):
            taught = lessons(model, monkeypatch)

        assert [key for key, _ in taught] == [((8,), (8,)), ((16,), (16,))]

    def test_measured_keys_are_the_keys_of_real_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        signature = Signature((self.FREE,), (Y,), batched=True)
        with opened(list, signature, rows=1, padding=(PaddedAxis("x", 0, outputs={}),)) as (model, _):
            taught = lessons(model, monkeypatch)
            assert model.padding is not None
            assert [model.padding.key("m", key) for key, _ in taught] == [key for key, _ in taught]
        assert len(taught) == 2

    def test_any_number_of_buckets_is_measured_at_a_bounded_number_of_shapes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        signature = Signature((self.FREE,), (Y,), batched=True)
        padding = (PaddedAxis("x", 0, tuple(range(1, 100)), outputs={}),)
        with opened(list, signature, rows=1, padding=padding) as (model, _):
            taught = lessons(model, monkeypatch)

        assert len(taught) == preparing.MAX_SHAPES
        assert [key for key, _ in taught[:2]] == [((1,),), ((99,),)]

    def test_a_slow_shape_leaves_the_last_shape_its_share_of_the_time_budget(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(100)
        monkeypatch.setattr(warmup, "time", clock)
        monkeypatch.setattr(warmup, "BUDGET_NS", 1000)
        signature = Signature((self.FREE,), (Y,), batched=True)
        padding = (PaddedAxis("x", 0, (8, 16), outputs={}),)
        with opened(clock.run, signature, rows=64, padding=padding) as (model, _):
            taught = lessons(model, monkeypatch)

        assert [key for key, _ in taught] == [((8,),), ((16,),)]
        assert clock.now_ns <= 1000

    def test_a_shape_that_fails_does_not_prevent_other_shapes_from_being_measured(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def function(inputs: list[Any]) -> list[Any]:
            if inputs[0].shape[1] == 64:
                raise InferError(Code.INTERNAL, "out of memory")
            return list(inputs)

        signature = Signature((self.FREE,), (Y,), batched=True)
        padding = (PaddedAxis("x", 0, (8, 16, 64), outputs={}),)
        with opened(function, signature, rows=1, padding=padding) as (model, _):
            assert [key for key, _ in lessons(model, monkeypatch)] == [((8,),), ((16,),)]


def test_the_sweep_runs_on_zeros_with_free_axes_of_length_one(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = Signature((TensorSpec("x", "INT8", (-1, -1, 3)), TensorSpec("s", "BYTES", (-1,))), (Y,), batched=True)
    with opened(lambda inputs: [inputs[0]], signature, rows=2) as (model, backend):
        taught = lessons(model, monkeypatch)

    assert taught == [(((1, 3), ()), 1), (((1, 3), ()), 2)]
    numbers, strings = backend.runs[-1].inputs
    np.testing.assert_array_equal(numbers, np.zeros((2, 1, 3), np.int8))
    np.testing.assert_array_equal(strings, np.array([b"", b""], object))


def test_a_model_without_rows_is_measured_only_in_its_own_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = Signature((TensorSpec("x", "FP32", (2, -1)),), (TensorSpec("y", "FP32", (2, -1)),))
    with opened(list, signature, rows=0) as (model, backend):
        taught = lessons(model, monkeypatch)

    assert taught == [(((2, 1),), 1)]
    assert len(backend.runs) == warmup.RUNS_PER_SIZE


def test_the_sweep_stops_when_its_time_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "BUDGET_NS", 0)
    with opened(list) as (model, backend):
        taught = lessons(model, monkeypatch)

    assert taught == [(((4,),), 1)]
    assert len(backend.runs) == 1


@pytest.mark.parametrize("error", [InferError(Code.INVALID, "no zeros"), ZeroDivisionError()])
def test_a_model_that_fails_on_zeros_is_not_measured_further(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(inputs: list[Any]) -> list[Any]:
        raise error

    with opened(function) as (model, backend):
        taught = lessons(model, monkeypatch)

    assert taught == []
    assert len(backend.runs) == 1


def test_sizes_measured_before_one_fails_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(inputs: list[Any]) -> list[Any]:
        if len(inputs[0]) > 2:
            raise InferError(Code.INTERNAL, "out of memory")
        return list(inputs)

    with opened(function) as (model, _):
        taught = lessons(model, monkeypatch)

    assert [rows for _, rows in taught] == [1, 2]


def test_sweeping_a_model_that_is_not_open_is_an_error() -> None:
    with pytest.raises(ValueError, match="not open"):
        warmup.sweep(fake_model())


def test_memory_used_for_large_outputs_in_the_sweep_is_released_before_the_model_is_ready(tmp_path: Path) -> None:
    ends = [value("x", TensorProto.FLOAT, ["N", 1])], [value("y", TensorProto.FLOAT, ["N", 3_000_000])]
    nodes, shape = [node("Expand", ["x", "shape"], ["y"])], {"shape": ints([1, 3_000_000])}
    path = save(tmp_path / "model.onnx", nodes, *ends, shape)

    model = open_model(ModelSpec("m", 1, path, policy=BatchPolicy(max_batch_rows=1)), LOADERS, lambda *_: None)
    looped: Any = model.loop_binding
    trimmable = looped.can_trim
    close_model(model)

    assert not trimmable
