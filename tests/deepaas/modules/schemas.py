"""Answers that are checked: schemas as a dict and as a class, and such as are none."""

import marshmallow
from marshmallow import fields
from webargs import fields as asked

GOOD = [{"label": "foo", "probability": 1.0}, {"label": "bar", "probability": 0.5}]
RESULTS = {
    "good": {"status": "OK", "predictions": GOOD},
    "no-predictions": {"status": "OK"},
    "extra": {"status": "OK", "predictions": GOOD, "more": 1},
    "extra-inside": {"status": "OK", "predictions": [{"label": "a", "probability": 1, "more": 1}]},
    "missing": {"predictions": GOOD},
    "missing-inside": {"status": "OK", "predictions": [{"label": "a"}]},
    "texts": {"status": "OK", "predictions": [{"label": "a", "probability": "0.25"}]},
    "wrong": {"status": "OK", "predictions": [{"label": "a", "probability": "much"}]},
    "number-for-text": {"status": 1, "predictions": []},
    "null": {"status": None, "predictions": []},
    "nan": {"status": "OK", "predictions": [{"label": "a", "probability": float("nan")}]},
    "tuple": {"status": "OK", "predictions": tuple(GOOD)},
    "dict-for-list": {"status": "OK", "predictions": GOOD[0]},
    "text": "OK",
    "list": [GOOD],
    "empty-list": [],
    "list-of-it": [{"status": "OK", "predictions": GOOD}],
    "none": None,
    "number": 7,
    "empty": {},
    "set": {"status": "OK", "predictions": {1}},
}


class Prediction(marshmallow.Schema):
    label = fields.Str(required=True)
    probability = fields.Float(required=True)


class Response(marshmallow.Schema):
    status = fields.Str(description="Model predictions", required=True)
    predictions = fields.List(fields.Nested(Prediction))


class OfDict:
    schema = {
        "status": fields.Str(description="Model predictions", required=True),
        "predictions": fields.List(
            fields.Nested(
                {
                    "label": fields.Str(required=True),
                    "probability": fields.Float(required=True),
                },
            )
        ),
    }

    @staticmethod
    def get_predict_args():
        return {"give": asked.Str(missing="good")}

    @staticmethod
    def predict(give):
        return RESULTS[give]


class OfClass(OfDict):
    schema = Response


class OfInstance(OfDict):
    schema = Response()


class OfText(OfDict):
    schema = "status"


class OfNonsense(OfDict):
    schema = {"status": "a text"}


class OfAnotherClass(OfDict):
    schema = dict


class OfEmptyDict(OfDict):
    schema = {}


class Raising(marshmallow.Schema):
    status = fields.Str()

    @marshmallow.pre_load
    def fail(self, given, **kwargs):
        raise RuntimeError("the schema itself fails")


class OfRaising(OfDict):
    schema = Raising


class Loose(marshmallow.Schema):
    status = fields.Str()

    class Meta:
        unknown = marshmallow.EXCLUDE


class OfLoose(OfDict):
    schema = Loose


class Dated(marshmallow.Schema):
    when = fields.Date()
    labels = fields.Dict(keys=fields.Str(), values=fields.Int())


class OfDates(OfDict):
    schema = Dated

    @staticmethod
    def predict(give):
        import datetime

        when = {"good": "2020-01-02", "bad": "yesterday", "object": datetime.date(2020, 1, 2)}[give]
        return {"when": when, "labels": {"a": 1}}


class OfTheSeedsAttribute(OfDict):
    schema = None
    response = Response
