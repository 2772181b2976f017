"""What Triton's TensorFlow backend concludes from a SavedModel's signature and from dims."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading.completion import complete
from penstock.batching.spec import BatchPolicy, BatchTensor, ModelSpec

X = TensorSpec("x", "FP32", (-1, 4))
Y = TensorSpec("y", "FP32", (-1,))
DEFAULT = 9


def spec(
    inputs: tuple[TensorSpec, ...] = (), outputs: tuple[TensorSpec, ...] = (), rows: int | None = None
) -> ModelSpec:
    policy = BatchPolicy(max_batch_rows=rows, default_max_batch_rows=DEFAULT)
    return ModelSpec("m", 1, Path("m"), backend="tensorflow", inputs=inputs, outputs=outputs, policy=policy)


def rows_of(declared: ModelSpec, graph: Signature) -> int | None:
    return complete(declared, graph).policy.max_batch_rows


def refusal(declared: ModelSpec, graph: Signature) -> str:
    with pytest.raises(InferError) as caught:
        complete(declared, graph)
    assert caught.value.code is Code.INVALID
    return caught.value.message


GRAPH = Signature((X,), (Y,))


def test_inputs_and_outputs_with_free_first_axes_make_a_model_batched() -> None:
    assert rows_of(spec(), GRAPH) == DEFAULT
    assert rows_of(spec(rows=3), GRAPH) == 3
    assert rows_of(spec(rows=0), GRAPH) == 0


def test_dims_without_the_row_axis_make_a_fully_declared_model_batched() -> None:
    declared = spec((replace(X, shape=(4,)),), (replace(Y, shape=(1,), reshape=()),))

    assert rows_of(declared, GRAPH) == DEFAULT


def test_dims_with_every_axis_make_a_model_unbatched() -> None:
    assert rows_of(spec((X,), (Y,)), GRAPH) == 0
    assert rows_of(spec((X,)), GRAPH) == 0


def test_dims_that_contradict_each_other_are_refused_in_tritons_words() -> None:
    declared = spec((replace(X, shape=(4,)),), (Y,))

    assert refusal(declared, GRAPH) == (
        "unable to autofill for 'm', model tensor configurations are contradicting each other in terms of whether "
        "batching is supported"
    )


@pytest.mark.parametrize("shape", [(1, 4), ()])
def test_a_batch_size_for_a_signature_without_rows_is_refused_in_tritons_words(shape: tuple[int, ...]) -> None:
    graph = Signature((replace(X, shape=shape),), (Y,))

    assert refusal(spec(rows=8), graph) == (
        "unable to autofill for 'm', configuration specified max-batch 8 but model signature does not support batching"
    )
    assert rows_of(spec(), graph) == 0


@pytest.mark.parametrize(("rows", "front"), [(8, (-1,)), (0, ())])
def test_a_tensor_of_unknown_rank_has_its_declared_shape(rows: int, front: tuple[int, ...]) -> None:
    graph = Signature((replace(X, shape=()),), (replace(Y, shape=()),))
    done = complete(spec((replace(X, shape=(4,)),), (replace(Y, shape=(5, 2)),), rows=rows), graph)

    assert done.signature is not None
    assert done.signature.inputs[0].shape == (*front, 4)
    assert done.signature.outputs[0].shape == (*front, 5, 2)


def test_a_model_without_known_ranks_is_unbatched_unless_the_configuration_sets_rows() -> None:
    graph = Signature((replace(X, shape=()),), (replace(Y, shape=()),))

    assert rows_of(spec((replace(X, shape=(1,)),), (replace(Y, shape=(1,)),)), graph) == 0
    # a known rank decides for the other tensors
    assert (
        rows_of(spec((replace(X, shape=(4,)),), (replace(Y, shape=(5,)),)), Signature((X,), graph.outputs)) == DEFAULT
    )


def signature_of(declared: ModelSpec, graph: Signature) -> tuple[list[tuple[str, str, tuple[int, ...]]], ...]:
    done = complete(declared, graph).signature
    assert done is not None
    return tuple([(each.name, each.datatype, each.shape) for each in side] for side in (done.inputs, done.outputs))


PAIR = Signature(
    (TensorSpec("a", "INT32", (-1, 16)), TensorSpec("b", "INT64", (-1, -1, 3))),
    (TensorSpec("p", "INT8", (-1, 16)), TensorSpec("q", "FP32", (-1,))),
)


class TestPartlyDeclaredTensors:
    def test_missing_datatypes_and_dims_are_taken_from_the_model(self) -> None:
        declared = spec((TensorSpec("a", "INT32", ()), TensorSpec("b", "", (5, 3))), (TensorSpec("q", "", ()),))

        assert signature_of(declared, PAIR) == (
            [("a", "INT32", (-1, 16)), ("b", "INT64", (-1, 5, 3))], [("q", "FP32", (-1,))],
        )  # fmt: skip
        assert rows_of(declared, PAIR) == DEFAULT

    def test_dims_of_one_tensor_decide_whether_the_other_tensors_have_rows(self) -> None:
        declared = spec(outputs=(TensorSpec("p", "INT8", ()), TensorSpec("q", "", (-1,))))

        assert rows_of(declared, PAIR) == 0
        assert signature_of(declared, PAIR)[1] == [("p", "INT8", (-1, 16)), ("q", "FP32", (-1,))]

    @pytest.mark.parametrize("rows", [None, 0, 2])
    def test_undeclared_inputs_are_taken_from_the_model(self, rows: int | None) -> None:
        shape = (-1, 7, 3) if rows == 0 else (7, 3)
        declared = spec((TensorSpec("b", "INT64", shape),), rows=rows)

        assert signature_of(declared, PAIR)[0] == [("a", "INT32", (-1, 16)), ("b", "INT64", (-1, 7, 3))]

    def test_undeclared_outputs_are_not_served(self) -> None:
        assert signature_of(spec(outputs=(TensorSpec("p", "", ()),)), PAIR)[1] == [("p", "INT8", (-1, 16))]

    def test_a_batch_input_is_not_added_to_the_declared_inputs(self) -> None:
        declared = spec((TensorSpec("a", "", ()),))
        declared = replace(declared, batch_inputs=(BatchTensor("n", "BATCH_ELEMENT_COUNT", "INT32", ("a",)),))
        graph = Signature((X, TensorSpec("a", "FP32", (-1, 2)), TensorSpec("n", "INT32", (-1,))), (Y,))

        assert signature_of(declared, graph)[0] == [("x", "FP32", (-1, 4)), ("a", "FP32", (-1, 2))]

    def test_a_scalar_of_a_model_without_rows_needs_no_dims(self) -> None:
        graph = Signature((replace(X, shape=()),), (Y,))

        assert signature_of(spec((TensorSpec("x", "", ()),)), graph)[0] == [("x", "FP32", (1,))]

    def test_a_tensor_of_unknown_rank_has_rows_only_if_its_dims_are_declared(self) -> None:
        graph = Signature((replace(X, shape=()),), (Y,))

        assert "does not support batching" in refusal(spec((TensorSpec("x", "FP32", ()),), rows=8), graph)
        assert signature_of(spec((TensorSpec("x", "", (4,)),), rows=8), graph)[0] == [("x", "FP32", (-1, 4))]

    def test_too_many_inputs_are_refused_in_tritons_words(self) -> None:
        declared = spec(tuple(TensorSpec(name, "", ()) for name in ("a", "c")))

        assert "configuration expects 3 inputs, model provides 2" in refusal(declared, PAIR)

    @pytest.mark.parametrize("side", ["inputs", "outputs"])
    def test_a_datatype_other_than_the_models_is_refused(self, side: str) -> None:
        name = {"inputs": "a", "outputs": "p"}[side]
        text = f"configuration expects datatype TYPE_FP16 for {side[:-1]} '{name}', model provides TYPE_INT"

        declared: Any = {side: (TensorSpec(name, "FP16", ()),)}

        assert text in refusal(spec(**declared), PAIR)

    @pytest.mark.parametrize("side", ["inputs", "outputs"])
    def test_without_auto_complete_a_missing_datatype_is_an_error(self, side: str) -> None:
        in_part: Any = {side: (TensorSpec("x", "", (-1, 4)),)}
        declared_spec = replace(spec((X,), (Y,)), auto_complete=False, **in_part)

        assert refusal(declared_spec, GRAPH) == f"model {side[:-1]} 'x' must specify 'data_type' for m"


def test_without_auto_complete_dims_are_used_as_declared() -> None:
    declared = replace(spec((replace(X, shape=(4,)),), (replace(Y, shape=(1,), reshape=()),)), auto_complete=False)

    assert "explicit tensor shape" not in refusal(declared, GRAPH)  # without rows, the dims would lack an axis
    assert rows_of(replace(declared, policy=BatchPolicy(max_batch_rows=2)), GRAPH) == 2


@given(st.integers(1, 4), st.booleans())
def test_a_declaration_copied_from_a_completed_configuration_completes_to_the_same(rank: int, batched: bool) -> None:
    shape = (-1, *range(2, rank + 1))
    graph = Signature((replace(X, shape=shape),), (replace(Y, shape=shape),))
    first = complete(spec(rows=None if batched else 0), graph)
    assert first.signature is not None
    dims = (first.signature.inputs[0].shape[1:] or (1,)) if batched else first.signature.inputs[0].shape
    reshape = () if batched and rank == 1 else None
    declared = spec((replace(X, shape=dims, reshape=reshape),), (replace(Y, shape=dims, reshape=reshape),))

    # dims of [1] with an empty reshape do not tell whether there are rows, as in Triton
    assert rows_of(declared, graph) == (DEFAULT if batched else 0)
