"""Derived inputs and kept outputs: inputs and outputs hidden from clients, rows at fixed positions, and failed runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading.completion import complete
from penstock.batching.loading.counting import Split, Trials
from penstock.batching.loading.dummy_inputs import dummy_fill, dummy_key, smallest_row_shapes
from penstock.batching.loading.invariance import probe, set_invariant_size
from penstock.batching.loading.warmup import sweep
from penstock.batching.model import Model
from penstock.batching.request import InferRequest, InSequence
from penstock.batching.running.batch import Batch
from penstock.batching.running.execution import run_batch
from penstock.batching.running.isolation import execute
from penstock.batching.shapes.derived import derived_names, stored_names
from penstock.batching.spec import BatchPolicy, BatchTensor, Control, ModelSpec, SequenceSpec, State
from tests.fakes import FakeBackend, Function, fake_request

X = TensorSpec("x", "FP32", (-1, 4))
Y = TensorSpec("y", "FP32", (-1, 4))
READY = TensorSpec("ready", "INT32", (-1, 1))
BEFORE = TensorSpec("before", "FP32", (-1, 2))
AFTER = TensorSpec("after", "FP32", (-1, 2))
GRAPH = Signature((READY, X, BEFORE), (AFTER, Y))
CONTROL = Control("ready", "ready", "INT32")
STATE = State("before", "after", "FP32", (2,))
SEQUENCE = SequenceSpec(controls=(CONTROL,), states=(STATE,))
ROWS_ONLY = SequenceSpec(controls=(CONTROL,))


def spec_of(sequence: SequenceSpec = SEQUENCE, **more: Any) -> ModelSpec:
    return ModelSpec(
        "m", 1, Path("m"), policy=BatchPolicy(max_batch_rows=8, executor="thread"), sequence=sequence, **more
    )


def echo(inputs: list[Any]) -> list[Any]:
    """A model that takes READY and X and returns X."""
    return [inputs[1]]


def placing(function: Function = echo) -> tuple[Model, FakeBackend]:
    """Make a model with one control, whose requests have row positions."""
    # a fake passes its inputs in the graph's order, and a Binding lends buffers in the order of its signature
    graph = Signature((X, READY), (Y,))
    backend = FakeBackend(graph, lambda inputs: function([inputs[1], inputs[0]]))
    return Model(complete(spec_of(ROWS_ONLY), graph), [backend], lambda *_: None), backend


def batch_of(model: Model, places: dict[int, float], rows: int = 1) -> Batch:
    requests = [fake_request(model, rows, value=value) for value in places.values()]
    for number, request in enumerate(requests, 1):
        request.sequence = InSequence(number)
    batch = Batch(requests, rows * len(requests), ((4,),), 1)
    batch.row_positions = list(places)
    return batch


class TestCompletion:
    def test_derived_inputs_and_stored_outputs_are_not_in_the_clients_signature(self) -> None:
        done = complete(spec_of(), GRAPH)

        assert done.signature == Signature((X,), (Y,), batched=True)
        assert done.binding_signature == Signature((X, READY, BEFORE), (Y, AFTER), batched=True)

    def test_derived_inputs_count_toward_the_number_of_the_models_inputs(self) -> None:
        x, y = replace(X, shape=(4,)), replace(Y, shape=(4,))

        assert complete(spec_of(inputs=(x,), outputs=(y,)), GRAPH).signature == Signature((X,), (Y,), batched=True)
        with pytest.raises(InferError) as caught:
            complete(spec_of(ROWS_ONLY, inputs=(x,), outputs=(y,)), GRAPH)
        text = "unable to load model 'm', configuration expects 2 inputs, model provides 3"
        assert caught.value.message.startswith(text)

    def test_a_state_declared_as_an_output_is_both_stored_and_returned(self) -> None:
        after = replace(AFTER, shape=(2,))
        done = complete(spec_of(outputs=(after,)), GRAPH)

        assert done.signature is not None
        assert done.binding_signature is not None
        assert done.signature.outputs == done.binding_signature.outputs == (AFTER,)

    def test_derived_inputs_are_ordered_controls_then_states_then_batch_inputs(self) -> None:
        batch_tensor = BatchTensor("told", "BATCH_ELEMENT_COUNT", "INT32", ("x",))
        spec = spec_of(batch_inputs=(batch_tensor,))

        assert derived_names(spec) == ("ready", "before", "told")
        assert stored_names(spec) == ("after",)

    def test_a_model_with_only_derived_inputs_is_refused_for_lack_of_rows(self) -> None:
        with pytest.raises(InferError, match="no input has rows"):
            complete(spec_of(ROWS_ONLY), Signature((READY,), (Y,)))


class TestRowPositions:
    def test_rows_are_gathered_at_their_positions_with_zeros_between(self) -> None:
        model, backend = placing()
        batch = batch_of(model, {1: 5, 4: 7})

        run_batch(model, backend.bind(model.binding_signature, 8), batch)

        x, ready = backend.runs[0].inputs
        assert x is not None
        assert ready is not None
        assert x[:, 0].tolist() == [0, 5, 0, 0, 7]
        assert ready.tolist() == [[0], [1], [0], [0], [1]]
        assert [request.outputs[0].tolist() for request in batch.requests if request.outputs] == [[[5] * 4], [[7] * 4]]

    def test_string_inputs_have_empty_strings_between_positions(self) -> None:
        text = TensorSpec("x", "BYTES", (-1, 1))
        graph = Signature((text, READY), (replace(text, name="y"),))
        backend = FakeBackend(graph, lambda inputs: inputs[:1])
        model = Model(complete(spec_of(ROWS_ONLY), graph), [backend], lambda *_: None)
        batch = batch_of(model, {1: 0})
        batch.requests[0].inputs = [np.array([[b"word"]], object)]
        batch.key = ((1,),)

        run_batch(model, backend.bind(model.binding_signature, 8), batch)

        (x, _) = backend.runs[0].inputs
        assert x is not None
        assert x.tolist() == [[b""], [b"word"]]

    @settings(max_examples=40, deadline=None)
    @given(
        st.dictionaries(st.integers(0, 7), st.integers(1, 100), min_size=1).map(lambda each: dict(sorted(each.items())))
    )
    def test_every_request_gets_its_own_row_at_any_position(self, places: dict[int, float]) -> None:
        model, backend = placing()
        batch = batch_of(model, places)

        run_batch(model, backend.bind(model.binding_signature, 8), batch)

        assert backend.runs[0].rows == max(places) + 1
        for request, value in zip(batch.requests, places.values(), strict=True):
            assert request.outputs is not None
            assert request.outputs[0].tolist() == [[value] * 4]

    def test_retried_parts_of_a_failed_batch_keep_their_row_positions(self) -> None:
        def picky(inputs: list[Any]) -> list[Any]:
            if (inputs[1] == 13).any():
                raise InferError(Code.INVALID, "unlucky")
            return [inputs[1] + np.arange(len(inputs[1]), dtype=np.float32)[:, None]]

        model, backend = placing(picky)
        batch = batch_of(model, {0: 10, 2: 13, 3: 20, 6: 30})

        parts = execute(model, backend.bind(model.binding_signature, 8), batch)

        guilty = batch.requests[1]
        assert guilty.error is not None
        assert [each.outputs[0][0, 0] for each in batch.requests if each.outputs] == [10, 23, 36]
        assert [place for part in parts for place in part.row_positions or ()] == [0, 2, 3, 6]


class Keeping:
    """A Kept that records what it is given."""

    specs: tuple[TensorSpec, ...] = (AFTER,)

    def __init__(self) -> None:
        self.stored: list[tuple[list[InferRequest], list[Any]]] = []

    def store(self, batch: Batch, outputs: list[Any]) -> None:
        self.stored.append((batch.requests, [output.tolist() for output in outputs]))


def counting(inputs: list[Any]) -> list[Any]:
    """A model of X that returns Y, and AFTER with each row's first value; a row of 13 makes it fail."""
    if (inputs[0] == 13).any():
        raise InferError(Code.INVALID, "unlucky")
    return [inputs[0], inputs[0][:, :2]]


