from __future__ import annotations

import re

import pytest

from penstock.server.backend_config import parse


@pytest.mark.parametrize(
    ("rules", "rows"),
    [
        ((), 0),
        (("onnxruntime,default-max-batch-size=5",), 5),
        (("default-max-batch-size=6",), 6),
        (("default-max-batch-size=6", "onnxruntime,default-max-batch-size=5"), 5),
        (("default-max-batch-size=6", "default-max-batch-size=6"), 6),
    ],
)
def test_a_batch_size_is_set_for_all_or_for_the_backend(rules: tuple[str, ...], rows: int) -> None:
    assert parse(rules) == rows


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("default-max-batch-size", "wanted [BACKEND,]SETTING=VALUE"),
        ("=3", "wanted [BACKEND,]SETTING=VALUE"),
        ("onnxruntime,enable-global-threadpool=1", "'enable-global-threadpool' cannot be set"),
        ("cmdline-unknown=1", "'cmdline-unknown' cannot be set"),
        ("tensorflow,default-max-batch-size=5", "there is no backend 'tensorflow' with such settings"),
        ("python,shm-region-prefix-name=x", "there is no backend 'python' with such settings"),
        ("default-max-batch-size=0", "got '0', wanted a whole number from 1 to 1048576"),
        ("default-max-batch-size=x", "got 'x', wanted a whole number"),
        ("default-max-batch-size=-4", "got '-4', wanted a whole number"),
    ],
)
def test_anything_else_is_refused_by_its_name(rule: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse((rule,))


def test_the_same_thing_said_differently_is_refused() -> None:
    with pytest.raises(ValueError, match="said twice, and differently"):
        parse(("default-max-batch-size=1", "default-max-batch-size=2"))
