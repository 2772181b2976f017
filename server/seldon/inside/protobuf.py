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

from .answers import encode_reply
from .component import NO_RESULT, merge_meta, merge_metrics
from .errors import exception_text
from .payloads import NUMERIC
from .proto_bytes import data_bytes, json_bytes, meta_bytes, pb
from .proto_values import array_of, meta_of, payload_of
from .seldon_core_classes import SeldonMicroserviceException, SeldonNotImplementedError

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
_NOT_SERIALIZED = b"Failed to serialize response!"
_REQUESTS = {Endpoint.AGGREGATE: pb.SeldonMessageList, Endpoint.FEEDBACK: pb.Feedback}
_PARSERS = [_REQUESTS.get(endpoint, pb.SeldonMessage).FromString for endpoint in Endpoint]
_EMPTY_META = field(2, b"")
_DATA, _BIN, _STR, _JSON, _CUSTOM = 3, 4, 5, 6, 7


def answer(component: Component, endpoint: Endpoint, payload: bytes) -> bytes:
    """Make one call over gRPC. Returns: the answer to a CALL, also for failures."""
    try:
        request = _PARSERS[endpoint](payload)
    except (DecodeError, UnicodeDecodeError):  # the latter from protobuf's pure Python
        status = Status.INTERNAL if component.strict else Status.INVALID_ARGUMENT
        return encode_reply(component, status, b"Exception deserializing request!")
    return _encode_outcome(component, endpoint, partial(call_endpoint, component, endpoint, request))


def finish(component: Component, endpoint: Endpoint, request: Any, data: Any, tags: Any, runtime: Any) -> bytes:
    """Finish a call whose result is already there. Returns: the answer to a CALL, also for failures.

    `data`, `tags` and `runtime` are the result of Component.call_method, for this call or for it and others together.
    """

    def body() -> bytes:
        return encode_answer(
            component, request, data, _meta(component, request), component.metrics(endpoint, runtime), tags
        )

    return _encode_outcome(component, endpoint, body)


def error_reply(component: Component, endpoint: Endpoint, error: Exception) -> bytes:
    """Return the answer to a CALL that raised an exception."""
    status, text = grpc_error(error, strict=component.strict)
    if status in {Status.UNKNOWN, Status.INTERNAL}:
        logger.error("%s failed", endpoint.label, exc_info=error)
    return encode_reply(component, status, text.encode("utf-8", "replace"))


def _encode_outcome(component: Component, endpoint: Endpoint, produce_body: Callable[[], bytes | None]) -> bytes:
    try:
        body = produce_body()
    except Exception as error:  # noqa: BLE001 - user code may raise anything, and its client gets an answer
        return error_reply(component, endpoint, error)
    return (
        encode_reply(component, 0, body)
        if body is not None
        else encode_reply(component, Status.INTERNAL, _NOT_SERIALIZED)
    )


def grpc_error(error: Exception, *, strict: bool = True) -> tuple[Status, str]:
    """Return the gRPC status and the text for an exception of a call.

    The original has one status for all, and no text for its own exceptions, which keep theirs elsewhere.
    """
    try:
        description = exception_text(error)
    except Exception:  # noqa: BLE001 - as grpcio has it
        return Status.UNKNOWN, "Calling application raised unprintable Exception!"
    if strict:
        return Status.UNKNOWN, f"Exception calling application: {description}"
    text = str(getattr(error, "message", "") or description)
    if isinstance(error, (SeldonNotImplementedError, NotImplementedError)):
        return Status.UNIMPLEMENTED, text
    status = getattr(error, "status_code", None)
    if not isinstance(status, int) or not 400 <= status < 600:
        return Status.UNKNOWN, text or type(error).__name__
    return STATUSES.get(status, Status.INVALID_ARGUMENT if status < 500 else Status.INTERNAL), text


def call_endpoint(component: Component, endpoint: Endpoint, request: Any) -> bytes | None:
    """Return the answer's message; None if the component's result is none. Raises: the exceptions of user code."""
    if endpoint is Endpoint.FEEDBACK:
        return _serialized(_feedback(component, request))
    result = component.call_raw(endpoint, request, True)
    if result is not NO_RESULT:
        return _serialized(result) if type(result) is not bytes else None
    if endpoint is Endpoint.AGGREGATE:
        return _aggregate(component, request)
    features, meta = _payload(component, request), _meta(component, request)
    data, tags, runtime = component.call_method(endpoint, features, list(request.data.names), meta)
    metrics = component.metrics(endpoint, runtime)
    # a router's answer does not repeat the request's meta
    return encode_answer(component, request, data, None if endpoint is Endpoint.ROUTE else meta, metrics, tags)