def keeping(function: Function = counting, outputs: tuple[TensorSpec, ...] = ()) -> tuple[Model, FakeBackend, Keeping]:
    """Make a model whose second output is kept, by a fake."""
    graph = Signature((X,), (Y, AFTER), batched=True)
    backend = FakeBackend(graph, function)
    spec = ModelSpec(
        "m", 1, Path("m"), policy=BatchPolicy(max_batch_rows=8, executor="thread"), sequence=SequenceSpec(),
        signature=Signature((X,), (Y, *outputs), batched=True), binding_signature=graph,
    )  # fmt: skip
    model, store = Model(spec, [backend], lambda *_: None), Keeping()
    assert model.forms is not None
    model.forms.output_store, model.forms.stored_positions = store, (1,)
    return model, backend, store


class TestStoredOutputs:
    def test_stored_outputs_are_run_and_stored_but_not_returned(self) -> None:
        model, backend, store = keeping()
        request = fake_request(model, value=3)

        run_batch(model, backend.bind(model.binding_signature, 8), Batch([request], 1, request.key, 1))

        assert backend.runs[0].positions == (0, 1)
        assert store.stored == [([request], [[[3, 3]]])]
        assert len(request.outputs or []) == 1

    def test_an_output_both_stored_and_returned_is_run_once(self) -> None:
        model, backend, store = keeping(outputs=(AFTER,))
        request = fake_request(model, value=3)
        request.output_positions = (1,)

        run_batch(model, backend.bind(model.binding_signature, 8), Batch([request], 1, request.key, 1))

        assert backend.runs[0].positions == (1,)
        assert [output.tolist() for output in request.outputs or []] == [[[3, 3]]]
        assert store.stored[0][1] == [[[3, 3]]]

    def test_only_outputs_of_successful_runs_are_stored(self) -> None:
        model, backend, store = keeping()
        requests = [fake_request(model, value=value) for value in (1, 13, 2)]

        execute(model, backend.bind(model.binding_signature, 8), Batch(requests, 3, requests[0].key, 1))

        assert [request for each, _ in store.stored for request in each] == [requests[0], requests[2]]
        assert [row for _, (rows,) in store.stored for row in rows] == [[1, 1], [2, 2]]

    @pytest.mark.parametrize(
        ("outputs", "text"),
        [
            ([np.zeros((1, 4)), np.zeros((2, 2))], "output 'y' has 1 rows for a batch of 2"),
            ([np.zeros((2, 4)), np.zeros((3, 2))], "output 'after' has 3 rows for a batch of 2"),
        ],
    )
    def test_outputs_with_wrong_row_counts_are_neither_stored_nor_returned(self, outputs: list[Any], text: str) -> None:
        model, backend, store = keeping(lambda _: outputs)
        requests = [fake_request(model), fake_request(model)]
        with pytest.raises(InferError) as caught:
            run_batch(model, backend.bind(model.binding_signature, 8), Batch(requests, 2, requests[0].key, 1))

        assert caught.value.code is Code.INTERNAL
        assert caught.value.message.startswith(f"model 'm': {text}; ")
        assert (store.stored, [request.outputs for request in requests]) == ([], [None, None])


