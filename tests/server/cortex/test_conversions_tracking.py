"""F39: the class or value that a tracker records for an answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.server.cortex.conversions import tracked_value

CLASS = {"model_type": "classification", "key": ""}
VALUE = {"model_type": "regression", "key": ""}


@pytest.mark.parametrize(("answer", "name"), [("iris-setosa", "iris-setosa"), (2, "2"), ("ñ", "ñ"), ("", "")])
def test_f39_a_tracked_class_is_a_str_or_an_int(answer: Any, name: str) -> None:
    assert tracked_value(CLASS, answer) == {"class": name}
    assert tracked_value(CLASS | {"key": "k"}, {"k": answer}) == {"class": name}


@pytest.mark.parametrize("answer", [1.5, 2])
def test_f39_a_tracked_value_is_a_float_or_an_int(answer: Any) -> None:
    found = tracked_value(VALUE | {"key": "k"}, {"k": answer})

    assert found == tracked_value(VALUE, answer) == {"value": float(answer)}
    assert type(found["value"]) is float


@pytest.mark.parametrize("answer", [True, 1.5, np.int64(1), np.str_("a"), ["a"], {"k": 1}, b"a"])
def test_f39_other_types_are_not_tracked_as_a_class(answer: Any) -> None:
    text = f"failed to track classification prediction: expected type 'str' or 'int' but encountered '{type(answer)}'"

    assert tracked_value(CLASS, answer) == {"warning": text}


@pytest.mark.parametrize("answer", [True, "1.5", np.float64(1.5), np.float32(1), [1.5]])
def test_f39_other_types_are_not_tracked_as_a_value(answer: Any) -> None:
    text = f"failed to track regression prediction: expected type 'float' or 'int' but encountered '{type(answer)}'"

    assert tracked_value(VALUE, answer) == {"warning": text}


def test_f39_a_missing_key_is_a_warning() -> None:
    missing = {"warning": "failed to track key 'k': not found in prediction"}
    text = "failed to track key 'k': expected prediction to be of type dict but found '<class 'list'>'"

    assert tracked_value(CLASS | {"key": "k"}, {}) == tracked_value(CLASS | {"key": "k"}, {"k": None}) == missing
    assert tracked_value(CLASS | {"key": "k"}, ["k"]) == {"warning": text}


def test_f39_an_answer_of_none_is_not_tracked() -> None:
    assert tracked_value(CLASS, None) == tracked_value(VALUE | {"key": "k"}, None) == {}


def test_a_number_that_is_too_big_is_a_warning() -> None:
    assert tracked_value(VALUE, 10**400) == {"warning": "int too large to convert to float"}
