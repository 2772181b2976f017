"""IsolatedLoader: loads a model with a Loader that is run in a worker process. Made by the composition root.

For runtimes that must not be in the server's process: TensorFlow takes threads, memory and the GIL as it likes, prints,
and ends the process it is in. And for ONNX models that ask for it, whose operators can end their process, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.backends.backend import Backend, Loader
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import ISOLATED, LOADERS, NOISE
from penstock.batching.spec import WorkerSpec
from penstock.server.workers.order import NotBegunError, Order
from penstock.server.workers.worker import Worker

from .backend import IsolatedBackend
from .keeper import Keeper

SERVICE = "penstock.server.isolated.inside"
APART = "isolated"
"""The option by which a model that could be loaded in the server asks for a process of its own: 1."""
OWN = "worker."
"""How the options begin that are not the runtime's, but say where it runs."""
NAME = "worker.name"
"""The option that says the model's name, where its path does not."""
Interpreters = Callable[[WorkerSpec, str], str]
"""Gives the Python for a WorkerSpec and whose it is. Blocks, for minutes where an environment is to be made."""


def with_isolated(loaders: Mapping[str, Loader], interpreters: Interpreters) -> dict[str, Loader]:
    """Give Loaders by backend name: `loaders`, and those of ISOLATED in workers, where they are not.

    Those of `loaders` that are LOADERS' load in workers what asks for it. ISOLATED and LOADERS are functions of
    modules: a worker imports them by their names.
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
    """A Loader that loads in the server, or in a worker what asks for it (APART)."""

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
    """A Loader. Each load starts a worker, which is the Backend's until that is closed.

    `loader` is "module:function", which workers import, `path` first on their sys.path. The thread that looks after
    the workers is there while there are any.
    Threads: any; it blocks.
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
            path=self._path, memory_bytes=place.memory_bytes, noise=NOISE,
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
    """Read what options say of the worker. Raises: InferError (INVALID)."""
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
    """Name a model by its name, or else by its path, where its version stands behind it: NAME/VERSION[/FILE]."""
    if name:
        return f"model '{name}'"
    for folder in (path, path.parent):
        if folder.name.isdecimal() and folder.parent.name:
            return f"model '{folder.parent.name}'"
    return f"model '{path.name}'"
