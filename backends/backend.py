"""The interface between batching and a runtime: a Backend loads one model on one device and provides Bindings.

A new runtime is one file that implements these two protocols, one line in `loading.py` and one test file
(tests/backends/contract.py has the cases that each must pass).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from .errors import Code, InferError
from .signature import Signature

Array = np.ndarray[Any, Any]

FREE_ROWS = "penstock.free_rows"
"""The Loader option, "1", for a model whose graph fixes the first axis of every tensor to 1: it is loaded with that
axis free. The caller must find out whether its answers stay the same (batching/loading/freeing.py)."""


class BufferSource(Protocol):
    """The part of a Binding that fills its inputs."""

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        """Return the input buffers for a run of `rows`, in the Signature's order, to be filled before `run`.

        Shapes: `shapes[i]` is the whole shape of input i, rows included; None for an absent optional input (its buffer
        is None too). Buffers are C-contiguous, since they are also filled through other shapes with as many elements.
        Ownership: the buffers stay the Binding's, and are valid until the next `acquire_buffers`.
        """


class Binding(BufferSource, Protocol):
    """Input and output buffers on one device, allocated once and run many times.

    Threads: one user at a time; different Bindings of a Backend may run at once.
    """

    capacity_rows: int

    def run(self, wanted: Sequence[int]) -> list[Any]:
        """Run the model on the acquired buffers; return the outputs at the positions in `wanted`, in that order.

        Ownership: a returned array is the caller's: no later run writes into it. Outputs that are not wanted are not
        copied, nor computed if the runtime can leave them out.
        Raises: InferError (INTERNAL, or INVALID if the runtime blames the input); OutOfMemory, RunStopped or DeviceLost
        if that is what happened. The Binding can be used again after all but the last.
        """

    def stop(self) -> None:
        """End the current run: it raises RunStopped as soon as the runtime checks, or ends normally.

        Threads: any. Without a current run it has no effect beyond the next `acquire_buffers`.
        """


class OverlappingBinding(Binding, Protocol):
    """A Binding whose run is begun and ended separately, so that another's copies and run overlap with it.

    `run` is `begin` followed by `end`. At most one run is begun and not ended. It may have `is_done() -> bool`, which
    tells whether `end` would return, or raise, at once.
    """

    device_ns: int
    """Device time of the latest run that has ended, excluding copies and waiting; 0 means unknown."""

    def begin(self, wanted: Sequence[int]) -> None:
        """Begin the run of the acquired and filled buffers, and return. Raises: as `run`; nothing is begun then."""

    def end(self) -> list[Any]:
        """Wait for the run that was begun. Returns and raises: as `run`."""


def supports_overlap(binding: Binding) -> TypeGuard[OverlappingBinding]:
    """Whether a Binding's run can be begun and ended separately."""
    return hasattr(binding, "begin")


