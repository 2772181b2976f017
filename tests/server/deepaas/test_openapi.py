"""The OpenAPI 3 document: derived from the Swagger document, and correct where that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.server.deepaas import openapi, swagger
from penstock.server.deepaas.messages import ModelDescription

ARGUMENTS = [
    {"in": "query", "name": "n", "type": "integer", "format": "int32", "default": 3, "required": False},
    {"in": "query", "name": "many", "type": "array", "items": {"type": "string"}, "collectionFormat": "multi",
     "required": True, "x-nullable": True, "default": None},
    {"in": "formData", "name": "data", "type": "file", "required": True, "description": "A picture"},
    {"in": "query", "name": "placeless", "type": "file", "required": False},
    {"in": "formData", "name": "word", "type": "string", "required": False},
    {"in": "header", "name": "X-Named", "type": "string", "required": False, "enum": ["a", "b"]},
    {"in": "query", "name": "nested", "$ref": "#/definitions/Inner", "required": False},
    {"in": "body", "name": "body", "required": False,
     "schema": {"type": "object", "properties": {"deep": {"x-nullable": True, "type": "string"}}}},
]  # fmt: skip
INNER = {"type": "object", "properties": {"again": {"$ref": "#/definitions/Inner"}}}


def document_of(**fields: Any) -> dict[str, Any]:
    """Make the document of a server with one model."""
    described = ModelDescription(predict_args={"parameters": ARGUMENTS, "definitions": {"Inner": INNER}, **fields})
    return openapi.document(swagger.document("/base", [("m", described)], predict=True, train=True))


def predict(**fields: Any) -> dict[str, Any]:
    """Return the description of predictions."""
    operation: dict[str, Any] = document_of(**fields)["paths"]["/base/v2/models/m/predict/"]["post"]
    return operation


def parameter(name: str) -> dict[str, Any]:
    """Return the description of an argument outside the body."""
    [found] = [each for each in predict()["parameters"] if each["name"] == name]
    return dict(found)


def references(value: Any) -> Iterator[str]:
    """List everything that a document refers to."""
    if isinstance(value, dict):
        yield from (each for key, each in value.items() if key == "$ref")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from references(each)


def test_the_document_has_version_3_and_refers_only_to_its_own_schemas() -> None:
    document = document_of()

    assert document["openapi"] == "3.0.3"
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= schemas
    assert "x-nullable" not in json.dumps(document)


def test_an_argument_has_a_schema() -> None:
    assert parameter("n") == {
        "name": "n", "in": "query", "required": False, "schema": {"type": "integer", "format": "int32", "default": 3},
    }  # fmt: skip
    assert parameter("X-Named")["schema"] == {"type": "string", "enum": ["a", "b"]}
    assert parameter("nested")["schema"] == {"$ref": "#/components/schemas/Inner"}


def test_a_repeatable_argument_is_described_as_exploded() -> None:
    many = parameter("many")

    assert (many["explode"], many["required"]) == (True, True)
    assert many["schema"] == {"type": "array", "items": {"type": "string"}, "default": None, "nullable": True}


def test_form_arguments_are_described_as_a_multipart_body() -> None:
    form = predict()["requestBody"]["content"]["multipart/form-data"]["schema"]

    assert form["properties"]["data"] == {"type": "string", "format": "binary", "description": "A picture"}
    assert form["properties"]["word"] == {"type": "string"}
    assert form["required"] == ["data"]


def test_a_file_without_a_location_is_in_the_form() -> None:
    form = predict()["requestBody"]["content"]["multipart/form-data"]["schema"]

    assert form["properties"]["placeless"] == {"type": "string", "format": "binary"}
    assert "placeless" not in {each["name"] for each in predict()["parameters"]}


def test_json_arguments_are_described_as_one_body() -> None:
    body = predict()["requestBody"]["content"]["application/json"]["schema"]

    assert body["properties"]["deep"] == {"nullable": True, "type": "string"}


def test_predictions_are_described_as_any_json() -> None:
    schema = document_of()["components"]["schemas"]["Prediction"]

    assert schema["properties"]["predictions"] == {}


def test_content_other_than_json_is_described_as_binary() -> None:
    content = predict(produces=["image/png", "application/json", "*/*"])["responses"]["200"]["content"]

    assert content["image/png"] == {"schema": {"type": "string", "format": "binary"}}
    assert content["application/json"] == {"schema": {"$ref": "#/components/schemas/Prediction"}}


def test_a_models_own_prediction_schema_replaces_the_general_one() -> None:
    own = {"type": "object", "properties": {"label": {"type": "string"}}}
    described = ModelDescription(schema={"name": "Prediction", "definitions": {"Prediction": own}})
    document = openapi.document(swagger.document("", [("m", described)], predict=True, train=True))

    assert document["components"]["schemas"]["Prediction"] == own


def test_trainings_are_described_as_a_list_with_paths_for_log_progress_and_page() -> None:
    document = document_of()
    train = document["paths"]["/base/v2/models/m/train/"]

    assert document["components"]["schemas"]["TrainingList"]["type"] == "array"
    assert train["post"]["responses"]["200"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Training"
    }
    assert "done" in document["components"]["schemas"]["Training"]["properties"]["status"]["enum"]
    for name in ("log", "progress", "page"):
        [uuid] = document["paths"][f"/base/v2/models/m/train/{{uuid}}/{name}"]["get"]["parameters"]
        assert (uuid["in"], uuid["required"]) == ("path", True)


def test_the_list_of_models_is_described_as_an_object_with_a_list() -> None:
    content = document_of()["paths"]["/base/v2/models/"]["get"]["responses"]["200"]["content"]

    assert content["application/json"]["schema"]["properties"]["models"]["type"] == "array"


def test_error_responses_of_predictions_are_described() -> None:
    assert {"200", "400", "422", "501"} == set(predict()["responses"])
