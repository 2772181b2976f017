"""Controls and states: the inputs that tell a run about its sequences, and the states that it leaves."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.request import InSequence
from penstock.batching.running.batch import Batch
from penstock.batching.sequences.active_sequence import ActiveSequence
from penstock.batching.sequences.controls import ControlInput, check_sequence
from penstock.batching.sequences.states import StateInput, StateOutputs
from penstock.batching.spec import BatchPolicy, Control, InstanceGroup, ModelSpec, PaddedAxis, SequenceSpec, State
from tests.fakes import fake_model, fake_request

MODEL = fake_model()
START, END, READY = (Control(kind, kind, "INT32", (-1, 7)) for kind in ("start", "end", "ready"))
MEMORY = State("in", "out", "FP32", (2,))
ROWS_OF_TWO = TensorSpec("in", "FP32", (-1, 2))


def batch_of(*sequences: InSequence, places: list[int] | None = None) -> Batch:
    """A batch of one request of each sequence."""
    requests = []
    for sequence in sequences:
        request = fake_request(MODEL)
        request.sequence = sequence
        request.active_sequence = ActiveSequence(sequence.id)
        requests.append(request)
    batch = Batch(requests, len(requests), ((4,),), 1)
    batch.row_positions = places
    return batch


def filled(control: Control, batch: Batch, rows: int, dtype: object = np.int32) -> list[object]:
    """Fill a buffer of one column that holds garbage."""
    control_input = ControlInput(control, TensorSpec(control.name, control.datatype, (-1, 1)))
    buffer: Array = np.full(control_input.shape(batch, rows), 99, dtype)
    control_input.fill(buffer, batch)
    assert buffer.shape == (rows, 1)
    return list(buffer.ravel().tolist())


class TestControls:
    @pytest.mark.parametrize(("control", "expected"), [(START, [7, -1, -1]), (END, [-1, -1, 7]), (READY, [7, 7, 7])])
    def test_start_end_and_ready_controls_are_set_per_row_from_its_request(
        self, control: Control, expected: list[int]
    ) -> None:
        batch = batch_of(InSequence(1, True), InSequence(2), InSequence(3, False, True))

        assert filled(control, batch, 3) == expected

    @pytest.mark.parametrize(("control", "expected"), [(START, [-1, 7, -1, 7]), (READY, [-1, 7, -1, 7])])
    def test_a_row_between_used_slots_is_not_ready(self, control: Control, expected: list[int]) -> None:
        batch = batch_of(InSequence(1, True), InSequence(2, True), places=[1, 3])

        assert filled(control, batch, 4) == expected

    @pytest.mark.parametrize(
        ("datatype", "dtype", "identity", "expected"),
        [
            ("UINT64", np.uint64, (1 << 64) - 1, (1 << 64) - 1),
            ("INT64", np.int64, (1 << 64) - 1, -1),
            ("INT32", np.int32, (1 << 32) + 5, 5),
            ("UINT32", np.uint32, 1 << 31, 1 << 31),
            ("BYTES", object, "é", "é".encode()),
        ],
    )
    def test_the_correlation_id_control_is_converted_to_the_models_datatype(
        self, datatype: str, dtype: object, identity: int | str, expected: object
    ) -> None:
        batch = batch_of(InSequence(identity), places=[1])

        assert filled(Control("c", "corrid", datatype), batch, 2, dtype) == [b"" if dtype is object else 0, expected]

    @pytest.mark.parametrize(("shape", "expected"), [((-1,), (3,)), ((-1, 1), (3, 1)), ((1,), (1,))])
    def test_a_control_has_the_shape_that_the_model_declares(
        self, shape: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        assert ControlInput(START, TensorSpec("s", "INT32", shape)).shape(batch_of(InSequence(1)), 3) == expected


def states_of(batch: Batch) -> list[object]:
    return [request.active_sequence.states["out"].tolist() for request in batch.requests]


def fill(state_input: StateInput, batch: Batch, rows: int) -> object:
    shape = state_input.shape(batch, rows)
    garbage = (
        np.full(shape, b"?", object) if state_input.spec.datatype == "BYTES" else np.full(shape, np.nan, np.float32)
    )
    state_input.fill(garbage, batch)
    return garbage.tolist()


class TestStates:
    def test_the_state_output_by_one_run_is_the_input_of_the_next(self) -> None:
        batch = batch_of(InSequence(1), InSequence(2), places=[0, 2])
        state_input, state_outputs = StateInput(MEMORY, ROWS_OF_TWO), StateOutputs((MEMORY,), (ROWS_OF_TWO,))
        assert fill(state_input, batch, 3) == [[0, 0]] * 3

        state_outputs.store(batch, [np.array([[1, 2], [3, 4], [5, 6]], np.float32)])

        assert states_of(batch) == [[1, 2], [5, 6]]
        assert fill(state_input, batch, 3) == [[1, 2], [0, 0], [5, 6]]

    def test_a_starting_sequence_has_no_previous_state(self) -> None:
        batch = batch_of(InSequence(1, True))
        batch.requests[0].active_sequence.states["out"] = np.ones(2, np.float32)

        assert fill(StateInput(MEMORY, ROWS_OF_TWO), batch, 1) == [[0, 0]]
        assert not batch.requests[0].active_sequence.states

    def test_a_stored_state_does_not_keep_the_whole_batch_in_memory(self) -> None:
        batch = batch_of(InSequence(1), InSequence(2))
        StateOutputs((MEMORY,), (ROWS_OF_TWO,)).store(batch, [np.zeros((2, 2), np.float32)])

        assert all(request.active_sequence.states["out"].base is None for request in batch.requests)

    @pytest.mark.parametrize("dims", [(1, 2), (2,)])
    def test_writing_into_an_output_does_not_change_the_stored_state(self, dims: tuple[int, ...]) -> None:
        batch, output = batch_of(InSequence(1)), np.zeros(dims, np.float32)
        spec = TensorSpec("in", "FP32", (-1, 2) if len(dims) == 2 else dims)
        StateOutputs((MEMORY,), (spec,), {"out"}).store(batch, [output])
        output += 1

        assert states_of(batch) == [[0, 0]]

    def test_too_few_state_rows_are_an_error_and_store_nothing(self) -> None:
        batch = batch_of(InSequence(1), InSequence(2))

        with pytest.raises(InferError, match="state 'out' has 1 rows for a batch of 2") as caught:
            StateOutputs((MEMORY,), (ROWS_OF_TWO,)).store(batch, [np.zeros((1, 2), np.float32)])
        assert caught.value.code is Code.INTERNAL
        assert not batch.requests[0].active_sequence.states

    def test_a_model_without_rows_has_a_single_state(self) -> None:
        batch = batch_of(InSequence(1))
        spec = TensorSpec("in", "FP32", (2,))
        StateOutputs((MEMORY,), (spec,)).store(batch, [np.array([1, 2], np.float32)])

        assert fill(StateInput(MEMORY, spec), batch, 1) == [1, 2]

    def test_a_free_axis_of_an_initial_state_is_one_unless_configured(self) -> None:
        free, spec = replace(MEMORY, shape=(-1,)), TensorSpec("in", "FP32", (-1, -1))
        batch = batch_of(InSequence(1))

        assert fill(StateInput(free, spec), batch, 1) == [[0]]
        assert fill(StateInput(replace(free, initial_shape=(3,)), spec), batch, 1) == [[0, 0, 0]]

    def test_an_initial_state_is_read_from_its_file(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(np.array([4, 5, 6], np.float32).tobytes())
        begun = replace(MEMORY, initial=tmp_path / "f", initial_shape=(2,))

        assert fill(StateInput(begun, ROWS_OF_TWO), batch_of(InSequence(1)), 1) == [[4, 5]]
        with pytest.raises(InferError, match=r"initial_state setting expects 16 bytes, .* from f only has 12 bytes\."):
            StateInput(replace(begun, shape=(4,), initial_shape=(4,)), ROWS_OF_TWO)

    def test_any_nonzero_byte_of_an_initial_state_file_is_true(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"\x02\x00")
        begun = replace(MEMORY, datatype="BOOL", initial=tmp_path / "f")
        state = StateInput(begun, TensorSpec("in", "BOOL", (-1, 2)))
        buffer = np.zeros((1, 2), np.bool_)
        state.fill(buffer, batch_of(InSequence(1)))

        assert buffer.view(np.uint8).tolist() == [[1, 0]]

    def test_initial_string_states_are_empty_or_read_from_their_file(self, tmp_path: Path) -> None:
        text, spec = replace(MEMORY, datatype="BYTES"), TensorSpec("in", "BYTES", (-1, 2))
        batch = batch_of(InSequence(1))
        assert fill(StateInput(text, spec), batch, 1) == [[b"", b""]]

        (tmp_path / "f").write_bytes(struct.pack("<I", 2) + b"ab" + struct.pack("<I", 0))
        begun = replace(text, initial=tmp_path / "f")
        assert fill(StateInput(begun, spec), batch, 1) == [[b"ab", b""]]
        for short in (struct.pack("<I", 2) + b"a", struct.pack("<I", 0) + struct.pack("<I", 2) + b"a"):
            (tmp_path / "f").write_bytes(short)
            with pytest.raises(InferError, match="initial_state of 'in' needs 2 elements, but its file has fewer"):
                StateInput(begun, spec)


GRAPH = Signature(
    (TensorSpec("x", "FP32", (-1, 4)), TensorSpec("start", "INT32", (-1, 1)), TensorSpec("in", "FP32", (-1, 2))),
    (TensorSpec("y", "FP32", (-1, 4)), TensorSpec("out", "FP32", (-1, 2))),
)


def check(
    controls: Sequence[Control] = (), states: Sequence[State] = (), rows: int = 4, graph: Signature = GRAPH,
    **members: object,
) -> None:  # fmt: skip
    sequence = SequenceSpec(controls=tuple(controls), states=tuple(states))
    policy = members.pop("policy", BatchPolicy(max_batch_rows=rows))
    check_sequence(ModelSpec("m", 1, Path("m"), sequence=sequence, policy=policy, **members), graph)  # type: ignore[arg-type]


class TestChecks:
    def test_controls_and_states_that_match_the_model_are_accepted(self) -> None:
        check((START,), (MEMORY,))
        check((), (replace(MEMORY, shape=(-1,)),))
        signature = Signature((TensorSpec("start", "INT32", (1,)),), ())
        check((START,), rows=0, graph=signature)
        check((START,), graph=Signature((TensorSpec("start", "INT32", (-1,)),), ()))

    @pytest.mark.parametrize(
        ("controls", "states", "text"),
        [
            ((END,), (), "configuration specified sequence control 'end', but model does not provide that input"),
            (
                (replace(START, name="in"),), (),
                r"unable to load model 'm', sequence control 'in' in model has dims \[2\] but dims \[1\] is expected",
            ),
            (
                (replace(START, datatype="FP32"),), (),
                "the model expects data-type TYPE_INT32 but the model configuration specifies data-type TYPE_FP32",
            ),
            ((), (replace(MEMORY, input="no"),), "state input 'no': the model does not provide that input"),
            ((), (replace(MEMORY, output="no"),), "state output 'no': the model does not provide that output"),
            ((), (replace(MEMORY, datatype="BYTES"),), "the model configuration specifies data-type TYPE_STRING"),
            ((), (replace(MEMORY, shape=(3,)),), r"\[-1,2\] but the model configuration specifies shape \[-1,3\]"),
        ],
    )  # fmt: skip
    def test_controls_and_states_that_do_not_match_the_model_are_refused(
        self, controls: tuple[Control, ...], states: tuple[State, ...], text: str
    ) -> None:
        with pytest.raises(InferError, match=text) as caught:
            check(controls, states)
        assert caught.value.code is Code.INVALID

    @pytest.mark.parametrize(
        ("members", "text"),
        [
            ({"cached": True}, "Response Cache does not currently support model m with sequence batching scheduler"),
            ({"padding": (PaddedAxis("x", 0),)}, "padding"),
            ({"instances": (InstanceGroup(0),)}, "instances.count = 'auto'"),
            ({"policy": BatchPolicy(max_batch_rows=4, split=True)}, "batching.split"),
            ({"policy": BatchPolicy(max_batch_rows=4, invariant=True)}, "batching.invariance"),
            ({"policy": BatchPolicy(max_batch_rows=4, latency_target_us=1)}, "batching.latency_target_ms"),
            ({"policy": BatchPolicy(max_batch_rows=4, allowed_rows=(4,))}, "batching.allowed_sizes"),
            (
                {"policy": BatchPolicy(max_batch_rows=4, preferred_rows=(8,))},
                "sequence batching preferred batch size must be <= max batch size for m",
            ),
            (
                {"inputs": (TensorSpec("start", "INT32", (1,)),)},
                "'start' is a control or a state, which clients must not send",
            ),
        ],
    )
    def test_options_that_cannot_be_combined_with_sequences_are_refused(
        self, members: dict[str, object], text: str
    ) -> None:
        with pytest.raises(InferError, match=text):
            check((START,), **members)  # type: ignore[arg-type]
