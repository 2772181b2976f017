from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading.completion import complete
from penstock.batching.spec import DEFAULT_MAX_BATCH_ROWS, BatchPolicy, ModelSpec

X = TensorSpec("x", "FP32", (-1, 4))
Y = TensorSpec("y", "FP32", (-1, 3))
ZIPMAP = TensorSpec("p", "seq(map(int64,tensor(float)))", ())


def spec(
    inputs: tuple[TensorSpec, ...] = (),
    outputs: tuple[TensorSpec, ...] = (),
    rows: int | None = None,
    **policy: object,
) -> ModelSpec:
    return ModelSpec(
        "m",
        1,
        Path("model.onnx"),
        inputs=inputs,
        outputs=outputs,
        policy=BatchPolicy(max_batch_rows=rows, **policy),  # type: ignore[arg-type]
    )


def refusal(declared: ModelSpec, graph: Signature) -> str:
    with pytest.raises(InferError) as caught:
        complete(declared, graph)
    assert caught.value.code is Code.INVALID
    return caught.value.message


class TestWithoutDeclaration:
    def test_a_model_whose_first_axes_are_free_is_batched(self) -> None:
        done = complete(spec(), Signature((X,), (Y,)))

        assert done.signature == Signature((X,), (Y,), batched=True)
        assert done.policy.max_batch_rows == DEFAULT_MAX_BATCH_ROWS

    def test_the_default_batch_size_is_the_servers(self) -> None:
        assert complete(spec(default_max_batch_rows=7), Signature((X,), (Y,))).policy.max_batch_rows == 7

    def test_a_configured_batch_size_is_kept(self) -> None:
        assert complete(spec(rows=5), Signature((X,), (Y,))).policy.max_batch_rows == 5

    @pytest.mark.parametrize("shape", [(1, 3), (3,), ()])
    def test_one_output_with_a_fixed_first_axis_makes_a_model_unbatched(self, shape: tuple[int, ...]) -> None:
        done = complete(spec(), Signature((X,), (replace(Y, shape=shape),)))

        assert done.signature is not None
        assert not done.signature.batched
        assert done.policy.max_batch_rows == 0

    def test_a_batch_size_of_zero_disables_batching(self) -> None:
        done = complete(spec(rows=0), Signature((X,), (Y,)))

        assert done.signature == Signature((X,), (Y,), batched=False)

    def test_a_scalar_input_becomes_one_element(self) -> None:
        done = complete(spec(), Signature((replace(X, shape=()),), (Y,)))

        assert done.signature is not None
        assert done.signature.inputs[0].shape == (1,)

    def test_a_model_without_inputs_has_no_rows(self) -> None:
        assert complete(spec(), Signature((), (Y,))).policy.max_batch_rows == 0

    def test_a_zipmap_output_is_kept_for_hooks_and_split_by_rows(self) -> None:
        done = complete(spec(), Signature((X,), (Y, ZIPMAP)))

        assert done.signature == Signature((X,), (Y, ZIPMAP), batched=True)

    def test_a_model_with_a_sequence_of_tensors_as_output_is_unbatched(self) -> None:
        sequence = TensorSpec("s", "seq(tensor(float))", ())

        assert complete(spec(), Signature((X,), (Y, sequence))).policy.max_batch_rows == 0

    def test_an_optional_input_of_the_graph_is_left_out(self) -> None:
        weight = TensorSpec("w", "FP32", (4, 3), optional=True)

        assert complete(spec(), Signature((X, weight), (Y,))).signature == Signature((X,), (Y,), batched=True)

    def test_a_batch_size_for_a_model_without_rows_is_refused(self) -> None:
        text = "autofill failed for model 'm': model does not support batching while non-zero max_batch_size"

        assert refusal(spec(rows=8), Signature((X,), (replace(Y, shape=(1, 3)),))) == (
            f"{text} is specified: 'y' is FP32 [1,3]"
        )

    def test_a_preferred_size_above_the_maximum_batch_size_is_refused(self) -> None:
        declared = spec(rows=4, preferred_rows=(2, 8))

        assert (
            refusal(declared, Signature((X,), (Y,)))
            == "dynamic batching preferred size must be <= max batch size for m"
        )


