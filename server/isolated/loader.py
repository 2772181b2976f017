"""IsolatedLoader: loads a model through a Loader in a worker process. Created by the composition root.

It is for runtimes that must not run in the server's process: TensorFlow uses threads, memory and the GIL without
limits, prints, and may end its process. It is also for ONNX models that request it, whose operators can end their
process too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.backends.backend import Backend, Loader
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import HARMLESS_LINES, ISOLATED, LOADERS
from penstock.batching.spec import WorkerSpec
from penstock.server.workers.order import NotBegunError, Order
from penstock.server.workers.worker import Worker

from .backend import IsolatedBackend
from .keeper import Keeper

SERVICE = "penstock.server.isolated.inside"
APART = "isolated"
"""The option with which a model that the server could load requests a process of its own: 1."""
OWN = "worker."
"""The prefix of options that describe where the model runs; the others are the runtime's."""
NAME = "worker.name"
"""The option with the model's name, for a path that does not contain it."""
Interpreters = Callable[[WorkerSpec, str], str]
"""Returns the Python for a WorkerSpec and a label. Blocks, for minutes if an environment must be built."""


def with_isolated(loaders: Mapping[str, Loader], interpreters: Interpreters) -> dict[str, Loader]:
    """Return Loaders by backend name: `loaders`, and for other names those of ISOLATED, run in workers.

    Those of `loaders` that are also in LOADERS use a worker for models that request it. ISOLATED and LOADERS hold
    functions of modules, which a worker imports by name.
    """
    made = {word: IsolatedLoader(_imported(load), interpreters) for word, load in ISOLATED.items()}
    either = {
        word: EitherLoader(load, IsolatedLoader(_imported(load), interpreters))
        for word, load in loaders.items()
        if LOADERS.get(word) is load
    }
    return {**made, **loaders, **either}


def _imported(load: Any) -> str:
    return f"{load.__module__}:{load.__name__}"


class EitherLoader:
    """A Loader that loads in the server, or in a worker if the model requests it (APART)."""

    def __init__(self, here: Loader, apart: IsolatedLoader) -> None:
        self._here = here
        self._apart = apart

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> Backend:
        """Load a model. Raises: InferError: the Loader's own; UNSUPPORTED for one in a worker and not on the CPU."""
        if options.get(APART, "0") != "1":
            return self._here(path, device, options)
        if device != "cpu":
            text = f"runtime.isolated requires a model on the CPU, but this one would run on {device}"
            raise InferError(Code.UNSUPPORTED, text)
        return self._apart(path, device, {name: value for name, value in options.items() if name != APART})


class IsolatedLoader:
    """A Loader that starts a worker per load. The worker belongs to the Backend until that is closed.

    `loader` is "module:function", which workers import, with `path` first on their sys.path. A thread supervises the
    workers while there are any.
    Threads: any; blocks.
    """

    def __init__(self, loader: str, interpreters: Interpreters, path: tuple[str, ...] = ()) -> None:
        self._loader = loader
        self._interpreters = interpreters
        self._path = path
        self._keeper = Keeper()

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> IsolatedBackend:
        """Load a model. Raises: InferError: the Loader's own, or one that says how its process has ended."""
        theirs = {name: value for name, value in options.items() if not name.startswith(OWN)}
        said = {name: value for name, value in options.items() if name.startswith(OWN)}
        label = label_of(path, said.pop(NAME, ""))
        place = read_place(said, label)
        settings = {
            "loader": self._loader, "path": str(path), "device": device, "options": theirs,
            "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        }  # fmt: skip
        order = Order(
            SERVICE, settings, label, {"path": str(path)}, interpreter=self._interpreters(place, label),
            path=self._path, memory_bytes=place.memory_bytes, noise=HARMLESS_LINES,
        )  # fmt: skip
        self._keeper.enter()
        try:
            return self._keeper.run(_opened(order, self._keeper, place.timeout_s))
        except BaseException:
            self._keeper.leave()
            raise


async def _opened(order: Order, keeper: Keeper, limit_s: float) -> IsolatedBackend:
    worker = Worker(order)
    try:
        body, _ = await worker.ready
        backend = IsolatedBackend(worker, keeper, body, limit_s)
        backend.watch()
    except BaseException as error:
        worker.kill(f"{order.label} is no longer needed")
        await worker.ended
        if isinstance(error, NotBegunError):
            raise InferError(Code.NOT_READY, worker.why) from error
        raise
    return backend


def read_place(said: Mapping[str, str], label: str) -> WorkerSpec:
    """Read the options that describe the worker. Raises: InferError (INVALID)."""
    unknown = said.keys() - {f"{OWN}{word}" for word in ("interpreter", "requirements", "memory_mb", "timeout_s")}
    if unknown:
        raise InferError(Code.INVALID, f"{label}: unknown option '{min(unknown)}'")
    requirements = said.get(f"{OWN}requirements", "")
    return WorkerSpec(
        interpreter=said.get(f"{OWN}interpreter", ""),
        requirements=Path(requirements) if requirements else None,
        timeout_s=_number(said, f"{OWN}timeout_s", label),
        memory_bytes=int(_number(said, f"{OWN}memory_mb", label) * (1 << 20)),
    )


def _number(said: Mapping[str, str], name: str, label: str) -> float:
    text = said.get(name, "") or "0"
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < float("inf"):
        raise InferError(Code.INVALID, f"{label}: option '{name}' must be a number of at least 0, not '{text}'")
    return number


def label_of(path: Path, name: str = "") -> str:
    """Return a label with the model's name, or the name in its path: NAME/VERSION[/FILE], or else its last part."""
    if name:
        return f"model '{name}'"
    for folder in (path, path.parent):
        if folder.name.isdecimal() and folder.parent.name:
            return f"model '{folder.parent.name}'"
    return f"model '{path.name}'"
