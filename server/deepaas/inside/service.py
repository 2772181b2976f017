"""The service of a DEEPaaS model's workers: Desk, predictions, or one training. `messages.py` describes the calls.

Source: deepaas 2.6.0, model/v2/wrapper.py and api/v2: how a model is called, and what becomes of its results.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.carrying.messages import CALL, read_answer
from penstock.server.deepaas.messages import CHECK, METADATA, PROGRESS, TRAIN, ModelDescription, WorkerRole
from penstock.server.ipc.channel import Channel

from .answers import (
    Refusal,
    content_answer,
    error_answer,
    failed_http_exception,
    json_answer,
    log,
    text_answer,
    write_json,
)
from .arguments import JSON_TYPES, AcceptArgument, Arguments
from .describing import Describer
from .files import Uploads
from .model import WrappedModel
from .multipart import Upload
from .requests import Request
from .untouched import restoring_dicts

Reply = tuple[bytes, Sequence[Array | None] | None]
IMPORTABLE = str(Path(__file__).resolve().parents[1] / "importable")
"""The substitute for `deepaas` if the original is not installed: last on the path."""


def open_service(settings: dict[str, Any], channel: Channel) -> DeepaasInside:
    """Import the model, and warm it up. Raises: InferError (INVALID)."""
    try:
        if IMPORTABLE not in sys.path:
            sys.path.append(IMPORTABLE)
        return DeepaasInside(WrappedModel(settings["model"], settings["target"]), settings, channel)
    except BaseException as error:  # noqa: BLE001 - whatever it is, there is no model
        log(error)
        text = f"model '{settings['model']}' ({settings['target']}): {type(error).__name__}: {error}"
        raise InferError(Code.INVALID, text) from None


class DeepaasInside:
    """One model. Threads: the main one."""

    concurrent_messages = False

    def __init__(self, model: WrappedModel, settings: dict[str, Any], channel: Channel) -> None:
        self._model = model
        self._role = WorkerRole(settings["role"])
        self._show_errors = bool(settings["show_errors"])
        self._channel = channel
        self._pid = os.getpid()
        self._uploads = Uploads()
        trains = self._role is not WorkerRole.PREDICT
        predicts = self._role is not WorkerRole.TRAIN
        # the Desk may keep state from declaring arguments, as the original's server did
        with contextlib.nullcontext() if self._role is WorkerRole.DESK else restoring_dicts(settings["target"]):
            predict_args = model.arguments("get_predict_args") if predicts else {}
            train_args = model.arguments("get_train_args") if trains else {}
        self._accept = AcceptArgument(predict_args, by_header=settings["accept_header"])
        self._predict_arguments = Arguments(self._accept.arguments)
        self._train_arguments = Arguments(train_args)
        self._schema = _schema_of(model.schema) if predicts else None
        if settings["warm"] and self._role is not WorkerRole.DESK:
            model.warm()

    def on_open(self) -> Reply:
        """Return the model's description, if this is its Desk."""
        if self._role is not WorkerRole.DESK:
            return b"", None
        try:
            return self._description().write(), None
        except Exception as error:  # noqa: BLE001 - a model that can be called must not fail because of its documents
            log(error)
            predicts, trains = (self._model.method(name) is not None for name in ("predict", "train"))
            return ModelDescription(predicts, trains).write(), None

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Run one call. Every failure except the server's own is returned as an answer."""
        if kind == CALL:
            return self._answer(self._predict, body), None
        if kind == TRAIN:
            return self._train(body, number), None
        if kind == CHECK:
            return self._answer(self._check, body), None
        if kind == METADATA:
            return self._answer(self._metadata, body), None
        raise InferError(Code.INTERNAL, f"unknown call kind {kind}")

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Ignore it: the server sends no notifications."""

    def close(self) -> None:
        """Remove stored files."""
        self._uploads.close()

    # -- calls -------------------------------------------------------------------------------------------------

    def _answer(self, function: Callable[[bytes], bytes], body: bytes) -> bytes:
        """Answer a call, also if it fails."""
        try:
            return function(body)
        except Refusal as refusal:
            return refusal.answer
        except BaseException as error:  # sys.exit in user code affects only its own call
            if os.getpid() != self._pid:
                raise  # a child that user code forked
            return error_answer(error, shown=self._show_errors)

    def _predict(self, body: bytes) -> bytes:
        request = Request(body)
        arguments = self._predict_arguments.read(request, self._accept.from_header(request.line.headers))
        predict = self._model.require("predict")
        try:
            if request.line.kind == "multipart/form-data":
                self._uploads.store(arguments)
            value, accept = predict(**arguments), arguments.get("accept")
            if isinstance(accept, str) and accept not in JSON_TYPES:
                return content_answer(value, accept)
            return self._prediction_answer(value)
        finally:
            self._uploads.clear()

    def _prediction_answer(self, value: Any) -> bytes:
        if self._schema is None:
            return json_answer({"status": "OK", "predictions": value})
        import marshmallow

        try:
            self._schema.load(value)
        except Exception as error:
            log(error)
            known = isinstance(error, marshmallow.ValidationError)
            reason = "ERROR validating model response" if known else "Unknown ERROR validating response"
            raise Refusal(text_answer(500, f"{reason}, check server logs.")) from error
        return json_answer(value)

    def _metadata(self, body: bytes) -> bytes:
        return self._model.metadata(body.decode() or f"/v2/models/{self._model.name}")

    def _check(self, body: bytes) -> bytes:
        arguments = self._train_arguments.read(Request(body))
        self._model.require("train")
        return json_answer({name: to_json(value) for name, value in arguments.items()})

    def _train(self, body: bytes, number: int) -> bytes:
        try:
            arguments = self._train_arguments.read(Request(body))
            train = self._model.require("train")
            self._uploads.store(arguments)
            self._channel.send(PROGRESS, number)
            return write_json({"output": to_json(train(**arguments))}).encode()
        except Refusal as refusal:
            return write_json({"error": read_answer(refusal.answer)[3].decode()}).encode()
        except BaseException as error:  # as in _answer
            if os.getpid() != self._pid:
                raise
            log(error)
            return write_json({"error": _message_of(error)}).encode()
        finally:
            self._uploads.clear()

    # -- description -------------------------------------------------------------------------------------------

    def _description(self) -> ModelDescription:
        model, describer = self._model, Describer()
        train_args = describer.arguments(self._train_arguments.fields)
        predict_args = describer.arguments(self._predict_arguments.fields)
        if self._accept.choices:
            predict_args["produces"] = self._accept.choices
        schema = {} if self._schema is None else describer.schema(self._schema)
        predicts, trains = (model.method(name) is not None for name in ("predict", "train"))
        return ModelDescription(predicts, trains, predict_args, train_args, schema)


def _schema_of(declared: Any) -> Any:
    """Make the Schema for validating answers, None for none. Raises: TypeError, marshmallow's exceptions."""
    if declared is None:
        return None
    import marshmallow

    if isinstance(declared, dict):
        return marshmallow.Schema.from_dict(declared, name="ModelPredictionResponse")()
    if isinstance(declared, type) and issubclass(declared, marshmallow.Schema):
        return declared()
    raise TypeError("`schema` must be a dict of fields, or a class that descends from marshmallow.Schema")


def to_json(value: Any) -> Any:
    """Return the form in which a training shows an argument, or its result.

    A file is shown as its argument name, content type and the client's file name. A value that is not JSON is shown as
    its text: many modules' train() returns a set after a successful training.
    """
    if isinstance(value, Upload):
        return [value.name, value.content_type, value.filename]
    if isinstance(value, list):
        return [to_json(each) for each in value]
    try:
        write_json(value)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value


def _message_of(error: BaseException) -> str:
    if (failed := failed_http_exception(error)) is not None:
        return failed[1]
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - user code's own
        text = type(error).__name__
    return text if isinstance(error, Exception) else f"{type(error).__name__}: {text}"
