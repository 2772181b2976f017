"""Invariance: what probing finds out about real models, and that it holds for any batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from penstock.backends import onnx as onnx_backend
from penstock.backends.backend import Array, Backend
from penstock.backends.loading import LOADERS
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.loading import invariance
from penstock.batching.loading.completion import complete
from penstock.batching.loading.invariance import ProbeResult, probe, set_invariant_size
from penstock.batching.model import Model
from penstock.batching.running.batch import Batch
from penstock.batching.running.execution import run_batch
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.server import cli
from tests.backends.onnx_models import floats, ints, node, save, value
from tests.fakes import FakeBackend, fake_request

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
WIDTH = 48
RNG = np.random.default_rng(3)
WEIGHT = RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32)
TABLE = RNG.standard_normal((10, WIDTH)).astype(np.float32)
X, Y = value("x", FLOAT, ["N", WIDTH]), value("y", FLOAT, ["N", WIDTH])
Values = dict[str, Array]
Models = dict[str, tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto], list[onnx.ValueInfoProto], Values]]

MODELS: Models = {
    "matmul": ([node("MatMul", ["x", "w"], ["h"]), node("Tanh", ["h"], ["y"])], [X], [Y], {"w": WEIGHT}),
    "quantized": (
        [node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])],
        [X], [Y], {},
    ),
    "centred": (
        [node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1), node("Sub", ["x", "m"], ["y"])], [X], [Y], {},
    ),
    "placed": (  # adds to each row the number of rows before it
        [
            node("ReduceSum", ["x", "last"], ["sums"], keepdims=1), node("Mul", ["sums", "zero"], ["nothing"]),
            node("Add", ["nothing", "one"], ["ones"]), node("CumSum", ["ones", "first"], ["place"]),
            node("Add", ["x", "place"], ["y"]),
        ],
        [X], [Y], {"last": ints([1]), "first": np.array(0, np.int64), "zero": floats([0]), "one": floats([1])},
    ),
    "embedding": (
        [node("Gather", ["table", "i"], ["h"]), node("MatMul", ["h", "w"], ["y"])],
        [value("i", INT64, ["N", 3])], [value("y", FLOAT, ["N", 3, WIDTH])], {"table": TABLE, "w": WEIGHT},
    ),
    "strings": ([node("Identity", ["x"], ["y"])], [value("x", STRING, ["N", 2])], [value("y", STRING, ["N", 2])], {}),
    "free": ([node("Identity", ["x"], ["y"])], [value("x", FLOAT, ["N", "L"])], [value("y", FLOAT, ["N", "L"])], {}),
}  # fmt: skip


def load(folder: Path, name: str, **policy: Any) -> tuple[ModelSpec, Backend]:
    nodes, inputs, outputs, initializers = MODELS[name]
    path = save(folder / f"{name}.onnx", nodes, inputs, outputs, initializers)
    backend = onnx_backend.load(path, "cpu", {"intra_op_thread_count": "1"})
    policy = {"max_batch_rows": 16, "invariant": True, "executor": "thread", **policy}
    return complete(ModelSpec("m", 1, path, policy=BatchPolicy(**policy)), backend.graph), backend


def open_settled(folder: Path, name: str, **policy: Any) -> tuple[Model, Backend]:
    spec, backend = load(folder, name, **policy)
    return Model(set_invariant_size(spec, [backend]), [backend], lambda *_: None), backend


def answers(model: Model, backend: Backend, arrays: Sequence[Array]) -> list[bytes]:
    """Run requests as one batch. Returns: the bytes of each answer."""
    requests = []
    for array in arrays:
        request = fake_request(model, len(array), (array.shape[1:],))
        request.inputs = [array]
        requests.append(request)
    batch = Batch(requests, sum(map(len, arrays)), requests[0].key, 1)
    run_batch(model, backend.bind(model.signature, model.max_rows), batch)
    found = [(request.outputs or [])[0] for request in requests]
    return [output.tobytes() for output in found]


@pytest.mark.parametrize("name", ["matmul", "embedding"])
def test_a_model_with_independent_rows_is_invariant_at_a_fixed_size(name: str, tmp_path: Path) -> None:
    spec, backend = load(tmp_path, name)

    assert 16 in probe(spec, backend, with_natural=False).fixed_sizes


@pytest.mark.parametrize("name", ["quantized", "centred", "placed"])
def test_a_model_whose_rows_depend_on_each_other_or_their_position_is_never_invariant(
    name: str, tmp_path: Path
) -> None:
    spec, backend = load(tmp_path, name)
    found = probe(spec, backend)

    assert found.fixed_sizes == {}
    assert found.reason == ""
    assert found.natural_sizes == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("strings", "input 'x' is BYTES, for which no random values can be generated"),
        ("free", "input 'x' has a free axis, and a result for one length does not hold for another"),
    ],
)
def test_a_model_that_cannot_be_probed_has_a_reason_and_runs_requests_alone(
    name: str, reason: str, tmp_path: Path
) -> None:
    spec, backend = load(tmp_path, name)

    assert probe(spec, backend) == ProbeResult({}, reason=reason)
    assert set_invariant_size(spec, [backend]).policy.cap_rows == 1


def test_a_model_that_fails_on_random_rows_has_that_as_its_reason() -> None:
    def picky(inputs: list[Any]) -> list[Any]:
        raise ValueError("never")

    signature = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),), batched=True)
    spec = ModelSpec("m", 1, Path("m"), policy=BatchPolicy(max_batch_rows=4, invariant=True), signature=signature)

    assert probe(spec, FakeBackend(signature, picky)).reason == "it does not run on random rows: never"


def test_a_model_too_slow_for_enough_trials_is_not_considered_invariant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, backend = load(tmp_path, "matmul")
    monkeypatch.setattr(invariance, "MAX_TRIALS_NS", 0)

    assert probe(spec, backend, with_natural=False).fixed_sizes == {}


def test_a_model_with_one_row_per_batch_needs_no_probe(tmp_path: Path) -> None:
    spec, backend = load(tmp_path, "matmul", max_batch_rows=1)

    assert probe(spec, backend).reason == "no two rows share a batch"


def test_a_size_that_the_model_cannot_run_is_not_invariant() -> None:
    def pairs_only(inputs: list[Any]) -> list[Any]:
        if len(inputs[0]) != 2:
            raise ValueError("not two rows")
        return inputs

    signature = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),), batched=True)
    spec = ModelSpec("m", 1, Path("m"), policy=BatchPolicy(max_batch_rows=4, invariant=True), signature=signature)
    found = probe(spec, FakeBackend(signature, pairs_only))

    assert (list(found.fixed_sizes), found.natural_sizes) == ([2], ())


def test_an_invariant_size_becomes_the_only_size_and_larger_requests_are_split(tmp_path: Path) -> None:
    spec, backend = load(tmp_path, "matmul", preferred_rows=(3,))
    policy = set_invariant_size(spec, [backend]).policy
    size = policy.max_batch_rows

    assert size in {2, 4, 8, 16}
    assert (policy.allowed_rows, policy.cap_rows, policy.preferred_rows, policy.split) == ((size,), size, (), True)


def test_only_allowed_sizes_are_probed(tmp_path: Path) -> None:
    spec, backend = load(tmp_path, "matmul", allowed_rows=(3, 5))

    assert set(probe(spec, backend, with_natural=False).fixed_sizes) <= {3, 5}
    assert set_invariant_size(spec, [backend]).policy.max_batch_rows in {3, 5}


def test_no_size_above_the_cap_is_probed(tmp_path: Path) -> None:
    spec, backend = load(tmp_path, "matmul", cap_rows=3)

    assert set(probe(spec, backend, with_natural=False).fixed_sizes) <= {2, 3}
    assert set_invariant_size(spec, [backend]).policy.max_batch_rows in {2, 3}


def test_a_spec_that_does_not_request_invariance_is_left_unchanged(tmp_path: Path) -> None:
    spec, backend = load(tmp_path, "matmul", invariant=False)

    assert set_invariant_size(spec, [backend]) is spec


def test_the_chosen_invariant_size_is_logged_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.batching")
    for name in ("matmul", "quantized"):
        spec, backend = load(tmp_path, name)
        set_invariant_size(spec, [backend])
    shared, alone = (record.getMessage() for record in caplog.records)

    assert shared.startswith("model m: every batch runs at ")
    text = (
        "model m: each request runs alone: no batch size was found in time at which answers do not depend on "
        "other requests"
    )
    assert alone.startswith(text)


def test_a_policy_with_an_invariant_size_is_completed_to_itself(tmp_path: Path) -> None:
    spec, backend = load(tmp_path, "matmul")
    settled = set_invariant_size(spec, [backend])

    assert complete(settled, backend.graph).policy == settled.policy


ROWS = np.random.default_rng(4).standard_normal((64, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def matmul(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Backend]:
    return open_settled(tmp_path_factory.mktemp("models"), "matmul")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=16), st.integers(0, 48), st.floats(-6, 6))
def test_an_answers_bytes_are_the_same_alone_and_in_any_batch(
    matmul: tuple[Model, Backend], sizes: list[int], first: int, magnitude: float
) -> None:
    model, backend = matmul
    fitting: list[int] = []
    for size in sizes:
        if sum(fitting) + size <= model.max_rows:
            fitting.append(size)
    starts = first + np.cumsum([0, *fitting])
    arrays = [
        ROWS[start : start + size] * (np.float32(10**magnitude) if number % 2 else 1)
        for number, (start, size) in enumerate(zip(starts, fitting, strict=False))
    ]
    alone = [answers(model, backend, [array])[0] for array in arrays]

    assert answers(model, backend, arrays) == alone
    assert answers(model, backend, arrays[::-1]) == alone[::-1]


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["matmul", "quantized", "centred"])
async def test_answers_served_in_batches_and_alone_have_the_same_bytes(name: str, tmp_path: Path) -> None:
    spec, backend = load(tmp_path, name)
    engine = Engine(asyncio.get_running_loop(), LOADERS)
    model = await engine.load(set_invariant_size(spec, [backend]))
    sent = [ROWS[start : start + rows] for start, rows in ((0, 1), (1, 3), (4, 30), (34, 1), (35, 2), (37, 16))]
    if name != "matmul":  # requests that run alone are not split
        sent = [rows[:16] for rows in sent]

    alone = [(await engine.infer(model, [rows]))[0].tobytes() for rows in sent]
    together = await asyncio.gather(*(engine.infer(model, [rows]) for rows in sent))
    batches = model.statistics.snapshot().execution_count
    await engine.stop(1.0)

    assert [outputs[0].tobytes() for outputs in together] == alone
    if name != "matmul":
        assert batches == 2 * len(sent)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_a_probe_result_is_described_in_one_line() -> None:
    every = tuple(range(2, 9))
    for found, text in (
        (
            ProbeResult({8: 1}, every, every),
            "invariant in all batches tried: 2 to 8 rows; invariant at a fixed size of 8 rows",
        ),
        (
            ProbeResult({8: 1, 4: 1}, (2,), every),
            "invariant only in batches of 2 rows; invariant at a fixed size of 4, 8 rows",
        ),
        (
            ProbeResult({}, (), every),
            "not invariant, and at no fixed size tried: with strict invariance, each request would run alone",
        ),
        (ProbeResult({}, reason="it is so"), "not probed: it is so"),
    ):
        assert str(found) == text


def test_the_check_command_reports_the_invariance_of_each_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matmul", "quantized"):
        (tmp_path / name / "1").mkdir(parents=True)
        nodes, inputs, outputs, initializers = MODELS[name]
        save(tmp_path / name / "1" / "model.onnx", nodes, inputs, outputs, initializers)

    assert cli.main(["check", "--invariance", str(tmp_path), "--default-max-batch-size", "8"]) == 0
    output_lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  invariance")]
    assert len(output_lines) == 2
    assert "; invariant at a fixed size of 2, 4, 8 rows" in output_lines[0]
    assert output_lines[1] == (
        "invariance not invariant, and at no fixed size tried: with strict invariance, each request would run alone"
    )

    assert cli.main(["check", str(tmp_path)]) == 0
    (known,) = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  invariance")]
    assert known.startswith("invariance not invariant: DynamicQuantizeLinear takes its scale from all rows of a batch")


def test_a_policys_other_settings_are_kept_when_requests_run_alone(tmp_path: Path) -> None:
    spec, backend = load(tmp_path, "quantized", allowed_rows=(4, 16))
    policy = set_invariant_size(spec, [backend]).policy

    assert policy == replace(spec.policy, cap_rows=1)