class TestDummyRuns:
    def test_dummy_runs_fill_controls_and_states_with_zeros(self) -> None:
        spec = complete(spec_of(), GRAPH)
        assert spec.binding_signature is not None
        backend = FakeBackend(spec.binding_signature, lambda inputs: [inputs[0], inputs[2]])
        binding = backend.bind(spec.binding_signature, 8)

        dummy_fill(spec, binding, 3, smallest_row_shapes(spec))()
        binding.run((0, 1))

        shapes = [(array.shape, bool(array.any())) for array in backend.runs[0].inputs if array is not None]
        assert shapes == [((3, 4), False), ((3, 1), False), ((3, 2), False)]

    def test_batch_inputs_of_a_dummy_run_describe_its_ragged_rows(self) -> None:
        batch_tensor = BatchTensor("told", "BATCH_ACCUMULATED_ELEMENT_COUNT", "INT32", ("x",))
        ragged, y = TensorSpec("x", "FP32", (-1,), ragged=True), replace(Y, shape=(4,))
        policy = BatchPolicy(max_batch_rows=8)
        declared = ModelSpec(
            "m", 1, Path("m"), policy=policy, inputs=(ragged,), outputs=(y,), batch_inputs=(batch_tensor,)
        )
        graph = Signature((TensorSpec("x", "FP32", (-1,)), TensorSpec("told", "INT32", (-1,))), (Y,))
        spec = complete(declared, graph)
        assert spec.binding_signature is not None
        backend = FakeBackend(spec.binding_signature, lambda inputs: inputs[:1])
        binding = backend.bind(spec.binding_signature, 8)

        dummy_fill(spec, binding, 3, [(5,)])()
        binding.run(())

        x, counts = backend.runs[0].inputs
        assert x is not None
        assert counts is not None
        assert (x.tolist(), counts.tolist()) == ([0] * 15, [5, 10, 15])
        assert dummy_key(spec, [(5,)]) == ((-1,),)


