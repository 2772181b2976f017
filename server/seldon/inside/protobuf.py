"""Calls whose request is a message of seldon.protos, and feedback, which is one over REST too.

Called by service.py for gRPC, by endpoints.py for feedback. Source: seldon-core 1.17.1, seldon_methods.py and utils.py,
by observed behavior over gRPC.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import any_pb2, json_format
from google.protobuf.message import DecodeError

from penstock.server.grpc.method import Status
from penstock.server.seldon.messages import Endpoint
from penstock.server.v2.rpc.wire import field

from .answers import reply
from .component import NOTHING, merged, merged_metrics
from .failing import text_of
from .originals import SeldonMicroserviceException, SeldonNotImplementedError
from .payloads import NUMERIC
from .proto_bytes import data_bytes, json_bytes, meta_bytes, pb
from .proto_values import array_of, meta_of, payload_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .component import Component

logger = logging.getLogger("seldon_core")

STATUSES = {
    400: Status.INVALID_ARGUMENT,
    401: Status.UNAUTHENTICATED,
    403: Status.PERMISSION_DENIED,
    404: Status.NOT_FOUND,
    408: Status.DEADLINE_EXCEEDED,
    409: Status.ABORTED,
    412: Status.FAILED_PRECONDITION,
    416: Status.OUT_OF_RANGE,
    429: Status.RESOURCE_EXHAUSTED,
    499: Status.CANCELLED,
    501: Status.UNIMPLEMENTED,
    503: Status.UNAVAILABLE,
    504: Status.DEADLINE_EXCEEDED,
}
"""The gRPC status for an exception's HTTP status, unless `strict`. Any other status from 400 on is INVALID_ARGUMENT,
from 500 on INTERNAL; one that is no error's is UNKNOWN. Source: google/rpc/code.proto."""
_UNWRITTEN = b"Failed to serialize response!"
_REQUESTS = {Endpoint.AGGREGATE: pb.SeldonMessageList, Endpoint.FEEDBACK: pb.Feedback}
_READ = [_REQUESTS.get(endpoint, pb.SeldonMessage).FromString for endpoint in Endpoint]
_EMPTY_META = field(2, b"")
_DATA, _BIN, _STR, _JSON, _CUSTOM = 3, 4, 5, 6, 7


def answer(component: Component, endpoint: Endpoint, payload: bytes) -> bytes:
    """Make one call over gRPC. Returns: the answer to a CALL, also for failures."""
    try:
        request = _READ[endpoint](payload)
    except (DecodeError, UnicodeDecodeError):  # the latter from protobuf's pure Python
        status = Status.INTERNAL if component.strict else Status.INVALID_ARGUMENT
        return reply(component, status, b"Exception deserializing request!")
    return _replied(component, endpoint, partial(called, component, endpoint, request))


def answered(component: Component, endpoint: Endpoint, request: Any, data: Any, tags: Any, runtime: Any) -> bytes:
    """Finish a call whose result is already there. Returns: the answer to a CALL, also for failures.

    `data`, `tags` and `runtime` are the result of Component.respond, for this call or for it and others together.
    """

    def body() -> bytes:
        return respond(component, request, data, _meta(component, request), component.metrics(endpoint, runtime), tags)

    return _replied(component, endpoint, body)


def unanswered(component: Component, endpoint: Endpoint, error: Exception) -> bytes:
    """Return the answer to a CALL that raised an exception."""
    status, text = failed(error, strict=component.strict)
    if status in {Status.UNKNOWN, Status.INTERNAL}:
        logger.error("%s failed", endpoint.label, exc_info=error)
    return reply(component, status, text.encode("utf-8", "replace"))


def _replied(component: Component, endpoint: Endpoint, work: Callable[[], bytes | None]) -> bytes:
    try:
        body = work()
    except Exception as error:  # noqa: BLE001 - user code may raise anything, and its client gets an answer
        return unanswered(component, endpoint, error)
    return reply(component, 0, body) if body is not None else reply(component, Status.INTERNAL, _UNWRITTEN)


def failed(error: Exception, *, strict: bool = True) -> tuple[Status, str]:
    """Return the gRPC status and the text for an exception of a call.

    The original has one status for all, and no text for its own exceptions, which keep theirs elsewhere.
    """
    try:
        said = text_of(error)
    except Exception:  # noqa: BLE001 - as grpcio has it
        return Status.UNKNOWN, "Calling application raised unprintable Exception!"
    if strict:
        return Status.UNKNOWN, f"Exception calling application: {said}"
    text = str(getattr(error, "message", "") or said)
    if isinstance(error, (SeldonNotImplementedError, NotImplementedError)):
        return Status.UNIMPLEMENTED, text
    status = getattr(error, "status_code", None)
    if not isinstance(status, int) or not 400 <= status < 600:
        return Status.UNKNOWN, text or type(error).__name__
    return STATUSES.get(status, Status.INVALID_ARGUMENT if status < 500 else Status.INTERNAL), text


def called(component: Component, endpoint: Endpoint, request: Any) -> bytes | None:
    """Return the answer's message; None if the component's result is none. Raises: the exceptions of user code."""
    if endpoint is Endpoint.FEEDBACK:
        return _written(_feedback(component, request))
    result = component.raw(endpoint, request, True)
    if result is not NOTHING:
        return _written(result) if type(result) is not bytes else None
    if endpoint is Endpoint.AGGREGATE:
        return _aggregated(component, request)
    features, meta = _payload(component, request), _meta(component, request)
    data, tags, runtime = component.respond(endpoint, features, list(request.data.names), meta)
    metrics = component.metrics(endpoint, runtime)
    # a router's answer does not repeat the request's meta
    return respond(component, request, data, None if endpoint is Endpoint.ROUTE else meta, metrics, tags)


