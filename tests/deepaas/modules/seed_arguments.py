"""The seed's arguments and metadata, as printed."""

from webargs import fields


def get_metadata():
    return {
        "author": "Author name",
        "description": "Model description",
        "license": "Model's license",
        "url": "URL for the model (e.g. GitHub repository)",
        "version": "Model version",
    }


def get_train_args():
    return {
        "arg1": fields.Str(
            required=False,  # force the user to define the value
            missing="foo",  # default value to use
            enum=["choice1", "choice2"],  # list of choices
            description="Argument one"  # help string
        ),
    }


def get_predict_args():
    return {
        "arg1": fields.Str(
            required=False,  # force the user to define the value
            missing="foo",  # default value to use
            enum=["choice1", "choice2"],  # list of choices
            description="Argument one"  # help string
        ),
    }


def predict(**kwargs):
    return kwargs


def train(**kwargs):
    return kwargs
