"""The service of a worker that holds one Backend: loads it, and runs each of its Bindings on a thread of its own.

Runs in the worker. It imports the Loader named in its settings, and so the runtime that this needs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backends.backend import Array, Backend, Binding, Loader, supports_direct_runs
from penstock.backends.errors import Code, InferError, RunStopped
from penstock.server.ipc.channel import Channel

from .messages import FAILED, NUMBER, READY, RESULT, read_binding, read_run, write_backend, write_failure

END_S = 0.5
"""How long closing waits for a run that continues."""


def open_service(settings: dict[str, Any], channel: Channel) -> IsolatedService:
    """Load the model named in the settings. Raises: what its Loader raises."""
    if settings["cpus"]:
        with contextlib.suppress(OSError):  # a CPU that no longer exists
            os.sched_setaffinity(0, settings["cpus"])
    return IsolatedService(_loader(settings["loader"])(Path(settings["path"]), settings["device"], settings["options"]))


def _loader(name: str) -> Loader:
    """Import a Loader. `name`: "module:function"."""
    module, _, function = name.partition(":")
    found: Loader = getattr(importlib.import_module(module), function)
    return found


class IsolatedService:
    """One Backend. Threads: `on_message` and `on_descriptors` run on the thread that listens."""

    concurrent_messages = True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._bindings: dict[int, BindingThread] = {}

    def on_open(self) -> tuple[bytes, None]:
        """Return the Backend's description of its model."""
        return write_backend(self._backend), None

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> tuple[bytes, None]:
        """Reject: runs use the Bindings' own sockets."""
        raise InferError(Code.INTERNAL, f"no call is of kind {kind}")

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Stop a run."""
        binding = self._bindings.get(number)
        if binding is not None:
            binding.stop(NUMBER.unpack(body)[0])

    def on_descriptors(self, number: int, body: bytes, descriptors: Sequence[int]) -> None:
        """Make a Binding."""
        binding = self._bindings[number] = BindingThread(self._backend, body, socket.socket(fileno=descriptors[0]))
        binding.start(lambda: self._bindings.pop(number, None))

    def close(self) -> None:
        """Free the model."""
        for binding in list(self._bindings.values()):
            binding.end()
        self._backend.close()


class BindingThread:
    """One Binding, and the thread that runs the requests from its socket until that is closed.

    A DirectBinding runs on the received arrays in place; for others they are copied into acquired buffers. A run that
    is stopped before it begins does not begin: a STOP message may overtake the run.
    Threads: another thread calls `stop`; `_lock` ensures that it stops only the intended run.
    """

    def __init__(self, backend: Backend, body: bytes, sock: socket.socket) -> None:
        self._backend = backend
        self._body = body
        self._channel = Channel(sock)
        self._binding: Binding | None = None
        self._lock = threading.Lock()
        self._running = self._stopped = 0
        self._thread: threading.Thread | None = None

    def start(self, on_end: Callable[[], object]) -> None:
        """Start the thread; `on_end` is called when it ends."""
        self._thread = threading.Thread(target=self._main, args=(on_end,), name="binding", daemon=True)
        self._thread.start()

    def stop(self, number: int) -> None:
        """Stop the run of that number, whether it is in progress or still to come."""
        with self._lock:
            self._stopped = number
            if self._running == number and self._binding is not None:
                self._binding.stop()

    def end(self) -> None:
        """Close the socket, and wait briefly for the thread."""
        self._channel.close()
        if self._thread is not None:
            self._thread.join(END_S)

    def _main(self, on_end: Callable[[], object]) -> None:
        try:
            self._serve()
        except (EOFError, OSError):
            pass  # the other side has gone
        finally:
            self._channel.close()
            self._binding = None
            on_end()

    def _serve(self) -> None:
        try:
            binding = self._binding = self._backend.bind(*read_binding(self._body))
        except Exception as error:  # noqa: BLE001 - reported to the caller
            self._channel.send(FAILED, 0, _encode_error(error))
            return
        self._channel.send(READY, 0)
        while True:
            for message in self._channel.receive()[::-1]:
                _, number, body, arrays, _ = message
                del message
                self._answer(binding, number, body, arrays)

    def _answer(self, binding: Binding, number: int, body: bytes, arrays: list[Array | None]) -> None:
        failure = b""
        outputs: list[Array | None] = []
        try:
            outputs = self._run(binding, number, *read_run(body), arrays)
        except BaseException as error:  # noqa: BLE001 - sys.exit in a runtime fails only its own run
            failure = _encode_error(error)
        arrays.clear()  # the answer also reports the received slots as free
        if not failure:
            try:
                self._channel.send(RESULT, number, b"", outputs)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - values that cannot be sent
                failure = _encode_error(error)
        if failure:
            self._channel.send(FAILED, number, failure)

    def _run(
        self, binding: Binding, number: int, rows: int, wanted: tuple[int, ...], arrays: list[Array | None]
    ) -> list[Array | None]:
        direct = binding if supports_direct_runs(binding) else None
        if direct is None:
            shapes = [None if array is None else array.shape for array in arrays]
            for buffer, array in zip(binding.acquire_buffers(rows, shapes), arrays, strict=True):
                if buffer is not None and array is not None:
                    np.copyto(buffer, array)
        else:
            direct.clear_stop()  # clear a stop that was meant for the previous run
        with self._lock:
            if self._stopped == number:
                raise RunStopped(Code.EXPIRED, "the run was stopped")
            self._running = number
        try:
            outputs: list[Any] = binding.run(wanted) if direct is None else direct.run_on(arrays, wanted)
        finally:
            with self._lock:
                self._running = 0
        if len(outputs) != len(wanted):
            raise ValueError(f"{len(outputs)} outputs, where {len(wanted)} are wanted")
        return [_to_tensor(output) for output in outputs]


def _to_tensor(output: Any) -> Array:
    if isinstance(output, np.ndarray | np.generic):
        return np.asarray(output)
    text = f"an output that is no tensor, but a {type(output).__name__}, cannot leave the model's process"
    raise InferError(Code.UNSUPPORTED, text)


def _encode_error(error: BaseException) -> bytes:
    """Encode an exception; one that is not an InferError is also logged."""
    if not isinstance(error, InferError):
        with contextlib.suppress(Exception):
            traceback.print_exception(error)
    return write_failure(error)
