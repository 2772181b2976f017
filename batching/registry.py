"""ModelRegistry: which Models are served, by name and version, and those being retired. Owned by the Engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError

if TYPE_CHECKING:
    from .model import Model


STOPPING_MESSAGE = "Server is stopping, scheduler for model has stopped accepting new inference requests"
"""Triton's text; also used for a model that is being unloaded."""
LOADING_MESSAGE = "the server is loading its models, try again soon"
LOADING_RETRY_NS = 1_000_000_000


def _unknown_model_error(name: str, version: str = "") -> InferError:
    label = f"'{name}' version {version}" if version else f"'{name}'"
    return InferError(Code.NOT_FOUND, f"Request for unknown model: {label} is not found")


class ModelRegistry:
    """The published Models, one per name and version, and which versions existed or should exist.

    `loading`: startup is still loading models; until it ends, no model is reported as unknown.
    Threads: the event loop's.
    """

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Model]] = {}
        self._absent: dict[str, set[str]] = {}
        self.loading = False

    def find(self, name: str, version: str = "") -> Model:
        """Find a version; "" means the highest. Raises: InferError (NOT_FOUND; NOT_READY while `loading`)."""
        versions = self._models.get(name)
        if versions is None:
            raise self._not_found_error(name, version)
        if not version:
            if len(versions) == 1:
                return next(iter(versions.values()))
            return versions[max(versions, key=int)]
        model = versions.get(version)
        if model is None:
            raise self._not_found_error(name, version)
        return model

    def _not_found_error(self, name: str, version: str) -> InferError:
        """Make the error for a version that was not found. Source of the texts: Triton core, model_lifecycle.cc."""
        if self.loading:
            return InferError(Code.NOT_READY, LOADING_MESSAGE, LOADING_RETRY_NS)
        absent = self._absent.get(name)
        if absent is None:
            return _unknown_model_error(name)
        if not version:
            return InferError(Code.NOT_FOUND, f"Request for unknown model: '{name}' has no available versions")
        if version in absent:
            text = f"Request for unknown model: '{name}' version {version} is not at ready state"
            return InferError(Code.NOT_FOUND, text)
        return _unknown_model_error(name, version)

    def all(self) -> list[Model]:
        """List every version, ordered by name and version."""
        # for probes and pages; most models have a single version, which needs no sorting
        return [
            versions[version]
            for _, versions in sorted(self._models.items())
            for version in (sorted(versions, key=int) if len(versions) > 1 else versions)
        ]

    def versions_of(self, name: str) -> tuple[list[Model], list[str]]:
        """Return the Models of a name, and the version numbers that existed or should exist."""
        return list(self._models.get(name, {}).values()), sorted(self._absent.get(name, ()))

    def put(self, model: Model) -> Model | None:
        """Add a version. Returns: the Model it replaces."""
        versions = self._models.setdefault(model.name, {})
        self._absent.setdefault(model.name, set()).discard(model.version)
        old = versions.get(model.version)
        versions[model.version] = model
        return old

    def replace(self, name: str, models: Iterable[Model], absent: Iterable[str] = ()) -> list[Model]:
        """Replace all versions of a name; `absent` lists versions that should exist but could not load.

        Returns: the replaced Models.
        """
        old = self._models.pop(name, {})
        new = {model.version: model for model in models}
        if new:
            self._models[name] = new
        self._absent[name] = {*self._absent.get(name, ()), *old, *absent} - new.keys()
        return [model for model in old.values() if new.get(model.version) is not model]

    def remove(self, name: str, version: str) -> Model:
        """Remove a version. Raises: InferError (NOT_FOUND)."""
        versions = self._models.get(name, {})
        model = versions.pop(version, None)
        if model is None:
            raise _unknown_model_error(name, version)
        if not versions:
            del self._models[name]
        self._absent.setdefault(name, set()).add(version)
        return model

    def clear(self) -> None:
        """Remove everything."""
        self._models.clear()
        self._absent.clear()


class CompletionWaiters:
    """Models whose end something awaits. `is_done` reports whether a Model has nothing left to do.

    Threads: the event loop's.
    """

    def __init__(self, is_done: Callable[[Model], bool]) -> None:
        self._is_done = is_done
        self._events: dict[Model, asyncio.Event] = {}

    def __bool__(self) -> bool:
        return bool(self._events)

    def models(self) -> list[Model]:
        """List the awaited Models."""
        return list(self._events)

    def check(self, model: Model) -> None:
        """Wake the waiter of a model if the model is done."""
        event = self._events.get(model)
        if event is not None and self._is_done(model):
            event.set()

    async def wait(self, model: Model) -> None:
        """Wait until a model is done. Each model may have only one waiter at a time."""
        if self._is_done(model):
            return
        event = self._events[model] = asyncio.Event()
        try:
            await event.wait()
        finally:
            del self._events[model]
