"""Helpers for the tests of isolated Backends: Loaders, and checks that nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.batching.spec import WorkerSpec
from penstock.server.isolated.backend import IsolatedBackend
from penstock.server.isolated.loader import IsolatedLoader
from tests.processes import children
from tests.server.ipc.wire_pairs import memory_use
from tests.server.workers.orders import descriptors

HERE = str(Path(__file__).parent)
PATIENCE_S = 20.0


def own_python(spec: WorkerSpec, label: str) -> str:
    """Return the given interpreter unchanged."""
    return spec.interpreter


def onnx_loader() -> IsolatedLoader:
    """Load ONNX models in workers."""
    return IsolatedLoader("penstock.backends.loading:load_onnx", own_python)


def faulty_loader() -> IsolatedLoader:
    """Load the Backends of `faulty_backend.py` in workers."""
    return IsolatedLoader("faulty_backend:load", own_python, (HERE,))


@contextmanager
def faulty(**options: Any) -> Iterator[IsolatedBackend]:
    """Yield a faulty Backend for the block."""
    backend = faulty_loader()(
        Path("/models/faulty/1/model"), "cpu", {key: str(value) for key, value in options.items()}
    )
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that a block leaves no process, descriptor, mapping or thread."""
    mapped, opened, others, threads = memory_use()[1], descriptors(), children(), set(threading.enumerate())
    yield
    until(lambda: children() <= others and set(threading.enumerate()) <= threads)
    assert memory_use()[1] <= mapped
    assert descriptors() - opened == set()


def until(true: Callable[[], bool]) -> None:
    """Poll until a condition on other threads or in other processes holds."""
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s, "it did not come to be"
        time.sleep(0.002)
