"""The models of the check: the same in all precisions, and of the sizes that they are named for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from penstock.perf.gpu import models
from penstock.perf.gpu.correct import TOLERANCE, max_error
from penstock.perf.gpu.models import BF16, FP16, FP32, FULL, SMALL, Variant


def answer(folder: Path, variant: Variant) -> Any:
    path = models.model_file(folder, variant)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, variant.inputs(3))
    return models.bf16_to_fp32(output, variant.precision)


@pytest.mark.parametrize("kind", models.BUILDERS)
def test_half_precision_has_the_same_model(kind: str, tmp_path: Path) -> None:
    single, half = (answer(tmp_path, Variant(kind, precision, SMALL)) for precision in (FP32, FP16))

    assert np.isfinite(single).all()
    assert 0 < max_error(half, single) < TOLERANCE[FP16]


@pytest.mark.parametrize("kind", models.BUILDERS)
def test_rows_differ_and_the_same_seed_draws_the_same_rows(kind: str) -> None:
    variant = Variant(kind, FP32, SMALL)
    one, again, other = variant.inputs(4), variant.inputs(4), variant.inputs(4, seed=1)

    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert any(not np.array_equal(one[name], other[name]) for name in one)
    assert any(not np.array_equal(each[0], each[1]) for each in one.values())


@pytest.mark.parametrize("precision", [FP32, FP16, BF16])
def test_a_model_has_inputs_and_outputs_of_its_precision(precision: str, tmp_path: Path) -> None:
    model = onnx.load(models.model_file(tmp_path, Variant("mlp", precision, SMALL)))
    code = {FP32: 1, FP16: 10, BF16: 16}[precision]

    onnx.checker.check_model(model)
    assert [each.type.tensor_type.elem_type for each in (*model.graph.input, *model.graph.output)] == [code, code]
    assert {each.data_type for each in model.graph.initializer} == {code}


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 3.14159], np.float32)

    assert models.bf16_to_fp32(models.cast(values, BF16), BF16).tolist() == [1.0, -2.5, 1.0, 1 + 2**-6, 3.140625]


def test_the_full_sizes_are_those_of_resnet_50_and_bert_base() -> None:
    assert (FULL.image, FULL.blocks, FULL.width) == (224, (3, 4, 6, 3), 64)
    assert (FULL.layers, FULL.hidden, FULL.heads, FULL.length) == (12, 768, 12, 128)


def test_the_cnn_has_the_convolutions_of_a_resnet_with_its_blocks(tmp_path: Path) -> None:
    model = onnx.load(models.model_file(tmp_path, Variant("cnn", FP32, SMALL)))
    kinds = [node.op_type for node in model.graph.node]

    assert kinds.count("Conv") == 1 + 3 * sum(SMALL.blocks) + len(SMALL.blocks)  # and a shortcut for each stage


def test_the_encoder_is_sent_words_of_its_vocabulary(tmp_path: Path) -> None:
    path = models.requests_file(tmp_path, Variant("encoder", FP16, SMALL))

    assert path is not None
    steps = json.loads(path.read_text("utf-8"))["data"]
    assert all(len(step["ids"]) == SMALL.length and max(step["ids"]) < SMALL.words for step in steps)
    assert models.requests_file(tmp_path, Variant("cnn", FP16, SMALL)) is None
