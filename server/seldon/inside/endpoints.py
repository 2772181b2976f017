"""Endpoints: what each of a component's URLs does. Source: seldon-core 1.17.1, wrapper.py and seldon_methods.py."""

from __future__ import annotations

import logging
import os
from typing import Any

from penstock.server.seldon.environ import read_boolean
from penstock.server.seldon.messages import Endpoint, PayloadKind

from .answers import JsonWriter, encode_reply, make_message
from .blueprints import Blueprints, blueprints_of, request_app
from .component import NO_RESULT, Component, merge_meta, merge_metrics
from .errors import UNREPORTABLE, error_message, failure, http_status, is_response
from .payloads import names_of, split_message
from .requests import read_http_message, read_json_message
from .seldon_core_classes import SeldonMicroserviceException

logger = logging.getLogger("seldon_core")

_BODILESS = (204, 304)
_PREDICT, _ROUTE, _HEALTH, _JSON = Endpoint.PREDICT, Endpoint.ROUTE, Endpoint.HEALTH, PayloadKind.JSON


class Rest:
    """A component over HTTP. Threads: one call at a time."""

    def __init__(self, component: Component) -> None:
        self.component = component
        self.writer = JsonWriter(strict=component.strict)
        self.is_passthrough = read_boolean(os.environ, "PAYLOAD_PASSTHROUGH") is True
        self.blueprints = blueprints_of(component.user, self.writer)
        self.request_app = request_app(self.writer)
        self._methods = (
            self._call_method,
            self._feedback,
            self._call_method,
            self._call_method,
            self._call_method,
            self._aggregate,
        )

    def answer(self, endpoint: Endpoint, payload_kind: PayloadKind, payload: bytes) -> bytes:
        """Answer one request. Returns: the reply to a CALL. Raises: only BaseExceptions that are not Exceptions."""
        if self.blueprints is not None and self.blueprints.wraps_calls:
            return encode_reply(
                self.component,
                *self.blueprints.run(
                    endpoint, payload_kind, payload, lambda: self._run(endpoint, payload_kind, payload)
                ),
            )
        try:
            status, body = self._run(endpoint, payload_kind, payload)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            return self.error_reply(endpoint, error, payload_kind, payload)
        return encode_reply(self.component, status, body)

    def answer_in_context(self, payload_kind: PayloadKind, endpoint: Endpoint, payload: bytes) -> bytes:
        """Answer one request, within Flask's if the component may read that. Raises: as `answer`."""
        if self.request_app is None:
            return self.answer(endpoint, payload_kind, payload)
        with self.request_app.request_context(endpoint, payload_kind, payload):
            return self.answer(endpoint, payload_kind, payload)

    def empty_answer(self, endpoint: Endpoint) -> bytes:
        """Return the body that answers an empty request of PayloadKind.JSON."""
        return self._run(endpoint, PayloadKind.JSON, b"")[1]

    def finish(self, endpoint: Endpoint, request: Any, data: Any, tags: Any, metrics: Any) -> bytes:
        """Answer a request whose method has run: `data`, `tags` and `metrics` are from Component.call_method."""
        try:
            message = self._make_answer(endpoint, request, request.get("meta"), data, tags, metrics)
            return encode_reply(self.component, 200, self.writer.write(message))
        except Exception as error:  # noqa: BLE001 - as in answer
            return self.error_reply(endpoint, error)

    def error_reply(
        self, endpoint: Endpoint, error: Exception, payload_kind: PayloadKind = PayloadKind.JSON, payload: bytes = b""
    ) -> bytes:
        """Answer with an exception, through the component's blueprint if it has one."""
        if self.blueprints is None and is_response(error):
            self.blueprints = Blueprints(None, self.writer)
        if self.blueprints is not None:
            return encode_reply(self.component, *self.blueprints.error_page(endpoint, payload_kind, payload, error))
        try:
            status, message = failure(error)
            return encode_reply(self.component, http_status(status), self.writer.write(message))
        except Exception:  # its text cannot be obtained, or JSON cannot represent it
            logger.exception("An exception cannot be reported to the client")
            return encode_reply(self.component, 500, self.writer.write(error_message(UNREPORTABLE)))

    def _run(self, endpoint: Endpoint, payload_kind: PayloadKind, payload: bytes) -> tuple[int, bytes]:
        """Return the status and the body. Raises: any failure."""
        if endpoint is _HEALTH:
            return 200, self.writer.write(self._health())
        is_passthrough = self.is_passthrough and endpoint is _PREDICT
        if payload_kind is _JSON:
            request = payload if is_passthrough else read_json_message(payload)
        else:
            request = read_http_message(payload, decode=not is_passthrough)
        if endpoint is not _PREDICT:
            return 200, self.writer.write(self._methods[endpoint](endpoint, request))
        message = self._call_method(endpoint, request)
        body = raw_body(message) if is_passthrough else self.writer.write(message)
        if isinstance(message, dict) and "status" in message and "code" in message["status"]:
            status = http_status(message["status"]["code"])
            return status, b"" if status in _BODILESS else body
        return 200, body

    def _call_method(self, endpoint: Endpoint, request: Any) -> Any:
        component = self.component
        message = component.call_raw(endpoint, request, False)
        if message is not NO_RESULT:
            return message
        features, meta, datadef, _ = split_message(request)
        return self._make_answer(
            endpoint, request, meta, *component.call_method(endpoint, features, names_of(datadef), meta)
        )

    def _make_answer(self, endpoint: Endpoint, request: Any, meta: Any, *result: Any) -> Any:
        """Make the message of an answer. `result` is that of Component.call_method."""
        data, tags, metrics = result
        answer_metrics = self.component.metrics(endpoint, metrics)
        # a router's answer does not repeat the request's meta
        return make_message(self.component, request, data, None if endpoint is _ROUTE else meta, answer_metrics, tags)

    def _aggregate(self, endpoint: Endpoint, request: Any) -> Any:
        component = self.component
        message = component.call_raw(endpoint, request, False)
        if message is not NO_RESULT:
            return message
        if isinstance(request, list):
            messages = request
        elif "seldonMessages" in request and isinstance(request["seldonMessages"], list):
            messages = request["seldonMessages"]
        else:
            raise SeldonMicroserviceException(f"Invalid request data type: {request}")
        payloads = [split_message(each) for each in messages]
        names = [names_of(each[2]) for each in payloads]
        data, tags, metrics = component.aggregate([each[0] for each in payloads], names)
        answer_metrics = component.metrics(endpoint, metrics)
        metas = [each[1] for each in payloads]
        return make_message(component, messages[0], data, merge_meta(metas), merge_metrics(metas, answer_metrics), tags)

    def _feedback(self, endpoint: Endpoint, request: Any) -> Any:
        # feedback is protobuf for either transport: its numbers are floats, and only known fields are accepted
        from .proto_values import json_of
        from .protobuf import feedback, feedback_of

        return json_of(feedback(self.component, feedback_of(request)))

    def _health(self) -> Any:
        component = self.component
        message = component.call_raw(Endpoint.HEALTH, None, False)
        if message is not NO_RESULT:
            return message
        data = component.health()
        return make_message(component, {}, data, None, component.metrics(Endpoint.HEALTH), {})


def raw_body(message: Any) -> bytes:
    """Return the body for PAYLOAD_PASSTHROUGH: the result of user code, as a WSGI server would send it."""
    if message is None:
        return b""
    if isinstance(message, (bytes, bytearray)):
        return bytes(message)
    if isinstance(message, str):
        return message.encode()
    return b"".join(each.encode() if isinstance(each, str) else each for each in message)
