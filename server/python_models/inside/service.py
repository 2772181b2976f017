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
from penstock.server.python_models.messages import ANSWER, ASK_READY, EXECUTE, READY

from .errors import ErrorCode, WrongAnswerError, failure_text, line_in, traceback_text, written_error
from .loading import load_class
from .model_config import ModelConfig
from .module import make_module, received
from .outside import ServerProxy, dumps, loads
from .requests import Received
from .responses import InferenceResponse

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

Reply = tuple[bytes, list[Array | None] | None]
NOT_AGAIN = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag."
)
"""Source: Triton core, infer_request.cc."""


def open_service(settings: dict[str, Any], channel: Channel) -> PythonModel:
    """Create the service; `opened` loads the model, once the worker listens."""
    return PythonModel(settings, channel)


class PythonModel:
    """One instance of a model.

    Invariant: each request of an EXECUTE gets one last answer: in the call's reply, or in an ANSWER message.
    Threads: the worker's for calls, its ear thread for `on_message`, and any threads of model.py for the objects passed
    to it.
    """

    concurrent_messages = True

    def __init__(self, settings: dict[str, Any], channel: Channel) -> None:
        self._file = Path(settings["file"])
        self._args: dict[str, str] = settings["args"]
        self._complete: dict[str, Any] | None = settings.get("complete")
        self._outside = ServerProxy(channel)
        self._module = make_module(self._outside, str(self._file.parent))
        config = self._complete or json.loads(self._args["model_config"])
        self._received = received(self._module, config)
        self._decoupled = self._received._decoupled  # noqa: SLF001 - its own class
        self._iterative = bool(config.get("sequence_batching", {}).get("iterative_sequence"))
        self._name = self._args["model_instance_name"]
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def opened(self) -> Reply:
        """Load the model and initialize it, or have it complete its configuration. Raises: InferError."""
        try:
            kind = load_class(self._file, self._module)
            if self._complete is not None:
                return dumps({"config": self._completed(kind)}), None
            self._model = kind()
            if hasattr(self._model, "initialize"):
                self._model.initialize(dict(self._args))
            if not hasattr(self._model, "execute"):  # in Triton the first request fails instead
                raise WrongAnswerError(f"Python model {self._file} does not implement `execute` method.")
        except BaseException as error:
            self._log("info", error)  # the traceback; the server reports that loading failed
            raise InferError(Code.INTERNAL, failure_text(error)) from error
        self._outside.serving = True
        return dumps({"config": None, "asked": hasattr(self._model, "is_ready")}), None

    def _completed(self, kind: Any) -> dict[str, Any]:
        config: Any = ModelConfig(json.dumps(self._complete))
        if hasattr(kind, "auto_complete_config"):
            config = kind.auto_complete_config(config)
        if not isinstance(config, ModelConfig):
            raise WrongAnswerError(
                f"auto_complete_config function in model '{self._name}' must return a valid pb.ModelConfig object."
            )
        return config.as_dict()

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        if kind == ASK_READY:  # on a thread: it may take long, and the ear must hear other messages
            threading.Thread(target=self._tell_ready, name="ready", daemon=True).start()
        else:
            self._outside.on_message(kind, number, body, arrays)

    def _tell_ready(self) -> None:
        """Report whether the model is ready; an exception means that it is not."""
        ready = False
        with contextlib.suppress(OSError):  # the server has gone
            try:
                ready = self._says_ready()
            except BaseException as error:  # noqa: BLE001 - also sys.exit in user code
                self._log("error", error, f"Model '{self._name}' is not ready: ")
            self._outside.tell(READY, 0, {"ready": ready})

    def _says_ready(self) -> bool:
        """Call `is_ready`, also while `execute` runs. Raises: what it raises; WrongAnswerError."""
        said = self._model.is_ready()
        if isinstance(said, Coroutine):
            said = self._started(said).result()
        if not isinstance(said, bool):
            raise WrongAnswerError(f"Expected a bool in the is_ready return, found type '{type(said)}'.")
        return said

    def close(self) -> None:
        """Finalize the model; exceptions are logged."""
        self._outside.serving = False
        self._outside.ending = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if hasattr(self._model, "finalize"):
            try:
                self._model.finalize()
            except BaseException as error:  # noqa: BLE001 - Triton logs it as well
                self._log("info", error)

    def _log(self, level: str, error: BaseException, what: str = "") -> None:
        text = what + traceback_text(error)
        self._outside.log(level, text, str(self._file), line_in(str(self._file), error))

    # -- execute -----------------------------------------------------------------------------------------------

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Execute a batch of requests."""
        if kind != EXECUTE:
            raise InferError(Code.INTERNAL, f"a Python model has no call of kind {kind}")
        at = 0
        requests: list[Received] = []
        kind_of_request = self._received
        for said in loads(body)["requests"]:
            requests.append(kind_of_request(said, arrays, at))
            at += len(said["inputs"])
        for request in requests if self._outside.kept else ():
            request.sender = self._outside.kept.pop(request.number, None)
        answers: dict[int, InferenceResponse] = {}
        error = self._run(requests, answers)
        try:
            return self._written(requests, answers, error)
        except (TypeError, ValueError) as wrong:  # parameters that JSON cannot encode
            return self._written(requests, {}, self._failed(wrong))

    def _run(self, requests: list[Received], answers: dict[int, InferenceResponse]) -> dict[str, Any] | None:
        """Execute requests. Returns: the answer for all that have none, if execution failed."""
        try:
            responses = self._execute(requests)
            if responses is not None:
                _take(requests, responses, answers)
            for request in requests:
                if request.number not in answers:
                    request.get_response_sender()  # every request must end, even if model.py drops it
        except BaseException as error:
            if self._outside.elsewhere:
                raise  # a child forked by execute ends
            return self._failed(error)  # sys.exit in user code fails only its own call
        return None

    def _failed(self, error: BaseException) -> dict[str, Any]:
        what = f"Failed to process the request(s) for model '{self._name}', message: "
        self._log("error", error, what)
        return _failure(written_error(what + failure_text(error)))

    def _written(
        self, requests: list[Received], answers: dict[int, InferenceResponse], error: dict[str, Any] | None
    ) -> Reply:
        """Return the reply to a call: each request's answer, `error` if it has no last one, or null if it is sent.

        Requests to be executed again are listed, unless their last answer has been sent.
        """
        answered: list[dict[str, Any] | None] = []
        outgoing: list[Array | None] = []
        again: list[int] = []
        for request in requests:
            response, said = answers.get(request.number), error
            if response is not None:
                said, tensors = response.written(request.wanted, final=True)
                outgoing += tensors
            elif error is None and request.again and self._iterative:
                if request.get_response_sender().keep():
                    again.append(request.number)
            elif (error is not None or request.again) and _left_open(request):
                said = error or _failure(written_error(NOT_AGAIN, ErrorCode.INVALID_ARG))
            else:
                said = None
            answered.append(said)
        return dumps({"answers": answered, "again": again} if again else {"answers": answered}), outgoing

    def _execute(self, requests: list[Received]) -> list[Any] | None:
        """Call `execute`. Returns: its answers, None if they are sent. Raises: what it raises; WrongAnswerError."""
        returned = self._model.execute(requests)
        if isinstance(returned, Coroutine):
            running = self._started(returned)
            if self._decoupled:
                running.add_done_callback(lambda done: self._ended(done, requests))
                return None
            returned = running.result()
        if returned is None:
            return None
        if self._decoupled:
            raise WrongAnswerError(
                f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."
            )
        if not isinstance(returned, list):
            raise WrongAnswerError(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise WrongAnswerError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        return returned

    def _started(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        import asyncio  # models without coroutines need not wait for this import

        with self._outside.making:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._keep_running, args=(self._loop,), name="execute", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _keep_running(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until the model is closed, even if `sys.exit` in a coroutine, or `stop`, ends it."""
        while not (self._outside.ending or loop.is_closed()):
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    def _ended(self, done: Future[Any], requests: list[Received]) -> None:
        """If a decoupled coroutine failed, end the requests that it left open."""
        import asyncio

        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            failed = self._failed(error)
            for request in requests:
                if request.get_response_sender().close():
                    self._outside.tell(ANSWER, request.number, failed)


def _failure(error: dict[str, Any]) -> dict[str, Any]:
    return {"outputs": [], "error": error, "parameters": {}, "final": True}


def _take(requests: list[Received], responses: list[Any], answers: dict[int, InferenceResponse]) -> None:
    """Add what `execute` returned to `answers`. Raises: WrongAnswerError; TritonModelException for a surplus answer."""
    taken: dict[int, InferenceResponse] = {}
    for request, response in zip(requests, responses, strict=True):
        if response is None:
            continue
        if request.again:
            raise WrongAnswerError(
                "Expected a None object in the execute function return list for reschduled request, found type "
                f"'{type(response)}'."
            )
        if not isinstance(response, InferenceResponse):
            raise WrongAnswerError(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response)}'."
            )
        if request.sender is not None:
            request.sender.count()
        request.ended = True
        taken[request.number] = response
    answers.update(taken)


def _left_open(request: Received) -> bool:
    """Close a request. Returns: whether its last answer was still to be sent."""
    if request.sender is not None:
        return request.sender.close() or request.ended
    request.ended = True
    return True