class PreparableBinding(Binding, Protocol):
    """A Binding that is prepared for the sizes that it will run, by the thread that will run them."""

    def prepare(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Prepare for runs of this size, whose buffers are acquired and filled. Raises: InferError."""


def supports_preparation(binding: Binding) -> TypeGuard[PreparableBinding]:
    """Whether a Binding is prepared for the sizes that it will run."""
    return hasattr(binding, "prepare")


class TrimmableBinding(Binding, Protocol):
    """A Binding that keeps memory for speed, and releases it when idle for a while."""

    can_trim: bool
    """Whether there is anything to release."""

    def trim_memory(self) -> None:
        """Release what it can. Threads: that which runs it. Never raises InferError."""


def supports_trimming(binding: Binding | None) -> TypeGuard[TrimmableBinding]:
    """Whether a Binding keeps memory that it can release."""
    return hasattr(binding, "trim_memory")


class DirectBinding(Binding, Protocol):
    """A Binding that can run on arrays of the caller's, without copying them into buffers."""

    def clear_stop(self) -> None:
        """Clear a `stop`, as `acquire_buffers` does. Call before `run_on`."""

    def run_on(self, inputs: Sequence[Array | None], wanted: Sequence[int]) -> list[Array]:
        """Run the model on these arrays, in the Signature's order.

        Ownership: the result may be the model's own memory, or an input's; it is only read, and only until an input is
        written to. Threads and Raises: as `run`.
        """


def supports_direct_runs(binding: Binding) -> TypeGuard[DirectBinding]:
    """Whether a Binding can run on arrays of the caller's."""
    return hasattr(binding, "run_on")


class InPlaceBinding(Binding, Protocol):
    """A Binding that reads and writes tensors on its device in place."""

    device: int
    """The device's number."""

    def can_copy(self, part: Any) -> bool:
        """Whether the device can copy a DeviceArray itself; otherwise it is better gathered."""

    def set_input_parts(self, position: int, parts: Sequence[Any]) -> None:
        """Take the rows of an input from these parts, arrays and DeviceArrays, instead of from its buffer.

        Call after `acquire_buffers`, which resets it. Rows of the run that the parts do not fill are copies of the last
        one. The parts are read until the run has ended. Raises: InferError.
        """

    def set_output_targets(self, position: int, targets: Sequence[tuple[int, Any]]) -> bool:
        """Write rows of an output to DeviceArrays, each starting at a row of the run.

        Call after `acquire_buffers` and `set_input_parts`.
        Returns: False if that is not possible: the output then goes to the host as usual. Otherwise they are written
        when the run has ended, and the output that it returns does not have those rows filled in. Raises: InferError.
        """


def supports_in_place(binding: Binding) -> TypeGuard[InPlaceBinding]:
    """Whether a Binding reads and writes tensors on its device in place."""
    return hasattr(binding, "set_input_parts")


class Backend(Protocol):
    """One model, loaded on one device.

    A Backend on a GPU also has `device` ("cuda:0"), `device_bytes` (its memory there, including its Bindings') and
    `cpu_nodes` (the nodes of the graph that run on the CPU anyway; None if unknown).
    """

    graph: Signature
    """The model's own signature, with every axis, and `batched` False."""

    node_inputs: Sequence[Any]
    """The runtime's own description of the inputs, as hooks see it (`onnxruntime.NodeArg`: name, shape, type)."""

    node_outputs: Sequence[Any]
    """The same for the outputs."""

    platform: str
    """Triton's platform name, such as `onnxruntime_onnx`."""

    runtime_metadata: Mapping[str, Any]
    """What else the runtime reports about the model, as JSON; empty for most. TensorFlow: `signature_def`, the
    MetaGraphDef's map of all signatures as protobuf's JSON, and `signature_key`, the one that is served."""

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        """Allocate a Binding for at most `capacity_rows` rows."""

    def close(self) -> None:
        """Free the model. No Binding may be used afterwards."""


def needs_thread(backend: Backend) -> bool:
    """Whether a run waits for another process, so that no event loop may run it.

    Such a Backend has `threads_only`; runtimes in this process need not have it.
    """
    return bool(getattr(backend, "threads_only", False)) or is_stateful(backend)


def is_stateful(backend: Backend) -> bool:
    """Whether a model may remember earlier runs, so that it is a different model on each Backend.

    Such a Backend has `stateful`: its graphs may write to variables.
    """
    return bool(getattr(backend, "stateful", False))


def compiles_each_size(backend: Backend) -> bool:
    """Whether a model is compiled anew, which takes long, for each number of rows with which it runs.

    Such a Backend has `compiles_each_size`.
    """
    return bool(getattr(backend, "compiles_each_size", False))


def shared_scale(backend: Backend) -> str:
    """Return the operator by which the rows of a batch share a scale, as in dynamic quantization; "" if there is none.

    A Backend that knows has `shared_scale`.
    """
    return str(getattr(backend, "shared_scale", ""))


def on_loss(backend: Backend, callback: Callable[[], None]) -> None:
    """Have a Backend that can be lost while nothing runs report that, once, on its own thread.

    Such a Backend has `on_loss`; runtimes in this process are only lost during a run, which raises DeviceLost.
    """
    subscribe = getattr(backend, "on_loss", None)
    if subscribe is not None:
        subscribe(callback)


class Loader(Protocol):
    """Loads a model file. Raises InferError if it cannot, with the runtime's own text."""

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> Backend: ...


def device_number(device: str) -> int | None:
    """Return the number of a GPU; None for the CPU. Raises: InferError (INVALID)."""
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index.isascii() and index.isdecimal()):
        raise InferError(Code.INVALID, f"device '{device}': expected 'cpu' or 'cuda:<number>'")
    return int(index)
