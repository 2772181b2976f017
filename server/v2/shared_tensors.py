"""Shared tensors: inputs that lie in shared memory, and outputs that are to go there from the device itself.

The rules are the same over HTTP and gRPC, whose decoding calls this. What a client shares of a device's memory stays
where it is if the model's Bindings read and write it there (`Model.in_place`), and what it shares of the host's until
it is gathered, if nobody looks at it before (`Model.reads_late`); anything else is copied when the request is decoded,
and when it is answered (`finish.py`). Texts are Triton's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from penstock.backends.device_array import HOST, DeviceArray
from penstock.batching.request import bytes_of

from .call_parameters import invalid, place, shared
from .regions import LargeRead, Lease
from .tensors import from_binary, wrong_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

    from .call_parameters import PerOutputPlan
    from .regions import Region, Regions

LATE_BYTES = 16384
"""What has less is read when it is decoded all the same. 16 tensors of 8 KiB take 41 us so and 38 when they are read as
they are gathered, of 16 KiB 54 and 43, one alone 5 and 10; 64 of 600 kB take 29 ms and 4.5."""


class SharedInput(NamedTuple):
    """An input that lies in shared memory: where, and what it is there. Its size is right for its shape.

    `plain`: its bytes are a tensor as they are. Not those of BYTES; and BOOL is whatever byte is not 0 to a client, and
    1 to a model.
    """

    region: str
    offset: int
    byte_size: int
    spec: TensorSpec
    shape: tuple[int, ...]
    plain: bool

    def fetch(self, model: Model, regions: Regions) -> Array:
        """Copy it; or, where its model reads it where it lies, give that itself. Raises: InferError; LargeRead."""
        name, offset, byte_size, spec, shape, plain = self
        region = regions.find(name, offset, byte_size)
        if plain and model.in_place and region.device in model.in_place:
            return cast("Array", DeviceArray(region, offset, shape, spec.type.dtype))
        if byte_size > (most := model.scheduler.room.most_bytes):
            text = f"input '{spec.name}' for model '{model.name}' has {byte_size} bytes, its queue takes {most}"
            raise invalid(text)
        if plain and byte_size >= LATE_BYTES and model.reads_late and region.device == HOST:
            region.check(offset + byte_size)
            return cast("Array", DeviceArray(region, offset, shape, spec.type.dtype))
        if byte_size > regions.most_bytes:
            raise LargeRead
        into = _copy_of(region, shape, spec.type.dtype) if plain else np.empty(byte_size, np.uint8)
        if byte_size:
            region.read(offset, into)
        return into if plain else from_binary(model.name, spec, list(shape), math.prod(shape), into.data)


class _Copy(np.ndarray[Any, Any]):
    """Memory that holds a region, which so is there until the request that has copied from it has ended."""

    __slots__ = ("region",)
    region: Region


def _copy_of(region: Region, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    memory = _Copy(shape, dtype)
    memory.region = region
    # a plain array: numpy takes longer for one of another class wherever it goes
    return np.ndarray(shape, dtype, memory)


def locate(
    model: Model, spec: TensorSpec, shape: list[int], items: Mapping[str, Any], regions: Regions | None
) -> SharedInput:
    """Read where an input lies, and check how large it says it is. Raises: InferError."""
    region, offset, byte_size = place(items)
    shared(regions).check()
    nbytes = math.prod(shape) * spec.type.size_bytes
    if spec.type.size_bytes and nbytes != byte_size:
        # before anything is copied: a size that is wrong may also be absurd
        raise wrong_size(model.name, spec, shape, math.prod(shape), byte_size)
    plain = nbytes > 0 and spec.datatype != "BOOL"
    return SharedInput(region, offset, byte_size, spec, tuple(shape), plain)


def shared_input(
    model: Model, spec: TensorSpec, shape: list[int], items: Mapping[str, Any], regions: Regions | None
) -> Array:
    """Make an input of what is in shared memory. Raises: InferError; LargeRead."""
    return locate(model, spec, shape, items, regions).fetch(model, shared(regions))


def copied_bytes(request: InferRequest, names: Iterable[str]) -> int:
    """Count what the server holds of a request's inputs in shared memory, of these names, or will: copies."""
    inputs = zip(request.model.signature.inputs, request.inputs, strict=True)
    wanted = set(names)
    return bytes_of(array for spec, array in inputs if spec.name in wanted)


def aim(request: InferRequest, plan: PerOutputPlan) -> None:
    """Have the model write those outputs where the request wants them that are to lie on a device of its own.

    Only where it is known that there is room: others go through the host, where they are measured first.
    """
    model, targets = request.model, {}
    for position, way in zip(request.wanted, plan.ways, strict=True):
        if type(way) is not Lease or way.device not in model.in_place:
            continue
        spec = model.signature.outputs[position]
        shape = (request.rows, *spec.shape[1:]) if model.signature.batched else spec.shape
        nbytes = math.prod(shape) * spec.type.size_bytes
        if min(shape, default=0) >= 0 and 0 < nbytes <= way.byte_size:
            targets[position] = way.array(shape, spec.type.dtype)
    if targets:
        request.targets = targets
