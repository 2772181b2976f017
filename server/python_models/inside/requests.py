"""Requests: those passed to a model, and those it makes to other models.

Source: python_backend, src/infer_request.cc and src/pb_stub.cc.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

from penstock.backends.backend import Array

from .errors import TritonModelException, as_text
from .responses import (
    InferenceResponse,
    ResponseIterator,
    ResponseSender,
    check_parameters,
    check_tensors,
    decode_response,
    failed_response,
)
from .server_proxy import ServerProxy
from .tensors import Tensor, received_tensor

if TYPE_CHECKING:
    import asyncio

MEMORY_CPU, MEMORY_GPU = 0, 2
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2


class PreferredMemory:
    """Where a model wants the outputs of a call. The setting is ignored: outputs are always in CPU memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """Links a request to the one on whose behalf it is made, by its `number`; 0: none."""

    def __init__(self, number: int = 0, context: Sequence[str] = ()) -> None:
        self.number = number
        self._context = context

    def get_context(self) -> str | None:
        """Return the W3C context of the request's span as JSON, None if it has none."""
        context = {
            name: value for name, value in zip(("traceparent", "tracestate"), self._context, strict=False) if value
        }
        return json.dumps(context) if context else None


def _check_unsigned(name: str, value: int, bits: int) -> int:
    """Return a number, checked to fit `bits` unsigned bits. Raises: TypeError, as pybind11 does."""
    number = int(value)
    if not 0 <= number < 1 << bits:
        raise TypeError(f"InferenceRequest: {name} is not an unsigned {bits}-bit number")
    return number


def _check_correlation_id(value: SupportsIndex | str) -> int | str:
    """Return the id of a sequence: a text or a number, which may be an element of the CORRID input.

    Source: python_backend before it had text ids, for which FunASR is written; later versions reject numpy's numbers.
    Raises: TritonModelException, with Triton's text; TypeError for a number that does not fit 64 bits.
    """
    if isinstance(value, str):
        return value
    try:
        number = index(value)
    except TypeError:
        raise TritonModelException("Correlation ID must be integer or string") from None
    return _check_unsigned("correlation_id", number, 64)


