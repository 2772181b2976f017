from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching import warmup
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy, ModelSpec
from tests.fakes import FakeBackend, Function, fake_model

X, Y = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("y", "FP32", (-1, 4))
BATCHED = Signature((X,), (Y,), batched=True)


@contextmanager
def opened(function: Function, signature: Signature = BATCHED, rows: int = 6) -> Iterator[tuple[Model, FakeBackend]]:
    backend = FakeBackend(signature, function)
    spec = ModelSpec("m", 1, Path("model"), policy=BatchPolicy(max_batch_rows=rows), signature=signature)
    model = Model(spec, [backend], lambda *_: None)
    model.open()
    try:
        yield model, backend
    finally:
        model.close()


def lessons(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Sweep, and tell what the Scheduler was taught: keys and rows."""
    taught: list[tuple[Any, int]] = []

    def learn(key: Any, rows: int, ns: int, now_ns: int) -> None:
        assert ns > 0
        taught.append((key, rows))

    monkeypatch.setattr(model.scheduler, "learn", learn)
    warmup.sweep(model)
    return taught


def test_sizes_double_up_to_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(list) as (model, backend):
        taught = lessons(model, monkeypatch)

    assert taught == [(((4,),), rows) for rows in (1, 2, 4, 6)]
    assert [run.rows for run in backend.runs] == [rows for rows in (1, 2, 4, 6) for _ in range(warmup.RUNS)]


def test_the_model_runs_on_zeros_with_free_axes_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = Signature((TensorSpec("x", "INT8", (-1, -1, 3)), TensorSpec("s", "BYTES", (-1,))), (Y,), batched=True)
    with opened(lambda inputs: [inputs[0]], signature, rows=2) as (model, backend):
        taught = lessons(model, monkeypatch)

    assert taught == [(((1, 3), ()), 1), (((1, 3), ()), 2)]
    numbers, strings = backend.runs[-1].inputs
    np.testing.assert_array_equal(numbers, np.zeros((2, 1, 3), np.int8))
    np.testing.assert_array_equal(strings, np.array([b"", b""], object))


def test_a_model_without_rows_runs_in_its_own_shape_only(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = Signature((TensorSpec("x", "FP32", (2, -1)),), (TensorSpec("y", "FP32", (2, -1)),))
    with opened(list, signature, rows=0) as (model, backend):
        taught = lessons(model, monkeypatch)

    assert taught == [(((2, 1),), 1)]
    assert len(backend.runs) == warmup.RUNS


def test_it_stops_when_its_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "BUDGET_NS", 0)
    with opened(list) as (model, backend):
        taught = lessons(model, monkeypatch)

    assert taught == [(((4,),), 1)]
    assert len(backend.runs) == 1


@pytest.mark.parametrize("error", [InferError(Code.INVALID, "no zeros"), ZeroDivisionError()])
def test_a_model_that_does_not_run_on_zeros_is_left_to_learn_from_its_requests(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(inputs: list[Any]) -> list[Any]:
        raise error

    with opened(function) as (model, backend):
        taught = lessons(model, monkeypatch)

    assert taught == []
    assert len(backend.runs) == 1


def test_sizes_that_ran_before_one_that_fails_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(inputs: list[Any]) -> list[Any]:
        if len(inputs[0]) > 2:
            raise InferError(Code.INTERNAL, "out of memory")
        return list(inputs)

    with opened(function) as (model, _):
        taught = lessons(model, monkeypatch)

    assert [rows for _, rows in taught] == [1, 2]


def test_only_an_open_model_can_be_warmed_up() -> None:
    with pytest.raises(ValueError, match="not open"):
        warmup.sweep(fake_model())
