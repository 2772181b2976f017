"""Visible: which GPUs this process may use, and their CUDA numbers. Pure.

Source: CUDA programming guide, CUDA environment variables; MIG user guide, CUDA device enumeration; the handling of
repeated entries and of text after a number follows PyTorch's findings (torch.cuda, _parse_visible_devices).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .nvml import Gpu

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
_BY_PCI_BUS = "PCI_BUS_ID"
_NUMBER = re.compile(r"\s*([+-]?[0-9]{1,9})", re.ASCII)
_UUIDS = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """UUIDs of the GPUs and MIG devices visible to CUDA. `ordered`: they are in CUDA's order, otherwise unknown."""

    uuids: tuple[str, ...]
    ordered: bool = True


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> VisibleGpus | None:
    """Return what CUDA shows of `gpus`, in NVML's order; None if an entry's number could mean any of them.

    Numbers are CUDA's own, and by default CUDA puts the fastest GPU first: with GPUs of several kinds, only CUDA knows
    the order.
    """
    present = sorted((gpu for gpu in gpus if gpu.present), key=lambda gpu: pci_location(gpu.bus_id) or ())
    numbered = environ.get(ORDER_VARIABLE) == _BY_PCI_BUS or len({gpu.name for gpu in present}) < 2
    setting = environ.get(DEVICES_VARIABLE)
    if setting is None:
        return VisibleGpus(_visible_uuids(present), numbered or len(_visible_uuids(present)) < 2)
    kind = next((prefix for prefix in _UUIDS if setting.startswith(prefix)), "")
    find = _by_uuid(kind, present) if kind else _by_number(present)
    if not kind and not numbered and find(setting) is not None:
        return None
    found: list[Gpu] = []
    for entry in setting.split(","):
        gpu = find(entry)
        if gpu is None:
            break  # all entries after it are hidden too
        if any(each.uuid == gpu.uuid for each in found):
            return VisibleGpus(())
        found.append(gpu)
    return VisibleGpus(_visible_uuids(found))


def pci_location(bus_id: str | None) -> tuple[int, ...] | None:
    """Parse a PCI place, as domain, bus and device; CUDA writes fewer digits than NVML."""
    try:
        parts = re.split("[:.]", bus_id or "")
        return tuple(int(part, 16) for part in parts[:3]) if len(parts) == 4 else None
    except ValueError:
        return None


def _visible_uuids(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Return the UUIDs; if they include a MIG device, only the first one, since CUDA then uses no other."""
    slices = [each.uuid for gpu in gpus for each in gpu.mig or ()]
    slices += [gpu.uuid for gpu in gpus if gpu.uuid.startswith("MIG-")]
    return tuple(slices[:1]) or tuple(gpu.uuid for gpu in gpus if gpu.mig is None)


def _by_number(gpus: Sequence[Gpu]) -> Callable[[str], Gpu | None]:
    def find(entry: str) -> Gpu | None:
        number = _NUMBER.match(entry)
        return gpus[int(number[1])] if number and 0 <= int(number[1]) < len(gpus) else None

    return find


def _by_uuid(kind: str, gpus: Sequence[Gpu]) -> Callable[[str], Gpu | None]:
    known = [each for gpu in gpus for each in (gpu, *(gpu.mig or ())) if each.uuid.startswith(kind)]

    def find(entry: str) -> Gpu | None:
        """Return the only device whose UUID starts with the entry: a unique prefix is enough."""
        entry = entry.strip()
        found = [each for each in known if entry.startswith(kind) and each.uuid.startswith(entry)]
        return found[0] if len(found) == 1 else None

    return find
