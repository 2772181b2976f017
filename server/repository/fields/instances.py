"""The number of Instances, their devices, and what they need to run: `instance_group`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.batching.spec import InstanceGroup, Resource

from .identity import BACKEND
from .notes import Notes, enum_name

HONOURED = (
    "instance_group.kind", "instance_group.count", "instance_group.gpus", "instance_group.passive",
    "instance_group.rate_limiter", "instance_group.host_policy",
)  # fmt: skip
REFUSED = ("instance_group.secondary_devices", "instance_group.profile")
DOCUMENTATION = ("instance_group.name",)

LACKING = "instances.lacking"
"""The Statement's entry if a model requests a GPU and none is present: the reason, in Triton's words."""
ASKED = "instances.asked"
"""The Statement's entry if the configuration names devices instead of leaving the choice open."""
MAX_INSTANCES = 1024
"""The limit per group, as in penstock.toml: a configuration may come over the network, and an Instance is a thread."""


def read(notes: Notes) -> None:
    """Read the fields of this module."""
    groups: list[InstanceGroup] = []
    for number, group in enumerate(notes.config.instance_group):
        count = group.count or 1
        if not 0 < count <= MAX_INSTANCES:
            notes.mistake("instance_group.count", f"instance group {number}: count must be from 1 to {MAX_INSTANCES}")
            continue
        limiter = group.rate_limiter
        groups += [
            InstanceGroup(
                count, (device,), group.passive, _resources(limiter.resources), limiter.priority, group.host_policy,
                number,
            )
            for device in _devices(notes, number, group)
        ]  # fmt: skip
    if groups:
        notes.say("instances", tuple(groups), "instance_group")
    if any(enum_name(group, "kind") != "KIND_AUTO" for group in notes.config.instance_group):
        notes.say(ASKED, True, "instance_group.kind")


def group_name(model: str, number: int, group: Any) -> str:
    """Return the name of a group, as Triton completes it."""
    return group.name or f"{model}_{number}"


def _resources(stated: Iterable[Any]) -> tuple[Resource, ...]:
    """Return the configured resources; of duplicates the last, as in Triton."""
    resources = {(each.name, getattr(each, "global")): each.count for each in stated}
    return tuple(Resource(name, count, shared) for (name, shared), count in resources.items())


def _devices(notes: Notes, number: int, group: Any) -> list[str]:
    """Return the devices of a group. Source of the texts: Triton core, ValidateInstanceGroup."""
    kind = enum_name(group, "kind").removeprefix("KIND_")
    title = f"instance group {group_name(notes.name, number, group)} of model {notes.name}"
    if kind == "AUTO" and not group.gpus:
        return list(notes.gpus.default(notes.values.get("model.backend", BACKEND)))
    if kind in {"CPU", "MODEL"} and group.gpus:
        notes.mistake("instance_group.gpus", f"{title} has kind KIND_{kind} but specifies one or more GPUs")
    if kind not in {"AUTO", "GPU"}:
        return ["cpu"]
    known = notes.gpus.numbers
    named = tuple(dict.fromkeys(group.gpus))
    wanted = named or known or ()
    absent = [gpu for gpu in wanted if gpu < 0 or (known is not None and gpu not in known)]
    if kind == "AUTO":
        return ["cpu"] if absent else _named(wanted)
    if absent and (known or absent[0] < 0):
        text = f"{title} specifies invalid or unsupported gpu id {absent[0]}. GPUs with at least the minimum required "
        there = ", ".join(map(str, known or ()))
        text += f"CUDA compute compatibility of {notes.gpus.least:f} are: {there}"
        notes.mistake("instance_group.gpus", text)
        wanted = known or ()
    elif absent or not wanted:
        none = "specifies no GPUs" if known is None else "no GPUs are available"
        why = f": {notes.gpus.why}" if notes.gpus.why else ""
        notes.say(LACKING, f"{title} has kind KIND_GPU but {none}{why}", "instance_group.gpus")
    return _named(wanted or (0,))


def _named(gpus: Iterable[int]) -> list[str]:
    return [f"cuda:{gpu}" for gpu in gpus]
