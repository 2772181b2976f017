"""Warm-up samples: what each Instance runs before a model is ready, with which values, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.datatypes import DATATYPES
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading import warmup
from penstock.batching.loading.opening import close_model, open_model
from penstock.batching.loading.samples import _random
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec, Sample, SampleInput
from tests.fakes import FakeBackend, FakeRun, fake_loader

ROWS = 4
ZERO = SampleInput("FP32", (3,), "zero")
RANDOM = SampleInput("FP32", (3,), "random")


@pytest.fixture(autouse=True)
def _no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "sweep", lambda model: None)


def signature(datatype: str = "FP32", *, rows: bool = True, optional: bool = False) -> Signature:
    shape = (-1, 3) if rows else (3,)
    inputs = TensorSpec("x", datatype, shape), TensorSpec("more", "FP32", shape, optional=optional)
    return Signature(inputs[: 1 + optional], (TensorSpec("y", datatype, shape),))


def opened(
    *samples: Sample, graph: Signature | None = None, instances: int = 1, most: int = ROWS, function: Any = None
) -> tuple[Model, list[FakeRun]]:
    """Open a model that returns `x`, and close it. Returns: the model and its runs."""
    backend = FakeBackend(graph or signature(), function or (lambda inputs: [inputs[0]]))
    policy = BatchPolicy(max_batch_rows=most)
    spec = ModelSpec(
        "m", 1, Path("m"), policy=policy, instances=(InstanceGroup(instances),), samples=samples,
        # a batched model completes itself
        inputs=() if most else backend.graph.inputs,
    )  # fmt: skip
    model = open_model(spec, {"onnxruntime": fake_loader(backend)}, lambda *_: None)
    close_model(model)
    return model, backend.runs


def sample(rows: int = 1, count: int = 1, name: str = "s", **inputs: SampleInput) -> Sample:
    return Sample(name, rows, count, inputs or {"x": ZERO})


def test_a_shape_tensor_of_a_sample_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(np.array([1, 5], np.int64).tobytes())
    specs = TensorSpec("x", "FP32", (3,)), TensorSpec("v", "INT64", (1,), is_shape=True)
    graph = Signature(
        (replace(specs[0], shape=(-1, 3)), replace(specs[1], shape=(2,), is_shape=False)),
        (TensorSpec("y", "FP32", (-1, 3)),),
    )
    backend = FakeBackend(graph, lambda inputs: [inputs[0]])
    values = SampleInput("INT64", (2,), tmp_path / "v")
    spec = ModelSpec("m", 1, Path("m"), policy=BatchPolicy(max_batch_rows=ROWS), inputs=specs,
                     samples=(sample(2, x=ZERO, v=values),))  # fmt: skip
    close_model(open_model(spec, {"onnxruntime": fake_loader(backend)}, lambda *_: None))

    assert [run.inputs[1].tolist() for run in backend.runs if run.inputs[1] is not None] == [[2, 5]] * 2


def refusal(*samples: Sample, **more: Any) -> str:
    with pytest.raises(InferError) as caught:
        opened(*samples, **more)
    return caught.value.message


def one(run: FakeRun, position: int = 0) -> Any:
    array = run.inputs[position]
    assert array is not None
    return array.tolist()


class TestRunning:
    def test_every_instance_and_the_loop_run_all_samples_in_order(self) -> None:
        _, runs = opened(sample(2, name="first"), sample(3, 2, name="second"), instances=2)

        assert [run.rows for run in runs] == [2, 3, 3] * 3

    def test_zero_inputs_are_zeros_and_all_rows_of_a_sample_are_equal(self) -> None:
        _, runs = opened(sample(2), sample(3, x=RANDOM))

        assert one(runs[0]) == [[0, 0, 0]] * 2
        first, *others = one(runs[1])
        assert others == [first] * 2
        assert 0 < first[0] < 1

    def test_random_values_are_the_same_on_every_load(self) -> None:
        assert one(opened(sample(x=RANDOM))[1][0]) == one(opened(sample(x=RANDOM))[1][0])

    def test_a_model_without_rows_runs_samples_without_a_row_axis(self) -> None:
        _, runs = opened(sample(), graph=signature(rows=False), most=0)

        assert one(runs[0]) == [0, 0, 0]

    def test_an_optional_input_may_be_missing_in_a_sample(self) -> None:
        without_input, with_input = sample(), sample(more=SampleInput("FP32", (3,), "random"), x=ZERO)
        _, runs = opened(without_input, with_input, graph=signature(rows=False, optional=True), most=0)

        assert runs[0].inputs[1] is None
        assert runs[1].inputs[1] is not None

    def test_sample_runs_are_not_counted_in_the_statistics(self) -> None:
        model, runs = opened(sample(count=5))

        counted = model.statistics.snapshot()
        assert (len(runs), counted.execution_count, counted.inference_count, counted.success.count) == (10, 0, 0, 0)

    def test_each_sample_run_is_logged_at_debug_level(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG, "penstock.batching"):
            opened(sample(count=2, name="regular sample"))

        messages = [record.getMessage() for record in caplog.records if "warmup" in record.getMessage()]
        assert messages == [
            f"model 'm' instance {name} is running warmup sample 'regular sample' for iteration {iteration}"
            for name in ("0", "loop")
            for iteration in (1, 2)
        ]


class TestFiles:
    @pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
    def test_values_of_a_sample_file_are_read_as_raw_tensor_bytes(self, tmp_path: Path, datatype: str) -> None:
        dtype = DATATYPES[datatype].dtype
        values = np.array([1, 0, 1], dtype)
        (tmp_path / "raw").write_bytes(values.tobytes() + b"more")
        _, runs = opened(sample(x=SampleInput(datatype, (3,), tmp_path / "raw")), graph=signature(datatype))

        assert one(runs[0]) == [values.tolist()]

    def test_strings_of_a_sample_file_are_preceded_by_their_lengths(self, tmp_path: Path) -> None:
        (tmp_path / "raw").write_bytes(b"\3\0\0\x00233" + b"\0\0\0\0" + b"\1\0\0\0x")
        _, runs = opened(sample(2, x=SampleInput("BYTES", (3,), tmp_path / "raw")), graph=signature("BYTES"))

        assert one(runs[0]) == [[b"233", b"", b"x"]] * 2

    @pytest.mark.parametrize("raw", [b"", b"\1\0\0\0", b"\1\0\0\0x", b"\0\0\0\0" * 4, b"\0\0\0\0" * 3 + b"x"])
    def test_a_sample_file_with_a_wrong_number_of_strings_is_refused(self, tmp_path: Path, raw: bytes) -> None:
        (tmp_path / "raw").write_bytes(raw)
        text = refusal(sample(x=SampleInput("BYTES", (3,), tmp_path / "raw")), graph=signature("BYTES"))

        assert text.startswith("failed to run warmup sample 's': warmup setting expects 3 strings for input 'x'")

    def test_a_sample_file_with_too_few_bytes_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "raw").write_bytes(bytes(11))

        assert refusal(sample(x=SampleInput("FP32", (3,), tmp_path / "raw"))) == (
            "failed to run warmup sample 's': warmup setting expects 12 bytes, but the data provided from raw only has "
            "11 bytes"
        )

    def test_a_missing_sample_file_is_refused(self, tmp_path: Path) -> None:
        text = refusal(sample(x=SampleInput("FP32", (3,), tmp_path / "raw")))

        place = tmp_path / "raw"
        assert text == (
            f"failed to run warmup sample 's': failed to open text file for read {place}: No such file or directory"
        )


class TestRandom:
    @pytest.mark.parametrize("datatype", DATATYPES)
    def test_random_values_cover_the_range_of_their_datatype(self, datatype: str) -> None:
        array = _random(SampleInput(datatype, (200, 5), "random"), np.random.default_rng(0))

        assert array.shape == (200, 5)
        assert array.dtype == DATATYPES[datatype].dtype
        assert len({str(value) for value in array.ravel().tolist()}) > (1 if datatype == "BOOL" else 50)
        if array.dtype.kind in "iu" and datatype != "BF16":
            bounds = np.iinfo(array.dtype.str)
            assert array.max() > bounds.max * 0.9
            assert int(array.min()) < bounds.min + bounds.max // 50 + 9
        if array.dtype.kind == "f":
            assert np.isfinite(array).all()
        if datatype == "BF16":
            assert (array < 0x3F81).all()  # from 0 to 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("inputs", "text"),
        [
            ({"z": ZERO, "x": ZERO}, "unexpected inference input 'z' for model 'm'"),
            (
                {"x": SampleInput("INT32", (3,), "zero")},
                "inference input 'x' data-type is 'INT32', but model 'm' expects",
            ),
            ({"x": SampleInput("FP32", (4,), "zero")}, "unexpected shape for input 'x' for model 'm'. Expected [-1,3]"),
            ({"x": SampleInput("FP32", (1, 3), "zero")}, "unexpected shape for input 'x' for model 'm'"),
        ],
    )
    def test_sample_inputs_that_do_not_match_the_model_are_refused(
        self, inputs: Mapping[str, SampleInput], text: str
    ) -> None:
        assert refusal(Sample("s", 1, 1, inputs)).startswith(f"failed to run warmup sample 's': {text}")

    def test_a_missing_sample_input_is_named_in_the_error(self) -> None:
        text = refusal(Sample("s", 1, 1, {}))

        assert text.endswith("got 0 inputs for model 'm', but missing required input(s) ['x']")

    def test_a_sample_with_more_rows_than_the_maximum_batch_size_is_refused(self) -> None:
        assert refusal(sample(5)).endswith("inference request batch-size must be <= 4 for 'm'")

    @pytest.mark.parametrize("source", ["zero", "random"])
    @pytest.mark.parametrize("length", [1 << 58, 1 << 62])
    def test_a_sample_too_large_for_memory_is_refused(self, source: str, length: int) -> None:
        text = refusal(sample(x=SampleInput("FP32", (length,), source)))

        assert text.startswith("failed to run warmup sample 's': ")

    def test_a_sample_with_rows_for_a_model_without_rows_is_refused(self) -> None:
        text = refusal(sample(2), graph=signature(rows=False), most=0)

        assert text.endswith("inference request batch-size must be <= 1 for 'm'")

    @pytest.mark.parametrize("failure", [InferError, ValueError])
    def test_a_failed_sample_run_fails_the_load_and_closes_the_backend(self, failure: type[Exception]) -> None:
        def fail(_: Any) -> Any:
            raise InferError(Code.INVALID, "no") if failure is InferError else ValueError("no")

        backend = FakeBackend(signature(), fail)
        spec = ModelSpec("m", 1, Path("m"), policy=BatchPolicy(max_batch_rows=4), samples=(sample(), sample(name="t")))
        with pytest.raises(InferError, match=r"failed to run warmup sample 's': (ValueError: )?no"):
            open_model(spec, {"onnxruntime": fake_loader(backend)}, lambda *_: None)

        assert len(backend.runs) == 1
        assert backend.closed
