"""BaseModel: a base class for models. Source: deepaas 2.6.0, model/v2/base.py."""

from __future__ import annotations

import abc
from typing import Any


class BaseModel(abc.ABC):
    """A model. Inheriting from this class is optional; a model that does must define all of these methods.

    Each answer is validated against `schema`, a dict of fields or a subclass of marshmallow.Schema. If it is None, the
    JSON that `predict` returns is sent as {"status": "OK", "predictions": ...}.
    """

    schema: Any = None

    @abc.abstractmethod
    def get_metadata(self) -> dict[str, Any]:
        """Return the model's metadata: author, description, license, version and more."""
        raise NotImplementedError

    @abc.abstractmethod
    def predict(self, **kwargs: Any) -> Any:
        """Predict, with the arguments that get_predict_args declares."""
        raise NotImplementedError

    @abc.abstractmethod
    def get_predict_args(self) -> dict[str, Any]:
        """Declare the arguments of `predict`: their names, and fields of webargs or marshmallow."""
        raise NotImplementedError

    @abc.abstractmethod
    def train(self, **kwargs: Any) -> Any:
        """Train, with the arguments that get_train_args declares. Returns: any JSON value."""
        raise NotImplementedError

    @abc.abstractmethod
    def get_train_args(self) -> dict[str, Any]:
        """Declare the arguments of `train`."""
        raise NotImplementedError

    @abc.abstractmethod
    def warm(self) -> None:
        """Prepare for the first prediction. Called once in each process, before it serves."""
        raise NotImplementedError
