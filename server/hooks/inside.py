"""Inside: a model's hooks in a worker process, as the service opened there by `worker_replica.py`.

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
from penstock.server.ipc.refusals import write_error

from .bound_hooks import bind
from .conversions import Described, make
from .loading import POST, PRE, HookModule, brief
from .mounts import install
from .packing import (
    ANSWER,
    ASKED,
    CALL,
    DONE,
    FORGET,
    FULL_JSON,
    FULL_PARAMETERS,
    GIVE_WAY,
    HUSH,
    INPUTS,
    JSON,
    NUMBER,
    PLAIN_JSON,
    RAISED,
    REFUSED,
    REPLIED,
    STEPS,
    TURN,
    YIELDED,
    read_json,
    read_signature,
    read_value,
    tensor_bytes,
    unpack,
)  # fmt: skip
from .siblings import FolderOnPath
from .user_frames import user_frames

_TELL_NS = 1_000_000_000
_ASKED_BYTES = ASKED.size
_PACK_REPLIED, _UNPACK_ASKED, _LOADS = REPLIED.pack, ASKED.unpack_from, orjson.loads
Reply = tuple[bytes, Sequence[Array | None] | None]


def open_service(settings: dict[str, Any], channel: Channel) -> Inside:
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
    inside = AwaitingInside if module.is_async else Inside
    return inside(module, on_path, settings, channel)


def _traceback(error: BaseException) -> str:
    """Format a traceback that begins in user code."""
    return "".join(traceback.format_exception(type(error), error, user_frames(error)))


class Inside:
    """One instance of the hook file, and its active generators.

    `_kept` are the parameters of requests whose pre_inference has run here and whose post_inference will: user code may
    have added objects to them that cannot be sent between processes.
    Threads: hooks run on the main one. `told` may be called on another, and only records.
    """

    awaits = False

    def __init__(self, module: HookModule, on_path: FolderOnPath, settings: dict[str, Any], channel: Channel) -> None:
        self._module = module
        self._on_path = on_path
        self._channel = channel
        signature = read_signature(settings["signature"])
        inputs, outputs = (list(map(Node.from_json, settings[side])) for side in ("inputs", "outputs"))
        described = Described(signature, inputs, outputs, settings["described"], settings["dialect_settings"])
        rules = make(settings["dialect"], described)
        self._bound = bind(module, rules, signature, unpack(settings["metadata"]))
        self._hooks, self._makers = (self._bound.functions[PRE], self._bound.functions[POST]), self._bound.makers
        self._prediction = rules.prediction
        self._in_hook = False
        self._takes = [bool(settings["dialect"]) or module.takes_parameters(hook) for hook in (PRE, POST)]
        self._keeps = module.takes_parameters(PRE) and module.takes_parameters(POST)
        self._kept: dict[int, dict[str, Any]] = {}
        self._generators: dict[int, tuple[Iterator[Any], dict[str, Any]]] = {}
        self._hushed: set[int] = set()
        self._give_way = 0
        self._told_ns = 0
        self._ended_ns = -1
        self.listens = module.yields and not self.awaits

    def opened(self) -> Reply:
        """Describe the hooks in the file."""
        has = {"pre": self._hooks[0] is not None, "post": self._hooks[1] is not None, "yields": self._module.yields}
        return json.dumps(has | {"takes": self._takes, "keeps": self._keeps}).encode(), None

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Any:
        """Run a hook, or some steps of a generator. Errors are part of the reply."""
        start_ns, self._in_hook = 0, False
        try:
            if kind == CALL:
                hook, form, value, parameters = self._asked(body, 0, arrays)
                start_ns = time.monotonic_ns()
                self._in_hook = True
                result = hook(value, parameters)
                if form == INPUTS:  # inlined from `_made`, for what every small request needs
                    self._in_hook = False
                    made = self._makers[INPUTS](result, parameters)
                    return _PACK_REPLIED(DONE, time.monotonic_ns() - start_ns, 0), made
                return self._done(start_ns, *self._made(form, result, parameters))
            start_ns = time.monotonic_ns()
            if kind == TURN:
                for _ in self._turn(body, arrays):
                    pass
            else:
                self._shut(NUMBER.unpack(body)[0])
            return self._done(start_ns)
        except BaseException as error:  # noqa: BLE001 - sys.exit in a hook must only affect its own request
            return self._wrong(start_ns, error, body if kind == CALL else b"")

    def _done(self, start_ns: int, text: bytes = b"", tensors: Sequence[Array | None] | None = None) -> Reply:
        ended_ns, self._ended_ns = self._ended_ns, -1
        return REPLIED.pack(DONE, time.monotonic_ns() - start_ns, ended_ns + 1) + text, tensors

    def _asked(self, body: bytes, start: int, arrays: list[Array | None]) -> tuple[Any, int, Any, dict[str, Any]]:
        position, form, how, size, request = _UNPACK_ASKED(body, start)
        start += _ASKED_BYTES
        if not (position or how or size or self._keeps):
            return self._hooks[0], form, _LOADS(body[start:]), {}
        parameters = self._kept.pop(request, None) if position else None
        if parameters is None:
            full = FULL_JSON if how & FULL_PARAMETERS else PLAIN_JSON
            parameters = read_json(body[start : start + size], full) if size else {}
            if self._keeps and not position:
                self._kept[request] = parameters
        if how == PLAIN_JSON:
            value = orjson.loads(body[start + size :])
        else:
            value = read_value(body[start + size :], how & ~FULL_PARAMETERS, arrays)
        if position:
            value = self._prediction(value, parameters)
        return self._hooks[position], form, value, parameters

    def _made(self, form: int, result: Any, parameters: Mapping[str, Any]) -> Reply:
        self._in_hook = False
        made = self._makers[form](result, parameters)
        if form == INPUTS:
            return b"", made
        return (made, None) if form == JSON else (orjson.dumps(list(made)), list(made.values()))

    def _wrong(self, start_ns: int, error: BaseException, body: bytes) -> Reply:
        """Encode an exception, with a traceback unless the sample may be the cause and the last one was just sent."""
        now_ns, is_pre = time.monotonic_ns(), body[:1] == b"\0"
        if is_pre:
            self._kept.pop(ASKED.unpack_from(body)[-1], None)
        took_ns = now_ns - start_ns if start_ns else 0
        worded = self._bound.words(PRE if is_pre else POST, error) if self._in_hook else None
        if worded is None and isinstance(error, InferError):
            return REPLIED.pack(REFUSED, took_ns, 0) + write_error(error), None
        plain, lines = isinstance(error, Exception), ""
        if not (is_pre and plain) or now_ns - self._told_ns > _TELL_NS:
            self._told_ns = now_ns
            lines = _traceback(error)
        told = write_error(worded).decode() if worded is not None else ""
        return REPLIED.pack(RAISED, took_ns, 0) + json.dumps([brief(error), plain, lines, told]).encode(), None

    # -- generators --------------------------------------------------------------------------------------------

    def _turn(self, body: bytes, arrays: list[Array | None]) -> Iterator[None]:
        """Step until enough is ahead, another call waits, or it ends; pause after each. Raises: what a step raises."""
        number, turn, form, most, room_bytes = STEPS.unpack_from(body)
        steps = made_bytes = 0
        try:
            while number not in self._hushed and steps < most and made_bytes < room_bytes:
                if steps and turn <= self._give_way:
                    return
                steps += 1
                start_ns = time.monotonic_ns()
                if number not in self._generators:
                    hook, _, value, parameters = self._asked(body, STEPS.size, arrays)
                    self._in_hook = True
                    self._generators[number] = iter(hook(value, parameters)), parameters
                    del value
                    arrays.clear()
                self._in_hook = True
                steps_of, parameters = self._generators[number]
                try:
                    value = next(steps_of)
                except StopIteration:
                    self._generators.pop(number)
                    self._ended_ns = time.monotonic_ns() - start_ns
                    return
                made_bytes += self._tell(number, value, start_ns, form, parameters)
                yield
        except BaseException:
            self._shut(number)
            raise
        if number in self._hushed:
            self._shut(number)

    def _tell(self, number: int, value: Any, start_ns: int, form: int, parameters: dict[str, Any]) -> int:
        computed_ns = time.monotonic_ns()
        infer_ns = computed_ns - start_ns
        if isinstance(value, InferError):
            self._channel.send(ANSWER, number, YIELDED.pack(REFUSED, infer_ns, 0, 0) + write_error(value))
            return 0
        text, tensors = self._made(form, value, parameters)
        nbytes = tensor_bytes(tensors) if tensors else len(text)
        output_ns = time.monotonic_ns() - computed_ns
        self._channel.send(ANSWER, number, YIELDED.pack(DONE, infer_ns, output_ns, nbytes) + text, tensors)
        return nbytes

    def _shut(self, number: int) -> None:
        """Close a generator, if it is active: its `finally` runs. Raises: what that raises."""
        self._hushed.discard(number)
        close = getattr(self._generators.pop(number, (None,))[0], "close", None)
        if close is not None:
            close()

    # -- notifications -----------------------------------------------------------------------------------------

    def told(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Record a notification that arrives while a hook runs."""
        if kind == GIVE_WAY:
            self._give_way = number
        elif kind == HUSH:
            self._hushed.add(number)
        elif kind == FORGET:
            self._kept.pop(number, None)

    def close(self) -> None:
        """Close active generators."""
        for number in tuple(self._generators):
            try:
                self._shut(number)
            except BaseException as error:  # noqa: BLE001 - an error of user code that nobody waits for
                traceback.print_exception(error)
        self._module.close()
        self._on_path.close()


class AwaitingInside(Inside):
    """One for a file with an `async` hook: its tasks survive between calls, on the loop that awaits `call`."""

    awaits = True

    async def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Run a hook, or some steps of a generator; between steps the loop receives notifications."""
        start_ns, self._in_hook = time.monotonic_ns(), False
        try:
            if kind == CALL:
                hook, form, value, parameters = self._asked(body, 0, arrays)
                start_ns = time.monotonic_ns()
                self._in_hook = True
                result = hook(value, parameters)
                if inspect.isawaitable(result):
                    result = await result
                return self._done(start_ns, *self._made(form, result, parameters))
            if kind == TURN:
                import asyncio  # already imported by a worker that awaits

                for _ in self._turn(body, arrays):
                    await asyncio.sleep(0)
            else:
                self._shut(NUMBER.unpack(body)[0])
            return self._done(start_ns)
        except BaseException as error:  # noqa: BLE001 - as above
            return self._wrong(start_ns, error, body if kind == CALL else b"")
