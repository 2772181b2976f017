from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from penstock.backends.errors import Code, InferError, OutOfMemory
from penstock.backends.loading import LOADERS
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading.opening import close_model, open_model
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy, ModelSpec
from tests.backends.onnx_models import ints, node, save, value
from tests.fakes import FakeBackend, Function, fake_loader


def x(*shape: int) -> TensorSpec:
    return TensorSpec("x", "FP32", shape)


def y(*shape: int) -> TensorSpec:
    return TensorSpec("y", "FP32", shape)


def rows_of(
    function: Function, inputs: tuple[TensorSpec, ...] = (x(-1, 4),), outputs: tuple[TensorSpec, ...] = (y(-1, 4),),
    shared_scale: str = "", **terms: Any,
) -> int:  # fmt: skip
    """Open a model with only this configuration. Returns: its maximum batch size."""
    policy = BatchPolicy(executor="thread", **terms)
    spec = ModelSpec("m", 1, Path("model"), backend="fake", policy=policy)
    model = _opened(spec, FakeBackend(Signature(inputs, outputs), function, shared_scale=shared_scale))
    close_model(model)
    return model.spec.policy.max_batch_rows or 0


def _opened(spec: ModelSpec, backend: FakeBackend) -> Model:
    return open_model(spec, {"fake": fake_loader(backend)}, lambda *_: None)


def found(inputs: list[Any]) -> list[Any]:
    """Return the values above 0.5 of all rows together."""
    (array,) = inputs
    return [array[array > 0.5].reshape(-1, 1).repeat(4, 1)]


def test_a_model_with_one_output_row_per_input_row_is_batched() -> None:
    assert rows_of(list) == 64


def test_a_model_whose_output_length_depends_on_values_is_unbatched() -> None:
    assert rows_of(found) == 0


def test_a_model_with_an_output_that_is_not_a_tensor_is_probed_by_its_tensors() -> None:
    maps = TensorSpec("maps", "seq(map(int64,tensor(float)))", ())

    assert rows_of(lambda inputs: [[{}], *inputs], outputs=(maps, y(-1, 4))) == 64
    assert rows_of(lambda inputs: [[{}], np.asarray(inputs[0]).sum(0, keepdims=True)], outputs=(maps, y(-1, 4))) == 0
    assert rows_of(lambda inputs: [[{}], np.cumsum(np.asarray(inputs[0]), axis=0)], outputs=(maps, y(-1, 4))) == 0


def test_a_model_that_concatenates_its_inputs_is_unbatched() -> None:
    def function(inputs: list[Any]) -> list[Any]:
        return [np.concatenate(inputs)]

    assert rows_of(function, (x(-1, 4), TensorSpec("z", "FP32", (-1, 4)))) == 0


def test_a_model_that_compares_all_rows_with_each_other_is_unbatched() -> None:
    def function(inputs: list[Any]) -> list[Any]:
        return [inputs[0] @ inputs[1].T]

    assert rows_of(function, (x(-1, 4), TensorSpec("z", "FP32", (-1, 4))), (y(-1, -1),)) == 0


def test_a_model_that_runs_on_one_row_but_not_on_two_is_unbatched() -> None:
    def function(inputs: list[Any]) -> list[Any]:
        if len(inputs[0]) > 1:
            raise InferError(Code.INTERNAL, "cannot reshape {2,4} to {1,4}")
        return inputs

    assert rows_of(function) == 0


def test_a_model_that_runs_on_fewer_rows_but_not_on_a_few_is_unbatched() -> None:
    def not_even(inputs: list[Any]) -> list[Any]:
        if len(inputs[0]) == 4:
            raise InferError(Code.INTERNAL, "cannot broadcast 4 to 2")
        return inputs

    def in_pairs(inputs: list[Any]) -> list[Any]:
        pairs = inputs[0].reshape(-1, 2, 4)
        return [(pairs - pairs.mean(axis=1, keepdims=True)).reshape(-1, 4)]

    def limited(inputs: list[Any]) -> list[Any]:
        if len(inputs[0]) > 16:
            raise InferError(Code.INTERNAL, "not supported")
        return inputs

    assert rows_of(not_even) == 0
    assert rows_of(_failing(in_pairs)) == 0
    assert rows_of(limited) == 64


