"""Strategies for the payloads' suites: models, and what is sent to them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.backends.datatypes import DATATYPES
from penstock.backends.signature import Signature, TensorSpec
from penstock.perf.payloads.tensors import InputTensor, Step
from penstock.perf.payloads.writing import Parameter
from penstock.perf.profiling.model import ModelDescription, Tensor
from penstock.server.v2 import tensors as wire
from tests.server.v2.documents import TEXTS, tensors

NAMES = st.text('abcdefgh_:- "\\é', min_size=1, max_size=6)
SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
IDS = st.integers(1, 2**64 - 1)
VALUES = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), TEXTS
)
PARAMETERS: st.SearchStrategy[tuple[Parameter, ...]] = st.dictionaries(
    st.text("xyz", min_size=1, max_size=4), VALUES, max_size=3
).map(lambda found: tuple(found.items()))


def model_of(*inputs: Tensor, rows: int = 64, **facts: Any) -> ModelDescription:
    return ModelDescription("m", "", "", inputs, (Tensor("y", "FP32", (1,)),), rows, **facts)


def signature_of(model: ModelDescription) -> Signature:
    """Give a model's signature as a server would have it."""

    def spec(tensor: Tensor) -> TensorSpec:
        return TensorSpec(tensor.name, tensor.datatype, (-1, *tensor.shape) if model.batched else tensor.shape)

    return Signature(tuple(map(spec, model.inputs)), tuple(map(spec, model.outputs)), batched=model.batched)


@st.composite
def requested(draw: st.DrawFn, *, json: bool = False) -> tuple[ModelDescription, Step]:
    """Draw a model and one request for it; `json`: one that JSON can carry."""
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    datatypes = [name for name in DATATYPES if not json or name not in ("FP16", "BF16")]
    rows = draw(st.integers(1, 4))
    inputs, step = [], []
    for name in names:
        tensor = Tensor(name, draw(st.sampled_from(datatypes)), draw(SHAPES))
        shape = (rows, *tensor.shape)
        array = draw(tensors(tensor.datatype, st.just(list(shape))))
        if json and array.dtype.kind == "f":
            array = np.nan_to_num(array)
        inputs.append(tensor)
        step.append(InputTensor(name, tensor.datatype, shape, bytes(wire.to_binary(tensor.datatype, array))))
    return model_of(*inputs), tuple(step)
