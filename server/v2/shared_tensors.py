"""Shared tensors: inputs in shared memory, and outputs that the device writes there directly.

The rules are the same over HTTP and gRPC, whose decoding calls this. Shared device memory is used in place if the
model's Bindings can (`Model.in_place`). Shared host memory stays in place until the input is gathered, if nothing reads
it earlier (`Model.reads_at_gather`). Anything else is copied when the request is decoded, and when it is answered
(`finish.py`). Texts are Triton's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from penstock.backends.device_array import HOST, DeviceArray
from penstock.batching.request import input_bytes

from .call_parameters import invalid, parse_location, require_regions
from .regions import LargeRead, Lease
from .tensors import from_binary, size_mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

    from .call_parameters import PerOutputPlan
    from .regions import Region, Regions

MIN_LATE_READ_BYTES = 16384
"""Smaller inputs are always read during decoding. For 16 tensors of 8 KiB that takes 41 us, against 38 if they are read
when gathered; of 16 KiB 54 against 43, for a single one 5 against 10; 64 of 600 kB take 29 ms against 4.5."""


class SharedInput(NamedTuple):
    """An input in shared memory: where, and what it holds. Its size is checked against its shape.

    `is_direct`: its bytes can be used as a tensor directly. BYTES cannot; nor can BOOL, where clients may send any
    nonzero byte for true, but models expect 1.
    """

    region: str
    offset: int
    byte_size: int
    spec: TensorSpec
    shape: tuple[int, ...]
    is_direct: bool

    def fetch(self, model: Model, regions: Regions) -> Array:
        """Return a copy, or the memory itself if the model reads it in place. Raises: InferError; LargeRead."""
        name, offset, byte_size, spec, shape, is_direct = self
        region = regions.find(name, offset, byte_size)
        if is_direct and model.in_place_devices and region.device in model.in_place_devices:
            return cast("Array", DeviceArray(region, offset, shape, spec.type.dtype))
        if byte_size > (max_bytes := model.scheduler.limits.nbytes_ceiling):
            text = f"input '{spec.name}' for model '{model.name}' has {byte_size} bytes, its queue accepts {max_bytes}"
            raise invalid(text)
        if is_direct and byte_size >= MIN_LATE_READ_BYTES and model.reads_at_gather and region.device == HOST:
            region.check(offset + byte_size)
            return cast("Array", DeviceArray(region, offset, shape, spec.type.dtype))
        if byte_size > regions.max_copy_bytes:
            raise LargeRead
        into = _copy_of(region, shape, spec.type.dtype) if is_direct else np.empty(byte_size, np.uint8)
        if byte_size:
            region.read(offset, into)
        return into if is_direct else from_binary(model.name, spec, list(shape), math.prod(shape), into.data)


class _Copy(np.ndarray[Any, Any]):
    """Memory that keeps its region alive until the request that copied from it has ended."""

    __slots__ = ("region",)
    region: Region


def _copy_of(region: Region, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    memory = _Copy(shape, dtype)
    memory.region = region
    # a plain array, because numpy is slower with subclasses everywhere
    return np.ndarray(shape, dtype, memory)


def locate(
    model: Model, spec: TensorSpec, shape: list[int], items: Mapping[str, Any], regions: Regions | None
) -> SharedInput:
    """Read an input's location and check its declared size. Raises: InferError."""
    region, offset, byte_size = parse_location(items)
    require_regions(regions).check()
    nbytes = math.prod(shape) * spec.type.size_bytes
    if spec.type.size_bytes and nbytes != byte_size:
        # before anything is copied: a wrong size may be absurdly large
        raise size_mismatch(model.name, spec, shape, math.prod(shape), byte_size)
    is_direct = nbytes > 0 and spec.datatype != "BOOL"
    return SharedInput(region, offset, byte_size, spec, tuple(shape), is_direct)


def shared_input(
    model: Model, spec: TensorSpec, shape: list[int], items: Mapping[str, Any], regions: Regions | None
) -> Array:
    """Return an input that is in shared memory. Raises: InferError; LargeRead."""
    return locate(model, spec, shape, items, regions).fetch(model, require_regions(regions))


def copied_bytes(request: InferRequest, names: Iterable[str]) -> int:
    """Count the bytes that the server holds or will hold for a request's shared inputs of these names: copies."""
    inputs = zip(request.model.signature.inputs, request.inputs, strict=True)
    shared_names = set(names)
    return input_bytes(array for spec, array in inputs if spec.name in shared_names)


def set_output_targets(request: InferRequest, plan: PerOutputPlan) -> None:
    """Have the model write outputs directly to device memory, for outputs that go to a device its Bindings use.

    Only if they are known to fit; others go through the host, where their size is checked first.
    """
    model, targets = request.model, {}
    for position, mode in zip(request.output_positions, plan.modes, strict=True):
        if type(mode) is not Lease or mode.device not in model.in_place_devices:
            continue
        spec = model.signature.outputs[position]
        shape = (request.rows, *spec.shape[1:]) if model.signature.batched else spec.shape
        nbytes = math.prod(shape) * spec.type.size_bytes
        if min(shape, default=0) >= 0 and 0 < nbytes <= mode.byte_size:
            targets[position] = mode.array(shape, spec.type.dtype)
    if targets:
        request.output_targets = targets
