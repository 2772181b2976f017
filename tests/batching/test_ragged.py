"""Ragged batches: flat inputs, batch inputs that describe them, flat outputs, and shape tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading.completion import complete
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.running.execution import run_batch
from penstock.batching.running.isolation import execute
from penstock.batching.scheduling.request_checks import check_shapes, values_key
from penstock.batching.shapes.ragged import KINDS, RAGGED, SCATTER
from penstock.batching.spec import BatchPolicy, BatchTensor, ModelSpec, PaddedAxis, SequenceSpec
from tests.fakes import FakeBackend, Function, NoSink

FLAT = TensorSpec("r", "FP32", (-1,))
TOTAL = TensorSpec("total", "FP32", (-1, 1))
RAGGED_INPUT = TensorSpec("r", "FP32", (-1,), ragged=True)


def batch_tensor(kind: str, datatype: str = "INT32", name: str = "told") -> BatchTensor:
    return BatchTensor(name, kind, datatype, ("r",))


def spec_of(*batch_inputs: BatchTensor, source: TensorSpec = RAGGED_INPUT, **more: Any) -> ModelSpec:
    policy = more.pop("policy", BatchPolicy(max_batch_rows=16))
    terms = {"outputs": (replace(TOTAL, shape=(1,)),), "inputs": (source,), "batch_inputs": batch_inputs, **more}
    return ModelSpec("m", 1, Path("m"), policy=policy, **terms)


def graph_of(*batch_inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (TOTAL,)) -> Signature:
    return Signature((FLAT, *batch_inputs), outputs)


def batch_input_spec(kind: str, datatype: str = "INT32", width: int = -1) -> TensorSpec:
    return TensorSpec("told", datatype, (-1, width) if kind == "BATCH_ITEM_SHAPE" else (-1,))


def model_of(spec: ModelSpec, graph: Signature, function: Function) -> tuple[Model, FakeBackend]:
    backend = FakeBackend(graph, function)
    return Model(complete(spec, graph), [backend], lambda *_: None), backend


def ragged_request(model: Model, *shape: int, start: float = 0) -> InferRequest:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + np.float32(start)
    rows, key = check_shapes(model.name, model.signature, model.max_request_rows, [shape])
    return InferRequest(model, [array], rows, key, model.all_outputs, NoSink())


def run(model: Model, backend: FakeBackend, *requests: InferRequest) -> list[Array | None]:
    rows = sum(request.rows for request in requests)
    run_batch(model, backend.bind(model.binding_signature, 16), Batch(list(requests), rows, requests[0].key, 1))
    return backend.runs[-1].inputs


def batch_input_of(kind: str, *shapes: tuple[int, ...], datatype: str = "INT32") -> Array:
    """Run one batch. Returns: the batch input that the model received."""
    source = replace(RAGGED_INPUT, shape=(-1,) * (len(shapes[0]) - 1))
    rows = sum(shape[0] for shape in shapes)
    graph = graph_of(batch_input_spec(kind, datatype))
    model, backend = model_of(
        spec_of(batch_tensor(kind, datatype), source=source), graph, lambda _: [np.zeros((rows, 1), np.float32)]
    )
    _, array = run(model, backend, *(ragged_request(model, *shape) for shape in shapes))
    assert array is not None
    return array


class TestBatchInputs:
    SHAPES = ((1, 2), (1, 4), (1, 1), (1, 3))

    @pytest.mark.parametrize(
        ("kind", "values"),
        [
            ("BATCH_ELEMENT_COUNT", [2, 4, 1, 3]),
            ("BATCH_ACCUMULATED_ELEMENT_COUNT", [2, 6, 7, 10]),
            ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 2, 6, 7, 10]),
            ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0, 0, 0, 0]),
        ],
    )
    def test_batch_inputs_count_the_elements_of_each_request(self, kind: str, values: list[int]) -> None:
        assert batch_input_of(kind, *self.SHAPES).tolist() == values

    def test_batch_inputs_give_the_shape_of_each_item(self) -> None:
        shapes = ((2, 1, 2), (1, 1, 2), (1, 2, 2))

        assert batch_input_of("BATCH_ITEM_SHAPE", *shapes).tolist() == [[1, 2], [1, 2], [1, 2], [2, 2]]
        assert batch_input_of("BATCH_ITEM_SHAPE_FLATTEN", *shapes).tolist() == [1, 2, 1, 2, 1, 2, 2, 2]

    @pytest.mark.parametrize("datatype", ["INT32", "FP32"])
    def test_a_batch_input_has_its_declared_datatype(self, datatype: str) -> None:
        assert batch_input_of("BATCH_ELEMENT_COUNT", (1, 2), datatype=datatype).dtype == np.dtype(
            {"INT32": "int32", "FP32": "float32"}[datatype]
        )

    def test_the_rows_of_a_request_count_toward_its_elements(self) -> None:
        assert batch_input_of("BATCH_ELEMENT_COUNT", (3, 2), (1, 5)).tolist() == [6, 5]

    def test_item_shapes_are_those_after_a_reshape(self) -> None:
        source = TensorSpec("r", "FP32", (-1, 4), reshape=(-1, 2, 2), ragged=True)
        graph = graph_of(batch_input_spec("BATCH_ITEM_SHAPE"))
        model, backend = model_of(
            spec_of(batch_tensor("BATCH_ITEM_SHAPE"), source=source), graph, lambda _: [np.zeros((1, 1), np.float32)]
        )
        _, array = run(model, backend, ragged_request(model, 1, 3, 4))
        assert array is not None
        assert array.tolist() == [[3, 2, 2]]

    def test_a_batch_input_is_not_in_the_clients_signature(self) -> None:
        done = complete(spec_of(batch_tensor("BATCH_ELEMENT_COUNT")), graph_of(batch_input_spec("BATCH_ELEMENT_COUNT")))

        assert done.signature is not None
        assert done.binding_signature is not None
        assert [(each.name, each.shape) for each in done.signature.inputs] == [("r", (-1, -1))]
        assert [(each.name, each.shape) for each in done.binding_signature.inputs] == [("r", (-1,)), ("told", (-1,))]


class TestSharedBatches:
    def test_ragged_requests_of_any_shape_share_a_key(self) -> None:
        model, _ = model_of(spec_of(), graph_of(), list)

        assert ragged_request(model, 1, 3).key == ragged_request(model, 2, 7).key == (RAGGED,)

    def test_the_shape_of_a_ragged_input_must_match_its_dims(self) -> None:
        model, _ = model_of(spec_of(source=replace(RAGGED_INPUT, shape=(4,))), graph_of(), list)
        with pytest.raises(InferError, match=r"Expected \[-1,4\], got \[1,3\]"):
            ragged_request(model, 1, 3)

    def test_one_invalid_request_of_a_ragged_batch_fails_alone(self) -> None:
        def picky(inputs: list[Any]) -> list[Any]:
            if (inputs[0] < 0).any():
                raise InferError(Code.INVALID, "negative")
            return [np.zeros((len(inputs[1]), 1), np.float32)]

        graph = graph_of(batch_input_spec("BATCH_ELEMENT_COUNT"))
        model, backend = model_of(spec_of(batch_tensor("BATCH_ELEMENT_COUNT")), graph, picky)
        requests = [ragged_request(model, 1, size, start=-1 if size == 2 else 1) for size in (3, 1, 2, 4)]

        execute(model, backend.bind(model.binding_signature, 16), Batch(requests, 4, requests[0].key, 1))

        assert [request.error is None for request in requests] == [True, True, False, True]


class TestFlatOutputs:
    def scattering(
        self, function: Callable[[list[Any]], list[Any]], dims: tuple[int, ...] = (-1,)
    ) -> tuple[Model, FakeBackend]:
        output = TensorSpec("y", "FP32", dims)
        declared = spec_of(outputs=(output,), batch_outputs=(BatchTensor("y", SCATTER, "", ("r",)),))
        return model_of(declared, Signature((FLAT,), (TensorSpec("y", "FP32", (-1,)),)), function)

    def test_each_request_gets_the_part_of_a_flat_output_at_its_own_elements(self) -> None:
        model, backend = self.scattering(lambda inputs: [inputs[0] * 2])
        requests = [ragged_request(model, 1, size, start=size) for size in (2, 4, 1)]

        run(model, backend, *requests)

        assert [request.outputs[0].tolist() for request in requests if request.outputs] == [
            [[4, 6]], [[8, 10, 12, 14]], [[2]],
        ]  # fmt: skip

    def test_fixed_dims_of_a_flat_output_are_kept(self) -> None:
        model, backend = self.scattering(lambda inputs: [np.repeat(inputs[0], 3)], (-1, 3))
        request = ragged_request(model, 2, 2)

        run(model, backend, request)

        assert [output.shape for output in request.outputs or []] == [(2, 2, 3)]

    def test_a_wrong_number_of_output_elements_is_an_internal_error(self) -> None:
        model, backend = self.scattering(lambda inputs: [inputs[0][1:]])
        requests = [ragged_request(model, 1, 2), ragged_request(model, 1, 3)]
        with pytest.raises(InferError) as caught:
            run(model, backend, *requests)

        text = "model 'm': output 'y' has 4 elements for a batch whose inputs have 5"
        assert (caught.value.code, caught.value.message) == (Code.INTERNAL, text)
        assert [request.outputs for request in requests] == [None, None]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2).map(tuple), min_size=1, max_size=5))
    def test_a_ragged_batch_gives_each_request_the_same_answer_as_alone(self, shapes: list[tuple[int, ...]]) -> None:
        rows = sum(shape[0] for shape in shapes)
        if rows > 16:
            return
        model, backend = self.scattering(lambda inputs: [inputs[0] + 1])
        together = [ragged_request(model, *shape, start=number) for number, shape in enumerate(shapes)]
        alone = [ragged_request(model, *shape, start=number) for number, shape in enumerate(shapes)]

        run(model, backend, *together)
        for request in alone:
            run(model, backend, request)

        for one, other in zip(together, alone, strict=True):
            assert one.outputs is not None
            assert other.outputs is not None
            np.testing.assert_array_equal(one.outputs[0], other.outputs[0])
            assert one.outputs[0].shape == one.inputs[0].shape  # type: ignore[union-attr]


class TestRefusedConfigurations:
    @pytest.mark.parametrize(
        ("spec", "graph", "text"),
        [
            (
                spec_of(),
                Signature((TensorSpec("r", "FP32", (-1, 4)),), (TOTAL,)),
                (
                    "unable to load model 'm', configuration expects model provides input with shape [-1]  for ragged"
                    " input 'r', model provides [-1,4]"
                ),
            ),
            (
                spec_of(policy=BatchPolicy(max_batch_rows=0)),
                graph_of(),
                "model 'm', ragged input 'r': max_batch_size must be > 0",
            ),
            (
                spec_of(batch_tensor("BATCH_ELEMENT_COUNT")),
                graph_of(),
                "unable to load model 'm', configuration expects 2 inputs, model provides 1: 'r'",
            ),
            (
                spec_of(batch_tensor("BATCH_ELEMENT_COUNT")),
                graph_of(TensorSpec("other", "INT32", (-1,))),
                "unexpected inference input 'told', allowed inputs are: other, r",
            ),
            (
                spec_of(batch_tensor("BATCH_ELEMENT_COUNT")),
                graph_of(TensorSpec("told", "FP32", (-1,))),
                (
                    "unable to load model 'm', batch input 'told': configuration expects datatype TYPE_INT32, model"
                    " provides TYPE_FP32"
                ),
            ),
            (
                spec_of(batch_tensor("BATCH_ITEM_SHAPE")),
                graph_of(TensorSpec("told", "INT32", (-1,))),
                "unable to load model 'm', batch input 'told': BATCH_ITEM_SHAPE has shape [-1,1], model provides [-1]",
            ),
            (
                spec_of(replace(batch_tensor("BATCH_ELEMENT_COUNT"), sources=("q",))),
                graph_of(batch_input_spec("BATCH_ELEMENT_COUNT")),
                "unknown source input name 'q'",
            ),
            (
                spec_of(batch_outputs=(BatchTensor("z", SCATTER, "", ("r",)),)),
                graph_of(),
                "unknown target output name 'z'",
            ),
            (
                spec_of(batch_outputs=(BatchTensor("total", SCATTER, "", ("r",)),) * 2),
                graph_of(),
                "target output name 'total' can only be specified once",
            ),
            (
                spec_of(
                    outputs=(TensorSpec("total", "FP32", (3, -1)),),
                    batch_outputs=(BatchTensor("total", SCATTER, "", ("r",)),),
                ),
                graph_of(),
                "model 'm', batch output 'total': [-1,3,-1] has a variable-size dimension where 'r' has none",
            ),
            (
                spec_of(padding=(PaddedAxis("r", 0),)),
                graph_of(),
                "model 'm', padding: cannot be combined with allow_ragged_batch",
            ),
            (
                spec_of(policy=BatchPolicy(max_batch_rows=8, allowed_rows=(4, 8))),
                graph_of(),
                "model 'm', batching.allowed_sizes: cannot be combined with allow_ragged_batch",
            ),
            (
                spec_of(policy=BatchPolicy(max_batch_rows=8, split=True)),
                graph_of(),
                "model 'm', batching.split: cannot be combined with allow_ragged_batch",
            ),
            (
                spec_of(sequence=SequenceSpec(direct=True)),
                graph_of(),
                "model 'm', sequence_batching.direct: cannot be combined with allow_ragged_batch",
            ),
        ],
    )
    def test_invalid_ragged_configurations_are_refused(self, spec: ModelSpec, graph: Signature, text: str) -> None:
        with pytest.raises(InferError) as caught:
            complete(spec, graph)
        assert (caught.value.code, caught.value.message) == (Code.INVALID, text)

    def test_every_kind_of_batch_input_of_triton_is_supported(self) -> None:
        assert len(KINDS) == 6


VALUES = TensorSpec("v", "INT64", (2,), is_shape=True)
X = TensorSpec("x", "FP32", (4,))


class TestShapeTensors:
    GRAPH = Signature(
        (TensorSpec("x", "FP32", (-1, 4)), TensorSpec("v", "INT64", (3,))), (TensorSpec("y", "FP32", (-1, 4)),)
    )

    def model(self, values: TensorSpec = VALUES, graph: Signature = GRAPH, rows: int = 8) -> tuple[Model, FakeBackend]:
        declared = ModelSpec(
            "m", 1, Path("m"), inputs=(X, values), outputs=(replace(X, name="y"),),
            policy=BatchPolicy(max_batch_rows=rows),
        )  # fmt: skip
        return model_of(declared, graph, lambda inputs: inputs[:1])

    def request(self, model: Model, rows: int, *values: int) -> InferRequest:
        inputs: list[Array | None] = [np.zeros((rows, 4), np.float32), np.array(values, np.int64)]
        admitted, key = check_shapes(
            model.name, model.signature, 8, [None if each is None else each.shape for each in inputs]
        )
        request = InferRequest(model, inputs, admitted, key, (0,), NoSink())
        request.key = values_key(request)
        return request

    def test_a_key_contains_the_values_of_a_shape_tensor_except_the_first(self) -> None:
        model, _ = self.model()

        assert self.request(model, 1, 1, 4, 6).key == self.request(model, 2, 2, 4, 6).key == ((4,), (4, 6))
        assert self.request(model, 1, 1, 4, 7).key == ((4,), (4, 7))
        assert self.request(model, 1, 1, 0, 7).key != self.request(model, 1, 1, 0, 8).key

    def test_the_model_gets_a_shape_tensor_once_with_the_rows_of_the_whole_batch(self) -> None:
        model, backend = self.model()

        _, values = run(model, backend, self.request(model, 1, 1, 4, 6), self.request(model, 2, 2, 4, 6))

        assert values is not None
        assert values.tolist() == [3, 4, 6]

    def test_the_first_value_of_a_shape_tensor_must_be_the_requests_rows(self) -> None:
        model, _ = self.model()
        with pytest.raises(InferError) as caught:
            self.request(model, 2, 1, 4, 6)
        assert caught.value.code is Code.INVALID
        assert caught.value.message == (
            "shape tensor 'v' for model 'm' begins with 1, expected the request's batch size, 2"
        )

    @pytest.mark.parametrize("values", [(1, 4), (1, 4, 6, 8), ()])
    def test_the_number_of_values_in_a_shape_tensor_is_checked(self, values: tuple[int, ...]) -> None:
        model, _ = self.model()
        with pytest.raises(InferError, match="unexpected shape for input 'v'"):
            self.request(model, 1, *values)

    @pytest.mark.parametrize("shape", [(3, 1), (3, 3), ()])
    def test_a_shape_tensor_that_is_not_a_list_is_rejected(self, shape: tuple[int, ...]) -> None:
        model, _ = self.model()
        with pytest.raises(InferError, match="unexpected shape for input 'v'"):
            check_shapes(model.name, model.signature, 8, [(1, 4), shape])

    def test_a_shape_tensor_of_a_model_without_rows_is_passed_unchanged(self) -> None:
        graph = Signature((TensorSpec("x", "FP32", (4,)), TensorSpec("v", "INT64", (2,))), (replace(X, name="y"),))
        model, _ = self.model(graph=graph, rows=0)

        assert model.forms is None
        assert model.signature.input["v"].shape == (2,)

    @pytest.mark.parametrize(
        ("values", "shape", "text"),
        [
            (replace(VALUES, datatype="FP32"), (3,), "it must be TYPE_INT32 or TYPE_INT64"),
            (replace(VALUES, shape=(2, 2)), (3,), "it must be a list of values"),
            (VALUES, (2,), "the model takes 2 values, one of them for the batch size"),
            (VALUES, (3, 2), "it must be a list of values"),
        ],
    )
    def test_invalid_shape_tensors_are_refused(self, values: TensorSpec, shape: tuple[int, ...], text: str) -> None:
        graph = Signature((self.GRAPH.inputs[0], TensorSpec("v", values.datatype, shape)), self.GRAPH.outputs)
        with pytest.raises(InferError, match=text):
            self.model(values, graph)

    def test_a_batched_model_with_only_shape_tensors_is_refused(self) -> None:
        declared = ModelSpec(
            "m", 1, Path("m"), inputs=(VALUES,), outputs=(replace(X, name="y"),), policy=BatchPolicy(max_batch_rows=8)
        )
        with pytest.raises(InferError, match="no input has rows"):
            complete(declared, Signature(self.GRAPH.inputs[1:], self.GRAPH.outputs))
