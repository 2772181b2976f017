"""FrontModelTable: the Models of a front end, with their Hooks, as announced by the engine.

The front end's half of `published_engine.py`. A Model here is built from the completed spec alone, like an ensemble: it
has no Instances, and its queue is always empty, so dialects need not know which process they run in.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.backends.node import Node
from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec
from penstock.batching.statistics import ModelStatistics
from penstock.server.hooks.garbage import collect_garbage
from penstock.server.hooks.runner import Hooks, close_all
from penstock.server.ipc.errors import error_to_json

from . import snapshot
from .message_kinds import MODEL_RELEASED, MODELS_APPLIED, STATISTICS
from .pending_statistics import PendingStatistics
from .remote_engine import NO_ENGINE, RETRY_NS, RemoteEngine

if TYPE_CHECKING:
    from penstock.server.ipc.link import Link
    from penstock.server.workers.order import Interpreters

logger = logging.getLogger("penstock.fronts")


def write_model(model: Model) -> dict[str, Any]:
    """Encode what a front end builds its Model from. Raises: TypeError."""
    return {
        "spec": snapshot.write(model.spec),
        "platform": model.platform,
        "inputs": [Node.from_runtime(node).to_json() for node in model.node_inputs],
        "outputs": [Node.from_runtime(node).to_json() for node in model.node_outputs],
        "described": dict(model.runtime_description),
    }


def read_model(document: Mapping[str, Any]) -> Model:
    """Build a Model from the result of `write_model`. Raises: ValueError, TypeError, LookupError."""
    model = Model(snapshot.read(ModelSpec, document["spec"]), (), lambda *_: None)
    model.platform = document["platform"]
    model.node_inputs = [Node.from_json(node) for node in document["inputs"]]
    model.node_outputs = [Node.from_json(node) for node in document["outputs"]]
    model.runtime_description = document["described"]
    return model


class FrontModelTable:
    """The Models that one engine has announced, by its numbers. Each Link has a table, since numbers differ by engine.

    Invariants: a Model that can be found has its Hooks, or the reason why not. A name is found as soon as its Models
    have theirs, whatever else is being loaded. A Model that the engine no longer publishes is kept, with its Hooks,
    until nothing here needs it; the engine keeps it as long.
    Threads: the event loop's.
    """

    def __init__(
        self, engine: RemoteEngine, link: Link, interpreters: Interpreters, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        """Create the table; `on_ready` is called when the engine's first message is in place, and after each change."""
        self._engine = engine
        self._link = link
        self._interpreters = interpreters
        self._on_ready = on_ready
        self._models: dict[int, Model] = {}
        self._hooks: dict[Model, Hooks] = {}
        self._failed: dict[Model, InferError] = {}
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._names: dict[str, tuple[list[int], list[str]]] = {}
        self._loading_names: set[str] = set()
        self._load_complete = False
        self._changed_keys: set[int] = set()

    # -- messages of the engine --------------------------------------------------------------------------------

    def receive(self, number: int, body: bytes) -> None:
        """Handle a MODELS: build the new Models, and publish the names once their hooks are loaded."""
        changes: dict[str, Any] = json.loads(body)
        new = {int(key): document for key, document in changes["new"].items()}
        for key, document in new.items():
            self._add_model(key, document)
        for key in changes["retired"]:
            self._start_task(self._retire(key))
        self._names.update(changes["names"])
        self._load_complete = changes["load_complete"]
        self._publish(changes["names"])
        needed = {*new, *(key for keys, _ in changes["names"].values() for key in keys)}
        loading = [task for key, task in self._loading.items() if key in needed]
        if loading:
            self._start_task(self._acknowledge_later(number, list(new), loading))
        else:
            self._acknowledge(number, list(new))

    async def _acknowledge_later(self, number: int, new: list[int], loading: list[asyncio.Task[None]]) -> None:
        await asyncio.wait(loading)
        self._acknowledge(number, new)

    def _acknowledge(self, number: int, new: list[int]) -> None:
        """Acknowledge that a MODELS is in place, with the Models that cannot be served."""
        failed = {
            key: error_to_json(self._failed[self._models[key]]) for key in new if self._models.get(key) in self._failed
        }
        self._link.send(MODELS_APPLIED, number, json.dumps(failed).encode())

    def _publish(self, names: Iterable[str]) -> None:
        """Publish the latest Models of these names, but none for a name whose hooks are being loaded."""
        if self._link.closed:
            return
        for name in names:
            keys, absent = self._names[name]
            is_loading = not self._loading.keys().isdisjoint(keys)
            (self._loading_names.add if is_loading else self._loading_names.discard)(name)
            found = [] if is_loading else [self._models[key] for key in keys if key in self._models]
            self._engine.publish(name, found, absent)
        self._engine.load_complete = self._load_complete and not self._loading_names
        if self._engine.load_complete:
            self._on_ready()

    def _add_model(self, key: int, document: Mapping[str, Any]) -> None:
        try:
            model = read_model(document)
        except Exception as error:
            logger.exception("a model announced by the engine could not be created")
            self._link.send(MODELS_APPLIED, 0, json.dumps({key: ["INTERNAL", str(error), 0]}).encode())
            return
        statistics = model.statistics = PendingStatistics(partial(self._on_count, key))
        model.on_blockers_changed = lambda: statistics.record_hindered(hindered=bool(model.blockers))
        self._models[key] = model
        self._engine.numbers[model] = key
        if model.spec.hooks is None:
            self._hooks[model] = Hooks(self._engine, model)
        else:
            self._loading[key] = self._start_task(self._load_hooks(key, model))

    async def _load_hooks(self, key: int, model: Model) -> None:
        try:
            self._hooks[model] = await Hooks.load(self._engine, model, self._interpreters)
        except InferError as error:
            self._failed[model] = error
        except Exception as error:
            logger.exception("hooks of %s: not loaded", model.name)
            self._failed[model] = InferError(Code.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            self._loading.pop(key, None)
        if model in self._failed:
            logger.error("hooks of %s: %s", model.name, self._failed[model].message)
        self._publish({model.name} & self._names.keys())

    async def _retire(self, key: int) -> None:
        """Drop a Model once it is no longer needed, and notify the engine."""
        model = self._models.pop(key, None)
        if model is None:
            return  # announced twice before this ran
        loading = self._loading.get(key)
        if loading is not None:
            await asyncio.wait((loading,))
        await self._engine.wait_released(model)
        hooks = self._hooks.get(model)
        if hooks is not None:
            await hooks.close()
        await self._engine.retire(model)
        self._hooks.pop(model, None)
        self._failed.pop(model, None)
        del hooks
        await collect_garbage(model)
        self._send_statistics(model, key)
        self._link.send(MODEL_RELEASED, key)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- for dialects ------------------------------------------------------------------------------------------

    def hooks_of(self, model: Model) -> Hooks:
        """Return a model's Hooks, which may be empty. Raises: InferError (NOT_READY) if there are none to use."""
        hooks = self._hooks.get(model)
        if hooks is not None:
            return hooks
        failed = self._failed.get(model)
        if failed is not None:
            raise InferError(Code.NOT_READY, f"the hooks of model '{model.name}' are not loaded: {failed.message}")
        if model not in self._engine.numbers:
            raise InferError(Code.NOT_READY, NO_ENGINE, RETRY_NS)
        raise InferError(Code.NOT_READY, f"model '{model.name}' is being unloaded")

    # -- counts ------------------------------------------------------------------------------------------------

    def _on_count(self, key: int) -> None:
        if not self._changed_keys:
            asyncio.get_running_loop().call_soon(self._send_changed_statistics)
        self._changed_keys.add(key)

    def _send_changed_statistics(self) -> None:
        # only those that changed: this runs once per loop turn, and there may be many models
        changed_keys, self._changed_keys = self._changed_keys, set()
        for key in changed_keys & self._models.keys():
            self._send_statistics(self._models[key], key)

    def _send_statistics(self, model: Model, key: int) -> None:
        statistics = model.statistics
        if isinstance(statistics, PendingStatistics) and (statistics.has_pending or model.event_counts):
            # the workers' events, which are sent with the model's next count
            events, model.event_counts = model.event_counts, {}
            self._link.send(STATISTICS, key, statistics.flush(events))

    # -- the end -----------------------------------------------------------------------------------------------

    async def close(self, grace_s: float = 0.0) -> int:
        """Finish accepted requests, then end the hooks. Returns: how many models' hooks had not finished."""
        for task in (*self._loading.values(), *self._tasks):
            task.cancel()
        unfinished = await close_all(self._hooks.values(), grace_s)
        for key, model in self._models.items():
            self._send_statistics(model, key)
        self._hooks.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in self._models.values():
            # hooks refer to a Model until the collector runs, but not to this
            model.statistics, model.on_blockers_changed = ModelStatistics(), None
        self._models.clear()
        return unfinished
