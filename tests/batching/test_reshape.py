"""Reshape: valid declarations, errors in Triton's words, and the mapping between the clients' dims and the model's."""

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
from penstock.batching.model import Model
from penstock.batching.running.batch import Batch
from penstock.batching.running.execution import run_batch
from penstock.batching.shapes.reshape import Dims, Reshape, check_reshape
from penstock.batching.spec import BatchPolicy, ModelSpec, PaddedAxis
from tests.fakes import FakeBackend, Function, fake_request


def declared(dims: Dims, reshape: Dims) -> TensorSpec:
    return TensorSpec("x", "FP32", dims, reshape=reshape)


def completed(dims: Dims, reshape: Dims, graph: Dims, rows: int = 8, **more: Any) -> ModelSpec:
    """Complete a model whose input and output both have these dims."""
    x = declared(dims, reshape)
    spec = ModelSpec(
        "m", 1, Path("m"), inputs=(x,), outputs=(replace(x, name="y"),), policy=BatchPolicy(max_batch_rows=rows), **more
    )
    inside = TensorSpec("x", "FP32", graph)
    return complete(spec, Signature((inside,), (replace(inside, name="y"),)))


def model_of(spec: ModelSpec, function: Function = list) -> tuple[Model, FakeBackend]:
    bound = spec.binding_signature
    assert bound is not None
    backend = FakeBackend(bound, function)
    return Model(spec, [backend], lambda *_: None), backend


class TestDeclarations:
    @pytest.mark.parametrize(
        ("dims", "reshape"),
        [
            ((2, 3), (6,)),
            ((6,), (1, 2, 3)),
            ((1,), ()),
            ((1, 1), ()),
            ((-1, 4), (-1, 2, 2)),
            ((2, 4, -1, 6), (8, -1, 1, 6)),
            ((-1, -1), (-1, 1, -1)),
        ],
    )
    def test_a_reshape_with_the_same_elements_in_the_same_order_is_accepted(self, dims: Dims, reshape: Dims) -> None:
        check_reshape(declared(dims, reshape), "input", "m", batched=True)

    @pytest.mark.parametrize(
        ("dims", "reshape", "text"),
        [
            ((2, 3), (5,), "has different size for dims and reshape"),
            ((2,), (), "has different size for dims and reshape"),
            ((-1,), (4,), "has different size for dims and reshape"),
            ((4,), (-1,), "has different size for dims and reshape"),
            ((-1, 4), (4, -1), "has different size for dims and reshape"),
            ((-1, -1), (-1,), "has different number of variable-size dimensions for dims and reshape"),
            ((4,), (0, 4), "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"),
        ],
    )
    def test_a_reshape_to_other_elements_is_refused_in_tritons_words(
        self, dims: Dims, reshape: Dims, text: str
    ) -> None:
        with pytest.raises(InferError) as caught:
            check_reshape(declared(dims, reshape), "output", "m", batched=True)
        assert (caught.value.code, caught.value.message) == (Code.INVALID, f"model output 'x' {text} for m")

    def test_an_empty_reshape_needs_a_batched_model(self) -> None:
        with pytest.raises(InferError) as caught:
            check_reshape(declared((1,), ()), "input", "m", batched=False)
        text = "cannot have empty reshape for non-batching model as scalar tensors are not supported"
        assert caught.value.message == f"model input 'x' {text} for m"

    def test_the_reshape_must_match_the_models_shape(self) -> None:
        with pytest.raises(InferError, match=r"the model expects 3 dimensions \(shape \[-1,2,3\]\)"):
            completed((6,), (3, 2), (-1, 2, 3))

    def test_padding_cannot_be_combined_with_reshape(self) -> None:
        padding = (PaddedAxis("x", 0),)
        with pytest.raises(InferError, match="padding: cannot be combined with reshape"):
            completed((-1, 4), (-1, 2, 2), (-1, -1, 2, 2), padding=padding)


class TestSignatures:
    def test_the_clients_signature_has_the_dims_and_the_bindings_has_the_reshape(self) -> None:
        done = completed((2, 3), (6,), (-1, 6))

        assert done.signature is not None
        assert done.binding_signature is not None
        assert [each.shape for each in (*done.signature.inputs, *done.signature.outputs)] == [(-1, 2, 3)] * 2
        assert [each.shape for each in (*done.binding_signature.inputs, *done.binding_signature.outputs)] == [
            (-1, 6)
        ] * 2

    def test_a_model_without_a_reshape_has_no_separate_binding_signature(self) -> None:
        x = TensorSpec("x", "FP32", (-1, 4))
        done = complete(ModelSpec("m", 1, Path("m")), Signature((x,), (replace(x, name="y"),)))

        assert done.binding_signature is None

    @pytest.mark.parametrize("dims", [(1,), (1, 1)])
    def test_a_scalar_may_be_declared_with_any_dims_of_one_element(self, dims: Dims) -> None:
        x = TensorSpec("x", "FP32", dims)
        policy = BatchPolicy(max_batch_rows=0)
        declared = ModelSpec("m", 1, Path("m"), inputs=(x,), outputs=(replace(x, name="y"),), policy=policy)
        graph = Signature((TensorSpec("x", "FP32", ()),), (TensorSpec("y", "FP32", ()),))
        done = complete(declared, graph)
        model = Model(done, [FakeBackend(graph, list)], lambda *_: None)
        request = fake_request(model, key=(dims,))
        request.inputs = [np.full(dims, 3, np.float32)]

        run_batch(model, FakeBackend(graph, list).bind(model.binding_signature, 1), Batch([request], 1, (dims,), 1))

        assert [output.tolist() for output in request.outputs or []] == [np.full(dims, 3).tolist()]
        assert [output.shape for output in request.outputs or []] == [dims]

    def test_a_scalar_declared_with_several_elements_is_refused(self) -> None:
        declared = ModelSpec(
            "m", 1, Path("m"), inputs=(TensorSpec("x", "FP32", (1, 2)),), outputs=(TensorSpec("y", "FP32", (1,)),),
            policy=BatchPolicy(max_batch_rows=0),
        )  # fmt: skip
        with pytest.raises(InferError) as caught:
            complete(declared, Signature((TensorSpec("x", "FP32", ()),), (TensorSpec("y", "FP32", ()),)))
        assert caught.value.message == (
            "unable to load model 'm', scalar tensor 'x', should only provide 1 in the model configuration when the "
            "model doesn't support batching. Model configuration provided: [1,2]."
        )


