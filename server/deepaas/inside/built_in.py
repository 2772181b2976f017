"""BuiltIn: the model that is served if none is found. Source: deepaas 2.6.0, model/v2/test.py, by observed behavior."""

from __future__ import annotations

import base64
import time
from typing import Any

from marshmallow import Schema, fields, validate

_PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)
"""A PNG of one gray pixel; the original has a logo."""


class BuiltIn:
    """A model that makes the same prediction for all arguments."""

    schema = {  # noqa: RUF012 - as users write it
        "date": fields.Date(),
        # a class: `Nested` takes dicts only since marshmallow 3.15
        "labels": fields.List(fields.Nested(Schema.from_dict({"label": fields.Str(), "probability": fields.Float()}))),
        "data": fields.Str(),
    }

    def get_metadata(self) -> dict[str, Any]:
        """Return its metadata."""
        return {
            "id": "0",
            "name": "deepaas-test",
            "description": "This is not a model but a placeholder, for trying the API: no model was found.",
            "author": "Alvaro Lopez Garcia",
            "version": "0.0.1",
            "url": "https://github.com/indigo-dc/DEEPaaS/",
            "license": "Apache 2.0",
        }

    def get_predict_args(self) -> dict[str, Any]:
        """Declare the arguments of predict."""
        return {
            "data": fields.Raw(
                required=True,
                metadata={"description": "Data file to perform inference.", "location": "form", "type": "file"},
            ),
            "parameter": fields.Int(required=True, metadata={"description": "This is a parameter for prediction"}),
            "parameter_three": fields.Str(
                validate=validate.OneOf(["foo", "bar"]),
                metadata={
                    "description": "This is a parameter that forces its value to be one of the choices declared "
                    "in 'enum'",
                    "enum": ["foo", "bar"],
                },
            ),
            "accept": fields.Str(
                validate=validate.OneOf(["application/json", "text/plain", "image/png"]),
                metadata={
                    "description": "Media type(s) that is/are acceptable for the response.",
                    "location": "headers",
                },
            ),
        }

    def predict(self, **arguments: Any) -> Any:
        """Return the constant prediction, in the requested form."""
        if arguments.get("accept") == "image/png":
            return _PICTURE
        text = "data:image/png;base64," + base64.b64encode(_PICTURE).decode()
        if arguments.get("accept") == "text/plain":
            return text
        return {"date": "2019-01-1", "labels": [{"label": "foo", "probability": 1.0}], "data": text}

    def get_train_args(self) -> dict[str, Any]:
        """Declare the arguments of train."""
        return {
            "sleep": fields.Int(required=True),
            "parameter_two": fields.Str(metadata={"description": "This is a string parameter."}),
        }

    def train(self, **arguments: Any) -> None:
        """Sleep as long as requested. Units: `sleep` in seconds."""
        time.sleep(arguments["sleep"])