def _failing(function: Function) -> Function:
    """Make a function whose failures are those of a runtime."""

    def run(inputs: list[Any]) -> list[Any]:
        try:
            return function(inputs)
        except ValueError as error:
            raise InferError(Code.INTERNAL, str(error)) from error

    return run


def test_errors_caused_by_zeros_or_a_lack_of_memory_do_not_make_a_model_unbatched() -> None:
    def no_zeros(inputs: list[Any]) -> list[Any]:
        if not inputs[0].all():
            raise InferError(Code.INTERNAL, "division by zero")
        return inputs

    def little_memory(inputs: list[Any]) -> list[Any]:
        if len(inputs[0]) > 1:
            raise OutOfMemory(Code.OVERLOADED, "no memory")
        return inputs

    assert rows_of(no_zeros) == 64
    assert rows_of(little_memory) == 64


def test_an_onnx_model_with_a_nonzero_node_is_unbatched(tmp_path: Path) -> None:
    nodes = [node("NonZero", ["x"], ["places"]), node("Transpose", ["places"], ["y"])]
    ends = [value("x", TensorProto.FLOAT, ["batch", 4])], [value("y", TensorProto.INT64, ["found", 2])]
    spec = ModelSpec("m", 1, save(tmp_path / "model.onnx", nodes, *ends))

    model = open_model(spec, LOADERS, lambda *_: None)
    close_model(model)

    assert not model.signature.batched
    assert [each.shape for each in model.signature.outputs] == [(-1, 2)]


def test_an_onnx_model_that_takes_no_fewer_rows_than_it_returns_is_unbatched(tmp_path: Path) -> None:
    nodes = [node("TopK", ["scores", "three"], ["best", "places"], axis=0), node("Gather", ["boxes", "places"], ["y"])]
    inputs = [value("scores", TensorProto.FLOAT, ["found"]), value("boxes", TensorProto.FLOAT, ["found", 4])]
    path = save(
        tmp_path / "model.onnx", nodes, inputs, [value("y", TensorProto.FLOAT, ["best", 4])], {"three": ints([3])}
    )

    model = open_model(ModelSpec("m", 1, path), LOADERS, lambda *_: None)
    close_model(model)

    assert not model.signature.batched


def test_a_configured_batch_size_overrides_the_probe() -> None:
    assert rows_of(found, max_batch_rows=8) == 8
    assert rows_of(found, allowed_rows=(1, 4)) == 4


def test_a_configured_batch_size_that_the_probe_contradicts_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rows_of(list, max_batch_rows=8)
    assert not caplog.messages

    rows_of(found, max_batch_rows=8)
    text = "its configuration gives it rows, but output 'y' has 0 rows for 1 row of zeros"
    assert caplog.messages == [f"model m: {text}; its requests may fail unless max_batch_size is 0"]


def test_the_reason_why_a_model_is_unbatched_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.batching"):
        rows_of(found)

    text = (
        "model m: its first axis is not a batch axis, and requests run one at a time: output 'y' has 0 rows "
        "for 1 row of zeros"
    )
    assert text in caplog.messages


def mixed(change: Callable[[Any], Any], shape: tuple[int, ...] = (-1, 4)) -> int:
    """Open a model of this function over its rows. Returns: its maximum batch size."""
    return rows_of(lambda inputs: [change(inputs[0])], (x(*shape),), (y(*shape),))


def test_a_model_that_accumulates_over_rows_is_unbatched() -> None:
    assert mixed(lambda rows: np.cumsum(rows, axis=0)) == 0
    assert mixed(lambda steps: np.cumsum(steps, axis=0), (-1, -1, 4)) == 0


def test_a_model_that_normalizes_over_all_rows_is_unbatched() -> None:
    assert mixed(lambda rows: rows - rows.mean(axis=0)) == 0
    assert mixed(lambda rows: np.exp(rows) / np.exp(rows).sum(axis=0)) == 0
    assert mixed(lambda samples: samples / (samples.std() + 1e-5), (-1,)) == 0
    assert mixed(_normalised, (-1, 3, -1, -1)) == 0


def _normalised(images: Any) -> Any:
    """Normalize over a batch, as an export in training mode does."""
    return (images - images.mean((0, 2, 3), keepdims=True)) / (images.std((0, 2, 3), keepdims=True) + 1e-5)


