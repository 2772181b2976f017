"""seldon_core.utils and microservice return what seldon-core's functions returned (original/conversions.json)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from seldon_core import microservice, utils

from tests.server.seldon.original import conversions

RECORDED = json.loads(Path(conversions.__file__).with_suffix(".json").read_text("utf-8"))
CASES = dict(conversions.cases())


def test_every_conversion_case_is_recorded() -> None:
    assert CASES.keys() == RECORDED.keys()


@pytest.mark.parametrize("name", CASES)
def test_each_conversion_returns_what_seldon_core_returned(name: str) -> None:
    call: Callable[[], Any] = CASES[name]

    assert json.loads(json.dumps(conversions.outcome(call))) == RECORDED[name]


def test_texts_cannot_be_converted_to_a_tensor() -> None:
    with pytest.raises((TypeError, ValueError)):
        utils.array_to_grpc_datadef("tensor", conversions.ARRAYS["texts"])


def test_arrays_are_converted_to_tftensors_without_tensorflow() -> None:
    array = conversions.ARRAYS["floats"]
    back = utils.grpc_datadef_to_array(utils.array_to_grpc_datadef("tftensor", array))
    datadef = utils.array_to_rest_datadef("tftensor", array, ["a"])

    assert (back.tolist(), back.dtype) == (array.tolist(), array.dtype)
    assert datadef["tftensor"]["dtype"] == "DT_FLOAT"
    assert utils.extract_request_parts_json({"data": datadef})[0].tolist() == array.tolist()


def test_getenv_and_get_request_path_read_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREDICTIVE_UNIT_ID", raising=False)
    in_no_graph = utils.get_request_path()
    for name, value in {"A": "T", "B": "no", "PREDICTIVE_UNIT_ID": "m", "PREDICTIVE_UNIT_IMAGE": "i:1"}.items():
        monkeypatch.setenv(name, value)

    assert (in_no_graph, utils.get_request_path()) == ({}, {"m": "i:1"})
    assert (utils.getenv("NONE", "A"), utils.getenv("NONE"), utils.getenv("NONE", default=3)) == ("T", None, 3)
    assert utils.getenv_as_bool("A") is True
    assert utils.getenv_as_bool("B") is False
    assert utils.getenv_as_bool("NONE", default=None) is None


def test_load_annotations_reads_the_annotations_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "annotations"
    monkeypatch.setattr(microservice, "ANNOTATIONS_FILE", str(file))
    without = microservice.load_annotations()
    file.write_text('seldon.io/rest-timeout="1000"\nbad line\n a = "b=c" \n')

    assert without == {}
    assert microservice.load_annotations() == {"seldon.io/rest-timeout": "1000", "a": "b=c"}
    file.write_bytes(b"\xff=\n")
    assert microservice.load_annotations() == {}


def test_an_invalid_parameter_raises_an_exception_with_its_reason() -> None:
    with pytest.raises(microservice.SeldonMicroserviceException) as caught:
        microservice.parse_parameters([{"name": "a", "value": "x", "type": "INT"}])

    assert caught.value.reason == "MICROSERVICE_BAD_PARAMETER"
