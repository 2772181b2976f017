"""Upcalls: what one worker with a Python model asks of the server, other than answers to its requests.

It calls other models (BLS), loads and unloads them, reports metrics, and writes to the log. loading.py makes one for
each worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from penstock.backends.datatypes import DATATYPES
from penstock.backends.errors import Code, InferError
from penstock.batching.request import InSequence, RequestOptions
from penstock.batching.running.external_models import check_ready
from penstock.batching.scheduling.request_checks import check_shapes
from penstock.batching.scheduling.timeouts import queue_deadline_ns
from penstock.batching.stream import StreamedAnswer
from penstock.server.v2.decode import datatype_mismatch, inputs_mismatch
from penstock.server.v2.requested_outputs import is_hook_output, require_hook_outputs

from .batch_codec import END, START, encode_error
from .messages import CALL, CALL_ANSWER, CANCEL_CALL, CONTROL, CONTROL_RESULT, LOG, METRIC, TRACEBACK
from .metrics import CustomMetrics

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.engine import Engine
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest
    from penstock.server.hooks.runner import Hooks
    from penstock.server.repository.control import ModelControl
    from penstock.server.workers.worker import Worker

logger = logging.getLogger("penstock.python_models.user")
_LEVELS = {"verbose": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_DATATYPES = {row.dtype: row.name for row in reversed(DATATYPES.values())}  # for BF16, the one numpy has
_FILE = "file:"
_NO_DECOUPLED = (
    "Model {} is using the decoupled. The current BLS request call doesn't support models using the decoupled "
    "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
    "models.'"
)
_NOT_READY = "Failed for execute the inference request. Model '{}' is not ready."
"""Source of both: python_backend, request_executor.cc."""


@dataclass(slots=True)
class ServerSide:
    """The server as seen by its Python models. The composition root sets the fields that may be None.

    `context_for` returns the `traceparent` and `tracestate` for work done on behalf of a request, "" for none.
    """

    engine: Engine
    metrics: CustomMetrics
    hooks_of: Callable[[Model], Hooks] | None = None
    control: ModelControl | None = None
    context_for: Callable[[InferRequest], tuple[str, str]] | None = None


def _log(entry: Mapping[str, Any], log_fields: Mapping[str, str]) -> None:
    """Log a message of user code; a traceback is placed where the server's own are."""
    level = _LEVELS.get(entry["level"], logging.INFO)
    if logger.isEnabledFor(level):
        message, separator, lines = entry["message"].partition(TRACEBACK)
        location = entry["file"], entry["line"], message
        record = logger.makeRecord(logger.name, level, "", 0, "%s:%d: %s", location, None, extra=dict(log_fields))
        record.exc_text = (separator + lines).strip() or None
        logger.handle(record)