def _aggregated(component: Component, request: Any) -> bytes:
    messages = request.seldonMessages
    features, names, metas = [], [], []
    for each in messages:
        features.append(_payload(component, each))
        names.append(list(each.data.names))
        metas.append(_meta(component, each))
    data, tags, runtime = component.aggregate(features, names)
    metrics = component.metrics(Endpoint.AGGREGATE, runtime)
    if not messages:
        raise IndexError("list index (0) out of range")
    return respond(component, messages[0], data, merged(metas), merged_metrics(metas, metrics), tags)


def _payload(component: Component, message: Any) -> Any:
    try:
        return payload_of(message, exact=component.strict)
    except LookupError as error:
        raise SeldonMicroserviceException(str(error)) from None
    except (TypeError, ValueError) as error:
        if component.strict:
            raise
        raise SeldonMicroserviceException(str(error)) from error


def _meta(component: Component, message: Any) -> dict[str, Any]:
    return meta_of(message.meta, exact=component.strict) if message.HasField("meta") else {}


def _written(result: Any) -> bytes | None:
    if isinstance(result, pb.SeldonMessage):
        return bytes(result.SerializeToString())
    return result if type(result) is bytes else None


# -- feedback --------------------------------------------------------------------------------------------------


def feedback_of(said: Any) -> Any:
    """Make a Feedback from JSON. Raises: SeldonMicroserviceException, TypeError."""
    message = pb.Feedback()
    try:
        json_format.ParseDict(said, message)
    except json_format.ParseError as error:
        raise SeldonMicroserviceException(f"Invalid JSON: {error}") from None
    except SystemError as error:  # raised by protobuf itself for a field whose name is not UTF-8
        raise SeldonMicroserviceException(f"Invalid JSON: {error.__cause__ or error}") from None
    return message


def feedback(component: Component, request: Any) -> Any:
    """Pass a Feedback to the component. Returns: a SeldonMessage, or its own method's result. Raises: as that."""
    result = _feedback(component, request)
    return pb.SeldonMessage.FromString(result) if type(result) is bytes else result


def _feedback(component: Component, request: Any) -> Any:
    component.reward(request.reward)
    user = component.user
    if hasattr(user, "send_feedback_rest"):
        return _message_of(component.settled(user.send_feedback_rest(json_format.MessageToJson(request))))
    if hasattr(user, "send_feedback_grpc"):
        return _message_of(component.settled(user.send_feedback_grpc(request)))
    result = component.raw(Endpoint.FEEDBACK, request, True)
    if result is not NOTHING:
        return result
    asked, exact = request.request, component.strict
    try:
        features, truth = array_of(asked.data, exact=exact), array_of(request.truth.data, exact=exact)
    except (TypeError, ValueError) as error:
        if component.strict:
            raise
        raise SeldonMicroserviceException(str(error)) from error
    routing = request.response.meta.routing.get(component.unit)
    data, tags, runtime = component.feedback(features, list(asked.data.names), request.reward, truth, routing)
    metrics = component.metrics(Endpoint.FEEDBACK, runtime)
    return respond(component, asked, np.array([]) if data is None else data, None, metrics, tags)


def _message_of(said: Any) -> Any:
    """Make a SeldonMessage from JSON. Raises: SeldonMicroserviceException."""
    message = pb.SeldonMessage()
    try:
        json_format.ParseDict({} if said is None else said, message)
    except json_format.ParseError as error:
        raise SeldonMicroserviceException(f"Invalid JSON: {error}") from None
    return message


# -- answers ---------------------------------------------------------------------------------------------------


def respond(component: Component, request: Any, result: Any, meta: Any, metrics: list[Any], tags: Any) -> bytes:
    """Encode the SeldonMessage that answers `request` with the component's result.

    `meta` is the request's, None to leave it out. Raises: SeldonMicroserviceException, TypeError, ValueError, and
    json_format's ParseError.
    """
    exact = component.strict
    said = component.meta(meta, metrics, tags)
    puid = request.meta.puid if request.HasField("meta") else ""
    before = field(2, meta_bytes(said, puid, exact=exact)) if said or puid else _EMPTY_META
    if isinstance(result, (np.ndarray, list)):
        array = result if type(result) is np.ndarray else np.array(result)
        names = component.class_names(array)
        return before + field(_DATA, data_bytes(_kind(request, array), array, names))
    if isinstance(result, str):
        return before + field(_STR, result.encode())
    if isinstance(result, dict):
        return before + field(_JSON, json_bytes(result, exact=exact))
    if isinstance(result, bytearray) and exact:
        raise TypeError(f"{result} has type bytearray, but expected one of: bytes")
    if isinstance(result, (bytes, bytearray)):
        return before + field(_BIN, bytes(result))
    if isinstance(result, any_pb2.Any):
        return before + field(_CUSTOM, result.SerializeToString())
    # the original fails in this concatenation, whatever was returned
    text = "Unknown data type returned as payload:"
    raise SeldonMicroserviceException(text + (result if exact else str(result)))


def _kind(request: Any, array: Any) -> str | None:
    """Return the encoding of an array: the request's, if it is numeric."""
    if array.dtype.kind not in NUMERIC:
        return "ndarray"
    kind = request.WhichOneof("data_oneof")
    return request.data.WhichOneof("data_oneof") if kind == "data" else "tensor"