def ragged_spec(**policy: Any) -> tuple[ModelSpec, Signature]:
    batch_tensor = BatchTensor("told", "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "INT32", ("x",))
    declared = ModelSpec(
        "m", 1, Path("m"), policy=BatchPolicy(max_batch_rows=4, executor="thread", **policy),
        inputs=(TensorSpec("x", "FP32", (-1,), ragged=True),), outputs=(replace(Y, shape=(4,)),),
        batch_inputs=(batch_tensor,),
    )  # fmt: skip
    return declared, Signature((TensorSpec("x", "FP32", (-1,)), TensorSpec("told", "INT32", (-1,))), (Y,))


def strict(inputs: list[Any]) -> list[Any]:
    """A model that fails unless its batch inputs match its rows."""
    x, offsets = inputs
    if offsets[0] != 0 or offsets[-1] != len(x):
        raise InferError(Code.INVALID, "offsets do not fit")
    return [np.zeros((len(offsets) - 1, 4), np.float32)]


class TestRunsDuringLoading:
    def test_the_sweep_measures_ragged_batches(self) -> None:
        declared, graph = ragged_spec()
        backend = FakeBackend(graph, strict)
        model = Model(complete(declared, graph), [backend], lambda *_: None)
        model.loop_binding = backend.bind(model.binding_signature, 4)

        sweep(model)

        assert {(known.key, known.rows) for known in model.costs.run_times()} == {
            (((-1,),), rows) for rows in (1, 2, 4)
        }

    def test_instance_counting_runs_a_model_with_ragged_inputs(self) -> None:
        declared, graph = ragged_spec()
        trials = Trials(declared, lambda _: FakeBackend(graph, strict), 1)

        assert trials(Split(1, 1)) is not None
        trials.close()

    def test_a_model_with_inputs_that_describe_the_batch_has_no_invariant_size(self) -> None:
        declared, graph = ragged_spec(invariant=True)
        spec = complete(declared, graph)
        backend = FakeBackend(graph, strict)

        assert "it has inputs that describe the batch" in probe(spec, backend).reason
        assert set_invariant_size(spec, [backend]).policy.cap_rows == 1

    def test_invariance_of_a_reshaped_model_is_probed_in_the_models_own_shape(self) -> None:
        policy = BatchPolicy(max_batch_rows=4, executor="thread", invariant=True)
        x = TensorSpec("x", "FP32", (2, 2), reshape=(4,))
        declared = ModelSpec("m", 1, Path("m"), policy=policy, inputs=(x,), outputs=(replace(x, name="y"),))
        graph = Signature((X,), (Y,))
        backend = FakeBackend(graph, list)

        assert probe(complete(declared, graph), backend).fixed_sizes
        assert {array.shape[1:] for run in backend.runs for array in run.inputs if array is not None} == {(4,)}
