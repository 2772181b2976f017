"""HookService: a model's hooks in a worker process, as the service opened there by `worker_replica.py`.

Any Python with numpy and orjson can import everything this module imports.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from penstock.backends.backend import Array
from penstock.backends.errors import InferError
from penstock.backends.node import Node
from penstock.server.ipc.channel import Channel
from penstock.server.ipc.errors import write_error

from .conversions import ModelDescription, bind, make_conversions
from .loading import POST, PRE, HookModule, exception_line, user_frames
from .mounts import install
from .packing import (
    ANSWER,
    ANSWER_HEADER,
    CALL,
    CALL_HEADER,
    CANCEL_GENERATOR,
    DISCARD_PARAMETERS,
    DONE,
    EXCEPTION,
    INFER_ERROR,
    INPUTS,
    JSON,
    PLAIN_JSON,
    PREEMPT,
    PYTHON_JSON,
    PYTHON_JSON_PARAMETERS,
    REPLY_HEADER,
    REQUEST_NUMBER,
    STEP_GENERATOR,
    STEP_HEADER,
    read_json,
    read_signature,
    read_value,
    tensor_bytes,
    unpack,
)  # fmt: skip
from .private_modules import FolderOnPath

_TRACEBACK_INTERVAL_NS = 1_000_000_000
_CALL_HEADER_BYTES = CALL_HEADER.size
_PACK_REPLY_HEADER, _UNPACK_CALL_HEADER, _LOADS = REPLY_HEADER.pack, CALL_HEADER.unpack_from, orjson.loads
Reply = tuple[bytes, Sequence[Array | None] | None]


def open_service(settings: dict[str, Any], channel: Channel) -> HookService:
    """Load the hook file. Raises: InferError (INVALID) if it is invalid."""
    # before any user code is loaded; it stays for the life of the process
    install(settings["mounts"])
    path, roots = Path(settings["path"]), tuple(map(Path, settings["roots"]))
    on_path = FolderOnPath(*(roots or (path.parent,)))
    try:
        module = HookModule(
            path, decoupled=settings["decoupled"], roots=roots, dialect=settings["dialect"], label=settings["model"]
        )
    except InferError as error:
        if error.__cause__ is not None:
            sys.stderr.write(_traceback(error.__cause__))
        raise
    service = AsyncHookService if module.is_async else HookService
    return service(module, on_path, settings, channel)


def _traceback(error: BaseException) -> str:
    """Format a traceback that begins in user code."""
    return "".join(traceback.format_exception(type(error), error, user_frames(error)))


class HookService:
    """One instance of the hook file, and its active generators.

    `_retained_parameters` are the parameters of requests whose pre_inference has run here and whose post_inference
    will: user code may have added objects to them that cannot be sent between processes.
    Threads: hooks run on the main one. `on_message` may be called on another, and only records.
    """

    is_async = False

    def __init__(self, module: HookModule, on_path: FolderOnPath, settings: dict[str, Any], channel: Channel) -> None:
        self._module = module
        self._on_path = on_path
        self._channel = channel
        signature = read_signature(settings["signature"])
        inputs, outputs = (list(map(Node.from_json, settings[side])) for side in ("inputs", "outputs"))
        description = ModelDescription(
            signature, inputs, outputs, settings["runtime_metadata"], settings["dialect_settings"]
        )
        conversions = make_conversions(settings["dialect"], description)
        self._bound = bind(module, conversions, signature, unpack(settings["metadata"]))
        self._hooks, self._converters = (
            (self._bound.functions[PRE], self._bound.functions[POST]),
            self._bound.converters,
        )
        self._to_prediction = conversions.to_prediction
        self._in_hook = False
        self._accepts_parameters = [bool(settings["dialect"]) or module.takes_parameters(hook) for hook in (PRE, POST)]
        self._keeps_parameters = module.takes_parameters(PRE) and module.takes_parameters(POST)
        self._retained_parameters: dict[int, dict[str, Any]] = {}
        self._generators: dict[int, tuple[Iterator[Any], dict[str, Any]]] = {}
        self._cancelled: set[int] = set()
        self._preempted_turn = 0
        self._last_traceback_ns = 0
        self._exhausted_ns = -1
        self.concurrent_messages = module.yields and not self.is_async

    def on_open(self) -> Reply:
        """Describe the hooks in the file."""
        description = {
            "pre": self._hooks[0] is not None,
            "post": self._hooks[1] is not None,
            "yields": self._module.yields,
        }
        return json.dumps(
            description | {"takes": self._accepts_parameters, "keeps": self._keeps_parameters}
        ).encode(), None

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Any:
        """Run a hook, or some steps of a generator. Errors are part of the reply."""
        start_ns, self._in_hook = 0, False
        try:
            if kind == CALL:
                hook, conversion, value, parameters = self._read_call(body, 0, arrays)
                start_ns = time.monotonic_ns()
                self._in_hook = True
                result = hook(value, parameters)
                if conversion == INPUTS:  # inlined from `_convert_result`, for what every small request needs
                    self._in_hook = False
                    converted = self._converters[INPUTS](result, parameters)
                    return _PACK_REPLY_HEADER(DONE, time.monotonic_ns() - start_ns, 0), converted
                return self._reply(start_ns, *self._convert_result(conversion, result, parameters))
            start_ns = time.monotonic_ns()
            if kind == STEP_GENERATOR:
                for _ in self._step_generator(body, arrays):
                    pass
            else:
                self._close_generator(REQUEST_NUMBER.unpack(body)[0])
            return self._reply(start_ns)
        except BaseException as error:  # noqa: BLE001 - sys.exit in a hook must only affect its own request
            return self._error_reply(start_ns, error, body if kind == CALL else b"")

    def _reply(self, start_ns: int, text: bytes = b"", tensors: Sequence[Array | None] | None = None) -> Reply:
        exhausted_ns, self._exhausted_ns = self._exhausted_ns, -1
        return REPLY_HEADER.pack(DONE, time.monotonic_ns() - start_ns, exhausted_ns + 1) + text, tensors

    def _read_call(self, body: bytes, start: int, arrays: list[Array | None]) -> tuple[Any, int, Any, dict[str, Any]]:
        hook_index, conversion, encoding, parameters_bytes, request_number = _UNPACK_CALL_HEADER(body, start)
        start += _CALL_HEADER_BYTES
        if not (hook_index or encoding or parameters_bytes or self._keeps_parameters):
            return self._hooks[0], conversion, _LOADS(body[start:]), {}
        parameters = self._retained_parameters.pop(request_number, None) if hook_index else None
        if parameters is None:
            parameters_encoding = PYTHON_JSON if encoding & PYTHON_JSON_PARAMETERS else PLAIN_JSON
            parameters = (
                read_json(body[start : start + parameters_bytes], parameters_encoding) if parameters_bytes else {}
            )
            if self._keeps_parameters and not hook_index:
                self._retained_parameters[request_number] = parameters
        if encoding == PLAIN_JSON:
            value = orjson.loads(body[start + parameters_bytes :])
        else:
            value = read_value(body[start + parameters_bytes :], encoding & ~PYTHON_JSON_PARAMETERS, arrays)
        if hook_index:
            value = self._to_prediction(value, parameters)
        return self._hooks[hook_index], conversion, value, parameters

    def _convert_result(self, conversion: int, result: Any, parameters: Mapping[str, Any]) -> Reply:
        self._in_hook = False
        converted = self._converters[conversion](result, parameters)
        if conversion == INPUTS:
            return b"", converted
        return (converted, None) if conversion == JSON else (orjson.dumps(list(converted)), list(converted.values()))

    def _error_reply(self, start_ns: int, error: BaseException, body: bytes) -> Reply:
        """Encode an exception, with a traceback unless the sample may be the cause and the last one was just sent."""
        now_ns, is_pre = time.monotonic_ns(), body[:1] == b"\0"
        if is_pre:
            self._retained_parameters.pop(CALL_HEADER.unpack_from(body)[-1], None)
        duration_ns = now_ns - start_ns if start_ns else 0
        dialect_error = self._bound.dialect_error(PRE if is_pre else POST, error) if self._in_hook else None
        if dialect_error is None and isinstance(error, InferError):
            return REPLY_HEADER.pack(INFER_ERROR, duration_ns, 0) + write_error(error), None
        is_exception, traceback_text = isinstance(error, Exception), ""
        if not (is_pre and is_exception) or now_ns - self._last_traceback_ns > _TRACEBACK_INTERVAL_NS:
            self._last_traceback_ns = now_ns
            traceback_text = _traceback(error)
        dialect_error_text = write_error(dialect_error).decode() if dialect_error is not None else ""
        return REPLY_HEADER.pack(EXCEPTION, duration_ns, 0) + json.dumps(
            [exception_line(error), is_exception, traceback_text, dialect_error_text]
        ).encode(), None

    # -- generators --------------------------------------------------------------------------------------------

    def _step_generator(self, body: bytes, arrays: list[Array | None]) -> Iterator[None]:
        """Step until enough is ahead, another call waits, or it ends; pause after each. Raises: what a step raises."""
        number, turn, conversion, max_steps, room_bytes = STEP_HEADER.unpack_from(body)
        steps = answered_bytes = 0
        try:
            while number not in self._cancelled and steps < max_steps and answered_bytes < room_bytes:
                if steps and turn <= self._preempted_turn:
                    return
                steps += 1
                start_ns = time.monotonic_ns()
                if number not in self._generators:
                    hook, _, value, parameters = self._read_call(body, STEP_HEADER.size, arrays)
                    self._in_hook = True
                    self._generators[number] = iter(hook(value, parameters)), parameters
                    del value
                    arrays.clear()
                self._in_hook = True
                generator, parameters = self._generators[number]
                try:
                    value = next(generator)
                except StopIteration:
                    self._generators.pop(number)
                    self._exhausted_ns = time.monotonic_ns() - start_ns
                    return
                answered_bytes += self._send_answer(number, value, start_ns, conversion, parameters)
                yield
        except BaseException:
            self._close_generator(number)
            raise
        if number in self._cancelled:
            self._close_generator(number)

    def _send_answer(self, number: int, value: Any, start_ns: int, conversion: int, parameters: dict[str, Any]) -> int:
        computed_ns = time.monotonic_ns()
        infer_ns = computed_ns - start_ns
        if isinstance(value, InferError):
            self._channel.send(ANSWER, number, ANSWER_HEADER.pack(INFER_ERROR, infer_ns, 0, 0) + write_error(value))
            return 0
        text, tensors = self._convert_result(conversion, value, parameters)
        nbytes = tensor_bytes(tensors) if tensors else len(text)
        output_ns = time.monotonic_ns() - computed_ns
        self._channel.send(ANSWER, number, ANSWER_HEADER.pack(DONE, infer_ns, output_ns, nbytes) + text, tensors)
        return nbytes

    def _close_generator(self, number: int) -> None:
        """Close a generator, if it is active: its `finally` runs. Raises: what that raises."""
        self._cancelled.discard(number)
        close = getattr(self._generators.pop(number, (None,))[0], "close", None)
        if close is not None:
            close()

    # -- notifications -----------------------------------------------------------------------------------------

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Record a notification that arrives while a hook runs."""
        if kind == PREEMPT:
            self._preempted_turn = number
        elif kind == CANCEL_GENERATOR:
            self._cancelled.add(number)
        elif kind == DISCARD_PARAMETERS:
            self._retained_parameters.pop(number, None)

    def close(self) -> None:
        """Close active generators."""
        for number in tuple(self._generators):
            try:
                self._close_generator(number)
            except BaseException as error:  # noqa: BLE001 - an error of user code that nobody waits for
                traceback.print_exception(error)
        self._module.close()
        self._on_path.close()


class AsyncHookService(HookService):
    """One for a file with an `async` hook: its tasks survive between calls, on the loop that awaits `call`."""

    is_async = True

    async def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Run a hook, or some steps of a generator; between steps the loop receives notifications."""
        start_ns, self._in_hook = time.monotonic_ns(), False
        try:
            if kind == CALL:
                hook, conversion, value, parameters = self._read_call(body, 0, arrays)
                start_ns = time.monotonic_ns()
                self._in_hook = True
                result = hook(value, parameters)
                if inspect.isawaitable(result):
                    result = await result
                return self._reply(start_ns, *self._convert_result(conversion, result, parameters))
            if kind == STEP_GENERATOR:
                import asyncio  # already imported by a worker that awaits

                for _ in self._step_generator(body, arrays):
                    await asyncio.sleep(0)
            else:
                self._close_generator(REQUEST_NUMBER.unpack(body)[0])
            return self._reply(start_ns)
        except BaseException as error:  # noqa: BLE001 - as above
            return self._error_reply(start_ns, error, body if kind == CALL else b"")
