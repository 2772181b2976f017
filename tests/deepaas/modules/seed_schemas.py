"""The seed's two schemas, as printed."""

import marshmallow
from marshmallow import fields

GOOD = {
    "status": "OK",
    "predictions": [
        {
            "label": "foo",
            "probability": 1.0,
        },
        {
            "label": "bar",
            "probability": 0.5,
        },
    ],
}


class OfADict:
    schema = {
        "status": fields.Str(
            description="Model predictions",
            required=True
        ),
        "predictions": fields.List(
            fields.Nested(
                {
                    "label": fields.Str(required=True),
                    "probability": fields.Float(required=True),
                },
            )
        )
    }

    @staticmethod
    def predict():
        return GOOD


class Prediction(marshmallow.Schema):
    label = fields.Str(required=True)
    probability = fields.Float(required=True)


class Response(marshmallow.Schema):
    status = fields.Str(
        description="Model predictions",
        required=True
    )
    predictions = fields.List(fields.Nested(Prediction))


class OfAClass:
    schema = Response

    @staticmethod
    def predict():
        return GOOD
