"""In place: tensors on a device that a Binding reads and writes where they are. Used by execution.py and model.py.

A request's input may be a DeviceArray, and its `output_targets` may place its outputs on a device. The Binding copies
rows from and to there on the device, or copies nothing if the request runs alone. A tensor in a client's host memory is
gathered like any other (gathering.py), unless the device copies it itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.backends.backend import Binding, supports_in_place
from penstock.backends.device_array import DeviceArray

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

DirectOutputs = list[tuple[int, "InferRequest"]]
"""Outputs that a run writes directly to their targets: the position of each, and its request."""


def has_unread_values(model: Model) -> bool:
    """Whether nothing reads the values of a model's tensors before a Binding does.

    Padding, sequence states, caching and hooks read them, on the host.
    """
    reads_values = model.spec.cached or (model.spec.hooks is not None and model.spec.hooks.has_file)
    return not (
        reads_values or model.padding is not None or model.forms is not None or model.scheduler.sequences is not None
    )


def devices_of(model: Model, bindings: Iterable[Binding]) -> frozenset[int]:
    """Return the devices on which a model reads and writes in place; none if anything else reads its tensors."""
    return (
        frozenset(binding.device for binding in bindings if supports_in_place(binding))
        if has_unread_values(model)
        else frozenset()
    )


def read_in_place(binding: Binding, position: int, requests: Sequence[InferRequest]) -> bool:
    """Have a run read an input in place, after `acquire_buffers`, if its device can reach it. Returns: whether it does.

    The Binding fills rows that the requests do not. Raises: InferError; PartUnreadable.
    """
    parts: list[object] = [request.inputs[position] for request in requests]
    if not supports_in_place(binding) or not any(
        isinstance(part, DeviceArray) and binding.can_copy(part) for part in parts
    ):
        return False
    binding.set_input_parts(position, [part for part in parts if part is not None])
    return True


def write_in_place(
    binding: Binding, requests: Sequence[InferRequest], output_positions: Sequence[int]
) -> DirectOutputs:
    """Have a run write outputs to the requests' device targets, as far as it can. Raises: InferError."""
    direct_outputs: DirectOutputs = []
    if not supports_in_place(binding) or not any(hasattr(request, "output_targets") for request in requests):
        return direct_outputs
    for position in output_positions:
        first, targets, written = 0, [], []
        for request in requests:
            target = getattr(request, "output_targets", {}).get(position)
            if target is not None:
                targets.append((first, target))
                written.append((position, request))
            first += request.rows
        if targets and binding.set_output_targets(position, targets):
            direct_outputs += written
    return direct_outputs


def collect_in_place(direct_outputs: DirectOutputs) -> None:
    """Put the outputs written in place among the requests' outputs, after a successful run."""
    for position, request in direct_outputs:
        outputs = request.outputs
        if outputs is not None:
            outputs[request.output_positions.index(position)] = request.output_targets[position]
