"""HookedEngine: the Engine, and the Hooks of each Model. Used by ModelControl to load, and by dialects for Hooks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from penstock.backends.errors import Code, InferError
from penstock.batching.engine import Engine
from penstock.batching.loading.resizing import Change
from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec
from penstock.server.environments.environments import Environments

from .garbage import collect_garbage
from .runner import Hooks, close_all


class HookedEngine:
    """Opens, publishes and retires Models with their Hooks.

    Invariant: a Model that can be found has its Hooks. If its hooks cannot be loaded, it is closed again.
    Threads: the event loop's.
    """

    def __init__(self, engine: Engine, environments: Environments | None = None) -> None:
        self._engine = engine
        self.environments = environments or Environments()
        self._hooks: dict[Model, Hooks] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    async def open(self, spec: ModelSpec) -> Model:
        """Load a model and its hooks; it cannot be found before it is published. Raises: InferError."""
        model = await open_model(self._engine, spec, self.retire)
        start = time.monotonic()
        try:
            self._hooks[model] = await Hooks.load(self._engine, model, self.environments.interpreter)
            if self._engine.stopping:
                raise InferError(Code.NOT_READY, "Server is stopping")
        except BaseException:
            self.retire((model,))
            raise
        model.load_s += time.monotonic() - start
        return model

    async def change(self, model: Model, spec: ModelSpec) -> Change | None:
        """Make the Instances a Model lacks, as `Engine.change`; its hooks stay unchanged. Raises: InferError."""
        return await self._engine.change(model, spec)

    def publish(self, name: str, models: Iterable[Model], absent: Iterable[str] = ()) -> asyncio.Task[None]:
        """Replace all versions of a name with opened Models, at once; without any, the name is removed.

        `absent` are versions that should be served too, and cannot be. Returns: the retirement of the replaced ones.
        """
        return self.retire(self._engine.publish(name, models, absent))

    def retire(self, models: Iterable[Model]) -> asyncio.Task[None]:
        """Close Models that can no longer be found, once they have finished accepted requests."""
        task = asyncio.ensure_future(self._retire(tuple(models)))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task

    async def _retire(self, models: tuple[Model, ...]) -> None:
        await asyncio.gather(*map(self._retire_one, models))

    async def _retire_one(self, model: Model) -> None:
        await self._engine.wait_released(model)
        hooks = self._hooks.get(model)
        if hooks is not None:
            await hooks.close()
        await self._engine.retire(model)
        self._hooks.pop(model, None)
        del hooks
        await collect_garbage(model)

    def hooks_of(self, model: Model) -> Hooks:
        """Return a model's Hooks, which may have no functions. Raises: InferError (NOT_READY) when it is gone."""
        hooks = self._hooks.get(model)
        if hooks is None:
            raise InferError(Code.NOT_READY, f"model '{model.name}' is being unloaded")
        return hooks

    async def stop(self, grace_s: float) -> int:
        """Finish accepted requests, hooks first. Returns: how many requests were dropped."""
        deadline = time.monotonic() + grace_s
        unfinished = await close_all(self._hooks.values(), grace_s)
        self._hooks.clear()
        dropped = await self._engine.stop(max(0.0, deadline - time.monotonic()))
        if self._retiring and not dropped:
            await asyncio.wait(self._retiring, timeout=max(0.0, deadline - time.monotonic()))
        return max(unfinished, dropped)


async def open_model(engine: Engine, spec: ModelSpec, retire: Callable[[Iterable[Model]], object]) -> Model:
    """Load a model; if the caller is cancelled, `retire` gets it, because the loading thread cannot be stopped.

    Raises: InferError.
    """
    opening = asyncio.ensure_future(engine.open(spec))

    def retire_opened(ended: asyncio.Future[Model]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            retire((ended.result(),))

    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(retire_opened)
        raise
    finally:
        # its error holds this frame, and those of the load with all data read, until a garbage collection
        del opening
