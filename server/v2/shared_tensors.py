"""Shared tensors: inputs that lie in shared memory, and outputs that are to go there from the device itself.

The rules are the same over HTTP and gRPC, whose decoding calls this. What a client shares of a device's memory stays
where it is if the model's Bindings read and write it there (`Model.in_place`); anything else is copied when the
request is decoded, and when it is answered (`finish.py`). Texts are Triton's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from penstock.batching.request import bytes_of

from .regions import Lease
from .said import invalid, place, shared
from .tensors import from_binary, wrong_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

    from .regions import Regions
    from .said import Ways


def shared_input(
    model: Model, spec: TensorSpec, shape: list[int], items: Mapping[str, Any], regions: Regions | None
) -> Array:
    """Make an input of what is in shared memory: a copy; or, on a device where its model reads it, that itself.

    Raises: InferError; LargeRead.
    """
    region, offset, byte_size = place(items)
    found = shared(regions)
    found.check()
    name, count, dtype = spec.name, math.prod(shape), spec.type.dtype
    nbytes = count * spec.type.size_bytes
    if spec.type.size_bytes and nbytes != byte_size:
        # before anything is copied: a size that is wrong may also be absurd
        raise wrong_size(model.name, spec, shape, count, byte_size)
    lease = found.lease(region, offset, byte_size)
    if model.in_place and lease.device in model.in_place and nbytes and dtype.kind != "b":
        # BOOL is whatever byte is not 0 to a client, and 1 to a model
        return cast("Array", lease.array(tuple(shape), dtype))
    most = model.scheduler.room.most_bytes
    if byte_size > most:
        raise invalid(f"input '{name}' for model '{model.name}' has {byte_size} bytes, its queue takes {most}")
    return from_binary(model.name, spec, shape, count, found.read(lease))


def copied_bytes(request: InferRequest, names: Iterable[str]) -> int:
    """Count what the server holds of a request's inputs in shared memory, of these names: copies, not what stays."""
    inputs = zip(request.model.signature.inputs, request.inputs, strict=True)
    wanted = set(names)
    return bytes_of(array for spec, array in inputs if spec.name in wanted)


def aim(request: InferRequest, plan: Ways) -> None:
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
