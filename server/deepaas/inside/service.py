"""The service of a DEEPaaS model's workers: desk, predictions, or one training. `messages.py` says what they are asked.

Source: deepaas 2.6.0, model/v2/wrapper.py and api/v2: what a model is called with, and what becomes of its answers.
"""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Sequence
from typing import Any

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.carrying.messages import pack_answer
from penstock.server.deepaas.messages import METADATA, Description
from penstock.server.ipc.channel import Channel

Reply = tuple[bytes, Sequence[Array | None] | None]
JSON = b"application/json; charset=utf-8"


def open_service(settings: dict[str, Any], channel: Channel) -> DeepaasInside:
    """Import the model. Raises: InferError (INVALID)."""
    module, _, name = settings["target"].partition(":")
    try:
        found = importlib.import_module(module)
        return DeepaasInside(getattr(found, name) if name else found, settings)
    except BaseException as error:  # noqa: BLE001 - whatever it is, there is no model
        traceback.print_exception(error)
        said = f"model '{settings['model']}' ({settings['target']}): {type(error).__name__}: {error}"
        raise InferError(Code.INVALID, said) from None


class DeepaasInside:
    """One model. Threads: the main one."""

    listens = False

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        self._model = model
        self._settings = settings

    def opened(self) -> Reply:
        """Describe the model."""
        return Description().write(), None

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Do one call."""
        if kind == METADATA:
            return pack_answer(200, JSON, json.dumps(self._model.get_metadata()).encode()), None
        answer = {"status": "OK", "predictions": self._model.predict()}
        return pack_answer(200, JSON, json.dumps(answer).encode()), None

    def told(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Nothing is told."""

    def close(self) -> None:
        """Nothing is left."""
