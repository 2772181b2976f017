"""Hooks: a request's way through pre_inference, the Engine and post_inference. What the fast lane calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.request import NO_TERMS, Terms
from penstock.batching.spec import HookSpec

from .call import Call
from .convert import to_inputs, to_prediction, to_tensors
from .encode import to_json
from .loading import POST, PRE
from .replicas import Replicas, plan
from .siblings import FolderOnPath

Parameters = Mapping[str, Any] | None
"""What a request says beside its sample: its own parameters and forwarded headers."""

_BIG = 4096
"""Values from which converting them is worth a thread, where no hook's thread does it: some 100 us to and from JSON."""

logger = logging.getLogger("penstock.hooks")


class Inference(Protocol):
    """What hooks need of the Engine."""

    async def infer(
        self,
        model: Model,
        inputs: list[Array | None],
        *,
        wanted: tuple[int, ...] | None = None,
        terms: Terms = NO_TERMS,
        id: str = "",  # noqa: A002 - the protocol's word
    ) -> list[Any]:
        """Run one request through the batcher."""


@dataclass(frozen=True, slots=True)
class _Form:
    """One way to answer: what to make of a hook's result, or of the outputs `wanted` where there is no hook."""

    of_result: Callable[[Any], Any]
    of_outputs: Callable[[list[Any]], Any]
    wanted: tuple[int, ...] | None


class Hooks:
    """One loaded model with its hooks, or without any: then a sample goes to the model as it is.

    Invariant: a replica that writes globals handles one request at a time, from before pre_inference until after
    post_inference, while other replicas' requests share the model's batches.
    Threads: the event loop's; hooks run on their replicas' threads only.
    """

    def __init__(self, engine: Inference, model: Model) -> None:
        self._engine = engine
        self._model = model
        self._replicas: Replicas | None = None
        self._on_path: FolderOnPath | None = None
        names = [spec.name for spec in model.signature.outputs]
        self._as_json = _Form(to_json, lambda outputs: to_json(to_prediction(outputs, model.signature)), None)
        self._as_tensors = _Form(
            lambda result: to_tensors(result, model.signature),
            lambda outputs: {names[at]: output for at, output in zip(model.all_outputs, outputs, strict=True)},
            model.all_outputs,
        )
        self._in_flight = 0
        self._drained: asyncio.Event | None = None
        self.has_pre = False
        self.has_post = False

    @classmethod
    async def load(cls, engine: Inference, model: Model) -> Hooks:
        """Load what the model's spec says of hooks; mistakes in the file fail here.

        Raises: InferError (INVALID; EXPIRED when the file takes too long).
        """
        hooks = cls(engine, model)
        if model.spec.hooks is not None:
            await hooks._start(model.spec.hooks)
        return hooks

    async def _start(self, spec: HookSpec) -> None:
        loop = asyncio.get_running_loop()
        decided = await loop.run_in_executor(None, plan, spec)
        replicas = Replicas(self._model, spec, decided, loop)
        on_path = FolderOnPath(spec.path.parent)
        try:
            first = await replicas.start()
        except BaseException:
            replicas.close()
            on_path.close()
            raise
        self._on_path = on_path
        self.has_pre, self.has_post = first.has_pre, first.has_post
        replicas.leave(first)
        self._replicas = replicas
        logger.info("hooks of %s: %s", self._model.name, decided.reason, extra={"model": self._model.name})

    async def close(self) -> None:
        """Finish what was accepted, then end the replicas. To be called before the model is unloaded."""
        if self._drained is None:
            self._drained = asyncio.Event()
        if self._in_flight:
            await self._drained.wait()
        if self._replicas is not None:
            self._replicas.close()
        if self._on_path is not None:
            self._on_path.close()
        self._replicas = self._on_path = None

    def watch(self, now_ns: int) -> None:
        """Fail what is past its limit by `now_ns`; it happens by itself when the time comes."""
        if self._replicas is not None:
            self._replicas.watch(now_ns)

    async def predict(
        self, sample: Any, request_id: str = "", terms: Terms = NO_TERMS, parameters: Parameters = None
    ) -> bytes:
        """Take any JSON value; answer what post_inference returns, or else the list of outputs, as JSON.

        Raises: InferError.
        """
        answer: bytes = await self._pass(sample, self._as_json, request_id, terms, parameters)
        return answer

    async def infer(
        self, inputs: Mapping[str, Array], request_id: str = "", terms: Terms = NO_TERMS, parameters: Parameters = None
    ) -> dict[str, Array]:
        """Take tensors by name; answer what post_inference returns as tensors by name, or else the outputs.

        Ownership: the arrays are given to the hook as they are, and may be views of the request's body.
        Raises: InferError.
        """
        answer: dict[str, Array] = await self._pass(dict(inputs), self._as_tensors, request_id, terms, parameters)
        return answer

    async def _pass(self, sample: Any, form: _Form, request_id: str, terms: Terms, parameters: Parameters) -> Any:
        """Carry one request from its sample to its answer."""
        model = self._model
        # those of a request whose like is remembered are every such request's
        own = dict(parameters or {})
        if self._drained is not None:
            raise InferError(Code.NOT_READY, f"model '{model.name}' is being unloaded")
        passage = None if self._replicas is None else self._replicas.admit()
        self._in_flight += 1
        try:
            if passage is not None and self.has_pre:
                call = Call(PRE, sample, self._inputs, terms.deadline_ns, request_id)
                call.parameters = own
                inputs = await passage.call(call)
            else:
                inputs = await _converted(self._inputs, sample, _is_big(sample))
            wanted = None if self.has_post else form.wanted
            outputs = await self._engine.infer(model, inputs, wanted=wanted, terms=terms, id=request_id)
            if passage is not None and self.has_post:
                prediction = to_prediction(outputs, model.signature)
                # a deadline is for waiting: what the model has run for is finished
                call = Call(POST, prediction, form.of_result, 0, request_id)
                call.parameters = own
                return await passage.call(call)
            return await _converted(form.of_outputs, outputs, _is_big(outputs))
        finally:
            if passage is not None:
                passage.leave()
            self._leave()

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._drained is not None and not self._in_flight:
            self._drained.set()

    def _inputs(self, value: Any) -> list[Array | None]:
        return to_inputs(value, self._model.signature)


async def _converted(convert: Callable[[Any], Any], value: Any, big: bool) -> Any:
    return await asyncio.to_thread(convert, value) if big else convert(value)


def _is_big(value: Any) -> bool:
    """Guess, from the first element at each depth, whether there are many values in lists and dicts of them."""
    if isinstance(value, dict):
        return any(map(_is_big, value.values()))
    count = 1
    while isinstance(value, list | np.ndarray):
        if isinstance(value, np.ndarray):
            return count * value.size > _BIG
        if not value:
            return False
        count *= len(value)
        if count > _BIG or any(isinstance(item, np.ndarray) and item.size > _BIG for item in value):
            return True
        value = value[0]
    return False
