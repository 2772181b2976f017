"""Bound: every declaration is either refused or runs in shapes that the model's graph accepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from penstock.backends.errors import InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading.completion import complete
from penstock.batching.loading.dummy_inputs import dummy_fill, dummy_key, smallest_row_shapes
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.running.execution import run_batch
from penstock.batching.shapes.bound import reshaped_signature
from penstock.batching.shapes.ragged import KINDS, SCATTER
from penstock.batching.spec import BatchPolicy, BatchTensor, ModelSpec
from tests.fakes import FakeBackend, NoSink

DIM = st.sampled_from([-1, 1, 2, 4])
DIMS = st.lists(DIM, max_size=3).map(tuple)


@st.composite
def declared(draw: st.DrawFn) -> TensorSpec:
    """Draw an input, mostly valid: a reshape of as many elements, ragged, or a list of values."""
    dims = draw(DIMS)
    reshape = draw(st.sampled_from([None, None, (1, *dims), (*dims, 1)]) | DIMS)
    x = TensorSpec("x", "FP32", dims, reshape=reshape)
    form = draw(st.sampled_from(["", "", "ragged", "ragged", "is_shape", "both"]))
    if form == "is_shape":
        return replace(x, datatype="INT64", shape=(draw(DIM),), reshape=None, is_shape=True)
    return replace(x, ragged=form in ("ragged", "both"), is_shape=form == "both")


ROWS = TensorSpec("rows", "FP32", (-1, 1))
Y = TensorSpec("y", "FP32", (-1, 1))
BATCH_TENSORS = st.sampled_from([*[None] * 6, *(BatchTensor("told", kind, "INT32", ("x",)) for kind in KINDS)])


def fits(shape: tuple[int, ...], graph: tuple[int, ...]) -> bool:
    """Tell whether ONNX Runtime takes such a shape; a scalar is bound as one element."""
    graph_shape = graph or (1,)
    return len(shape) == len(graph_shape) and all(
        graph_dim in (-1, dim) for dim, graph_dim in zip(shape, graph_shape, strict=True)
    )


@settings(max_examples=400, deadline=None)
@given(declared(), st.sampled_from([0, 4, 4, 4]), BATCH_TENSORS, st.sampled_from([(-1,), (-1,), (-1, -1)]), st.data())
def test_an_accepted_configuration_runs_in_shapes_of_the_models_graph(
    x: TensorSpec, rows: int, batch_tensor: BatchTensor | None, batch_tensor_dims: tuple[int, ...], data: st.DataObject
) -> None:
    first = 1 if rows else 0
    dims = x.shape if x.reshape is None else x.reshape
    right = (-1, *dims) if rows else dims
    if x.ragged:
        right = (-1,)
    elif x.is_shape and rows:
        right = tuple(1 + dim if dim > 0 else dim for dim in x.shape)
    graph_dims = data.draw(st.sampled_from([right, right, right, ()]) | DIMS)
    cut = data.draw(st.sampled_from([False, False, True]))
    graph_inputs = [TensorSpec("x", x.datatype, graph_dims), ROWS]
    if batch_tensor is not None:
        graph_inputs.append(TensorSpec("told", "INT32", batch_tensor_dims))
    graph = Signature(tuple(graph_inputs), (Y,))
    declared = ModelSpec(
        "m", 1, Path("m"), policy=BatchPolicy(max_batch_rows=rows),
        inputs=(x, replace(ROWS, shape=ROWS.shape[first:])), outputs=(replace(Y, shape=Y.shape[first:]),),
        batch_inputs=() if batch_tensor is None else (batch_tensor,),
        batch_outputs=(BatchTensor("y", SCATTER, "", ("x",)),) if cut else (),
    )  # fmt: skip
    try:
        spec = complete(declared, graph)
    except InferError:
        return
    forms = [word for word in ("ragged", "is_shape", "reshape") if getattr(x, word) not in (None, False)]
    event(f"{rows} rows, {forms}")
    bound = spec.binding_signature or spec.signature
    assert bound is not None
    backend = FakeBackend(bound, list)
    binding = backend.bind(bound, 4)

    dummy_fill(spec, binding, 3 if rows else 1, smallest_row_shapes(spec))()
    binding.run(())

    for tensor, array in zip(bound.inputs, backend.runs[0].inputs, strict=True):
        assert array is not None
        assert fits(array.shape, graph.input[tensor.name].shape)


@settings(max_examples=100, deadline=None)
@given(DIMS, DIMS, st.data())
def test_an_ensemble_reshapes_tensors_between_steps_as_a_model_would(
    dims: tuple[int, ...], reshape: tuple[int, ...], data: st.DataObject
) -> None:
    x, y = TensorSpec("x", "FP32", dims, reshape=reshape), TensorSpec("y", "FP32", dims, reshape=reshape)
    declared = ModelSpec("m", 1, Path("m"), policy=BatchPolicy(max_batch_rows=4), inputs=(x,), outputs=(y,))
    inside = (-1, *reshape)
    graph = Signature((TensorSpec("x", "FP32", inside),), (TensorSpec("y", "FP32", inside),))
    try:
        spec = complete(declared, graph)
    except InferError:
        return
    assert spec.signature is not None
    assume(spec.binding_signature is not None)
    sent = (2, *(data.draw(st.integers(1, 3)) if dim < 0 else dim for dim in dims))
    array = np.arange(np.prod(sent), dtype=np.float32).reshape(sent)
    backend = FakeBackend(graph, list)
    model = Model(spec, [backend], lambda *_: None)
    request = InferRequest(model, [array], 2, (sent[1:],), (0,), NoSink())

    run_batch(model, backend.bind(model.binding_signature, 4), Batch([request], 2, request.key, 1))

    assert reshaped_signature(spec.signature) == spec.binding_signature
    assert model.forms is not None
    (handed,) = model.forms.to_model([array])
    (ran,) = backend.runs[0].inputs
    np.testing.assert_array_equal(handed, ran)
    np.testing.assert_array_equal(model.forms.to_client("m", (0,), [handed])[0], array)
    assert len(dummy_key(spec, smallest_row_shapes(spec))) == 1