class TestRuns:
    def test_the_model_receives_its_own_shape_and_clients_receive_theirs(self) -> None:
        model, backend = model_of(completed((2, 3), (6,), (-1, 6)))
        requests = [fake_request(model, rows, ((2, 3),), value=rows) for rows in (1, 2)]

        run_batch(model, backend.bind(model.binding_signature, 8), Batch(requests, 3, ((2, 3),), 1))

        (ran,) = backend.runs[0].inputs
        assert ran is not None
        assert ran.tolist() == [[1.0] * 6, [2.0] * 6, [2.0] * 6]
        assert [each.outputs[0].shape for each in requests if each.outputs] == [(1, 2, 3), (2, 2, 3)]

    def test_reshaped_outputs_are_views(self) -> None:
        array = np.zeros((1, 6), np.float32)
        model, backend = model_of(completed((2, 3), (6,), (-1, 6)), lambda _: [array])
        request = fake_request(model, key=((2, 3),))

        run_batch(model, backend.bind(model.binding_signature, 8), Batch([request], 1, request.key, 1))

        assert request.outputs is not None
        assert np.shares_memory(request.outputs[0], array)

    @pytest.mark.parametrize("shape", [(1, 5), (1, 6, 1)])
    def test_an_output_that_cannot_be_reshaped_is_an_internal_error(self, shape: Dims) -> None:
        model, backend = model_of(completed((2, 3), (6,), (-1, 6)), lambda _: [np.zeros(shape, np.float32)])
        request = fake_request(model, key=((2, 3),))

        with pytest.raises(InferError, match=r"output 'y' has shape .* cannot be reshaped") as caught:
            run_batch(model, backend.bind(model.binding_signature, 8), Batch([request], 1, request.key, 1))
        assert caught.value.code is Code.INTERNAL
        assert request.outputs is None


DIM = st.integers(1, 4)
CHUNK = st.lists(DIM, max_size=2)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[Dims, Dims]:
    """Draw dims and a reshape of them: between the free ones, a chunk is split or joined."""
    dims: list[int] = []
    reshape: list[int] = []
    for number in range(draw(st.integers(1, 3))):
        if number:
            dims.append(-1)
            reshape.append(-1)
        chunk = draw(CHUNK)
        joined = [int(np.prod(chunk))] if chunk else draw(st.sampled_from([[], [1]]))
        sides = [chunk, joined] if draw(st.booleans()) else [joined, chunk]
        dims += sides[0]
        reshape += sides[1]
    return tuple(dims) or (1,), tuple(reshape)


@settings(max_examples=100, deadline=None)
@given(reshapes(), st.data())
def test_mapping_dims_to_the_model_and_back_gives_the_same_dims(pair: tuple[Dims, Dims], data: st.DataObject) -> None:
    dims, reshape = pair
    check_reshape(declared(dims, reshape), "input", "m", batched=True)
    sent = tuple(data.draw(st.integers(0, 4)) if dim < 0 else dim for dim in dims)
    mapped = Reshape(dims, reshape)

    inside = mapped.to_model(sent)

    assert np.prod(inside) == np.prod(sent)
    assert len(inside) == len(reshape)
    assert mapped.to_client(inside) == sent


@settings(max_examples=40, deadline=None)
@given(reshapes(), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.data())
def test_every_request_gets_its_own_elements_back(
    pair: tuple[Dims, Dims], rows: list[int], data: st.DataObject
) -> None:
    dims, reshape = pair
    sent = tuple(data.draw(st.integers(0, 3)) if dim < 0 else dim for dim in dims)
    if reshape == dims:
        return
    model, backend = model_of(completed(dims, reshape, (-1, *reshape), 16))
    requests = [fake_request(model, count, (sent,)) for count in rows]
    for number, request in enumerate(requests):
        elements = np.arange(request.rows * np.prod(sent, dtype=int), dtype=np.float32) + 100 * number
        request.inputs = [elements.reshape(request.rows, *sent)]

    run_batch(model, backend.bind(model.binding_signature, 16), Batch(requests, sum(rows), (sent,), 1))

    for request in requests:
        assert request.outputs is not None
        np.testing.assert_array_equal(request.outputs[0], request.inputs[0])
