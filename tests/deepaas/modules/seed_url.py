"""The seed's URL argument, as printed."""

from webargs import fields


def get_predict_args():
    return {
        "url": fields.Url(
            description="Url of data to perform inference on.",
            required=False,
            missing=None)
    }


def predict(**kwargs):
    return kwargs