class InferenceRequest:
    """A request that a model makes. `_message` is its form in messages.py."""

    __slots__ = ("__weakref__", "_inputs", "_message", "_model", "_trace", "_version")
    _server: ClassVar[ServerProxy]

    def __init__(  # noqa: PLR0913 - Triton's
        self, request_id: str | bytes = "", correlation_id: SupportsIndex | str = 0,
        inputs: Sequence[Tensor] | None = None, requested_output_names: Sequence[str | bytes] | None = None,
        model_name: str | bytes | None = None, model_version: int = -1, flags: int = 0, timeout: int = 0,
        preferred_memory: PreferredMemory | None = None, trace: InferenceTrace | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if inputs is None or requested_output_names is None or model_name is None or request_id is None:
            raise TypeError("InferenceRequest: model_name, requested_output_names and inputs must be given")
        request_id = as_text("InferenceRequest: request_id", request_id)
        self._model = as_text("InferenceRequest: model_name", model_name)
        requested = [
            as_text("InferenceRequest: each of requested_output_names", name) for name in requested_output_names
        ]
        sequence = _check_correlation_id(correlation_id)
        subject = f"for request with id '{request_id}' and model name '{self._model}' should not be empty."
        self._inputs: list[Tensor] | None = check_tensors(inputs, f"Input tensor {subject}")
        if trace is not None and not isinstance(trace, InferenceTrace):
            raise TypeError(f"InferenceRequest: trace must be a pb_utils.InferenceTrace, not {type(trace)}")
        if "" in requested:
            raise TritonModelException(f"Requested output name {subject}")
        self._version = int(model_version)
        self._trace = trace
        self._message: dict[str, Any] = {
            "id": request_id, "number": 0, "inputs": [tensor.name() for tensor in self._inputs],
            "outputs": list(dict.fromkeys(requested)), "correlation": sequence,
            "flags": _check_unsigned("flags", flags, 32),
            "timeout_us": _check_unsigned("timeout", timeout, 64), "priority": 0,
            "parameters": check_parameters(parameters),
        }  # fmt: skip

    def inputs(self) -> list[Tensor]:
        return self._inputs or []

    def request_id(self) -> str:
        return self._message["id"]  # type: ignore[no-any-return]

    def correlation_id(self) -> int | str:
        return self._message["correlation"]  # type: ignore[no-any-return]

    def requested_output_names(self) -> set[str]:
        return set(self._message["outputs"])

    def flags(self) -> int:
        return self._message["flags"]  # type: ignore[no-any-return]

    def set_flags(self, flags: int) -> None:
        self._message["flags"] = _check_unsigned("flags", flags, 32)

    def timeout(self) -> int:
        """Return its time limit. Units: microseconds; 0 for none."""
        return self._message["timeout_us"]  # type: ignore[no-any-return]

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return json.dumps(self._message["parameters"])

    def trace(self) -> InferenceTrace:
        return self._trace or InferenceTrace()

    def is_cancelled(self) -> bool:
        return False

    def get_response_sender(self) -> ResponseSender:
        raise TritonModelException(
            "Unable to send response. Response sender has no reference to the decoupled state of the model."
        )

    def set_release_flags(self, flags: int) -> None:
        """Do nothing: the caller owns the request."""

    # -- calling another model ---------------------------------------------------------------------------------

    def _encode_call(self, *, decoupled: bool) -> tuple[dict[str, Any], list[Array]]:
        if not self._server.serving:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        version = str(self._version) if self._version >= 0 else ""
        message = {"model": self._model, "version": version, "decoupled": decoupled, "trace": self.trace().number}
        return message | {"request": self._message}, [tensor.outgoing for tensor in self.inputs()]

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Call the model, and wait for its answer, or for the first of several. Threads: any."""
        message, arrays = self._encode_call(decoupled=decoupled)
        if decoupled:
            try:
                answers = ResponseIterator(self._server, message, arrays)
            except (TypeError, ValueError) as error:
                raise TritonModelException(str(error)) from error
            answers.wait_for_next()
            return answers
        answers_queue: queue.SimpleQueue[tuple[dict[str, Any], list[Array | None]]] = queue.SimpleQueue()
        try:
            self._server.call(message, arrays, lambda answer, tensors: answers_queue.put((answer, tensors)))
        except (TypeError, ValueError) as error:
            return failed_response(str(error))
        return decode_response(*answers_queue.get())

    def async_exec(self, decoupled: bool = False) -> asyncio.Future[Any]:
        """Call the model. Returns: an awaitable on the running loop, for the result of `exec`."""
        import asyncio  # any code that awaits has imported it

        loop = asyncio.get_running_loop()
        if decoupled:
            return loop.run_in_executor(None, self.exec, True)
        message, arrays = self._encode_call(decoupled=False)
        future: asyncio.Future[Any] = loop.create_future()
        self._server.start_sender()

        def set_result(response: InferenceResponse) -> None:
            if not future.done():
                future.set_result(response)

        def on_answer(answer: dict[str, Any], tensors: list[Array | None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(set_result, decode_response(answer, tensors))

        try:
            number = self._server.call(message, arrays, on_answer)
        except (TypeError, ValueError) as error:
            set_result(failed_response(str(error)))
        else:
            future.add_done_callback(lambda done: self._server.cancel_call(number) if done.cancelled() else None)
        return future


class ReceivedRequest(InferenceRequest):
    """A request passed to the model. Its tensors are created on demand.

    `answered`: the last answer has been sent, or is returned with its batch. `rescheduled`: it will be executed again.
    """

    __slots__ = ("_arrays", "_first_array", "answered", "rescheduled", "sender")
    _datatypes: ClassVar[dict[str, int]]
    _outputs: ClassVar[frozenset[str]]
    _decoupled: ClassVar[bool]

    def __init__(self, message: dict[str, Any], arrays: list[Array | None], first_array: int) -> None:
        self._message = message
        self._arrays = arrays
        self._first_array = first_array
        self._inputs = self._trace = None
        self.sender: ResponseSender | None = None
        self.answered = self.rescheduled = False

    # the model may call exec() on its own request, which has no target
    _model = ""
    _version = -1

    def inputs(self) -> list[Tensor]:
        tensors = self._inputs
        if tensors is None:
            datatypes = self._datatypes
            names = self._message["inputs"]
            arrays = self._arrays[self._first_array : self._first_array + len(names)]
            tensors = self._inputs = [
                received_tensor(name, array, datatypes.get(name, 0) if datatypes else 0)
                for name, array in zip(names, arrays, strict=True)
                if array is not None
            ]
        return tensors

    @property
    def number(self) -> int:
        """The number assigned by the server."""
        return self._message["number"]  # type: ignore[no-any-return]

    @property
    def requested_outputs(self) -> list[str]:
        """The requested outputs, empty for all."""
        return self._message["outputs"]  # type: ignore[no-any-return]

    def requested_output_names(self) -> set[str]:
        return set(self._message["outputs"]) or set(self._outputs)

    def trace(self) -> InferenceTrace:
        return InferenceTrace(self.number, self._message.get("context") or ())

    def is_cancelled(self) -> bool:
        return self.number in self._server.cancelled

    def get_response_sender(self) -> ResponseSender:
        with self._server.creation_lock:  # a thread of the model may call this as `execute` returns
            if self.sender is None:
                self.sender = ResponseSender(
                    self._server, self.number, self.requested_outputs, decoupled=self._decoupled
                )
                self.sender.closed = self.answered
            return self.sender

    def set_release_flags(self, flags: int) -> None:
        """Set whether `execute` will receive the request again. No effect once the request has left `execute`."""
        self.rescheduled = bool(flags & RELEASE_RESCHEDULE)
