"""The interface between batching and a runtime: a Backend loads one model on one device and lends Bindings.

A new runtime is one file that fulfils these two protocols, one line in `loading.py` and one test file
(tests/backends/contract.py holds the cases that each must pass).
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
"""The option of a Loader, "1", for a model whose graph fixes the first axis of every tensor to 1: it is loaded with
that axis free. Whether its answers stay the same is for the caller to find out (batching/loading/freeing.py)."""


class Binding(Protocol):
    """Input and output buffers on one device, allocated once and run many times.

    Threads: one user at a time; different Bindings of a Backend may run at once.
    """

    capacity_rows: int

    def lend(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        """Give the input buffers for a run of `rows`, in the Signature's order, to be filled before `run`.

        Shapes: `shapes[i]` is the whole shape of input i, rows included; None where the optional input is absent
        (its buffer is None too). Buffers are C-contiguous: they are filled in other shapes of as many elements too.
        Ownership: the buffers stay the Binding's, and are valid until the next `lend`.
        """

    def run(self, wanted: Sequence[int]) -> list[Any]:
        """Run the model on what was lent; return the outputs whose positions are `wanted`, in that order.

        Ownership: an array returned is the caller's: no later run writes into it. Outputs that are not wanted are
        neither computed, where the runtime can leave them out, nor copied.
        Raises: InferError (INTERNAL, or INVALID where the runtime blames the input); OutOfMemory, RunStopped or
        DeviceLost where that is what happened. The Binding can be used again after all but the last.
        """

    def stop(self) -> None:
        """End the run under way: it raises RunStopped as soon as the runtime looks, or ends as if nothing had been.

        Threads: any. Without a run under way it does nothing that outlives the next `lend`.
        """


class Overlapping(Binding, Protocol):
    """A Binding whose run is begun and ended apart, so that the copies and the run of another one go on meanwhile.

    `run` is `begin` and `end`. At most one run is begun and not ended. It may have `ended() -> bool`, which tells
    whether `end` would return, or raise, at once.
    """

    device_ns: int
    """What the device itself took for the latest run that has ended, copies and waiting left out; 0: unknown."""

    def begin(self, wanted: Sequence[int]) -> None:
        """Begin the run of what was lent and filled, and return. Raises: as `run`; nothing is begun then."""

    def end(self) -> list[Any]:
        """Wait for the run that was begun. Returns and raises: as `run`."""


def overlaps(binding: Binding) -> TypeGuard[Overlapping]:
    """Tell whether a Binding's run can be begun and ended apart."""
    return hasattr(binding, "begin")


class Preparing(Binding, Protocol):
    """A Binding that is got ready for the sizes that it will run, by the thread that will run them."""

    def prepare(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Get ready for runs like that which was lent, with the same arguments, and filled. Raises: InferError."""


class Resting(Binding, Protocol):
    """A Binding that keeps memory to be fast, and gives it back when nothing comes for a while."""

    tired: bool
    """Whether there is something to give back."""

    def rest(self) -> None:
        """Give back what it can. Threads: that which runs it. Never raises InferError."""


class Placing(Binding, Protocol):
    """A Binding that reads tensors from where they lie on its device, and writes them where they are wanted there."""

    device: int
    """The device's number."""

    def reaches(self, part: Any) -> bool:
        """Tell whether the device copies a DeviceArray from where it lies; else it is better gathered."""

    def place(self, position: int, parts: Sequence[Any]) -> None:
        """Take the rows of an input from these parts, arrays and DeviceArrays, instead of from its buffer.

        After `lend`, which forgets it. Rows of the run that the parts do not fill are copies of the last one. The parts
        are read until the run has ended. Raises: InferError.
        """

    def aim(self, position: int, targets: Sequence[tuple[int, Any]]) -> bool:
        """Write rows of an output to DeviceArrays, each from a row of the run on; after `lend` and `place`.

        Returns: False where that cannot be: the output comes to the host as ever. Otherwise they have been written when
        the run has ended, and what it returns for this output has those rows not filled in. Raises: InferError.
        """


def places(binding: Binding) -> TypeGuard[Placing]:
    """Tell whether a Binding reads and writes tensors where they lie on its device."""
    return hasattr(binding, "place")


class Backend(Protocol):
    """One model, loaded on one device.

    One on a GPU also says `device` ("cuda:0"), `device_bytes` (what it takes there, its Bindings included) and
    `cpu_nodes` (the nodes of the graph that run on the CPU all the same; None: unknown).
    """

    graph: Signature
    """The model's own signature, every axis included, `batched` False."""

    node_inputs: Sequence[Any]
    """The runtime's own description of the inputs, as hooks see it (`onnxruntime.NodeArg`: name, shape, type)."""

    node_outputs: Sequence[Any]
    """Likewise of the outputs."""

    platform: str
    """Triton's platform word, such as `onnxruntime_onnx`."""

    described: Mapping[str, Any]
    """What else the runtime says of the model, as JSON has it; for most nothing. TensorFlow: `signature_def`, the
    MetaGraphDef's map of all signatures as protobuf's JSON, and `signature_key`, the one that is served."""

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        """Allocate a Binding for at most `capacity_rows` rows."""

    def close(self) -> None:
        """Free the model. No Binding may be used afterwards."""


def needs_thread(backend: Backend) -> bool:
    """Tell whether a run waits for another process, so that no event loop is to be who runs it.

    Such a Backend says `threads_only`; runtimes in this process need not say anything.
    """
    return bool(getattr(backend, "threads_only", False)) or remembers(backend)


def remembers(backend: Backend) -> bool:
    """Tell whether a model may remember what was run before, so that it is another model on each Backend.

    Such a Backend says `remembers`: its graphs may write to variables.
    """
    return bool(getattr(backend, "remembers", False))


def tell_loss(backend: Backend, told: Callable[[], None]) -> None:
    """Have a Backend that can be lost while nothing runs say so when it is, once, on a thread of its own.

    Such a Backend has `tell_loss`; runtimes in this process are lost under a run, which raises DeviceLost.
    """
    tell = getattr(backend, "tell_loss", None)
    if tell is not None:
        tell(told)


class Loader(Protocol):
    """Loads a model file. Raises InferError when it cannot, saying why in the runtime's words."""

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> Backend: ...


def device_number(device: str) -> int | None:
    """Give the number of a GPU; None for the CPU. Raises: InferError (INVALID)."""
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index.isascii() and index.isdecimal()):
        raise InferError(Code.INVALID, f"device '{device}': expected 'cpu' or 'cuda:<number>'")
    return int(index)
