"""The seed's file argument, as printed."""

from webargs import fields


def get_predict_args():
    return {
        "data": fields.Field(
            description="Data file to perform inference on.",
            required=False,
            missing=None,
            type="file",
            location="form")
    }


def predict(data):
    if data is None:
        return None
    with open(data.filename, "rb") as stored:
        content = stored.read().decode()
    return {"name": data.name, "content_type": data.content_type, "original": data.original_filename, "content": content}