class Upcalls:
    """The work in progress for one worker, which is sent the result of each. Threads: the event loop's.

    `find_request` finds the worker's requests by number.
    """

    def __init__(
        self, server: ServerSide, log_fields: Mapping[str, str], worker: Worker,
        find_request: Callable[[int], InferRequest | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._worker = worker
        self._find_request = find_request
        self._server = server
        self._log_fields = dict(log_fields)
        self._call_tasks: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Handle a message from the worker."""
        if kind == CANCEL_CALL:
            if (task := self._call_tasks.get(number)) is not None:
                task.cancel()
            return
        message = orjson.loads(body)
        if kind == CALL:
            task = self._start_task(self._handle_call(number, message, arrays))
            self._call_tasks[number] = task
            task.add_done_callback(lambda _: self._call_tasks.pop(number, None))
        elif kind == CONTROL:
            self._start_task(self._handle_control(number, message, arrays))
        elif kind == METRIC:
            self._server.metrics.apply(self, message)
        elif kind == LOG:
            _log(message, self._log_fields)

    def cancel_all(self) -> None:
        """Cancel the work in progress: the worker has ended."""
        self._server.metrics.remove_owner(self)
        for task in list(self._tasks):
            task.cancel()

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- other models ------------------------------------------------------------------------------------------

    async def _handle_call(self, number: int, message: Mapping[str, Any], arrays: Sequence[Array | None]) -> None:
        """Send a request to another model as a dialect does, and return its answers."""
        try:
            await self._run_inference(number, message, arrays)
        except InferError as error:
            self._send_answer(number, StreamedAnswer({}, error, True))
        except Exception as error:
            logger.exception("the call to model '%s' failed", message["model"], extra=self._log_fields)
            text = f"{type(error).__name__} while model '{message['model']}' was called"
            self._send_answer(number, StreamedAnswer({}, InferError(Code.INTERNAL, text), True))

    async def _run_inference(self, number: int, message: Mapping[str, Any], arrays: Sequence[Array | None]) -> None:
        engine, hooks_of = self._server.engine, self._server.hooks_of
        model = self._find_model(message["model"], message["version"])
        if hooks_of is None:
            raise InferError(Code.NOT_READY, "the server is not ready to serve requests yet")
        if model.spec.decoupled and not message["decoupled"]:
            raise InferError(Code.UNSUPPORTED, _NO_DECOUPLED.format(model.name))
        engine.hold(model)
        try:
            hooks, request = hooks_of(model), message["request"]
            inputs = _check_inputs(model, request["inputs"], arrays, has_pre_hook=hooks.has_pre)
            terms = _make_terms(model, request)._replace(caller=self._find_request(message["trace"]))
            call = inputs, request["id"], terms, request["parameters"] or None
            requested = frozenset(request["outputs"])
            hook_outputs = [name for name in request["outputs"] if is_hook_output(model, name)]
            if not message["decoupled"]:
                answered = await hooks.infer(*call)
                require_hook_outputs(model, hook_outputs, answered)
                outputs, parameters = _select_outputs(answered, requested), getattr(answered, "parameters", None)
                self._send_answer(number, StreamedAnswer(outputs, None, True, parameters), model)
                return
            final = False
            async with aclosing(hooks.stream(*call)) as answers:
                async for answer in answers:
                    final, outputs = answer.final, {}
                    if answer.error is None:
                        require_hook_outputs(model, hook_outputs, answer.outputs)
                        outputs = _select_outputs(answer.outputs, requested)
                    self._send_answer(number, StreamedAnswer(outputs, answer.error, final, answer.parameters), model)
            if not final:
                self._send_answer(number, StreamedAnswer({}, None, True))
        finally:
            engine.release(model)

    def _find_model(self, name: str, version: str) -> Model:
        """Find the called model. Raises: InferError (INTERNAL)."""
        try:
            return self._server.engine.model(name, version)
        except InferError as error:
            raise InferError(Code.INTERNAL, _NOT_READY.format(name)) from error

    def _send_answer(self, number: int, answer: StreamedAnswer, model: Model | None = None) -> None:
        outputs = answer.outputs
        message = {
            "outputs": list(outputs),
            "bf16": [name for name, array in outputs.items() if model is not None and _is_bf16(model, name, array)],
            "error": None if answer.error is None else encode_error(answer.error),
            "parameters": dict(answer.parameters or {}),
            "final": answer.final,
        }
        self._worker.send_message(CALL_ANSWER, number, orjson.dumps(message), list(outputs.values()))

    # -- the repository ----------------------------------------------------------------------------------------

    async def _handle_control(self, number: int, message: Mapping[str, Any], arrays: Sequence[Array | None]) -> None:
        failure: InferError | None = None
        result = True
        try:
            result = await self._run_control(message, arrays)
        except InferError as error:
            failure = error
        except Exception as error:
            logger.exception("a model's repository request failed", extra=self._log_fields)
            failure = InferError(Code.INTERNAL, f"{type(error).__name__} in a repository request")
        reply = {"error": None if failure is None else encode_error(failure), "result": result}
        self._worker.send_message(CONTROL_RESULT, number, orjson.dumps(reply))

    async def _run_control(self, message: Mapping[str, Any], arrays: Sequence[Array | None]) -> bool:
        name, control = message["model"], self._server.control
        if message["do"] == "ready":
            with contextlib.suppress(InferError):
                return await check_ready(self._server.engine.model(name, message["version"]))
            return False
        if control is None:
            raise InferError(Code.NOT_READY, "the server is not ready to serve requests yet")
        if message["do"] == "unload":
            await control.unload(name, dependents=message["dependents"])
            return True
        files = {
            path.removeprefix(_FILE): b"" if array is None else array.tobytes()
            for path, array in zip(message["files"], arrays, strict=True)
        }
        await control.load(name, message["config"] or None, files)
        return True


def _check_inputs(
    model: Model, names: Sequence[str], arrays: Sequence[Array | None], *, has_pre_hook: bool
) -> dict[str, Array]:
    """Check a request's inputs against its model, and return them by name. Raises: InferError (INVALID)."""
    inputs = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    if has_pre_hook:
        return inputs
    signature = model.signature
    specs = signature.input
    if any(name not in specs for name in inputs) or any(n not in inputs and not s.optional for n, s in specs.items()):
        raise inputs_mismatch(model, list(inputs))
    for name, array in inputs.items():
        if array.dtype != specs[name].type.dtype:
            raise datatype_mismatch(model, specs[name], _DATATYPES.get(array.dtype, str(array.dtype)))
    shapes = [inputs[name].shape if name in inputs else None for name in specs]
    check_shapes(model.name, signature, model.max_request_rows, shapes, model.padding)
    return inputs


def _make_terms(model: Model, request: Mapping[str, Any]) -> RequestOptions:
    priority, flags = request["priority"], request["flags"]
    deadline_ns = queue_deadline_ns(time.monotonic_ns(), request["timeout_us"], model.spec.policy, 0, priority)
    sequence = None
    if request["correlation"] or flags:
        sequence = InSequence(request["correlation"], bool(flags & START), bool(flags & END))
    return RequestOptions(deadline_ns, priority, sequence, None, request["timeout_us"])


def _is_bf16(model: Model, name: str, array: Array) -> bool:
    """Return whether an array holds the bit patterns of a BF16 output: only the signature shows it."""
    spec = model.signature.output.get(name)
    return spec is not None and spec.datatype == "BF16" and array.dtype == spec.type.dtype


def _select_outputs(outputs: Mapping[str, Array], requested: frozenset[str]) -> dict[str, Array]:
    """Keep only the requested outputs; if none are requested, all."""
    return {name: array for name, array in outputs.items() if not requested or name in requested}
