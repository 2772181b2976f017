"""IsolatedLoader: loads a model through a Loader in a worker process. Created by the composition root.

It is for runtimes that must not run in the server's process: TensorFlow uses threads, memory and the GIL without
limits, prints, and may end its process. It is also for ONNX models that request it, whose operators can end their
process too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.backends.backend import Backend, Loader
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import HARMLESS_LINES, ISOLATED, LOADERS
from penstock.batching.spec import WorkerSpec
from penstock.server.workers.order import Interpreters, NotStartedError, Order
from penstock.server.workers.worker import Worker

from .backend import IsolatedBackend
from .loop_thread import LoopThread

SERVICE = "penstock.server.isolated.inside"
ISOLATED_OPTION = "isolated"
"""The option with which a model that the server could load requests a process of its own: 1."""
WORKER_PREFIX = "worker."
"""The prefix of options that describe where the model runs; the others are the runtime's."""
NAME_OPTION = "worker.name"
"""The option with the model's name, for a path that does not contain it."""


def with_isolated(loaders: Mapping[str, Loader], interpreters: Interpreters) -> dict[str, Loader]:
    """Return Loaders by backend name: `loaders`, and for other names those of ISOLATED, run in workers.

    Those of `loaders` that are also in LOADERS use a worker for models that request it. ISOLATED and LOADERS hold
    functions of modules, which a worker imports by name.
    """
    isolated = {name: IsolatedLoader(_import_path(load), interpreters) for name, load in ISOLATED.items()}
    optional = {
        name: OptionalIsolationLoader(load, IsolatedLoader(_import_path(load), interpreters))
        for name, load in loaders.items()
        if LOADERS.get(name) is load
    }
    return {**isolated, **loaders, **optional}


def _import_path(load: Any) -> str:
    return f"{load.__module__}:{load.__name__}"


class OptionalIsolationLoader:
    """A Loader that loads in the server, or in a worker if the model requests it (ISOLATED_OPTION)."""

    def __init__(self, local: Loader, isolated: IsolatedLoader) -> None:
        self._local = local
        self._isolated = isolated

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> Backend:
        """Load a model. Raises: InferError: the Loader's own; UNSUPPORTED for one in a worker and not on the CPU."""
        if options.get(ISOLATED_OPTION, "0") != "1":
            return self._local(path, device, options)
        if device != "cpu":
            text = f"runtime.isolated requires a model on the CPU, but this one would run on {device}"
            raise InferError(Code.UNSUPPORTED, text)
        return self._isolated(path, device, {name: value for name, value in options.items() if name != ISOLATED_OPTION})


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
        self._loop_thread = LoopThread()

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> IsolatedBackend:
        """Load a model. Raises: InferError: the Loader's own, or one that says how its process has ended."""
        runtime_options = {name: value for name, value in options.items() if not name.startswith(WORKER_PREFIX)}
        worker_options = {name: value for name, value in options.items() if name.startswith(WORKER_PREFIX)}
        label = label_of(path, worker_options.pop(NAME_OPTION, ""))
        worker_spec = read_worker_spec(worker_options, label)
        settings = {
            "loader": self._loader, "path": str(path), "device": device, "options": runtime_options,
            "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        }  # fmt: skip
        order = Order(
            SERVICE, settings, label, {"path": str(path)}, interpreter=self._interpreters(worker_spec, label),
            path=self._path, memory_bytes=worker_spec.memory_bytes, harmless_lines=HARMLESS_LINES,
        )  # fmt: skip
        self._loop_thread.acquire()
        try:
            return self._loop_thread.run(_open_backend(order, self._loop_thread, worker_spec.timeout_s))
        except BaseException:
            self._loop_thread.release()
            raise


async def _open_backend(order: Order, loop_thread: LoopThread, limit_s: float) -> IsolatedBackend:
    worker = Worker(order)
    try:
        body, _ = await worker.ready
        backend = IsolatedBackend(worker, loop_thread, body, limit_s)
        backend.watch()
    except BaseException as error:
        worker.kill(f"{order.label} is no longer needed")
        await worker.ended
        if isinstance(error, NotStartedError):
            raise InferError(Code.NOT_READY, worker.end_message) from error
        raise
    return backend


def read_worker_spec(options: Mapping[str, str], label: str) -> WorkerSpec:
    """Read the options that describe the worker. Raises: InferError (INVALID)."""
    unknown = options.keys() - {
        f"{WORKER_PREFIX}{name}" for name in ("interpreter", "requirements", "memory_mb", "timeout_s")
    }
    if unknown:
        raise InferError(Code.INVALID, f"{label}: unknown option '{min(unknown)}'")
    requirements = options.get(f"{WORKER_PREFIX}requirements", "")
    return WorkerSpec(
        interpreter=options.get(f"{WORKER_PREFIX}interpreter", ""),
        requirements=Path(requirements) if requirements else None,
        timeout_s=_number(options, f"{WORKER_PREFIX}timeout_s", label),
        memory_bytes=int(_number(options, f"{WORKER_PREFIX}memory_mb", label) * (1 << 20)),
    )


def _number(options: Mapping[str, str], name: str, label: str) -> float:
    text = options.get(name, "") or "0"
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
