"""Service: a Triton Python model in a worker, called by the loop of server/workers/service.py.

messages.py describes its settings.
Source: python_backend, src/pb_stub.cc: the order of steps, the checks, and the texts.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.ipc.channel import Channel
from penstock.server.python_models.messages import ANSWER, CHECK_READY, EXECUTE, READY

from .errors import ErrorCode, InvalidAnswerError, encode_error, failure_text, line_of_error, traceback_text
from .loading import load_class
from .model_config import ModelConfig
from .module import make_module, make_request_class
from .requests import ReceivedRequest
from .responses import InferenceResponse
from .server_proxy import ServerProxy, dumps, loads

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

Reply = tuple[bytes, list[Array | None] | None]
RESCHEDULE_UNSUPPORTED = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag."
)
"""Source: Triton core, infer_request.cc."""


def open_service(settings: dict[str, Any], channel: Channel) -> PythonModel:
    """Create the service; `on_open` loads the model, once the worker listens."""
    return PythonModel(settings, channel)


class PythonModel:
    """One instance of a model.

    Invariant: each request of an EXECUTE gets one last answer: in the call's reply, or in an ANSWER message.
    Threads: the worker's for calls, its listener thread for `on_message`, and any threads of model.py for the objects
    passed to it.
    """

    concurrent_messages = True

    def __init__(self, settings: dict[str, Any], channel: Channel) -> None:
        self._file = Path(settings["file"])
        self._args: dict[str, str] = settings["args"]
        self._config_to_complete: dict[str, Any] | None = settings.get("complete")
        self._server = ServerProxy(channel)
        self._module = make_module(self._server, str(self._file.parent))
        config = self._config_to_complete or json.loads(self._args["model_config"])
        self._request_class = make_request_class(self._module, config)
        self._decoupled = self._request_class._decoupled  # noqa: SLF001 - its own class
        self._iterative = bool(config.get("sequence_batching", {}).get("iterative_sequence"))
        self._name = self._args["model_instance_name"]
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def on_open(self) -> Reply:
        """Load the model and initialize it, or have it complete its configuration. Raises: InferError."""
        try:
            model_class = load_class(self._file, self._module)
            if self._config_to_complete is not None:
                return dumps({"config": self._complete_config(model_class)}), None
            self._model = model_class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(dict(self._args))
            if not hasattr(self._model, "execute"):  # in Triton the first request fails instead
                raise InvalidAnswerError(f"Python model {self._file} does not implement `execute` method.")
        except BaseException as error:
            self._log("info", error)  # the traceback; the server reports that loading failed
            raise InferError(Code.INTERNAL, failure_text(error)) from error
        self._server.serving = True
        return dumps({"config": None, "has_is_ready": hasattr(self._model, "is_ready")}), None

    def _complete_config(self, model_class: Any) -> dict[str, Any]:
        config: Any = ModelConfig(json.dumps(self._config_to_complete))
        if hasattr(model_class, "auto_complete_config"):
            config = model_class.auto_complete_config(config)
        if not isinstance(config, ModelConfig):
            raise InvalidAnswerError(
                f"auto_complete_config function in model '{self._name}' must return a valid pb.ModelConfig object."
            )
        return config.as_dict()

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        if kind == CHECK_READY:  # on a thread: it may take long, and the listener must receive other messages
            threading.Thread(target=self._send_ready, name="ready", daemon=True).start()
        else:
            self._server.on_message(kind, number, body, arrays)

    def _send_ready(self) -> None:
        """Report whether the model is ready; an exception means that it is not."""
        ready = False
        with contextlib.suppress(OSError):  # the server has gone
            try:
                ready = self._check_ready()
            except BaseException as error:  # noqa: BLE001 - also sys.exit in user code
                self._log("error", error, f"Model '{self._name}' is not ready: ")
            self._server.send_message(READY, 0, {"ready": ready})

    def _check_ready(self) -> bool:
        """Call `is_ready`, also while `execute` runs. Raises: what it raises; InvalidAnswerError."""
        ready = self._model.is_ready()
        if isinstance(ready, Coroutine):
            ready = self._schedule_coroutine(ready).result()
        if not isinstance(ready, bool):
            raise InvalidAnswerError(f"Expected a bool in the is_ready return, found type '{type(ready)}'.")
        return ready

    def close(self) -> None:
        """Finalize the model; exceptions are logged."""
        self._server.serving = False
        self._server.closing = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if hasattr(self._model, "finalize"):
            try:
                self._model.finalize()
            except BaseException as error:  # noqa: BLE001 - Triton logs it as well
                self._log("info", error)

    def _log(self, level: str, error: BaseException, prefix: str = "") -> None:
        text = prefix + traceback_text(error)
        self._server.log(level, text, str(self._file), line_of_error(str(self._file), error))

    # -- execute -----------------------------------------------------------------------------------------------

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Execute a batch of requests."""
        if kind != EXECUTE:
            raise InferError(Code.INTERNAL, f"unknown call kind {kind}")
        first_array = 0
        requests: list[ReceivedRequest] = []
        request_class = self._request_class
        for message in loads(body)["requests"]:
            requests.append(request_class(message, arrays, first_array))
            first_array += len(message["inputs"])
        for request in requests if self._server.rescheduled_senders else ():
            request.sender = self._server.rescheduled_senders.pop(request.number, None)
        answers: dict[int, InferenceResponse] = {}
        error = self._run(requests, answers)
        try:
            return self._encode_reply(requests, answers, error)
        except (TypeError, ValueError) as invalid:  # parameters that JSON cannot encode
            return self._encode_reply(requests, {}, self._log_failure(invalid))

    def _run(self, requests: list[ReceivedRequest], answers: dict[int, InferenceResponse]) -> dict[str, Any] | None:
        """Execute requests. Returns: the answer for all that have none, if execution failed."""
        try:
            responses = self._execute(requests)
            if responses is not None:
                _collect_responses(requests, responses, answers)
            for request in requests:
                if request.number not in answers:
                    request.get_response_sender()  # every request must end, even if model.py drops it
        except BaseException as error:
            if self._server.is_forked:
                raise  # a child forked by execute ends
            return self._log_failure(error)  # sys.exit in user code fails only its own call
        return None

    def _log_failure(self, error: BaseException) -> dict[str, Any]:
        prefix = f"Failed to process the request(s) for model '{self._name}', message: "
        self._log("error", error, prefix)
        return _error_answer(encode_error(prefix + failure_text(error)))

    def _encode_reply(
        self, requests: list[ReceivedRequest], answers: dict[int, InferenceResponse], error: dict[str, Any] | None
    ) -> Reply:
        """Return the reply to a call: each request's answer, `error` if it has no last one, or null if it is sent.

        Requests to be executed again are listed, unless their last answer has been sent.
        """
        encoded: list[dict[str, Any] | None] = []
        outgoing: list[Array | None] = []
        rescheduled: list[int] = []
        for request in requests:
            response, answer = answers.get(request.number), error
            if response is not None:
                answer, tensors = response.encode(request.requested_outputs, final=True)
                outgoing += tensors
            elif error is None and request.rescheduled and self._iterative:
                if request.get_response_sender().reschedule():
                    rescheduled.append(request.number)
            elif (error is not None or request.rescheduled) and _close_request(request):
                answer = error or _error_answer(encode_error(RESCHEDULE_UNSUPPORTED, ErrorCode.INVALID_ARG))
            else:
                answer = None
            encoded.append(answer)
        reply: dict[str, Any] = {"answers": encoded}
        if rescheduled:
            reply["rescheduled"] = rescheduled
        return dumps(reply), outgoing

    def _execute(self, requests: list[ReceivedRequest]) -> list[Any] | None:
        """Call `execute`. Returns: its answers, None if they are sent. Raises: what it raises; InvalidAnswerError."""
        returned = self._model.execute(requests)
        if isinstance(returned, Coroutine):
            running = self._schedule_coroutine(returned)
            if self._decoupled:
                running.add_done_callback(lambda done: self._on_coroutine_done(done, requests))
                return None
            returned = running.result()
        if returned is None:
            return None
        if self._decoupled:
            raise InvalidAnswerError(
                f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."
            )
        if not isinstance(returned, list):
            raise InvalidAnswerError(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise InvalidAnswerError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        return returned

    def _schedule_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        import asyncio  # models without coroutines need not wait for this import

        with self._server.creation_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run_loop, args=(self._loop,), name="execute", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until the model is closed, even if `sys.exit` in a coroutine, or `stop`, ends it."""
        while not (self._server.closing or loop.is_closed()):
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    def _on_coroutine_done(self, done: Future[Any], requests: list[ReceivedRequest]) -> None:
        """If a decoupled coroutine failed, end the requests that it left open."""
        import asyncio

        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            answer = self._log_failure(error)
            for request in requests:
                if request.get_response_sender().close():
                    self._server.send_message(ANSWER, request.number, answer)


def _error_answer(error: dict[str, Any]) -> dict[str, Any]:
    return {"outputs": [], "error": error, "parameters": {}, "final": True}


def _collect_responses(
    requests: list[ReceivedRequest], responses: list[Any], answers: dict[int, InferenceResponse]
) -> None:
    """Add the results of `execute` to `answers`. Raises: InvalidAnswerError; TritonModelException for an extra one."""
    accepted: dict[int, InferenceResponse] = {}
    for request, response in zip(requests, responses, strict=True):
        if response is None:
            continue
        if request.rescheduled:
            raise InvalidAnswerError(
                "Expected a None object in the execute function return list for reschduled request, found type "
                f"'{type(response)}'."
            )
        if not isinstance(response, InferenceResponse):
            raise InvalidAnswerError(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response)}'."
            )
        if request.sender is not None:
            request.sender.record_returned()
        request.answered = True
        accepted[request.number] = response
    answers.update(accepted)


def _close_request(request: ReceivedRequest) -> bool:
    """Close a request. Returns: whether its last answer was still to be sent."""
    if request.sender is not None:
        return request.sender.close() or request.answered
    request.answered = True
    return True
