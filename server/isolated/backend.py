"""IsolatedBackend: a Backend whose model is in a worker. Created by loader.py."""

from __future__ import annotations

import itertools
import json
import logging
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVarTuple

from penstock.backends.backend import Binding
from penstock.backends.errors import Code, DeviceLost, InferError
from penstock.backends.signature import Signature
from penstock.server.ipc.arena import WireError
from penstock.server.ipc.zero_copy import ZeroCopyChannel

from .binding import IsolatedBinding
from .messages import BIND, FAILED, NUMBER, READY, STOP, read_failure, read_nodes, read_signature, write_binding

if TYPE_CHECKING:
    import asyncio

    from penstock.server.workers.worker import Worker

    from .loop_thread import LoopThread

BIND_LIMIT_S = 60.0
END_MESSAGE_LIMIT_S = 1.0
"""How long a run whose worker has gone waits for the reason."""
CLOSE_LIMIT_S = 60.0
"""Longer than the limit for ending a worker plus the time that a large process then takes."""

logger = logging.getLogger("penstock.isolated")
Ts = TypeVarTuple("Ts")


class IsolatedBackend:
    """One model in one process. Once the process is gone, every use raises DeviceLost.

    `threads_only`: a run waits for another process, so it must not be on the event loop (backend.py).
    Units: `limit_s` of a run, 0 for none. Threads: any; the Worker runs on the LoopThread's loop.
    Ownership: of the Worker, and of one use of the LoopThread, until it is closed.
    """

    threads_only = True

    def __init__(self, worker: Worker, loop_thread: LoopThread, encoded: bytes, limit_s: float) -> None:
        description: Mapping[str, Any] = json.loads(encoded)
        self.graph = read_signature(description["graph"])
        self.node_inputs: Sequence[Any] = read_nodes(description["inputs"])
        self.node_outputs: Sequence[Any] = read_nodes(description["outputs"])
        self.platform: str = description["platform"]
        self.stateful: bool = description["stateful"]
        self.compiles_each_size: bool = description["compiles_each_size"]
        self.shared_scale: str = description["shared_scale"]
        self.runtime_metadata: Mapping[str, Any] = description["runtime_metadata"]
        self.limit_s = limit_s
        self._worker = worker
        self._loop_thread = loop_thread
        self.label = worker.order.label
        self._numbers = itertools.count(1)
        self._bindings: weakref.WeakSet[IsolatedBinding] = weakref.WeakSet()
        self._exited = threading.Event()
        self._lock = threading.Lock()
        self._loss_callback: Callable[[], None] | None = None
        self._killed = self._closed = False

    def watch(self) -> None:
        """Subscribe to the worker's end. Threads: its loop."""
        self._worker.ended.add_done_callback(self._on_worker_end)

    def _on_worker_end(self, _: asyncio.Future[None]) -> None:
        with self._lock:
            self._exited.set()
            callback, self._loss_callback = self._loss_callback, None
        if callback is not None and not self._closed:
            callback()

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Set a callback for the worker's end, called on its loop's thread; at once if it has already ended."""
        with self._lock:
            has_exited = self._exited.is_set()
            self._loss_callback = None if has_exited else callback
        if has_exited:
            callback()

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._worker.pid

    @property
    def killed_externally(self) -> bool:
        """Whether the worker was ended from outside."""
        return self._worker.killed_externally

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        """Have the worker allocate a Binding, with a socket of its own. Raises: what its Backend raises; DeviceLost."""
        self.check_serving()
        number = next(self._numbers)
        try:
            own_socket, child_socket = socket.socketpair()
        except OSError as error:
            text = f"{self.label}: no socket could be created for it: {error.strerror}"
            raise InferError(Code.NOT_READY, text) from error
        channel = ZeroCopyChannel(own_socket)
        try:
            with child_socket:
                self._loop_thread.run(
                    self._send_bind(number, write_binding(signature, capacity_rows), child_socket.fileno())
                )
            self._await_ready(channel)
        except BaseException:
            channel.close()
            raise
        binding = IsolatedBinding(self, number, signature, capacity_rows, channel)
        with self._lock:
            self._bindings.add(binding)
        return binding

    async def _send_bind(self, number: int, body: bytes, descriptor: int) -> None:
        self._worker.send_message(BIND, number, body, None, (descriptor,))

    def _await_ready(self, channel: ZeroCopyChannel) -> None:
        """Wait until a Binding is ready. Raises: InferError."""
        try:
            messages = channel.receive(BIND_LIMIT_S)
        except (EOFError, OSError, WireError) as error:
            raise DeviceLost(Code.NOT_READY, self.end_message()) from error
        for kind, _, body, _, _ in messages:
            if kind == READY:
                return
            if kind == FAILED:
                raise read_failure(body)
        self.kill(f"a Binding was not created within {BIND_LIMIT_S:g} s")
        raise DeviceLost(Code.NOT_READY, self.end_message())

    def check_serving(self) -> None:
        """Check that the worker serves. Raises: DeviceLost."""
        if self._killed or self._exited.is_set() or not self._worker.serving:
            raise DeviceLost(Code.NOT_READY, self.end_message())

    def end_message(self) -> str:
        """Return why the worker has ended; kill it if it has not, since communication with it failed."""
        if not self._exited.wait(END_MESSAGE_LIMIT_S):
            self.kill("it cannot be reached")
            self._exited.wait(END_MESSAGE_LIMIT_S)
        return self._worker.end_message or f"{self.label} has ended"

    def kill(self, reason: str) -> None:
        """Kill the worker as soon as its loop runs; from now on, nothing runs there."""
        self._killed = True
        self.call_soon(self.kill_now, reason)

    def kill_now(self, reason: str) -> None:
        """Kill the worker. Threads: its loop."""
        self._worker.kill(f"{self.label} was killed: {reason}")

    def call_soon(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Schedule a call on the worker's loop."""
        self._loop_thread.call_soon(function, *args)

    def stop_run(self, number: int, run: int) -> None:
        """Ask the worker to stop a run of one of its Bindings."""
        self.call_soon(self._worker.send_message, STOP, number, NUMBER.pack(run))

    def close(self) -> None:
        """End the worker, and wait until it is gone."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.call_soon(self._worker.stop)
        if not self._exited.wait(CLOSE_LIMIT_S):
            logger.error("%s does not end", self.label)
        with self._lock:
            bindings = list(self._bindings)
        for binding in bindings:  # not earlier: a run that failed to stop still reads from there
            binding.release()
        self._loop_thread.release()
