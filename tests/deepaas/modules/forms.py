"""The forms an entry point may have."""

from deepaas.model.v2 import base, wrapper  # noqa: F401 - as modules import them
from webargs import fields


class Whole(base.BaseModel):
    """An ordinary class, which is instantiated."""

    def __init__(self):
        self.calls = 0

    def get_metadata(self):
        return {"author": "of a class", "name": "named by itself", "id": "7", "extra": None}

    def get_predict_args(self):
        return {"a-hyphen": fields.Int(missing=1)}

    def predict(self, **kwargs):
        self.calls += 1
        return {"calls": self.calls, **kwargs}

    def get_train_args(self):
        return {}

    def train(self, **kwargs):
        return "trained"

    def warm(self):
        self.calls += 100


class Static:
    @staticmethod
    def get_metadata():
        return {"author": "static"}

    @staticmethod
    def get_predict_args():
        return {"a": fields.Int(missing=1)}

    @staticmethod
    def predict(**kwargs):
        return kwargs


class OfClass:
    author = "of the class"

    @classmethod
    def get_metadata(cls):
        return {"author": cls.author}

    @classmethod
    def get_predict_args(cls):
        return {"a": fields.Int(missing=1)}

    @classmethod
    def predict(cls, a):
        return [cls.author, a]


class Unfinished(base.BaseModel):
    """It says of most that it is not there."""

    def get_metadata(self):
        return super().get_metadata()

    def get_predict_args(self):
        return super().get_predict_args()

    def predict(self, **kwargs):
        return super().predict(**kwargs)

    def get_train_args(self):
        return super().get_train_args()

    def train(self, **kwargs):
        return super().train(**kwargs)

    def warm(self):
        return super().warm()


class Bare:
    def predict(self):
        return "bare"


class Misdescribed:
    def __init__(self, given):
        self.given = given

    def get_metadata(self):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    def predict(self):
        return "predicts all the same"


whole = Whole()
unfinished = Unfinished()
bare = Bare()
raising = Misdescribed(ValueError("no metadata"))
attribute = Misdescribed(AttributeError("inside"))
unfinished_metadata = Misdescribed(NotImplementedError())
of_none = Misdescribed(None)
of_text = Misdescribed("described")
of_pairs = Misdescribed([("author", "A")])
of_bytes = Misdescribed({"author": b"A"})
of_nan = Misdescribed({"version": float("nan"), "author": "\u00c9mile \u4e16"})
of_links = Misdescribed({"links": [], "id": 5, "name": None})
