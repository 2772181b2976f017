"""In place: tensors on a device that a Binding reads and writes where they lie. Called by execution.py and model.py.

A request's input may be a DeviceArray; its outputs may be wanted on the device, in its `targets`. The Binding copies
rows from there and to there on the device, or not at all where the request runs alone. What lies in a client's memory
on the host is gathered from there, like any other (gathering.py), where the device does not copy it by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.backends.backend import Binding, places
from penstock.backends.device_array import DeviceArray

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest

Aimed = list[tuple[int, "InferRequest"]]
"""Outputs that a run writes where their requests want them: the position of each, and the request."""


def unread(model: Model) -> bool:
    """Tell whether nobody looks at the values of a model's tensors before a Binding does.

    Who fills axes, keeps states or answers, or passes tensors to hooks does, on the host.
    """
    looked_at = model.spec.cached or (model.spec.hooks is not None and model.spec.hooks.has_file)
    return not (
        looked_at or model.padding is not None or model.forms is not None or model.scheduler.sequences is not None
    )


def devices_of(model: Model, bindings: Iterable[Binding]) -> frozenset[int]:
    """Tell on which devices a model reads and writes tensors in place: where all of its tensors' values go unread."""
    return frozenset(binding.device for binding in bindings if places(binding)) if unread(model) else frozenset()


def placed(binding: Binding, position: int, requests: Sequence[InferRequest]) -> bool:
    """Have a run read an input from where it lies, after `lend`, if its device reaches it; say whether it does.

    Rows that the requests do not fill are the Binding's to fill. Raises: InferError; PartUnreadable.
    """
    parts: list[object] = [request.inputs[position] for request in requests]
    if not places(binding) or not any(isinstance(part, DeviceArray) and binding.reaches(part) for part in parts):
        return False
    binding.place(position, [part for part in parts if part is not None])
    return True


def aim(binding: Binding, requests: Sequence[InferRequest], wanted: Sequence[int]) -> Aimed:
    """Have a run write outputs where requests want them on the device, as far as it can. Raises: InferError."""
    aimed: Aimed = []
    if not places(binding) or not any(hasattr(request, "targets") for request in requests):
        return aimed
    for position in wanted:
        first, targets, whose = 0, [], []
        for request in requests:
            target = getattr(request, "targets", {}).get(position)
            if target is not None:
                targets.append((first, target))
                whose.append((position, request))
            first += request.rows
        if targets and binding.aim(position, targets):
            aimed += whose
    return aimed


def take(aimed: Aimed) -> None:
    """Put what was written in place among the outputs of the requests, after the run has gone well."""
    for position, request in aimed:
        outputs = request.outputs
        if outputs is not None:
            outputs[request.wanted.index(position)] = request.targets[position]
