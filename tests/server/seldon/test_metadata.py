"""A component's metadata is assembled and checked as in seldon-core."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.server.seldon.inside.metadata import metadata_of

EMPTY: dict[str, Any] = {"name": "", "versions": [""], "platform": "", "inputs": [], "outputs": [], "custom": {}}


class Says:
    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata

    def init_metadata(self) -> Any:
        return self.metadata


def test_metadata_defaults_to_the_name_and_version_of_the_image() -> None:
    assert metadata_of(object(), {}) == EMPTY
    image = {"PREDICTIVE_UNIT_IMAGE": "reg.io:5000/org/img:0.3"}
    assert metadata_of(object(), image) == {**EMPTY, "name": "reg.io:5000/org/img", "versions": ["0.3"]}
    assert metadata_of(object(), {"PREDICTIVE_UNIT_IMAGE": "img"}) == {**EMPTY, "versions": ["img"]}


def test_metadata_in_the_environment_overrides_the_class_and_the_image() -> None:
    environ = {"PREDICTIVE_UNIT_IMAGE": "a:1", "MODEL_METADATA": "name: from-yaml\ncustom: {k: v}"}
    metadata = metadata_of(Says({"name": "from-class", "platform": "p"}), environ)
    assert metadata == {**EMPTY, "name": "from-yaml", "versions": ["1"], "platform": "p", "custom": {"k": "v"}}


@pytest.mark.parametrize("metadata", [None, "text", [1]])
def test_metadata_that_is_not_a_dict_is_ignored(metadata: Any) -> None:
    assert metadata_of(Says(metadata), {"MODEL_METADATA": "{"}) == EMPTY


GOOD: list[Any] = [
    {}, {"name": "a"}, {"datatype": "BYTES", "shape": [1, -1]}, {"shape": [1.0]}, {"messagetype": "tensor"},
    {"messagetype": "ndarray", "schema": {"names": ["a"], "shape": [2, 2]}}, {"messagetype": "tftensor", "schema": {}},
    {"messagetype": "jsonData", "schema": {"type": "object"}}, {"messagetype": "jsonData"}, {"messagetype": "strData"},
    {"messagetype": "binData"}, {"messagetype": "own", "schema": {"a": 1}},
]  # fmt: skip
BAD: list[Any] = [
    "a", None, {"name": 1}, {"datatype": "FLOAT"}, {"shape": ["1"]}, {"shape": [1.5]}, {"shape": [True]}, {"other": 1},
    {"messagetype": 1}, {"messagetype": "tensor", "name": "a"}, {"messagetype": "tensor", "schema": {"names": [1]}},
    {"messagetype": "tensor", "schema": {"other": 1}}, {"messagetype": "jsonData", "schema": []},
    {"messagetype": "strData", "schema": {}}, {"messagetype": "own", "schema": "a"}, {"messagetype": "own", "x": 1},
]  # fmt: skip


@pytest.mark.parametrize("tensor", GOOD, ids=range(len(GOOD)))
def test_valid_descriptions_of_inputs_and_outputs_are_accepted(tensor: Any) -> None:
    assert metadata_of(Says({"inputs": [tensor], "outputs": [tensor]}), {}) is not None


@pytest.mark.parametrize("tensor", BAD, ids=range(len(BAD)))
def test_invalid_descriptions_of_inputs_and_outputs_are_rejected(tensor: Any) -> None:
    assert metadata_of(Says({"inputs": [tensor]}), {}) is None
    assert metadata_of(Says({"outputs": [tensor]}), {}) is None


@pytest.mark.parametrize(
    "metadata",
    [{"versions": "v1"}, {"versions": [1]}, {"name": 1}, {"platform": None}, {"custom": {"a": 1}}, {"custom": []},
     {"inputs": {}}, {"other": 1}],
)  # fmt: skip
def test_metadata_with_invalid_or_unknown_fields_is_rejected(metadata: Any) -> None:
    assert metadata_of(Says(metadata), {}) is None
