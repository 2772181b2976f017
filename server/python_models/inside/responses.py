"""Responses: a model's answers, the objects that send them, and the answers of called models.

Source: python_backend, src/infer_response.cc, src/response_sender.cc and src/pb_response_iterator.cc.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from penstock.backends.backend import Array
from penstock.server.python_models.messages import ANSWER

from .errors import TritonError, TritonModelException, decode_error, encode_error
from .server_proxy import ServerProxy
from .tensors import BF16, Tensor, received_tensor

FINAL = 1
"""TRITONSERVER_RESPONSE_COMPLETE_FINAL."""
Answer = tuple[dict[str, Any], list[Array]]
"""An answer in the format of messages.py, and its tensors."""


def check_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check that parameters can be sent, and return them. Raises: TritonModelException."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise TritonModelException(f"Expect parameters values of type int to fit 64 bits, '{key}' does not")
    return parameters


def check_tensors(tensors: Sequence[Tensor], missing_message: str) -> list[Tensor]:
    """Return tensors as a list. Raises: TritonModelException if one is None; TypeError if one is not a Tensor."""
    tensor_list = list(tensors)
    for tensor in tensor_list:
        if tensor is None:
            raise TritonModelException(missing_message)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected pb_utils.Tensor objects, got {type(tensor)}")
    return tensor_list


class InferenceResponse:
    """One answer: tensors, or an error."""

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error: expected a pb_utils.TritonError, got {type(error)}")
        self._output_tensors = check_tensors(
            output_tensors, "Output tensor for inference response should not be empty."
        )
        self._error = error
        self._parameters = check_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._parameters)

    def encode(self, requested_outputs: Collection[str], *, final: bool) -> Answer:
        """Encode it in the format of messages.py, with the requested outputs only, or all if none are requested."""
        error, tensors = self._error, self._output_tensors
        if error is not None:
            message: dict[str, Any] = {"outputs": (), "error": encode_error(error.message(), error.code())}
            return message | {"parameters": self._parameters, "final": final}, []
        if requested_outputs:
            tensors = [tensor for tensor in tensors if tensor.name() in requested_outputs]
        names = [tensor.name() for tensor in tensors]
        message = {"outputs": names, "error": None, "parameters": self._parameters, "final": final}
        return message, [tensor.outgoing for tensor in tensors]


def decode_response(message: dict[str, Any], arrays: Sequence[Array | None]) -> InferenceResponse:
    """Create the response from a called model's answer."""
    error = message.get("error")
    if error:
        return InferenceResponse(error=decode_error(error))
    outputs = zip(message.get("outputs") or (), arrays, strict=True)
    bf16_outputs = message.get("bf16", ())
    tensors = [
        received_tensor(name, array, BF16 if name in bf16_outputs else 0)
        for name, array in outputs
        if array is not None
    ]
    return InferenceResponse(tensors, parameters=message.get("parameters"))


def failed_response(message: str) -> InferenceResponse:
    """Return the response of a call that could not be made."""
    return InferenceResponse(error=TritonError(message))


class ResponseSender:
    """Sends the answers to one request, from any thread, up to the last one.

    Invariant: every request ends. If model.py drops the sender before the last answer, an error is sent as the last.
    """

    def __init__(
        self, server: ServerProxy, number: int, requested_outputs: Collection[str], *, decoupled: bool
    ) -> None:
        self._server = server
        self._number = number
        self._requested_outputs = requested_outputs
        self._decoupled = decoupled
        self._lock = threading.Lock()
        self._sent = 0
        self.closed = False
        server.start_sender()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send an answer, or with FINAL the last one. Blocks while an ensemble or a front end cannot take more.

        Raises: TritonModelException if it may not be sent.
        """
        if flags not in {0, FINAL}:
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"response: expected a pb_utils.InferenceResponse, got {type(response)}")
        arrays: list[Array] | None = None
        if response is not None:
            message, arrays = response.encode(self._requested_outputs, final=bool(flags))
            self._server.wait_while_paused(self._number)
        else:
            message = {"outputs": None, "error": None, "parameters": {}, "final": True}
        with self._lock:
            self._check_allowed(response is not None, flags)
            self._server.send_message(ANSWER, self._number, message, arrays)
            self._record_sent(flags)

    def record_returned(self) -> None:
        """Count a returned answer, which is the last. Raises: TritonModelException."""
        with self._lock:
            self._check_allowed(True, FINAL)
            self._record_sent(FINAL)

    def _check_allowed(self, has_response: bool, flags: int) -> None:
        if not self._decoupled:
            if has_response and self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if not has_response and flags == FINAL and not self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
        if self.closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def _record_sent(self, flags: int) -> None:
        self._sent += 1
        if flags == FINAL:
            self.closed = True
            self._server.cancelled.pop(self._number, None)
            self._server.rescheduled_senders.pop(self._number, None)

    def reschedule(self) -> bool:
        """Keep the sender for the next execution of its request. Returns: False if the last answer has been sent."""
        with self._lock:
            if not self.closed:
                self._server.rescheduled_senders[self._number] = self
            return not self.closed

    def close(self) -> bool:
        """Stop sending. Returns: whether the last answer was still to be sent."""
        with self._lock:
            was_closed, self.closed = self.closed, True
            self._server.rescheduled_senders.pop(self._number, None)
        return not was_closed

    def is_cancelled(self) -> bool:
        return self._number in self._server.cancelled

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            error = encode_error("The model dropped the request without sending a final response.")
            message = {"outputs": [], "error": error, "parameters": {}, "final": True}
            self._server.queue_message(ANSWER, self._number, message)


class ResponseIterator:
    """The answers of a model that may return several: once as they arrive, and again from the first.

    Invariant: if it is dropped before the last answer, the server is notified.
    """

    def __init__(self, server: ServerProxy, message: dict[str, Any], arrays: Sequence[Array | None]) -> None:
        self._server = server
        self._answers: queue.SimpleQueue[tuple[dict[str, Any], list[Array | None]]] = queue.SimpleQueue()
        self._responses: list[InferenceResponse] = []
        self._next = 0
        self._finished = False
        server.start_sender()
        answers = self._answers  # the pending call refers to the queue, not to this object
        self._number = server.call(message, arrays, lambda answer, tensors: answers.put((answer, tensors)))

    def __iter__(self) -> Iterator[InferenceResponse]:
        if self._finished and self._next >= len(self._responses):
            self._next = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._next >= len(self._responses):
            if self._finished:
                raise StopIteration("Iteration is done for the responses.")
            self.wait_for_next()
        self._next += 1
        return self._responses[self._next - 1]

    def wait_for_next(self) -> None:
        """Wait for one more answer."""
        message, arrays = self._answers.get()
        self._finished = message["final"]
        self._responses.append(decode_response(message, arrays))

    def cancel(self) -> None:
        """Refuse further answers: the last one is an error."""
        if self._finished:
            return
        self._server.cancel_call(self._number)
        error = {"code": "CANCELLED", "message": "The request was cancelled."}
        self._answers.put(({"outputs": [], "error": error, "final": True}, []))

    def __del__(self) -> None:
        if not getattr(self, "_finished", True) and hasattr(self, "_number"):
            self._server.cancel_call(self._number)
