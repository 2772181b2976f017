"""`sequence_batching` of a ModelConfig: how it is read, rejected and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.batching.spec import Control, SequenceSpec, State
from penstock.server.fronts import snapshot
from penstock.server.repository.fields import sequences
from tests.server.repository.configs import parse_text, read_values

FLAG = 'control_input { name: "%s" control { kind: CONTROL_SEQUENCE_%s %s } }'
INITIAL = 'initial_state { name: "n" data_type: TYPE_FP32 dims: 2 %s }'
STATE = 'state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: 2 %s }'


def read(inside: str, folder: Path = Path("m")) -> tuple[dict[str, Any], list[str]]:
    return read_values(f"sequence_batching {{ {inside} }}", folder=folder)


def spec_of(inside: str, folder: Path = Path("m")) -> SequenceSpec:
    values, messages = read(inside, folder)
    assert not messages
    spec: SequenceSpec = values["sequence"]
    return spec


class TestReading:
    def test_sequence_batching_without_a_strategy_is_direct(self) -> None:
        assert spec_of("") == SequenceSpec()

    def test_the_fields_of_direct_are_read(self) -> None:
        fields = (
            "direct { max_queue_delay_microseconds: 5 minimum_slot_utilization: 0.5 } max_sequence_idle_microseconds: 7"
        )

        assert spec_of(fields) == SequenceSpec(max_delay_us=5, min_utilization=0.5, idle_us=7)

    def test_the_fields_of_oldest_include_batching_settings(self) -> None:
        fields = "preferred_batch_size: [ 4, 2 ] max_queue_delay_microseconds: 5 preserve_ordering: true"
        values, messages = read(f"oldest {{ max_candidate_sequences: 8 {fields} }}")

        assert not messages
        assert values["sequence"] == SequenceSpec(direct=False, max_candidates=8)
        assert [values[f"batching.{name}"] for name in ("preferred", "max_queue_delay_us", "preserve_ordering")] == [
            (2, 4), 5, True,
        ]  # fmt: skip

    def test_controls_of_every_kind_are_read(self) -> None:
        controls = [
            FLAG % ("s", "START", "int32_false_true: [ 0, 1 ]"), FLAG % ("e", "END", "fp32_false_true: [ -1, 1 ]"),
            FLAG % ("r", "READY", "bool_false_true: [ false, true ]"), FLAG % ("c", "CORRID", "data_type: TYPE_STRING"),
        ]  # fmt: skip

        assert spec_of(" ".join(controls)).controls == (
            Control("s", "start", "INT32", (0, 1)), Control("e", "end", "FP32", (-1, 1)),
            Control("r", "ready", "BOOL", (0, 1)), Control("c", "corrid", "BYTES"),
        )  # fmt: skip

    def test_the_values_of_a_boolean_control_can_be_sent_to_front_ends(self) -> None:
        spec = spec_of(FLAG % ("r", "READY", "bool_false_true: [ false, true ]"))

        assert snapshot.read(SequenceSpec, snapshot.write(spec)) == spec

    def test_states_and_their_initial_values_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "initial_state").mkdir()
        path = tmp_path / "initial_state" / "f"
        path.write_bytes(bytes(8))

        (empty,) = spec_of(
            (STATE % (INITIAL % "zero_data: true")).replace("dims: 2", "dims: -1", 1).replace("dims: 2", "dims: 0")
        ).states
        (state,) = spec_of(STATE % "use_same_buffer_for_input_output: true").states
        (zeros,) = spec_of(STATE % (INITIAL % "zero_data: true")).states
        (file,) = spec_of(STATE % (INITIAL % 'data_file: "f"'), tmp_path).states

        assert state == State("i", "o", "FP32", (2,))
        assert (zeros.initial, zeros.initial_shape) == (None, (2,))
        assert (empty.shape, empty.first_shape) == ((-1,), (0,))
        assert (file.initial, file.initial_shape) == (path, (2,))


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        ("iterative_sequence: true", "field 'sequence_batching.iterative_sequence' is for Python models"),
        (STATE % "use_growable_memory: true", "field 'sequence_batching.state.use_growable_memory' is not supported"),
        ("direct { minimum_slot_utilization: 1.5 }",
         "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m"),
        ("oldest { preferred_batch_size: 0 }", "sequence batching preferred batch size must be positive for m"),
        ("oldest { max_candidate_sequences: -1 }", "must be non-negative for m"),
        ("control_input { control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }",
         "sequence batching control tensor must have a name for m"),
        ('control_input { name: "c" }', "must specify a control for m"),
        (FLAG % ("s", "START", "") + FLAG % ("s", "END", ""), "is specified for multiple control kinds for m"),
        (FLAG % ("s", "END", "int32_false_true: [ 0, 1 ]") + FLAG % ("t", "END", "int32_false_true: [ 0, 1 ]"),
         "sequence batching specifies multiple CONTROL_SEQUENCE_END tensors for m"),
        (FLAG % ("s", "START", ""), "must specify either 'int32_false_true', 'fp32_false_true' or"),
        (FLAG % ("s", "START", "int32_false_true: 0"), "'int32_false_true' must have exactly 2 entries for"),
        (FLAG % ("s", "START", "int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]"),
         "specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' for CONTROL"),
        (FLAG % ("c", "CORRID", "data_type: TYPE_FP32"), "unexpected data type for control CONTROL_SEQUENCE_CORRID"),
        (FLAG % ("c", "CORRID", "data_type: TYPE_INT32 int32_false_true: [ 0, 1 ]"), "must not specify either"),
        (STATE % "" + STATE % "", "State input name 'i' specified more than once."),
        ('state { output_name: "o" data_type: TYPE_FP32 }', "state must specify 'input_name' for m"),
        ('state { input_name: "i" output_name: "o" }', "state 'i' must specify 'data_type' for m"),
        ('state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: 0 }', "dimension must be integer >= 1"),
        (STATE % (INITIAL % "" + INITIAL % ""), "must contain exactly one or zero element. Found '2' elements."),
        (STATE % (INITIAL % "").replace("FP32", "INT32"), "does not match the state data type."),
        (STATE % (INITIAL % "").replace('"n"', '""'), "Field 'name' must be set when using initial_state"),
        (STATE % (INITIAL % "dims: 3"), "for state input 'i'. 2 != 1"),
        (STATE % (INITIAL % "").replace("dims: 2", "dims: -1"), "contains variable dimensions."),
        (STATE % (INITIAL % "").replace("dims: 2", "dims: 3"), "doesn't match 'state' dim description. 3 != 2"),
        (STATE % (INITIAL % ""), "initial_state setting expects state'i' to have state_data set"),
        (STATE % (INITIAL % 'data_file: "no"'), "'initial_state/no' does not exist"),
        (STATE % (INITIAL % 'data_file: "../f"'), "'../f' is outside the folder 'initial_state'"),
    ],
)  # fmt: skip
def test_an_invalid_sequence_field_is_rejected_with_its_message(inside: str, text: str) -> None:
    assert any(text in message for message in read(inside)[1])


def test_an_initial_state_file_that_is_too_short_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "f").write_bytes(bytes(7))

    assert read(STATE % (INITIAL % 'data_file: "f"'), tmp_path)[1] == [
        "initial_state setting expects 8 bytes, but the data provided from f only has 7 bytes."
    ]


def test_missing_sequence_fields_are_completed() -> None:
    config = parse_text("sequence_batching { oldest { } }")

    sequences.complete(config, 8)

    assert config.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert list(config.sequence_batching.oldest.preferred_batch_size) == [8]
