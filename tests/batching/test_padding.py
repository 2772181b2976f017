"""Padding: keys, buckets, filling and trimming; and that a masked model gives the same answers as without padding."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends import onnx as onnx_backend
from penstock.backends.backend import Array, Backend
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import LOADERS
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.loading.completion import complete
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.running.execution import run_batch
from penstock.batching.scheduling.request_checks import check_shapes
from penstock.batching.shapes.padding import Padding, bucket
from penstock.batching.spec import BatchPolicy, ModelSpec, PaddedAxis
from penstock.perf.padding import masked
from penstock.server.v2.layout import Layouts
from tests.fakes import FakeBackend, Function, NoSink
from tests.server.v2.documents import decode_remembered

NAMES = ("N", "L")
IDS = TensorSpec("ids", "INT64", (-1, -1), axes=NAMES)
KIND = TensorSpec("kind", "INT64", (-1, -1), axes=NAMES)
MASK = TensorSpec("mask", "INT32", (-1, -1), axes=NAMES)
SAME = TensorSpec("same", "INT64", (-1, -1), axes=NAMES)
GRAPH = Signature((IDS, MASK), (SAME, TensorSpec("sum", "INT64", (-1,))))
PADDED = PaddedAxis("ids", 0, buckets=(4, 8), value=7.0, mask="mask")
LONE = "axis 0 must be as long as axis 0 of 'mask', which is not padded: add [padding.mask]"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def same_and_sum(inputs: list[Any]) -> list[Any]:
    return [inputs[0], (inputs[0] * inputs[1]).sum(axis=1)]


def too_short(inputs: list[Any]) -> list[Any]:
    return [inputs[0][:, :3], inputs[0][:, 0]]


def squared(inputs: list[Any]) -> list[Any]:
    return [inputs[0][:, None].repeat(inputs[0].shape[1], axis=1)]


def kind_and_length(inputs: list[Any]) -> list[Any]:
    return [inputs[1], inputs[2].sum(axis=1)]


def spec_of(*padding: PaddedAxis, graph: Signature = GRAPH, **policy: Any) -> ModelSpec:
    policy = {"max_batch_rows": 16, "executor": "thread", **policy}
    return complete(ModelSpec("m", 1, Path("m"), policy=BatchPolicy(**policy), padding=padding), graph)


def model_of(
    *padding: PaddedAxis, graph: Signature = GRAPH, function: Function = same_and_sum
) -> tuple[Model, FakeBackend]:
    backend = FakeBackend(graph, function)
    return Model(spec_of(*padding, graph=graph), [backend], lambda *_: None), backend


def request_of(model: Model, *inputs: Array | None) -> InferRequest:
    shapes = [None if array is None else array.shape for array in inputs]
    rows, key = check_shapes(model.name, model.signature, model.max_request_rows, shapes, model.padding)
    return InferRequest(model, list(inputs), rows, key, model.all_outputs, NoSink())


def run(model: Model, backend: Backend, *requests: InferRequest) -> list[list[Any]]:
    assert len({request.key for request in requests}) == 1
    rows = sum(request.rows for request in requests)
    run_batch(model, backend.bind(model.signature, 16), Batch(list(requests), rows, requests[0].key, 1))
    return [request.outputs or [] for request in requests]


def ones(rows: int, length: int) -> Array:
    return np.ones((rows, length), np.int64)


def refusal(*padding: PaddedAxis, graph: Signature = GRAPH, **policy: Any) -> str:
    with pytest.raises(InferError) as caught:
        spec_of(*padding, graph=graph, **policy)
    assert caught.value.code is Code.INVALID
    return caught.value.message


class TestBuckets:
    def test_a_length_is_rounded_up_to_the_next_bucket_and_kept_beyond_the_last(self) -> None:
        assert [bucket(length, (4, 8)) for length in (0, 1, 4, 5, 8, 9, 100)] == [4, 4, 4, 8, 8, 9, 100]

    def test_default_buckets_are_multiples_of_16_and_then_four_to_a_doubling(self) -> None:
        found = sorted({bucket(length, ()) for length in range(1, 257)})

        assert found == [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
        assert bucket(0, ()) == 0

    @given(st.integers(1, 1 << 40))
    def test_default_buckets_add_little_and_are_buckets_themselves(self, length: int) -> None:
        found = bucket(length, ())

        assert length <= found <= max(length * 5 / 4, length + 15)
        assert bucket(found, ()) == found


class TestKeys:
    def test_lengths_in_one_bucket_share_a_key_with_and_without_their_mask(self) -> None:
        model, _ = model_of(PADDED)
        keys = {
            request_of(model, ones(1, 5), None).key,
            request_of(model, ones(2, 8), None).key,
            request_of(model, ones(1, 6), ones(1, 6)).key,
        }

        assert keys == {((8,), (8,))}

    def test_a_length_beyond_the_last_bucket_has_its_own_key(self) -> None:
        model, _ = model_of(PADDED)

        assert request_of(model, ones(1, 9), None).key == ((9,), (9,))

    def test_unequal_lengths_that_must_be_equal_are_rejected(self) -> None:
        model, _ = model_of(PADDED)
        with pytest.raises(InferError) as caught:
            request_of(model, ones(1, 5), ones(1, 6))

        text = "input 'ids' has 5 on axis 1 and input 'mask' has 6 on axis 1, but model 'm' requires equal lengths"
        assert (caught.value.code, caught.value.message) == (Code.INVALID, text)

    def test_only_the_mask_is_an_optional_input(self) -> None:
        model, _ = model_of(PADDED)

        assert [spec.optional for spec in model.signature.inputs] == [False, True]

    def test_a_mask_of_another_rank_has_its_own_axes_in_the_key(self) -> None:
        wide = TensorSpec("mask", "FP32", (-1, 1, 1, -1))
        model, _ = model_of(PADDED, graph=replace(GRAPH, inputs=(IDS, wide)))

        assert request_of(model, ones(1, 3), None).key == ((4,), (1, 1, 4))


class TestRuns:
    def test_each_row_is_padded_and_masked_and_each_answer_is_trimmed(self) -> None:
        model, backend = model_of(PADDED)
        short, long = ones(1, 1) * 3, ones(2, 3) * 5

        answers = run(model, backend, request_of(model, short, None), request_of(model, long, None))

        filled, mask = backend.runs[0].inputs
        assert filled is not None
        assert mask is not None
        assert filled.tolist() == [[3, 7, 7, 7], [5, 5, 5, 7], [5, 5, 5, 7]]
        assert mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
        assert [[output.tolist() for output in each] for each in answers] == [
            [[[3]], [3]], [[[5, 5, 5], [5, 5, 5]], [15, 15]],
        ]  # fmt: skip
        assert all(output.flags.c_contiguous for each in answers for output in each)

    def test_a_mask_sent_by_the_client_is_kept_and_padded_with_zeros(self) -> None:
        model, backend = model_of(PADDED)
        sent = np.array([[1, 0]], np.int32)

        run(model, backend, request_of(model, ones(1, 2), sent), request_of(model, ones(1, 3), None))

        mask = backend.runs[0].inputs[1]
        assert mask is not None
        assert mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]

    def test_no_padding_except_the_mask_is_added_beyond_the_last_bucket(self) -> None:
        model, backend = model_of(PADDED)

        ((same, total),) = run(model, backend, request_of(model, ones(1, 9), None))

        assert (same.shape, total.tolist()) == ((1, 9), [9])
        assert model.event_counts.get("elements_padded", 0) == 0

    def test_real_and_padding_elements_are_counted_without_masks(self) -> None:
        model, backend = model_of(PADDED)

        run(model, backend, request_of(model, ones(1, 1), None), request_of(model, ones(2, 3), None))

        assert model.event_counts == {"elements_real": 7, "elements_padded": 5}

    def test_outputs_are_trimmed_as_configured_instead_of_by_axis_name(self) -> None:
        padded_axis = replace(PADDED, outputs={})
        model, backend = model_of(padded_axis)

        ((same, _),) = run(model, backend, request_of(model, ones(1, 3), None))

        assert same.shape == (1, 4)

    def test_only_the_configured_axis_of_an_output_without_axis_names_is_trimmed(self) -> None:
        graph = Signature((replace(IDS, axes=()),), (TensorSpec("pairs", "INT64", (-1, -1, -1)),))
        padded_axis = PaddedAxis("ids", 0, buckets=(4,), outputs={"pairs": 1})
        model, backend = model_of(padded_axis, graph=graph, function=squared)

        ((pairs,),) = run(model, backend, request_of(model, ones(1, 3)))

        assert pairs.tolist() == [[[1] * 3] * 4]

    def test_an_output_of_another_length_than_the_run_is_an_internal_error(self) -> None:
        model, backend = model_of(PADDED, function=too_short)
        request = request_of(model, ones(1, 2), None)
        with pytest.raises(InferError) as caught:
            run(model, backend, request)

        text = "model 'm': output 'same' has shape [1, 3], expected 4 on axis 1, the length of its padded input"
        assert (caught.value.code, caught.value.message) == (Code.INTERNAL, text)
        assert request.outputs is None

    def test_string_inputs_are_padded_with_empty_strings(self) -> None:
        graph = Signature(
            (TensorSpec("s", "BYTES", (-1, -1), axes=NAMES),), (TensorSpec("t", "BYTES", (-1, -1), axes=NAMES),)
        )
        model, backend = model_of(PaddedAxis("s", 0, (3,)), graph=graph, function=list)
        words = np.array([[b"a", b"b"]], object)

        ((answer,),) = run(model, backend, request_of(model, words))

        filled = backend.runs[0].inputs[0]
        assert filled is not None
        assert (filled.tolist(), answer.tolist()) == ([[b"a", b"b", b""]], [[b"a", b"b"]])

    def test_two_axes_of_one_input_are_padded_and_trimmed_separately(self) -> None:
        image = TensorSpec("image", "FP32", (-1, -1, -1), axes=("N", "H", "W"))
        graph = Signature((image,), (replace(image, name="out"),))
        axes = (PaddedAxis("image", 0, (4,)), PaddedAxis("image", 1, (6,)))
        model, backend = model_of(*axes, graph=graph, function=list)
        pictures = [np.full((1, height, width), height, np.float32) for height, width in ((2, 5), (4, 6), (3, 1))]

        answers = run(model, backend, *[request_of(model, picture) for picture in pictures])

        assert backend.runs[0].inputs[0] is not None
        assert backend.runs[0].inputs[0].shape == (3, 4, 6)
        assert [each[0].tolist() for each in answers] == [picture.tolist() for picture in pictures]

    def test_two_inputs_of_one_length_are_padded_alike_and_the_output_is_trimmed_once(self) -> None:
        graph = replace(GRAPH, inputs=(IDS, KIND, MASK))
        axes = (PADDED, replace(PADDED, input="kind", mask=""))
        model, backend = model_of(*axes, graph=graph, function=kind_and_length)

        ((same, total),) = run(model, backend, request_of(model, ones(1, 5), ones(1, 5), None))

        assert (same.tolist(), total.tolist()) == ([[1] * 5], [5])

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(5, 8), st.booleans()), min_size=1, max_size=5))
    def test_every_request_gets_its_own_rows_and_length_in_any_batch(self, sizes: list[tuple[int, int, bool]]) -> None:
        model, backend = model_of(PADDED)
        rng = np.random.default_rng(1)
        sent = [rng.integers(0, 99, (rows, length)) for rows, length, _ in sizes]
        masks = [ones(*array.shape) if masked else None for array, (_, _, masked) in zip(sent, sizes, strict=True)]

        answers = run(model, backend, *[request_of(model, *each) for each in zip(sent, masks, strict=True)])

        for array, (same, total) in zip(sent, answers, strict=True):
            assert same.tolist() == array.tolist()
            assert total.tolist() == array.sum(axis=1).tolist()


class TestRefusedConfigurations:
    @pytest.mark.parametrize(
        ("padded", "text"),
        [
            (PaddedAxis("x", 0), "padding.x: the model has no such input, its inputs are ids, mask"),
            (PaddedAxis("ids", 1), "padding.ids.axis: there is no axis 1, the dims after the rows are [-1]"),
            (PaddedAxis("ids", -1), "padding.ids.axis: there is no axis -1, the dims after the rows are [-1]"),
            (replace(PADDED, buckets=(8, 4)), "padding.ids.buckets: [8, 4] must be positive and ascending"),
            (replace(PADDED, buckets=(0, 4)), "padding.ids.buckets: [0, 4] must be positive and ascending"),
            (replace(PADDED, value=0.5), "padding.ids.value: INT64 cannot represent 0.5"),
            (replace(PADDED, value=float("inf")), "padding.ids.value: INT64 cannot represent inf"),
            (replace(PADDED, mask="m"), "padding.ids.mask: the model has no input 'm', its inputs are ids, mask"),
            (replace(PADDED, mask="ids"), "padding.ids.mask: an input cannot be its own mask"),
            (replace(PADDED, mask=""), f"padding.ids.axis: {LONE}"),
            (
                replace(PADDED, outputs={"y": 0}),
                "padding.ids.outputs: the model has no output 'y', its outputs are same, sum",
            ),
            (
                replace(PADDED, outputs={"sum": 0}),
                "padding.ids.outputs: axis 0 of 'sum' is not free, the dims after the rows are []",
            ),
        ],
    )
    def test_a_refused_padding_configuration_names_the_invalid_field(self, padded: PaddedAxis, text: str) -> None:
        assert refusal(padded) == f"model 'm', {text}"

    def test_padding_of_a_fixed_axis_is_refused(self) -> None:
        fixed = replace(GRAPH, inputs=(replace(IDS, shape=(-1, 4)), MASK))

        text = "model 'm', padding.ids.axis: axis 0 is fixed at 4, and only a free axis can be padded"
        assert refusal(PADDED, graph=fixed) == text

    def test_a_mask_with_a_wrong_datatype_or_shape_is_refused(self) -> None:
        for mask, text in (
            (replace(MASK, datatype="BYTES"), "'mask' is BYTES, expected one of INT64, INT32, BOOL, FP32, FP16"),
            (replace(MASK, shape=(-1, -1, -1)), "'mask' has shape [-1, -1, -1], expected one free axis after the rows"),
        ):
            graph = replace(GRAPH, inputs=(IDS, mask))
            assert refusal(PADDED, graph=graph) == f"model 'm', padding.ids.mask: {text}"

    def test_a_mask_shared_by_two_different_axes_is_refused(self) -> None:
        graph = replace(GRAPH, inputs=(IDS, TensorSpec("other", "INT64", (-1, -1), axes=("N", "M")), MASK))
        text = "padding.ids.mask: 'mask' is also the mask of 'other', whose axis does not have the same name"

        assert refusal(PADDED, replace(PADDED, input="other"), graph=graph) == f"model 'm', {text}"

    def test_two_axes_with_different_names_may_have_a_mask_each(self) -> None:
        other = (TensorSpec(name, "INT64", (-1, -1), axes=("N", "M")) for name in ("other", "other_mask"))
        graph = replace(GRAPH, inputs=(IDS, MASK, *other))

        assert spec_of(PADDED, replace(PADDED, input="other", mask="other_mask"), graph=graph).signature is not None

    def test_padding_one_axis_twice_is_refused(self) -> None:
        assert refusal(PADDED, PADDED) == "model 'm', padding.ids.axis: axis 0 is declared twice"

    def test_different_buckets_for_lengths_that_must_be_equal_are_refused(self) -> None:
        graph = replace(GRAPH, inputs=(IDS, KIND, MASK))
        other = PaddedAxis("kind", 0, buckets=(16,))

        text = "model 'm', padding.ids.buckets: [4, 8] must equal those of 'kind', which must have the same length"
        assert refusal(PADDED, other, graph=graph) == text

    def test_padding_of_a_model_without_rows_is_refused(self) -> None:
        text = "model 'm', padding.ids: the model has no batch axis, so requests never share a batch"

        assert refusal(PADDED, max_batch_rows=0) == text

    def test_padding_one_of_two_axes_that_must_be_equal_is_refused(self) -> None:
        square = Signature((TensorSpec("x", "FP32", (-1, -1, -1), axes=("N", "S", "S")),), (GRAPH.outputs[1],))

        text = (
            "padding.x.axis: axis 0 must be as long as axis 1 of 'x', which is not padded: only one axis "
            "of an input can be padded"
        )
        assert refusal(PaddedAxis("x", 0), graph=square) == f"model 'm', {text}"

    def test_an_output_with_an_unrelated_free_axis_must_be_configured(self) -> None:
        graph = Signature(GRAPH.inputs, (replace(SAME, axes=("N", "Castsame_dim_1")), GRAPH.outputs[1]))

        text = "same: has a free axis of no input; name it if it is as long as a padded axis, or set {}"
        assert refusal(PADDED, graph=graph) == f"model 'm', padding.ids.outputs: {text}"
        for outputs in ({"same": 0}, {}):
            assert spec_of(replace(PADDED, outputs=outputs), graph=graph).signature is not None

    def test_outputs_to_trim_must_be_configured_if_the_padded_axis_has_no_name(self) -> None:
        nameless = Signature((replace(IDS, axes=()),), (replace(SAME, axes=()),))
        padded = PaddedAxis("ids", 0)

        text = "model 'm', padding.ids.outputs: the model does not name this axis; set which axis of same is as long"
        assert refusal(padded, graph=nameless) == f"{text} as it, or {{}}"
        assert spec_of(replace(padded, outputs={"same": 0}), graph=nameless).signature is not None


class TestMaskedModel:
    """One layer of masked attention, mean pooling and an output per token, in ONNX Runtime."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "model.onnx"
        onnx.save(masked(width=16, hidden=32, vocabulary=50), path)
        return path

    def test_axes_of_the_model_have_the_names_in_its_graph(self, path: Path) -> None:
        graph = onnx_backend.load(path, "cpu", {}).graph

        assert [spec.axes for spec in (*graph.inputs, *graph.outputs)] == [
            ("N", "L"), ("N", "L"), ("N", "L", ""), ("N", ""),
        ]  # fmt: skip

    @pytest.mark.anyio
    async def test_padded_batches_give_the_same_answers_as_unpadded_single_requests(self, path: Path) -> None:
        rng = np.random.default_rng(5)
        sent = [rng.integers(0, 50, (rows, length)) for rows, length in ((1, 1), (2, 7), (1, 8), (3, 3), (1, 16))]
        unpadded = ModelSpec("plain", 1, path, policy=BatchPolicy(max_batch_rows=8, executor="thread"))
        axis = PaddedAxis("ids", 0, buckets=(16,), value=49.0, mask="mask")
        engine = Engine(asyncio.get_running_loop(), LOADERS)
        alone_model = await engine.load(unpadded)
        padded_model = await engine.load(replace(unpadded, name="padded", padding=(axis,)))

        alone = [await engine.infer(alone_model, [ids, ones(*ids.shape)]) for ids in sent]
        padded = await asyncio.gather(*(engine.infer(padded_model, [ids, None]) for ids in sent))
        batches = padded_model.statistics.snapshot().execution_count
        await engine.stop(1.0)

        assert batches < len(sent)
        for (tokens, pooled), (padded_tokens, padded_pooled) in zip(alone, padded, strict=True):
            assert padded_tokens.shape == tokens.shape
            np.testing.assert_allclose(padded_tokens, tokens, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(padded_pooled, pooled, rtol=1e-4, atol=1e-5)


def test_a_request_without_its_mask_is_decoded_with_a_remembered_layout() -> None:
    model, backend = model_of(PADDED)
    head = b'{"inputs":[{"name":"ids","shape":[1,3],"datatype":"INT64","parameters":{"binary_data_size":24}}]}'
    layouts = Layouts()
    bodies = [head + np.full((1, 3), number, np.int64).tobytes() for number in range(3)]

    requests = [decode_remembered(model, body, len(head), 10, NoSink(), layouts)[0] for body in bodies]
    answers = run(model, backend, *requests)

    assert len(layouts) == 1
    assert [request.inputs[1] for request in requests] == [None] * 3
    assert [same.tolist() for same, _ in answers] == [[[number] * 3] for number in range(3)]


def test_a_model_has_padding_only_if_it_is_configured() -> None:
    model, _ = model_of()

    assert model.padding is None
    assert isinstance(model_of(PADDED)[0].padding, Padding)
