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


def described(document: dict[str, Any], path: str) -> ModelDescription:
    """Extract the description of one model from the original's document."""
    predict = document["paths"].get(path + "predict/", {}).get("post", {})
    train = document["paths"].get(path + "train/", {}).get("post", {})
    own = {name: each for name, each in document["definitions"].items() if DEFINITIONS.get(name) != each}
    name = predict.get("responses", {"200": {"schema": {"$ref": ""}}})["200"]["schema"]["$ref"].rpartition("/")[2]
    return ModelDescription(
        predict_args={"parameters": predict.get("parameters"), "definitions": own, "produces": predict.get("produces")},
        train_args={"parameters": train.get("parameters", []), "definitions": own},
        schema={"name": name, "definitions": own} if name in own else {},
    )


@pytest.mark.parametrize("case", list(recorded()))
def test_the_document_equals_the_originals(case: Any) -> None:
    expected, base = json.loads(case["answer"]["body"]), case["path"].removesuffix("/swagger.json")
    root = f"{base}/v2/models/"
    names = [path.removeprefix(root)[:-1] for path in expected["paths"] if path.startswith(root) and path != root]
    models = [(name, described(expected, f"{root}{name}/")) for name in names if "/" not in name]
    paths = " ".join(expected["paths"])

    rendered = document(base, models, predict="/predict/" in paths, train="/train/" in paths)

    assert json.loads(shaped(case, {"status": 200, "body": json.dumps(rendered)})["body"]) == expected


def one(*definitions: tuple[str, Any], refers: str) -> ModelDescription:
    """Describe a model with one argument."""
    argument = {"in": "query", "name": "a", "$ref": f"#/definitions/{refers}"}
    return ModelDescription(predict_args={"parameters": [argument], "definitions": dict(definitions)})


def argument_of(rendered: dict[str, Any], name: str) -> str:
    """Return the definition that a model's argument refers to."""
    reference: str = rendered["paths"][f"/v2/models/{name}/predict/"]["post"]["parameters"][0]["$ref"]
    return reference.removeprefix("#/definitions/")


def test_equal_definitions_of_two_models_are_shared() -> None:
    description = one(("Outer", OUTER), ("Inner", INNER), refers="Outer")
    rendered = document("", [("m", description), ("n", description)], predict=True, train=True)

    assert argument_of(rendered, "m") == argument_of(rendered, "n") == "Outer"
    assert set(rendered["definitions"]) == {*DEFINITIONS, "Outer", "Inner"}


def test_different_definitions_with_the_same_name_are_kept_apart() -> None:
    other = {"type": "object", "properties": {"y": {"type": "integer"}}}
    models = [
        ("m", one(("Outer", OUTER), ("Inner", INNER), refers="Outer")),
        ("n", one(("Outer", OUTER), ("Inner", other), refers="Outer")),
    ]
    rendered = document("", models, predict=True, train=True)

    assert (argument_of(rendered, "m"), argument_of(rendered, "n")) == ("Outer", "Outer1")
    assert rendered["definitions"]["Outer1"]["properties"]["inner"] == {"$ref": "#/definitions/Inner1"}
    assert (rendered["definitions"]["Inner"], rendered["definitions"]["Inner1"]) == (INNER, other)


def test_a_models_definition_is_renamed_if_the_server_has_one_of_that_name() -> None:
    rendered = document("", [("m", one(("Version", INNER), refers="Version"))], predict=True, train=True)

    assert argument_of(rendered, "m") == "Version1"
    assert rendered["definitions"]["Version"] == DEFINITIONS["Version"]


def test_a_server_without_models_has_a_document() -> None:
    rendered = document("", [], predict=True, train=True)

    assert list(rendered["paths"]) == ["/v2/", "/v2/debug/", "/v2/models/", "/"]
    assert set(rendered["definitions"]) == {"Version", "Location", "Failure", "ModelMeta", "Versions"}


def test_a_generated_definition_name_is_not_used_twice() -> None:
    other = {"type": "object", "properties": {"y": {"type": "integer"}}}
    models = [
        ("m", one(("X", INNER), refers="X")),
        ("n", one(("X", other), ("X1", OUTER), ("Inner", INNER), refers="X")),
    ]
    rendered = document("", models, predict=True, train=True)

    assert (argument_of(rendered, "m"), argument_of(rendered, "n")) == ("X", "X2")
    assert [rendered["definitions"][name] for name in ("X", "X1", "X2")] == [INNER, OUTER, other]
