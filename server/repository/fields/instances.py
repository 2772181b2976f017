"""How many Instances there are, and on which devices: `instance_group`."""

from __future__ import annotations

from penstock.batching.spec import InstanceGroup

from .notes import Notes, enum_name

HONOURED = ("instance_group.kind", "instance_group.count", "instance_group.gpus")
REFUSED = (
    "instance_group.rate_limiter", "instance_group.secondary_devices", "instance_group.profile",
    "instance_group.passive", "instance_group.host_policy",
)  # fmt: skip
DOCUMENTATION = ("instance_group.name",)

MAX_INSTANCES = 1024
"""Of one group, as in penstock.toml: a configuration may come over the network, and an Instance is a thread."""


def read(notes: Notes) -> None:
    """Read them."""
    groups: list[InstanceGroup] = []
    for number, group in enumerate(notes.config.instance_group):
        count = group.count or 1
        if not 0 < count <= MAX_INSTANCES:
            notes.mistake("instance_group.count", f"instance group {number}: count must be from 1 to {MAX_INSTANCES}")
            continue
        kind = enum_name(group, "kind").removeprefix("KIND_")
        if group.gpus and kind in {"CPU", "MODEL"}:
            text = f"instance group {number} has kind KIND_{kind} but specifies one or more GPUs"
            notes.mistake("instance_group.gpus", text)
        groups += [InstanceGroup(count, (device,)) for device in _devices(notes, number, kind, tuple(group.gpus))]
    if groups:
        notes.say("instances", tuple(groups), "instance_group")


def _devices(notes: Notes, number: int, kind: str, gpus: tuple[int, ...]) -> list[str]:
    known = notes.gpus
    wanted = gpus or known or ()
    if kind == "AUTO":
        kind = "GPU" if wanted and (known is None or set(wanted) <= set(known)) else "CPU"
    if kind != "GPU":
        return ["cpu"]
    absent = sorted(set(wanted) - set(wanted if known is None else known))
    if absent or not wanted:
        none = "but names no gpus" if known is None else "but no GPUs are available"
        text = f"specifies gpu {absent[0]}, which is not there" if absent else none
        notes.mistake("instance_group.gpus", f"instance group {number} has kind KIND_GPU {text}")
        return ["cpu"]
    return [f"cuda:{gpu}" for gpu in wanted]
