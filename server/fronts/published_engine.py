"""PublishedEngine: the HookedEngine in an engine's process. Front ends load the hooks, and are sent every change.

The engine's half of `model_table.py`. ModelControl loads with it. A load is in place in every front end before its
client is answered, and a replaced Model is kept until no front end needs it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.server.hooks.engine import open_model
from penstock.server.hooks.runner import Hooks
from penstock.server.ipc.errors import error_from_json

from .message_kinds import MODEL_RELEASED, MODELS, MODELS_APPLIED
from .model_table import write_model

if TYPE_CHECKING:
    from penstock.batching.engine import Engine
    from penstock.batching.loading.resizing import Change
    from penstock.batching.model import Model
    from penstock.batching.spec import ModelSpec
    from penstock.server.ipc.link import Link

logger = logging.getLogger("penstock.fronts")

APPLIED_WITHIN_S = 5.0
"""How long a load waits for front ends that do not answer; they process its message before any later one."""
FIRST_FRONT_WITHIN_S = 5.0
"""How long a model with hooks waits for the first front end."""


def _check_encodable(model: Model) -> None:
    """Fail a model of which front ends cannot be told; later, this would end the engine with all its models.

    Raises: InferError (INTERNAL).
    """
    try:
        json.dumps(write_model(model))
    except Exception as error:
        logger.exception("model %s cannot be announced to front ends", model.name)
        raise InferError(Code.INTERNAL, f"model '{model.name}' cannot be announced to front ends: {error}") from error


class FrontModels:
    """What one front end has been sent, and its replies.

    `unacknowledged` are the MODELS that it has not applied, `models` the numbers of the Models that it knows, `failed`
    the reasons why it cannot serve some of them.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.unacknowledged: set[int] = set()
        self.models: set[int] = set()
        self.failed: dict[int, InferError] = {}


