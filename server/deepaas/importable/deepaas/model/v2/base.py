"""BaseModel: what models may inherit. Source: deepaas 2.6.0, model/v2/base.py."""

from __future__ import annotations

import abc
from typing import Any


class BaseModel(abc.ABC):
    """A model. It need not descend from this, but has these methods then, each of its own.

    `schema`, a dict of fields or a class that descends from marshmallow.Schema, is what each answer is checked against;
    with None, whatever JSON `predict` gives is sent as {"status": "OK", "predictions": ...}.
    """

    schema: Any = None

    @abc.abstractmethod
    def get_metadata(self) -> dict[str, Any]:
        """Give what is to be known of the model: author, description, license, version and more."""
        raise NotImplementedError

    @abc.abstractmethod
    def predict(self, **kwargs: Any) -> Any:
        """Predict, from the arguments that get_predict_args declares."""
        raise NotImplementedError

    @abc.abstractmethod
    def get_predict_args(self) -> dict[str, Any]:
        """Declare the arguments of `predict`: their names, and fields of webargs or marshmallow."""
        raise NotImplementedError

    @abc.abstractmethod
    def train(self, **kwargs: Any) -> Any:
        """Train, from the arguments that get_train_args declares. Returns: anything that is JSON."""
        raise NotImplementedError

    @abc.abstractmethod
    def get_train_args(self) -> dict[str, Any]:
        """Declare the arguments of `train`."""
        raise NotImplementedError

    @abc.abstractmethod
    def warm(self) -> None:
        """Prepare for the first prediction. Called once in each process, before it serves."""
        raise NotImplementedError
