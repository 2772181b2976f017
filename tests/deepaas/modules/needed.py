"""Arguments that must be there, that may be null, and that have defaults of every kind."""

from webargs import fields


def get_predict_args():
    return {
        "must": fields.Int(required=True),
        "must-too": fields.Str(required=True, error_messages={"required": "Say it."}),
        "null": fields.Int(required=True, allow_none=True),
        "list": fields.List(fields.Str(), required=True),
        "plain": fields.Int(),
        "default-null": fields.Int(missing=None),
        "default": fields.Int(load_default=5),
        "default-of-another-type": fields.Int(missing="5"),
        "default-list": fields.List(fields.Int(), missing=[1, 2]),
        "default-called": fields.Str(missing=lambda: "called"),
    }


def predict(**kwargs):
    return kwargs


get_train_args = get_predict_args