class PublishedEngine:
    """Opens, publishes and retires Models, with front ends.

    Invariants: a front end is sent everything when it joins, then each Model once, and all changes in order. Unchanged
    names are not sent again, since each of many models would then cost as much as all. `models` are those that any
    front end may name in a request, by number. `load_complete`: the initial load is complete, so what is not found does
    not exist.
    Threads: the event loop's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.models: dict[int, Model] = {}
        self._numbers: dict[Model, int] = {}
        self._last_model_number = 0
        self._last_message_number = 0
        self._open_numbers: set[int] = set()
        self._names: dict[str, tuple[list[int], list[str]]] = {}
        self.load_complete = False
        self._fronts: dict[Link, FrontModels] = {}
        self._reply_received = asyncio.Event()
        self._retiring: set[asyncio.Task[None]] = set()

    # -- front ends --------------------------------------------------------------------------------------------

    def attach(self, link: Link) -> None:
        """Send a new front end everything."""
        front = self._fronts[link] = FrontModels(link)
        self._send_changes(names=self._names, new=sorted(self._open_numbers), fronts=(front,))

    def detach(self, link: Link) -> None:
        """Stop waiting for a front end that has gone."""
        self._fronts.pop(link, None)
        self._wake_waiters()

    def receive(self, link: Link, kind: int, number: int, body: bytes) -> None:
        """Handle a MODELS_APPLIED or a MODEL_RELEASED of a front end."""
        front = self._fronts.get(link)
        if front is None:
            return
        if kind == MODELS_APPLIED:
            front.unacknowledged.discard(number)
            for key, error in json.loads(body).items():
                front.failed[int(key)] = error_from_json(error)
        elif kind == MODEL_RELEASED:
            front.models.discard(number)
            front.failed.pop(number, None)
        self._wake_waiters()

    def complete_load(self) -> None:
        """Announce that the initial load is complete: from now on, what is not found does not exist."""
        self.load_complete = True
        self._send_changes()

    def _wake_waiters(self) -> None:
        replied, self._reply_received = self._reply_received, asyncio.Event()
        replied.set()

    def _send_changes(
        self, names: Iterable[str] = (), new: Iterable[int] = (), retired: Iterable[int] = (),
        fronts: Iterable[FrontModels] | None = None,
    ) -> int:  # fmt: skip
        """Send front ends the changes: the Models of names, and Models that are new, unless known, or gone.

        Returns: the number that they acknowledge.
        """
        self._last_message_number += 1
        changes = {
            "names": {name: self._names[name] for name in names},
            "retired": list(retired),
            "load_complete": self.load_complete,
        }
        for front in self._fronts.values() if fronts is None else fronts:
            changes["new"] = {key: write_model(self.models[key]) for key in new if key not in front.models}
            front.models.update(new)
            front.unacknowledged.add(self._last_message_number)
            front.link.send(MODELS, self._last_message_number, json.dumps(changes).encode())
        return self._last_message_number

    async def _wait_until(self, done: Callable[[], bool], within_s: float | None = None) -> bool:
        """Wait at most `within_s` until replies of front ends make `done` true. Returns: whether it is."""
        deadline = None if within_s is None else time.monotonic() + within_s
        while not done():
            remaining_s = None if deadline is None else deadline - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                return False
            try:
                await asyncio.wait_for(self._reply_received.wait(), remaining_s)
            except TimeoutError:
                continue
        return True

    def _is_acknowledged(self, message_number: int) -> bool:
        return not any(message_number in front.unacknowledged for front in self._fronts.values())

    async def wait_applied(self) -> bool:
        """Wait until everything sent is in place, at most APPLIED_WITHIN_S. Returns: whether it is."""
        return await self._wait_until(
            lambda: not any(front.unacknowledged for front in self._fronts.values()), APPLIED_WITHIN_S
        )

    # -- models ------------------------------------------------------------------------------------------------

    async def open(self, spec: ModelSpec) -> Model:
        """Load a model, its hooks in every front end; it cannot be found until it is published. Raises: InferError."""
        model = await open_model(self._engine, spec, self.retire)
        start = time.monotonic()
        self._last_model_number += 1
        key = self._numbers[model] = self._last_model_number
        self.models[key] = model
        self._open_numbers.add(key)
        try:
            _check_encodable(model)
            if spec.hooks is not None and not self._fronts:
                # front ends start at the same time, and a model that they cannot serve must not be reported as served
                await self._wait_until(lambda: bool(self._fronts), FIRST_FRONT_WITHIN_S)
            if spec.hooks is not None:  # others are sent when published, in one message
                message_number = self._send_changes(new=(key,))
                await self._wait_until(lambda: self._is_acknowledged(message_number))
            for front in self._fronts.values():
                if key in front.failed:
                    raise front.failed[key]
            if self._engine.stopping:
                raise InferError(Code.NOT_READY, "Server is stopping")
        except BaseException:
            self.retire((model,))
            raise
        model.load_s += time.monotonic() - start
        return model

    async def change(self, model: Model, spec: ModelSpec) -> Change | None:
        """Create the Instances that a Model lacks, as `Engine.change`; front ends see no change. Raises: InferError."""
        return await self._engine.change(model, spec)

    def publish(self, name: str, models: Iterable[Model], absent: Iterable[str] = ()) -> asyncio.Task[None]:
        """Replace all versions of a name with opened Models; with none, remove the name.

        Returns: a task that ends when this is in place in every front end, and the replaced Models are retired.
        """
        replaced = self._engine.publish(name, models, absent)
        published, absent = self._engine.versions_of(name)
        keys = [self._numbers[model] for model in published if model in self._numbers]
        self._names[name] = keys, absent
        return self._start_retirement(replaced, name, keys)

    def retire(self, models: Iterable[Model]) -> asyncio.Task[None]:
        """Close Models that cannot be found, once they have finished their accepted requests."""
        return self._start_retirement(models)

    def _start_retirement(self, models: Iterable[Model], name: str = "", new: Iterable[int] = ()) -> asyncio.Task[None]:
        models = tuple(models)
        retired = [self._numbers[model] for model in models if model in self._numbers]
        self._open_numbers.difference_update(retired)
        message_number = self._send_changes((name,) if name else (), new, retired)
        task = asyncio.ensure_future(self._retire(models, message_number))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task

    async def _retire(self, models: tuple[Model, ...], message_number: int) -> None:
        if not await self._wait_until(lambda: self._is_acknowledged(message_number), APPLIED_WITHIN_S):
            late_count = sum(message_number in front.unacknowledged for front in self._fronts.values())
            logger.warning(
                "%d front ends did not respond within %g s: they serve an outdated state", late_count, APPLIED_WITHIN_S
            )
        await asyncio.gather(*map(self._retire_one, models))

    async def _retire_one(self, model: Model) -> None:
        key = self._numbers.get(model, 0)
        self._engine.flush(model)  # otherwise front ends would wait for a batch that is held open for more requests
        await self._wait_until(lambda: not any(key in front.models for front in self._fronts.values()))
        await self._engine.retire(model)
        self.models.pop(key, None)
        self._numbers.pop(model, None)

    def hooks_of(self, model: Model) -> Hooks:
        """Return the Hooks of a model without hooks: front ends have the others. Raises: InferError (UNSUPPORTED)."""
        if model.spec.hooks is not None:
            raise InferError(Code.UNSUPPORTED, f"the hooks of model '{model.name}' run in front ends")
        return Hooks(self._engine, model)

    async def stop(self, grace_s: float) -> int:
        """Finish accepted requests. Returns: how many requests were dropped."""
        deadline = time.monotonic() + grace_s
        dropped = await self._engine.stop(grace_s)
        if self._retiring and not dropped:
            await asyncio.wait(self._retiring, timeout=max(0.0, deadline - time.monotonic()))
        for task in list(self._retiring):
            task.cancel()
        return dropped
