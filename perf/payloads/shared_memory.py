"""Regions: tensors in shared memory, the system's or a device's, which requests refer to instead of carrying them.

There is one region for each input, with the values of all requests, and one for each output, which all requests write:
results are not read. Names are unique to this run, so no other client's region is replaced.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import Protocol

from penstock.perf.profiling.control import ControlError
from penstock.perf.profiling.model import ModelDescription

from .tensors import InputTensor, Place, Step, nbytes_of
from .writing import RequestedOutput

_ALIGNMENT = 256
"""As the CUDA runtime aligns memory: kernels read aligned data in place."""
Streams = tuple[tuple[Step, ...], ...]


class Registrar(Protocol):
    """The methods of a Control that are needed here. Raises: ControlError."""

    def register(self, region: str, key: str, size: int) -> None:
        """Register a region of system shared memory."""
        ...

    def unregister(self, region: str) -> None:
        """Unregister it."""
        ...

    def register_cuda(self, region: str, handle: bytes, device: int, size: int) -> None:
        """Register an allocation of device memory by its cudaIpcMemHandle."""
        ...

    def unregister_cuda(self, region: str) -> None:
        """Unregister it."""
        ...


Write = Callable[[int, bytes], None]
"""Write into a region at an offset."""
Create = Callable[[ExitStack, Registrar, str, int], Write]
"""Create and register a region of a size in bytes, at least one. It is removed with the stack."""


def system(stack: ExitStack, control: Registrar, region: str, size: int) -> Write:
    """Create a region of system shared memory: a `Create`."""
    memory = SharedMemory(region, create=True, size=size)
    stack.callback(memory.unlink)
    stack.callback(memory.close)
    control.register(region, f"/{region}", size)
    stack.callback(forgotten, control.unregister, region)

    def write(offset: int, raw: bytes) -> None:
        memory.buf[offset : offset + len(raw)] = raw  # type: ignore[index]  # None once closed

    return write


def forgotten(unregister: Callable[[str], None], region: str) -> None:
    """Unregister a region. A server that has gone has dropped it already."""
    with suppress(ControlError):
        unregister(region)


@contextmanager
def shared(
    control: Registrar,
    model: ModelDescription,
    streams: Streams,
    batch: int,
    output_bytes: int,
    create: Create = system,
) -> Iterator[tuple[Streams, tuple[RequestedOutput, ...]]]:
    """Place inputs and outputs in shared memory until the block ends. Yields: the requests that refer to it.

    Units: `output_bytes` per row of an output whose metadata leaves its size open.
    Raises: ControlError if the server rejects it; OSError if there is no memory.
    """
    run = f"perf_{secrets.token_hex(6)}"
    with ExitStack() as stack:
        places: dict[InputTensor, Place] = {}
        for number, each in enumerate(model.inputs):
            sent = {
                input_tensor: None
                for stream in streams
                for step in stream
                for input_tensor in step
                if input_tensor.name == each.name
            }
            if sent:
                places |= _filled(partial(create, stack, control), f"{run}_input_{number}", list(sent))
        outputs = []
        for number, tensor in enumerate(model.outputs):
            size = nbytes_of(tensor.datatype, tensor.shape)
            nbytes = (output_bytes if size is None else size) * batch
            region = f"{run}_output_{number}"
            create(stack, control, region, max(nbytes, 1))
            outputs.append(RequestedOutput(tensor.name, Place(region, 0, nbytes)))
        placed = tuple(
            tuple(tuple(replace(sent, raw=b"", place=places[sent]) for sent in step) for step in stream)
            for stream in streams
        )
        yield placed, tuple(outputs)


def _filled(create: Callable[[str, int], Write], region: str, sent: Sequence[InputTensor]) -> dict[InputTensor, Place]:
    """Write all values of an input into one region, one after another."""
    places, offset = {}, 0
    for each in sent:
        places[each] = Place(region, offset, len(each.raw))
        offset += -(-len(each.raw) // _ALIGNMENT) * _ALIGNMENT
    write = create(region, max(offset, 1))
    for each, place in places.items():
        write(place.offset, each.raw)
    return places
