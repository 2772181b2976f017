from __future__ import annotations

import re

import pytest

from penstock.server.options.backend_config import default_rows, ineffective_rules, parse, tensorflow_options


@pytest.mark.parametrize(
    ("rules", "rows", "of_tensorflow"),
    [
        ((), 64, 64),
        (("onnxruntime,default-max-batch-size=5",), 5, 64),
        (("tensorflow,default-max-batch-size=5",), 64, 5),
        (("tensorflow,default-max-batch-size=0",), 64, 0),
        (("default-max-batch-size=6", "onnxruntime,default-max-batch-size=0"), 0, 6),
        (("default-max-batch-size=6",), 6, 6),
        (("default-max-batch-size=6", "onnxruntime,default-max-batch-size=5"), 5, 6),
        (("default-max-batch-size=6", "default-max-batch-size=6"), 6, 6),
    ],
)
def test_the_default_batch_size_is_set_for_all_backends_or_for_one(
    rules: tuple[str, ...], rows: int, of_tensorflow: int
) -> None:
    assert (default_rows(rules, "onnxruntime", 64), default_rows(rules, "tensorflow", 64)) == (rows, of_tensorflow)


def test_other_tensorflow_settings_are_passed_to_its_loader() -> None:
    rules = ("tensorflow,gpu-memory-fraction=.5", "tensorflow,allow-soft-placement=true", "tensorflow,version=2")

    assert tensorflow_options(rules) == {"gpu_memory_fraction": "0.5"}
    assert tensorflow_options(rules[1:]) == {}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("default-max-batch-size", "must have the form [BACKEND,]SETTING=VALUE"),
        ("=3", "must have the form [BACKEND,]SETTING=VALUE"),
        ("cmdline-unknown=1", "'cmdline-unknown' cannot be set"),
        ("onnxruntime,gpu-memory-fraction=0.5", "'gpu-memory-fraction' cannot be set"),
        ("tensorflow,memory-limit-mb=0:20", "'memory-limit-mb' cannot be set, only 'default-max-batch-size', 'gpu-"),
        ("tensorflow,gpu-memory-fraction=2", "must be a number from 0 to 1, not '2'"),
        ("tensorflow,gpu-memory-fraction=nan", "must be a number from 0 to 1, not 'nan'"),
        ("tensorflow,allow-soft-placement=false", "must be true, since TensorFlow 2"),
        ("tensorflow,version=1", "must be 2, which also serves"),
        ("pythn,shm-region-prefix-name=x", "backend 'pythn' has no such settings"),
        ("python", "must have the form [BACKEND,]SETTING=VALUE"),
        ("default-max-batch-size=1048577", "must be a whole number from 0 to 1048576, not '1048577'"),
        ("default-max-batch-size=x", "must be a whole number from 0 to 1048576, not 'x'"),
        ("default-max-batch-size=-4", "must be a whole number from 0 to 1048576, not '-4'"),
    ],
)
def test_an_unknown_or_invalid_backend_setting_is_an_error_that_names_the_setting(rule: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse((rule,))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("python,shm-default-byte-size=1048576", "python,shm-default-byte-size has no effect: shared memory grows"),
        ("onnxruntime,enable-global-threadpool=1", "onnxruntime,enable-global-threadpool has no effect: each session"),
        ("onnxruntime,intra_op_thread_count=4", "onnxruntime,intra_op_thread_count has no effect: it applies"),
        (
            "onnxruntime,inter_op_thread_count=1,",
            "inter_op_thread_count has no effect: it applies to that pool only; set",
        ),
        ("tensorrt,coalesce-request-input=true", "has no effect: backend tensorrt"),
    ],
)
def test_settings_of_triton_internals_change_nothing_and_are_reported(rule: str, why: str) -> None:
    assert parse((rule,)) == parse(())
    assert [why in text for text in ineffective_rules(("default-max-batch-size=3", rule))] == [True]


def test_a_backend_setting_with_two_different_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="set twice with different values"):
        parse(("default-max-batch-size=1", "default-max-batch-size=2"))
