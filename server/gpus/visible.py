"""Visible: which GPUs this process may use, and by what numbers CUDA knows them. Pure.

Source: CUDA programming guide, CUDA environment variables; MIG user guide, CUDA device enumeration; what is said of
repeated entries and of text after a number is as PyTorch found it (torch.cuda, _parse_visible_devices).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .nvml import Gpu

DEVICES = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_BY_PLACE = "PCI_BUS_ID"
_NUMBER = re.compile(r"\s*([+-]?[0-9]{1,9})", re.ASCII)
_UUIDS = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class Visible:
    """UUIDs of the GPUs and MIG devices that CUDA shows. `ordered`: in CUDA's order, which is not known otherwise."""

    uuids: tuple[str, ...]
    ordered: bool = True


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible | None:
    """Tell what CUDA shows of `gpus`, which are in NVML's order; None where an entry's number may mean any of them.

    Numbers are CUDA's own, and CUDA puts the fastest first unless it is told otherwise: of GPUs of several kinds only
    CUDA knows which those are.
    """
    present = sorted((gpu for gpu in gpus if gpu.present), key=lambda gpu: place(gpu.bus_id) or ())
    numbered = environ.get(ORDER) == _BY_PLACE or len({gpu.name for gpu in present}) < 2
    said = environ.get(DEVICES)
    if said is None:
        return Visible(_narrowed(present), numbered or len(_narrowed(present)) < 2)
    kind = next((prefix for prefix in _UUIDS if said.startswith(prefix)), "")
    find = _by_uuid(kind, present) if kind else _by_number(present)
    if not kind and not numbered and find(said) is not None:
        return None
    found: list[Gpu] = []
    for entry in said.split(","):
        gpu = find(entry)
        if gpu is None:
            break  # whatever follows is not shown either
        if any(each.uuid == gpu.uuid for each in found):
            return Visible(())
        found.append(gpu)
    return Visible(_narrowed(found))


def place(bus_id: str | None) -> tuple[int, ...] | None:
    """Read a place on the PCI bus, domain, bus and device, of which CUDA writes fewer digits than NVML."""
    try:
        parts = re.split("[:.]", bus_id or "")
        return tuple(int(part, 16) for part in parts[:3]) if len(parts) == 4 else None
    except ValueError:
        return None


def _narrowed(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Give the UUIDs; with a MIG device among them that is the first one alone, for CUDA uses no other then."""
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
        """Find the only one whose UUID begins so: as many digits as tell it from the others are enough."""
        entry = entry.strip()
        found = [each for each in known if entry.startswith(kind) and each.uuid.startswith(entry)]
        return found[0] if len(found) == 1 else None

    return find