class TestWithDeclaration:
    graph = Signature((X,), (Y,))

    def test_dims_leave_out_the_row_axis_when_a_batch_size_is_configured(self) -> None:
        done = complete(spec((replace(X, shape=(4,)),), (replace(Y, shape=(3,)),), 8), self.graph)

        assert done.signature == Signature((X,), (Y,), batched=True)

    def test_dims_include_every_axis_when_no_batch_size_is_configured(self) -> None:
        done = complete(spec((X,), (Y,)), self.graph)

        assert done.signature == Signature((X,), (Y,), batched=False)

    def test_a_free_axis_of_an_input_may_be_declared_fixed(self) -> None:
        graph = Signature((replace(X, shape=(-1, -1)),), (Y,))
        done = complete(spec((replace(X, shape=(4,)),), (replace(Y, shape=(3,)),), 8), graph)

        assert done.signature == Signature((X,), (Y,), batched=True)

    def test_declared_inputs_are_completed_with_the_models_outputs(self) -> None:
        done = complete(spec((replace(X, shape=(4,)),)), self.graph)

        assert done.signature == Signature((X,), (Y,), batched=True)
        assert done.policy.max_batch_rows == DEFAULT_MAX_BATCH_ROWS

    def test_declared_inputs_that_include_the_row_axis_make_a_model_unbatched(self) -> None:
        assert complete(spec((X,)), self.graph).signature == Signature((X,), (Y,), batched=False)

    def test_declared_outputs_select_which_outputs_are_served(self) -> None:
        graph = Signature((X,), (Y, replace(Y, name="z"), ZIPMAP))
        done = complete(spec(outputs=(replace(Y, name="z", shape=(3,)),)), graph)

        assert done.signature == Signature((X,), (replace(Y, name="z"), ZIPMAP), batched=True)

    def test_the_models_order_of_tensors_is_kept(self) -> None:
        second = replace(X, name="a")
        graph = Signature((X, second), (Y,))

        assert complete(spec((second, X), (Y,)), graph).signature == Signature((X, second), (Y,))

    def test_an_output_of_unknown_rank_has_its_declared_shape(self) -> None:
        graph = Signature((X,), (replace(Y, shape=()),))
        done = complete(spec((replace(X, shape=(4,)),), (replace(Y, shape=(3,)),), 8), graph)

        assert done.signature == Signature((X,), (Y,), batched=True)

    def test_an_overridable_initializer_may_be_declared_optional(self) -> None:
        weight = TensorSpec("w", "FP32", (4, 3), optional=True)
        graph = Signature((X, weight), (Y,))

        assert complete(spec((X, weight), (Y,)), graph).signature == Signature((X, weight), (Y,))

    @pytest.mark.parametrize(
        ("inputs", "outputs", "rows", "text"),
        [
            ((replace(X, name="q"),), (Y,), None, "unexpected inference input 'q', allowed inputs are: x"),
            ((X,), (replace(Y, name="q"),), None, "unexpected inference output 'q', allowed outputs are: y"),
            (
                (X, replace(X, name="q")),
                (Y,),
                None,
                "unable to load model 'm', configuration expects 2 inputs, model provides 1: 'x'",
            ),
            (
                (replace(X, datatype="INT64"),),
                (Y,),
                None,
                (
                    "unable to load model 'm', configuration expects datatype TYPE_INT64 for input 'x', model provides"
                    " TYPE_FP32"
                ),
            ),
            (
                (replace(X, shape=(4,)),),
                (Y,),
                None,
                (
                    "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model configuration"
                    " specifies 1 dimensions (shape [4])"
                ),
            ),
            (
                (replace(X, shape=(5,)),),
                (replace(Y, shape=(3,)),),
                8,
                (
                    "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model configuration"
                    " specifies 2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the"
                    " explicit tensor shape, making complete shape [-1,5])"
                ),
            ),
            (
                (replace(X, shape=(-1,)),),
                (replace(Y, shape=(3,)),),
                8,
                (
                    "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model configuration"
                    " specifies 2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the"
                    " explicit tensor shape, making complete shape [-1,-1])"
                ),
            ),
        ],
    )
    def test_a_contradiction_is_refused_in_tritons_words(
        self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], rows: int | None, text: str
    ) -> None:
        assert refusal(spec(inputs, outputs, rows), self.graph) == text

    def test_a_fixed_first_axis_cannot_be_declared_batched(self) -> None:
        graph = Signature((replace(X, shape=(1, 4)),), (Y,))
        text = refusal(spec((replace(X, shape=(4,)),), (replace(Y, shape=(3,)),), 8), graph)

        assert text.startswith("model 'm', tensor 'x': for the model to support batching the shape should have")
        assert text.endswith("[1,4]")

    def test_an_output_declared_fixed_where_the_model_leaves_it_free_is_refused(self) -> None:
        graph = Signature((X,), (replace(Y, shape=(-1, -1)),))

        assert "tensor 'y'" in refusal(spec((X,), (replace(Y, shape=(-1, 3)),)), graph)

    def test_an_optional_input_is_refused_on_a_batched_model(self) -> None:
        weight = TensorSpec("w", "FP32", (4, 3), optional=True)
        declared = spec((replace(X, shape=(4,)), weight), (replace(Y, shape=(3,)),), 8)

        assert "optional input 'w' is not supported for models that support batching" in refusal(
            declared, Signature((X, weight), (Y,))
        )

    def test_an_output_that_is_not_a_tensor_cannot_be_declared(self) -> None:
        declared = spec((X,), (replace(Y, name="p"),))

        assert "remove it from the configuration" in refusal(declared, Signature((X,), (Y, ZIPMAP)))


