"""IsolatedBinding: a Binding that runs in a worker: gathered in shared memory, run over a socket of its own.

Created by backend.py. Inputs are written where the worker reads them, and outputs are views of what the worker has
written. Only strings and tensors of a few kilobytes are copied.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import Array
from penstock.backends.errors import Code, DeviceLost, DeviceRemoved, InferError, RunStopped
from penstock.backends.signature import Signature
from penstock.server.ipc.arena import WireError

from .messages import FAILED, RESULT, RUN, read_failure, write_run

if TYPE_CHECKING:
    from penstock.server.ipc.zero_copy import Form, SharedTensors, ZeroCopyChannel

    from .backend import IsolatedBackend


class IsolatedBinding:
    """Runs one batch at a time, on a thread that waits for the answer.

    `number` identifies it to the worker. Units: `limit_s` of a run, 0 for none.
    Ownership: acquired buffers are valid until the next `acquire_buffers`; an output is valid while it is referenced,
    even after the worker has ended.
    Threads: as a Binding's; `_lock` synchronizes the run's thread with those that stop it.
    """

    def __init__(
        self, backend: IsolatedBackend, number: int, signature: Signature, capacity_rows: int, channel: ZeroCopyChannel
    ) -> None:
        self.capacity_rows = capacity_rows
        self._backend = backend
        self._number = number
        self._dtypes = [spec.type.dtype for spec in signature.inputs]
        self._channel = channel
        self._inputs: SharedTensors | None = None
        self._rows = 0
        self._run_number = 0
        self._stopped_run = -1
        self._running = False
        self._lock = threading.Lock()
        self.release = weakref.finalize(self, channel.close)
        """Closes the socket, and with it the worker's Binding."""
        self.release.atexit = False

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        """Return buffers in shared memory; small buffers, and those of strings, are ordinary memory."""
        if rows > self.capacity_rows:
            raise ValueError(f"{rows} rows exceed the capacity of {self.capacity_rows}")
        self._backend.check_serving()
        if self._inputs is not None:
            self._channel.discard(self._inputs)
        form: Form = tuple(
            [None if shape is None else (dtype, shape) for dtype, shape in zip(self._dtypes, shapes, strict=True)]
        )
        self._inputs = self._channel.allocate(form)
        self._rows = rows
        self._run_number += 1
        return self._inputs.arrays

    def run(self, wanted: Sequence[int]) -> list[Any]:
        """Run the model on the acquired buffers. Raises: DeviceLost if the worker ends meanwhile."""
        inputs = self._inputs
        if inputs is None:
            raise ValueError("run without acquire_buffers")
        with self._lock:
            if self._stopped_run == self._run_number:
                raise RunStopped(Code.EXPIRED, "the run was stopped")
            self._running = True
        try:
            return self._run_remotely(inputs, wanted)
        finally:
            with self._lock:
                self._running = False

    def _run_remotely(self, inputs: SharedTensors, wanted: Sequence[int]) -> list[Any]:
        limit_s = self._backend.limit_s
        try:
            self._channel.send_allocated(RUN, self._run_number, write_run(self._rows, wanted), inputs)
            messages = self._channel.receive(limit_s or None)
        except (EOFError, OSError, WireError) as error:
            raise self._loss_error() from error
        if not messages:
            message = f"run exceeded its limit of {limit_s * 1000:g} ms"
            self._backend.kill(message)
            raise RunStopped(Code.EXPIRED, f"{self._backend.label}: {message}")
        ((kind, number, body, outputs, _), *more) = messages
        if number == self._run_number and not more:
            if kind == RESULT and len(outputs) == len(wanted) and all(output is not None for output in outputs):
                return outputs
            if kind == FAILED:
                raise read_failure(body)
        self._backend.kill("it answered a call that was not made")
        raise self._loss_error()

    def _loss_error(self) -> InferError:
        """Return the error of a run whose worker has ended."""
        message = self._backend.end_message()
        if self._stopped_run == self._run_number:
            return RunStopped(Code.EXPIRED, "the run was stopped together with its process")
        return (DeviceRemoved if self._backend.killed_externally else DeviceLost)(Code.NOT_READY, message)

    def stop(self) -> None:
        """Stop the current run: the first call asks the runtime, and a second one, if it still runs, kills its process.

        Other runs in that process are lost with it.
        """
        with self._lock:
            stop_failed, self._stopped_run = self._running and self._stopped_run == self._run_number, self._run_number
        if stop_failed:
            self._backend.call_soon(self._kill_if_running, self._run_number)
        else:
            self._backend.stop_run(self._number, self._run_number)

    def _kill_if_running(self, run_number: int) -> None:
        """Kill the worker if the run is still in progress. Threads: the worker's loop."""
        with self._lock:
            if self._running and self._run_number == run_number:
                self._backend.kill_now("a run did not stop when requested")
