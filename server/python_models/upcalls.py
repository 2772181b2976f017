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

from .messages import CALL, CALLED, CONTROL, CONTROLLED, LEAVE, LOG, METRIC, TRACEBACK
from .metrics import CustomMetrics
from .requests import END, START, error_said

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


def _log(said: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Log a message of user code; a traceback is placed where the server's own are."""
    level = _LEVELS.get(said["level"], logging.INFO)
    if logger.isEnabledFor(level):
        message, found, lines = said["message"].partition(TRACEBACK)
        terms = said["file"], said["line"], message
        record = logger.makeRecord(logger.name, level, "", 0, "%s:%d: %s", terms, None, extra=dict(about))
        record.exc_text = (found + lines).strip() or None
        logger.handle(record)


class Upcalls:
    """The work in progress for one worker, which is sent the result of each. Threads: the event loop's.

    `requests` finds the worker's requests by number.
    """

    def __init__(
        self, worker: Worker, beside: ServerSide, about: Mapping[str, str],
        requests: Callable[[int], InferRequest | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._worker = worker
        self._requests = requests
        self._beside = beside
        self._about = dict(about)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()

    def take(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Handle a message from the worker."""
        if kind == LEAVE:
            if (task := self._calls.get(number)) is not None:
                task.cancel()
            return
        said = orjson.loads(body)
        if kind == CALL:
            task = self._begin(self._infer(number, said, arrays))
            self._calls[number] = task
            task.add_done_callback(lambda _: self._calls.pop(number, None))
        elif kind == CONTROL:
            self._begin(self._control(number, said, arrays))
        elif kind == METRIC:
            self._beside.metrics.take(self, said)
        elif kind == LOG:
            _log(said, self._about)

    def end(self) -> None:
        """Cancel the work in progress: the worker has ended."""
        self._beside.metrics.forget(self)
        for task in list(self._others):
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task

    # -- other models ------------------------------------------------------------------------------------------

    async def _infer(self, number: int, said: Mapping[str, Any], arrays: Sequence[Array | None]) -> None:
        """Send a request to another model as a dialect does, and return its answers."""
        try:
            await self._carry(number, said, arrays)
        except InferError as error:
            self._answer(number, StreamedAnswer({}, error, True))
        except Exception as error:
            logger.exception("a call of model '%s' has failed", said["model"], extra=self._about)
            text = f"{type(error).__name__} while model '{said['model']}' was asked"
            self._answer(number, StreamedAnswer({}, InferError(Code.INTERNAL, text), True))

    async def _carry(self, number: int, said: Mapping[str, Any], arrays: Sequence[Array | None]) -> None:
        engine, hooks_of = self._beside.engine, self._beside.hooks_of
        model = self._model(said["model"], said["version"])
        if hooks_of is None:
            raise InferError(Code.NOT_READY, "the server does not serve yet")
        if model.spec.decoupled and not said["decoupled"]:
            raise InferError(Code.UNSUPPORTED, _NO_DECOUPLED.format(model.name))
        engine.hold(model)
        try:
            hooks, asked = hooks_of(model), said["request"]
            inputs = _checked(model, asked["inputs"], arrays, hooked=hooks.has_pre)
            terms = _terms(model, asked)._replace(caller=self._requests(said["trace"]))
            call = inputs, asked["id"], terms, asked["parameters"] or None
            wanted = frozenset(asked["outputs"])
            own = [name for name in asked["outputs"] if is_hook_output(model, name)]
            if not said["decoupled"]:
                answered = await hooks.infer(*call)
                require_hook_outputs(model, own, answered)
                outputs, said_with = _only(answered, wanted), getattr(answered, "parameters", None)
                self._answer(number, StreamedAnswer(outputs, None, True, said_with), model)
                return
            final = False
            async with aclosing(hooks.stream(*call)) as answers:
                async for answer in answers:
                    final, outputs = answer.final, {}
                    if answer.error is None:
                        require_hook_outputs(model, own, answer.outputs)
                        outputs = _only(answer.outputs, wanted)
                    self._answer(number, StreamedAnswer(outputs, answer.error, final, answer.parameters), model)
            if not final:
                self._answer(number, StreamedAnswer({}, None, True))
        finally:
            engine.release(model)

    def _model(self, name: str, version: str) -> Model:
        """Find the called model. Raises: InferError (INTERNAL)."""
        try:
            return self._beside.engine.model(name, version)
        except InferError as error:
            raise InferError(Code.INTERNAL, _NOT_READY.format(name)) from error

    def _answer(self, number: int, told: StreamedAnswer, model: Model | None = None) -> None:
        outputs = told.outputs
        said = {
            "outputs": list(outputs),
            "bf16": [name for name, array in outputs.items() if model is not None and _is_bf16(model, name, array)],
            "error": None if told.error is None else error_said(told.error),
            "parameters": dict(told.parameters or {}),
            "final": told.final,
        }
        self._worker.send_message(CALLED, number, orjson.dumps(said), list(outputs.values()))

    # -- the repository ----------------------------------------------------------------------------------------

    async def _control(self, number: int, said: Mapping[str, Any], arrays: Sequence[Array | None]) -> None:
        failed: InferError | None = None
        result = True
        try:
            result = await self._controlled(said, arrays)
        except InferError as error:
            failed = error
        except Exception as error:
            logger.exception("what a model has asked of the repository has failed", extra=self._about)
            failed = InferError(Code.INTERNAL, f"{type(error).__name__} while the repository was asked")
        told = {"error": None if failed is None else error_said(failed), "result": result}
        self._worker.send_message(CONTROLLED, number, orjson.dumps(told))

    async def _controlled(self, said: Mapping[str, Any], arrays: Sequence[Array | None]) -> bool:
        name, control = said["model"], self._beside.control
        if said["do"] == "ready":
            with contextlib.suppress(InferError):
                return await check_ready(self._beside.engine.model(name, said["version"]))
            return False
        if control is None:
            raise InferError(Code.NOT_READY, "the server does not serve yet")
        if said["do"] == "unload":
            await control.unload(name, dependents=said["dependents"])
            return True
        files = {
            path.removeprefix(_FILE): b"" if array is None else array.tobytes()
            for path, array in zip(said["files"], arrays, strict=True)
        }
        await control.load(name, said["config"] or None, files)
        return True


def _checked(model: Model, names: Sequence[str], arrays: Sequence[Array | None], *, hooked: bool) -> dict[str, Array]:
    """Check a request's inputs against its model, and return them by name. Raises: InferError (INVALID)."""
    inputs = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    if hooked:
        return inputs
    signature = model.signature
    known = signature.input
    if any(name not in known for name in inputs) or any(n not in inputs and not s.optional for n, s in known.items()):
        raise inputs_mismatch(model, list(inputs))
    for name, array in inputs.items():
        if array.dtype != known[name].type.dtype:
            raise datatype_mismatch(model, known[name], _DATATYPES.get(array.dtype, str(array.dtype)))
    shapes = [inputs[name].shape if name in inputs else None for name in known]
    check_shapes(model.name, signature, model.max_request_rows, shapes, model.padding)
    return inputs


def _terms(model: Model, asked: Mapping[str, Any]) -> RequestOptions:
    priority, flags = asked["priority"], asked["flags"]
    deadline_ns = queue_deadline_ns(time.monotonic_ns(), asked["timeout_us"], model.spec.policy, 0, priority)
    sequence = None
    if asked["correlation"] or flags:
        sequence = InSequence(asked["correlation"], bool(flags & START), bool(flags & END))
    return RequestOptions(deadline_ns, priority, sequence, None, asked["timeout_us"])


def _is_bf16(model: Model, name: str, array: Array) -> bool:
    """Return whether an array holds the bit patterns of a BF16 output: only the signature shows it."""
    spec = model.signature.output.get(name)
    return spec is not None and spec.datatype == "BF16" and array.dtype == spec.type.dtype


def _only(outputs: Mapping[str, Array], wanted: frozenset[str]) -> dict[str, Array]:
    """Keep only the requested outputs; if none are requested, all."""
    return {name: array for name, array in outputs.items() if not wanted or name in wanted}
