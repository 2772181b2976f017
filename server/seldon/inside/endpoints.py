"""Endpoints: what each of a component's URLs does. Source: seldon-core 1.17.1, wrapper.py and seldon_methods.py."""

from __future__ import annotations

import logging
import os
from typing import Any

from penstock.server.seldon.environ import truth
from penstock.server.seldon.messages import Endpoint, PayloadKind

from .answers import Writer, construct, reply
from .blueprints import Blueprints, blueprints_of, looking
from .component import NOTHING, Component, merged, merged_metrics
from .failing import UNTOLD, failure, http_status, is_response, said_of
from .originals import SeldonMicroserviceException
from .payloads import names_of, parts
from .requests import found_in, message_of

logger = logging.getLogger("seldon_core")

_BODILESS = (204, 304)
_PREDICT, _ROUTE, _HEALTH, _JSON = Endpoint.PREDICT, Endpoint.ROUTE, Endpoint.HEALTH, PayloadKind.JSON


class Rest:
    """A component over HTTP. Threads: one call at a time."""

    def __init__(self, component: Component) -> None:
        self.component = component
        self.writer = Writer(strict=component.strict)
        self.passes = truth(os.environ, "PAYLOAD_PASSTHROUGH") is True
        self.blueprints = blueprints_of(component.user, self.writer)
        self.looking = looking(self.writer)
        self._ends = (self._plain, self._feedback, self._plain, self._plain, self._plain, self._aggregate)

    def answer(self, endpoint: Endpoint, form: PayloadKind, payload: bytes) -> bytes:
        """Answer one request. Returns: the reply to a CALL. Raises: only BaseExceptions that are not Exceptions."""
        if self.blueprints is not None and self.blueprints.around:
            return reply(
                self.component,
                *self.blueprints.run(endpoint, form, payload, lambda: self._answered(endpoint, form, payload)),
            )
        try:
            status, body = self._answered(endpoint, form, payload)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            return self.failed(endpoint, error, form, payload)
        return reply(self.component, status, body)

    def asked(self, form: PayloadKind, endpoint: Endpoint, payload: bytes) -> bytes:
        """Answer one request, within Flask's if the component may read that. Raises: as `answer`."""
        if self.looking is None:
            return self.answer(endpoint, form, payload)
        with self.looking.request(endpoint, form, payload):
            return self.answer(endpoint, form, payload)

    def page(self, endpoint: Endpoint) -> bytes:
        """Return the body that answers an empty request of PayloadKind.JSON."""
        return self._answered(endpoint, PayloadKind.JSON, b"")[1]

    def answered(self, endpoint: Endpoint, request: Any, data: Any, tags: Any, metrics: Any) -> bytes:
        """Answer a request whose method has run: `data`, `tags` and `metrics` are the result of Component.respond."""
        try:
            message = self._message(endpoint, request, request.get("meta"), data, tags, metrics)
            return reply(self.component, 200, self.writer.write(message))
        except Exception as error:  # noqa: BLE001 - as in answer
            return self.failed(endpoint, error)

    def failed(
        self, endpoint: Endpoint, error: Exception, form: PayloadKind = PayloadKind.JSON, payload: bytes = b""
    ) -> bytes:
        """Answer with an exception, through the component's blueprint if it has one."""
        if self.blueprints is None and is_response(error):
            self.blueprints = Blueprints(None, self.writer)
        if self.blueprints is not None:
            return reply(self.component, *self.blueprints.failed(endpoint, form, payload, error))
        try:
            status, message = failure(error)
            return reply(self.component, http_status(status), self.writer.write(message))
        except Exception:  # its text cannot be obtained, or JSON cannot represent it
            logger.exception("An exception cannot be told to the client")
            return reply(self.component, 500, self.writer.write(said_of(UNTOLD)))

    def _answered(self, endpoint: Endpoint, form: PayloadKind, payload: bytes) -> tuple[int, bytes]:
        """Return the status and the body. Raises: any failure."""
        if endpoint is _HEALTH:
            return 200, self.writer.write(self._health())
        passes = self.passes and endpoint is _PREDICT
        if form is _JSON:
            request = payload if passes else message_of(payload)
        else:
            request = found_in(payload, decode=not passes)
        if endpoint is not _PREDICT:
            return 200, self.writer.write(self._ends[endpoint](endpoint, request))
        message = self._plain(endpoint, request)
        body = passed(message) if passes else self.writer.write(message)
        if isinstance(message, dict) and "status" in message and "code" in message["status"]:
            status = http_status(message["status"]["code"])
            return status, b"" if status in _BODILESS else body
        return 200, body

    def _plain(self, endpoint: Endpoint, request: Any) -> Any:
        component = self.component
        message = component.raw(endpoint, request, False)
        if message is not NOTHING:
            return message
        features, meta, datadef, _ = parts(request)
        return self._message(endpoint, request, meta, *component.respond(endpoint, features, names_of(datadef), meta))

    def _message(self, endpoint: Endpoint, request: Any, meta: Any, *result: Any) -> Any:
        """Make the message of an answer. `result` is that of Component.respond."""
        data, tags, metrics = result
        shown = self.component.metrics(endpoint, metrics)
        # a router's answer does not repeat the request's meta
        return construct(self.component, request, data, None if endpoint is _ROUTE else meta, shown, tags)

    def _aggregate(self, endpoint: Endpoint, request: Any) -> Any:
        component = self.component
        message = component.raw(endpoint, request, False)
        if message is not NOTHING:
            return message
        if isinstance(request, list):
            messages = request
        elif "seldonMessages" in request and isinstance(request["seldonMessages"], list):
            messages = request["seldonMessages"]
        else:
            raise SeldonMicroserviceException(f"Invalid request data type: {request}")
        taken = [parts(each) for each in messages]
        names = [names_of(each[2]) for each in taken]
        data, tags, metrics = component.aggregate([each[0] for each in taken], names)
        shown = component.metrics(endpoint, metrics)
        metas = [each[1] for each in taken]
        return construct(component, messages[0], data, merged(metas), merged_metrics(metas, shown), tags)

    def _feedback(self, endpoint: Endpoint, request: Any) -> Any:
        # feedback is protobuf for either transport: its numbers are floats, and only known fields are accepted
        from .proto_values import json_of
        from .protobuf import feedback, feedback_of

        return json_of(feedback(self.component, feedback_of(request)))

    def _health(self) -> Any:
        component = self.component
        message = component.raw(Endpoint.HEALTH, None, False)
        if message is not NOTHING:
            return message
        data = component.health()
        return construct(component, {}, data, None, component.metrics(Endpoint.HEALTH), {})


def passed(message: Any) -> bytes:
    """Return the body for PAYLOAD_PASSTHROUGH: the result of user code, as a WSGI server would send it."""
    if message is None:
        return b""
    if isinstance(message, (bytes, bytearray)):
        return bytes(message)
    if isinstance(message, str):
        return message.encode()
    return b"".join(each.encode() if isinstance(each, str) else each for each in message)
