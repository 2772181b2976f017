"""The API document in the original's format: equal to the original's, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.server.deepaas.messages import ModelDescription
from penstock.server.deepaas.swagger import DEFINITIONS, document
from tests.deepaas.replay import ORIGINAL, shaped

INNER = {"type": "object", "properties": {"x": {"type": "string"}}}
OUTER = {"type": "object", "properties": {"inner": {"$ref": "#/definitions/Inner"}}}


def recorded() -> Iterator[Any]:
    """Return the original's documents, each of a different server."""
    for group in ORIGINAL.names():
        for case in ORIGINAL.read(group)["cases"]:
            if case["path"].endswith("/swagger.json") and case["answer"]["status"] == 200 and "body" in case["answer"]:
                yield pytest.param(case, id=f"{group}-{case['name']}")


def described(wanted: dict[str, Any], path: str) -> ModelDescription:
    """Extract the description of one model from the original's document."""
    predict = wanted["paths"].get(path + "predict/", {}).get("post", {})
    train = wanted["paths"].get(path + "train/", {}).get("post", {})
    own = {name: each for name, each in wanted["definitions"].items() if DEFINITIONS.get(name) != each}
    name = predict.get("responses", {"200": {"schema": {"$ref": ""}}})["200"]["schema"]["$ref"].rpartition("/")[2]
    return ModelDescription(
        predict_args={"parameters": predict.get("parameters"), "definitions": own, "produces": predict.get("produces")},
        train_args={"parameters": train.get("parameters", []), "definitions": own},
        schema={"name": name, "definitions": own} if name in own else {},
    )


@pytest.mark.parametrize("case", list(recorded()))
def test_the_document_equals_the_originals(case: Any) -> None:
    wanted, base = json.loads(case["answer"]["body"]), case["path"].removesuffix("/swagger.json")
    root = f"{base}/v2/models/"
    names = [path.removeprefix(root)[:-1] for path in wanted["paths"] if path.startswith(root) and path != root]
    models = [(name, described(wanted, f"{root}{name}/")) for name in names if "/" not in name]
    paths = " ".join(wanted["paths"])

    made = document(base, models, predict="/predict/" in paths, train="/train/" in paths)

    assert json.loads(shaped(case, {"status": 200, "body": json.dumps(made)})["body"]) == wanted


def one(*definitions: tuple[str, Any], refers: str) -> ModelDescription:
    """Describe a model with one argument."""
    argument = {"in": "query", "name": "a", "$ref": f"#/definitions/{refers}"}
    return ModelDescription(predict_args={"parameters": [argument], "definitions": dict(definitions)})


def argument_of(made: dict[str, Any], name: str) -> str:
    """Return the definition that a model's argument refers to."""
    reference: str = made["paths"][f"/v2/models/{name}/predict/"]["post"]["parameters"][0]["$ref"]
    return reference.removeprefix("#/definitions/")


def test_equal_definitions_of_two_models_are_shared() -> None:
    said = one(("Outer", OUTER), ("Inner", INNER), refers="Outer")
    made = document("", [("m", said), ("n", said)], predict=True, train=True)

    assert argument_of(made, "m") == argument_of(made, "n") == "Outer"
    assert set(made["definitions"]) == {*DEFINITIONS, "Outer", "Inner"}


def test_different_definitions_with_the_same_name_are_kept_apart() -> None:
    other = {"type": "object", "properties": {"y": {"type": "integer"}}}
    models = [
        ("m", one(("Outer", OUTER), ("Inner", INNER), refers="Outer")),
        ("n", one(("Outer", OUTER), ("Inner", other), refers="Outer")),
    ]
    made = document("", models, predict=True, train=True)

    assert (argument_of(made, "m"), argument_of(made, "n")) == ("Outer", "Outer1")
    assert made["definitions"]["Outer1"]["properties"]["inner"] == {"$ref": "#/definitions/Inner1"}
    assert (made["definitions"]["Inner"], made["definitions"]["Inner1"]) == (INNER, other)


def test_a_models_definition_is_renamed_if_the_server_has_one_of_that_name() -> None:
    made = document("", [("m", one(("Version", INNER), refers="Version"))], predict=True, train=True)

    assert argument_of(made, "m") == "Version1"
    assert made["definitions"]["Version"] == DEFINITIONS["Version"]


def test_a_server_without_models_has_a_document() -> None:
    made = document("", [], predict=True, train=True)

    assert list(made["paths"]) == ["/v2/", "/v2/debug/", "/v2/models/", "/"]
    assert set(made["definitions"]) == {"Version", "Location", "Failure", "ModelMeta", "Versions"}


def test_a_generated_definition_name_is_not_used_twice() -> None:
    other = {"type": "object", "properties": {"y": {"type": "integer"}}}
    models = [
        ("m", one(("X", INNER), refers="X")),
        ("n", one(("X", other), ("X1", OUTER), ("Inner", INNER), refers="X")),
    ]
    made = document("", models, predict=True, train=True)

    assert (argument_of(made, "m"), argument_of(made, "n")) == ("X", "X2")
    assert [made["definitions"][name] for name in ("X", "X1", "X2")] == [INNER, OUTER, other]
