"""Arguments without defaults, as deepaas-cli meets them."""

from webargs import fields


def get_metadata():
    return {}


def get_predict_args():
    return {"maybe": fields.Str(), "must": fields.Int(required=True)}


def predict(**kwargs):
    return {name: type(value).__name__ for name, value in kwargs.items()}


get_train_args = get_predict_args
train = predict
