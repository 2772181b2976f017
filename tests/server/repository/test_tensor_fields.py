"""The tensor fields of a configuration: how they are read, and rejected with Triton's messages."""

from __future__ import annotations

import pytest

from penstock.backends.signature import TensorSpec
from penstock.batching.shapes.ragged import KINDS
from penstock.batching.spec import BatchTensor
from penstock.server.repository.parsed_config import ParsedConfig
from tests.server.repository.configs import read_text

INPUT = 'name: "x" data_type: TYPE_FP32 dims: [ -1 ]'


def stated(text: str) -> tuple[ParsedConfig, list[str]]:
    """Read a configuration; return its values and its mistakes."""
    statement, findings = read_text(text, None)
    return statement, [finding.message for finding in findings]


def inputs(text: str) -> TensorSpec:
    """Read the only input."""
    statement, mistakes = stated(f"input {{ {text} }}")
    assert mistakes == []
    (spec,) = statement.get("inputs", ())
    assert isinstance(spec, TensorSpec)
    return spec


class TestInputs:
    def test_a_plain_input_has_no_form(self) -> None:
        assert inputs(INPUT) == TensorSpec("x", "FP32", (-1,))

    @pytest.mark.parametrize(("shape", "reshape"), [("", ()), ("shape: [ -1, 1 ]", (-1, 1))])
    def test_a_reshape_may_be_empty(self, shape: str, reshape: tuple[int, ...]) -> None:
        assert inputs(f"{INPUT} reshape {{ {shape} }}").reshape == reshape

    def test_an_output_may_have_a_reshape(self) -> None:
        statement, _ = stated(f"output {{ {INPUT} reshape {{ shape: [ -1, 1 ] }} }}")

        assert statement.get("outputs") == (TensorSpec("x", "FP32", (-1,), reshape=(-1, 1)),)

    def test_ragged_and_shape_inputs_are_marked(self) -> None:
        assert inputs(f"{INPUT} allow_ragged_batch: true").ragged
        assert inputs(f"{INPUT} is_shape_tensor: true").is_shape


class TestBatchTensors:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("datatype", ["INT32", "FP32"])
    def test_every_kind_of_batch_input_is_read_for_each_of_its_targets(self, kind: str, datatype: str) -> None:
        text = f'batch_input {{ kind: {kind} target_name: [ "a", "b" ] data_type: TYPE_{datatype} source_input: "x" }}'
        statement, mistakes = stated(text)

        assert mistakes == []
        assert statement.get("batch_inputs") == tuple(BatchTensor(name, kind, datatype, ("x",)) for name in "ab")

    def test_a_batch_output_has_its_source_input(self) -> None:
        text = 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }'

        kind = "BATCH_SCATTER_WITH_INPUT_SHAPE"
        assert stated(text)[0].get("batch_outputs") == (BatchTensor("y", kind, "", ("x",)),)

    @pytest.mark.parametrize(
        ("text", "mistake"),
        [
            (
                'batch_input { target_name: "a" data_type: TYPE_FP32 }',
                "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0",
            ),
            (
                'batch_input { target_name: "a" data_type: TYPE_INT64 source_input: "x" }',
                "batch input data type must be TYPE_INT32 or TYPE_FP32",
            ),
            (
                'batch_output { target_name: "y" source_input: [ "x", "z" ] }',
                "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 2",
            ),
            (
                'batch_input { data_type: TYPE_FP32 source_input: "x" }',
                "batch input kind 'BATCH_ELEMENT_COUNT' expects a target_name",
            ),
        ],
    )
    def test_an_invalid_batch_tensor_is_rejected(self, text: str, mistake: str) -> None:
        assert mistake in stated(text)[1]


class TestEnsembles:
    @pytest.mark.parametrize(
        ("text", "field"),
        [
            (f"input {{ {INPUT} allow_ragged_batch: true }}", "input.allow_ragged_batch"),
            ('batch_output { target_name: "y" source_input: "x" }', "batch_output"),
        ],
    )
    def test_forms_are_rejected_for_ensembles(self, text: str, field: str) -> None:
        ensemble = 'platform: "ensemble" ensemble_scheduling { step { model_name: "a" model_version: -1 } }'

        assert f"ensemble 'm' cannot have {field}: set it on its models" in stated(f"{ensemble} {text}")[1]

    @pytest.mark.parametrize("reshape", ["", "reshape { shape: [ -1, 1 ] }"])
    def test_the_tensors_of_an_ensemble_may_have_a_reshape(self, reshape: str) -> None:
        ensemble = 'platform: "ensemble" ensemble_scheduling { step { model_name: "a" model_version: -1 } }'

        assert not [text for text in stated(f"{ensemble} input {{ {INPUT} {reshape} }}")[1] if "cannot have" in text]
