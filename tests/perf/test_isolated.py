from __future__ import annotations

from typing import Any

import numpy as np

from penstock.backends.signature import Signature, TensorSpec
from penstock.perf.isolated import Measuring, cost
from tests.fakes import FakeBackend


def test_a_run_has_a_cost_and_acquires_fills_and_runs_each_time() -> None:
    graph = Signature(
        (TensorSpec("x", "FP32", (-1, 4)), TensorSpec("text", "BYTES", (-1,))), (TensorSpec("y", "FP32", (-1, 4)),)
    )

    def function(inputs: list[Any]) -> list[Any]:
        x, text = inputs
        assert (x.tolist(), text.tolist()) == ([[0.0] * 4] * 2, [b""] * 2)
        return [np.ones((2, 4), np.float32)]

    backend = FakeBackend(graph, function)
    measured = cost(backend.bind(graph, 2), 2, [(2, 4), (2,)], (0,), Measuring(rounds=1, round_ns=1_000_000))

    assert measured.cpu > 0
    assert measured.wall > 0
    assert all(run.rows == 2 for run in backend.runs)