def test_a_model_whose_output_width_depends_on_the_longest_row_is_unbatched() -> None:
    def longest(inputs: list[Any]) -> list[Any]:
        (rows,) = inputs
        return [rows[:, : 1 + int((rows > 0.1).sum(axis=1).max())]]

    assert rows_of(longest, (x(-1, 16),), (y(-1, -1),)) == 0


def test_a_model_that_numbers_distinct_values_over_rows_is_unbatched() -> None:
    def function(inputs: list[Any]) -> list[Any]:
        first_positions: dict[int, int] = {}
        return [np.array([first_positions.setdefault(each, len(first_positions)) for each in inputs[0].tolist()])]

    assert rows_of(function, (TensorSpec("x", "INT64", (-1,)),), (TensorSpec("y", "INT64", (-1,)),)) == 0


def test_a_model_that_does_not_run_on_a_single_row_is_unbatched_if_rows_mix() -> None:
    def change(rows: Any) -> Any:
        if len(rows) < 2:
            raise InferError(Code.INTERNAL, "kernel is larger than input")
        return rows - rows.mean(axis=0)

    assert mixed(change) == 0


def test_a_row_mixing_model_that_accepts_only_image_sides_divisible_by_32_is_unbatched() -> None:
    def change(images: Any) -> Any:
        if images.shape[2] % 32 or images.shape[3] % 32:
            raise InferError(Code.INTERNAL, "non concat axis dimensions must match")
        return _normalised(images)

    assert mixed(change, (-1, 3, -1, -1)) == 0


def test_a_row_mixing_model_that_accepts_only_long_sounds_is_unbatched() -> None:
    def change(channels: Any) -> Any:
        if channels.shape[1] < 512:
            raise InferError(Code.INTERNAL, "kernel is larger than input")
        return channels - channels.mean(axis=0)

    assert mixed(change, (-1, -1)) == 0


@pytest.mark.parametrize("free", [2, 3])
def test_no_length_that_would_make_rows_with_several_free_axes_huge_is_tried(free: int) -> None:
    lengths = set()

    def change(rows: Any) -> Any:
        lengths.add(rows.shape[1:])
        raise InferError(Code.INTERNAL, "not of these")

    assert mixed(change, (-1,) * (free + 1)) == 64
    assert lengths == {(length,) * free for length in (1, 2, 3, 4, 8, 16, 64)}


def test_a_row_mixing_model_whose_free_axis_must_fit_the_model_is_unbatched() -> None:
    def change(rows: Any) -> Any:
        if rows.shape[1] != 3:
            raise InferError(Code.INTERNAL, "non concat axis dimensions must match")
        return rows - rows.mean(axis=0)

    assert mixed(change, (-1, -1)) == 0


def test_a_row_mixing_decoder_whose_mask_is_as_long_as_past_and_present_is_unbatched() -> None:
    def function(inputs: list[Any]) -> list[Any]:
        tokens, mask, past = inputs
        if mask.shape[1] != tokens.shape[1] + past.shape[1]:
            raise InferError(Code.INTERNAL, "dimensions must match")
        return [past - past.mean(axis=0)]

    mask = TensorSpec("mask", "INT64", (-1, -1), axes=("batch", "past_length + length"))
    past = TensorSpec("past", "FP32", (-1, -1), axes=("batch", "past_length"))
    assert rows_of(function, (TensorSpec("x", "INT64", (-1, -1)), mask, past), (y(-1, -1),)) == 0


def test_a_row_mixing_model_that_rejects_zero_integers_is_unbatched() -> None:
    def function(inputs: list[Any]) -> list[Any]:
        rows, lengths = inputs
        if not lengths.all():
            raise InferError(Code.INTERNAL, "lengths must be positive")
        return [rows - rows.mean(axis=0)]

    assert rows_of(function, (x(-1, 4), TensorSpec("lengths", "INT32", (-1,)))) == 0


def texts(change: Callable[[list[bytes]], list[Any]], *outputs: TensorSpec) -> int:
    """Open a model of this function over strings. Returns: its maximum batch size."""

    def function(inputs: list[Any]) -> list[Any]:
        return [np.array(change(inputs[0].tolist()), each.type.dtype) for each in outputs]

    return rows_of(function, (TensorSpec("x", "BYTES", (-1,)),), outputs)