def _aggregate(component: Component, request: Any) -> bytes:
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
    return encode_answer(component, messages[0], data, merge_meta(metas), merge_metrics(metas, metrics), tags)


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


def _serialized(result: Any) -> bytes | None:
    if isinstance(result, pb.SeldonMessage):
        return bytes(result.SerializeToString())
    return result if type(result) is bytes else None


# -- feedback --------------------------------------------------------------------------------------------------


def feedback_of(document: Any) -> Any:
    """Make a Feedback from JSON. Raises: SeldonMicroserviceException, TypeError."""
    message = pb.Feedback()
    try:
        json_format.ParseDict(document, message)
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
    component.record_reward(request.reward)
    user = component.user
    if hasattr(user, "send_feedback_rest"):
        return _message_of(component.resolve(user.send_feedback_rest(json_format.MessageToJson(request))))
    if hasattr(user, "send_feedback_grpc"):
        return _message_of(component.resolve(user.send_feedback_grpc(request)))
    result = component.call_raw(Endpoint.FEEDBACK, request, True)
    if result is not NO_RESULT:
        return result
    original, exact = request.request, component.strict
    try:
        features, truth = array_of(original.data, exact=exact), array_of(request.truth.data, exact=exact)
    except (TypeError, ValueError) as error:
        if component.strict:
            raise
        raise SeldonMicroserviceException(str(error)) from error
    routing = request.response.meta.routing.get(component.unit)
    data, tags, runtime = component.feedback(features, list(original.data.names), request.reward, truth, routing)
    metrics = component.metrics(Endpoint.FEEDBACK, runtime)
    return encode_answer(component, original, np.array([]) if data is None else data, None, metrics, tags)


def _message_of(document: Any) -> Any:
    """Make a SeldonMessage from JSON. Raises: SeldonMicroserviceException."""
    message = pb.SeldonMessage()
    try:
        json_format.ParseDict({} if document is None else document, message)
    except json_format.ParseError as error:
        raise SeldonMicroserviceException(f"Invalid JSON: {error}") from None
    return message


# -- answers ---------------------------------------------------------------------------------------------------


def encode_answer(component: Component, request: Any, result: Any, meta: Any, metrics: list[Any], tags: Any) -> bytes:
    """Encode the SeldonMessage that answers `request` with the component's result.

    `meta` is the request's, None to leave it out. Raises: SeldonMicroserviceException, TypeError, ValueError, and
    json_format's ParseError.
    """
    exact = component.strict
    answer_meta = component.meta(meta, metrics, tags)
    puid = request.meta.puid if request.HasField("meta") else ""
    meta_field = field(2, meta_bytes(answer_meta, puid, exact=exact)) if answer_meta or puid else _EMPTY_META
    if isinstance(result, (np.ndarray, list)):
        array = result if type(result) is np.ndarray else np.array(result)
        names = component.class_names(array)
        return meta_field + field(_DATA, data_bytes(_kind(request, array), array, names))
    if isinstance(result, str):
        return meta_field + field(_STR, result.encode())
    if isinstance(result, dict):
        return meta_field + field(_JSON, json_bytes(result, exact=exact))
    if isinstance(result, bytearray) and exact:
        raise TypeError(f"{result} has type bytearray, but expected one of: bytes")
    if isinstance(result, (bytes, bytearray)):
        return meta_field + field(_BIN, bytes(result))
    if isinstance(result, any_pb2.Any):
        return meta_field + field(_CUSTOM, result.SerializeToString())
    # the original fails in this concatenation, whatever was returned
    text = "Unknown data type returned as payload:"
    raise SeldonMicroserviceException(text + (result if exact else str(result)))


def _kind(request: Any, array: Any) -> str | None:
    """Return the encoding of an array: the request's, if it is numeric."""
    if array.dtype.kind not in NUMERIC:
        return "ndarray"
    kind = request.WhichOneof("data_oneof")
    return request.data.WhichOneof("data_oneof") if kind == "data" else "tensor"