DIMS = st.lists(st.sampled_from([-1, 1, 2, 5]), max_size=4).map(tuple)
TENSORS = st.lists(
    st.builds(TensorSpec, st.sampled_from("abcdef"), st.sampled_from(["FP32", "INT64", "BYTES"]), DIMS),
    min_size=1,
    max_size=4,
    unique_by=lambda tensor: tensor.name,
).map(tuple)
GRAPHS = st.builds(Signature, TENSORS, TENSORS)


@settings(max_examples=60, deadline=None)
@given(GRAPHS)
def test_every_graph_is_completed_and_declaring_the_result_changes_nothing(graph: Signature) -> None:
    done = complete(spec(), graph)
    signature = done.signature

    assert signature is not None
    assert [tensor.name for tensor in signature.inputs] == [tensor.name for tensor in graph.inputs]
    assert all(tensor.shape for tensor in (*signature.inputs, *signature.outputs))
    first = 1 if signature.batched else 0
    assert not signature.batched or all(t.shape[0] == -1 for t in (*signature.inputs, *signature.outputs))

    declared = spec(
        tuple(replace(tensor, shape=tensor.shape[first:]) for tensor in signature.inputs),
        tuple(replace(tensor, shape=tensor.shape[first:]) for tensor in signature.outputs),
        done.policy.max_batch_rows,
    )
    assert complete(declared, graph).signature == signature


@settings(max_examples=60, deadline=None)
@given(GRAPHS, TENSORS, TENSORS, st.sampled_from([None, 0, 1, 8]))
def test_a_declaration_is_refused_or_completed_to_a_signature_that_fits_the_graph(
    graph: Signature, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], rows: int | None
) -> None:
    try:
        done = complete(spec(inputs, outputs, rows), graph)
    except InferError:
        return
    assert done.signature is not None
    assert done.signature.batched == bool(done.policy.max_batch_rows)
    for tensor in done.signature.inputs:
        model = graph.input[tensor.name]
        assert tensor.datatype == model.datatype
        assert len(tensor.shape) == max(len(model.shape), 1)


class TestAllowedSizes:
    GRAPH = Signature((X,), (Y,))

    def test_the_largest_allowed_size_is_the_maximum_batch_size(self) -> None:
        assert complete(spec(allowed_rows=(1, 4, 48)), self.GRAPH).policy.max_batch_rows == 48
        assert complete(spec(allowed_rows=(1, 4, 200)), self.GRAPH).policy.max_batch_rows == 200
        assert complete(spec(rows=64, allowed_rows=(8, 32)), self.GRAPH).policy.max_batch_rows == 32

    @pytest.mark.parametrize(
        ("allowed", "text"),
        [
            ((4, 16), "16 exceeds the max batch size of 8"),
            ((4, 2), "[4,2] must be positive and ascending"),
            ((2, 2), "[2,2] must be positive and ascending"),
            ((0, 4), "[0,4] must be positive and ascending"),
        ],
    )
    def test_allowed_sizes_too_large_or_not_positive_and_ascending_are_refused(
        self, allowed: tuple[int, ...], text: str
    ) -> None:
        assert refusal(spec(rows=8, allowed_rows=allowed), self.GRAPH) == f"model 'm', batching.allowed_sizes: {text}"

    def test_allowed_sizes_are_refused_for_a_model_without_rows(self) -> None:
        text = "model 'm', batching.allowed_sizes: the model has no batch axis"
        assert refusal(spec(rows=0, allowed_rows=(1,)), self.GRAPH) == text

    def test_a_preferred_size_above_the_largest_allowed_size_is_refused(self) -> None:
        text = "dynamic batching preferred size must be <= max batch size for m"
        assert refusal(spec(rows=64, preferred_rows=(16,), allowed_rows=(1, 8)), self.GRAPH) == text


def test_axis_names_of_the_graph_survive_declared_dims() -> None:
    named = TensorSpec("x", "FP32", (-1, -1), axes=("N", "L"))
    declared = spec(inputs=(TensorSpec("x", "FP32", (-1,)),), outputs=(TensorSpec("y", "FP32", (3,)),), rows=4)

    done = complete(declared, Signature((named,), (Y,)))

    assert done.signature is not None
    assert done.signature.inputs[0].axes == ("N", "L")