def test_a_model_with_string_inputs_is_probed_for_row_mixing() -> None:
    def numbers(rows: list[bytes]) -> list[float]:
        return [float(each) / sum(map(float, rows)) for each in rows]

    def padded(rows: list[bytes]) -> list[list[bytes]]:
        words = [each.split() for each in rows]
        return [each + [b""] * (max(map(len, words)) - len(each)) for each in words]

    out = TensorSpec("y", "BYTES", (-1,))
    assert texts(lambda rows: rows, out) == 64
    assert texts(lambda rows: [b"|".join(rows)] * len(rows), out) == 0
    assert texts(padded, TensorSpec("y", "BYTES", (-1, -1))) == 0
    assert texts(numbers, y(-1)) == 0


def test_a_model_in_which_one_column_depends_on_the_other_rows_is_unbatched() -> None:
    def change(rows: Any) -> Any:
        made = rows.copy()
        made[:, 0] -= rows[:, 0].mean()
        return made

    assert mixed(change) == 0
    assert mixed(change, (-1, 1000)) == 0


def test_a_model_that_other_rows_change_slightly_is_unbatched() -> None:
    assert mixed(lambda rows: rows - 0.001 * rows.mean(axis=0)) == 0


def test_a_model_that_branches_on_a_sum_of_all_rows_is_unbatched() -> None:
    assert mixed(lambda rows: rows if rows.sum() > 0 else -rows) == 0
    assert mixed(lambda rows: rows if rows.sum() < 0 else -rows) == 0


def test_a_model_that_divides_by_the_largest_of_all_numbers_is_unbatched() -> None:
    assert mixed(lambda rows: rows / np.abs(rows).max()) == 0


def test_a_model_of_unknown_texts_is_batched_only_if_their_contents_cannot_determine_an_axis() -> None:
    def parse(_: list[bytes]) -> list[Any]:
        raise InferError(Code.INVALID, "Could not parse example input")

    assert texts(parse, TensorSpec("y", "BYTES", (-1, -1))) == 0
    assert texts(parse, y(-1, 4)) == 64


def test_a_dynamically_quantized_model_is_batched_despite_its_shared_scale() -> None:
    def function(inputs: list[Any]) -> list[Any]:
        return [np.rint(inputs[0] * 127 / np.abs(inputs[0]).max())]

    assert rows_of(function, shared_scale="DynamicQuantizeLinear") == 64


def test_a_model_that_draws_random_numbers_is_batched() -> None:
    rng = np.random.default_rng(1)
    assert mixed(lambda rows: rng.standard_normal(rows.shape)) == 64
    assert mixed(lambda rows: rows * (rng.random(rows.shape) > 0.1), (-1, 1000)) == 64


@pytest.mark.parametrize("seed", range(8))
def test_a_model_that_draws_one_of_two_classes_is_batched_although_it_often_draws_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert mixed(lambda rows: (rng.random(len(rows)) < 0.1).astype(np.float32), (-1,)) == 64


def test_a_model_with_a_small_batch_dependent_difference_in_one_column_is_batched() -> None:
    def change(rows: Any) -> Any:
        changed = rows.copy()
        changed[:, 0] += len(rows)
        return changed

    assert mixed(change) == 64


def test_a_model_with_an_output_row_for_each_time_step_is_unbatched() -> None:
    def function(inputs: list[Any]) -> list[Any]:
        return [inputs[0].reshape(-1, 4)]

    assert rows_of(function, (x(-1, -1, 4),)) == 0


def test_a_model_that_fails_on_random_values_is_batched_and_the_log_says_what_is_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def function(inputs: list[Any]) -> list[Any]:
        if inputs[0].any():
            raise InferError(Code.INTERNAL, "indices element out of data bounds")
        return inputs

    with caplog.at_level(logging.INFO, "penstock.batching"):
        assert rows_of(function) == 64

    text = "model m: whether its rows affect each other is unknown: no random rows could be run"
    assert f"{text}: indices element out of data bounds" in caplog.messages


def test_a_model_with_a_batch_size_of_two_is_probed() -> None:
    def function(inputs: list[Any]) -> list[Any]:
        return [np.cumsum(inputs[0], axis=0)]

    assert rows_of(function, default_max_batch_rows=2) == 0


def test_a_model_with_a_batch_size_of_one_need_not_be_probed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.batching"):
        assert rows_of(list, default_max_batch_rows=1) == 1
    assert not caplog.messages
