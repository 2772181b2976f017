"""The number of Instances, their devices, and what they need to run: `instance_group`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.batching.spec import InstanceGroup, Resource

from .identity import BACKEND
from .parse_context import ParseContext, enum_name

HONOURED = (
    "instance_group.kind", "instance_group.count", "instance_group.gpus", "instance_group.passive",
    "instance_group.rate_limiter", "instance_group.host_policy",
)  # fmt: skip
REFUSED = ("instance_group.secondary_devices", "instance_group.profile")
DOCUMENTATION = ("instance_group.name",)

MISSING_GPU = "instances.missing_gpu"
"""The ParsedConfig's entry if a model requests a GPU and none is present: the reason, in Triton's words."""
DEVICES_CONFIGURED = "instances.devices_configured"
"""The ParsedConfig's entry if the configuration names devices instead of leaving the choice open."""
MAX_INSTANCES = 1024
"""The limit per group, as in penstock.toml: a configuration may come over the network, and an Instance is a thread."""


def read(context: ParseContext) -> None:
    """Read the fields of this module."""
    groups: list[InstanceGroup] = []
    for number, group in enumerate(context.config.instance_group):
        count = group.count or 1
        if not 0 < count <= MAX_INSTANCES:
            context.add_mistake(
                "instance_group.count", f"instance group {number}: count must be from 1 to {MAX_INSTANCES}"
            )
            continue
        limiter = group.rate_limiter
        groups += [
            InstanceGroup(
                count, (device,), group.passive, _resources(limiter.resources), limiter.priority, group.host_policy,
                number,
            )
            for device in _read_devices(context, number, group)
        ]  # fmt: skip
    if groups:
        context.set_value("instances", tuple(groups), "instance_group")
    if any(enum_name(group, "kind") != "KIND_AUTO" for group in context.config.instance_group):
        context.set_value(DEVICES_CONFIGURED, True, "instance_group.kind")


def group_name(model: str, number: int, group: Any) -> str:
    """Return the name of a group, as Triton completes it."""
    return group.name or f"{model}_{number}"


def _resources(configured: Iterable[Any]) -> tuple[Resource, ...]:
    """Return the configured resources; of duplicates the last, as in Triton."""
    resources = {(each.name, getattr(each, "global")): each.count for each in configured}
    return tuple(Resource(name, count, shared) for (name, shared), count in resources.items())


def _read_devices(context: ParseContext, number: int, group: Any) -> list[str]:
    """Return the devices of a group. Source of the texts: Triton core, ValidateInstanceGroup."""
    kind = enum_name(group, "kind").removeprefix("KIND_")
    title = f"instance group {group_name(context.name, number, group)} of model {context.name}"
    if kind == "AUTO" and not group.gpus:
        return list(context.gpus.default(context.values.get("model.backend", BACKEND)))
    if kind in {"CPU", "MODEL"} and group.gpus:
        context.add_mistake("instance_group.gpus", f"{title} has kind KIND_{kind} but specifies one or more GPUs")
    if kind not in {"AUTO", "GPU"}:
        return ["cpu"]
    available = context.gpus.numbers
    listed = tuple(dict.fromkeys(group.gpus))
    requested = listed or available or ()
    absent = [gpu for gpu in requested if gpu < 0 or (available is not None and gpu not in available)]
    if kind == "AUTO":
        return ["cpu"] if absent else _device_names(requested)
    if absent and (available or absent[0] < 0):
        text = f"{title} specifies invalid or unsupported gpu id {absent[0]}. GPUs with at least the minimum required "
        available_text = ", ".join(map(str, available or ()))
        text += f"CUDA compute compatibility of {context.gpus.min_capability:f} are: {available_text}"
        context.add_mistake("instance_group.gpus", text)
        requested = available or ()
    elif absent or not requested:
        problem = "specifies no GPUs" if available is None else "no GPUs are available"
        reason = f": {context.gpus.reason}" if context.gpus.reason else ""
        context.set_value(MISSING_GPU, f"{title} has kind KIND_GPU but {problem}{reason}", "instance_group.gpus")
    return _device_names(requested or (0,))


def _device_names(gpus: Iterable[int]) -> list[str]:
    return [f"cuda:{gpu}" for gpu in gpus]
