"""The GPUs visible to CUDA, by the rules of its documentation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.gpus.nvml import Gpu
from penstock.server.gpus.visible import VisibleGpus, pci_location, visible_gpus

ALIKE = tuple(Gpu(f"GPU-{letter * 4}-1", name="H200", bus_id=f"00000000:{bus}:00.0") for letter, bus in
              zip("abcd", ("05", "25", "45", "A5"), strict=True))  # fmt: skip
UUIDS = tuple(gpu.uuid for gpu in ALIKE)
MIXED = (ALIKE[0], Gpu("GPU-eeee-1", name="L4", bus_id="00000000:65:00.0"))
SLICED = Gpu(
    "GPU-ffff-1", name="H200", bus_id="00000000:85:00.0",
    mig=(Gpu("MIG-aaaa-1", name="1g"), Gpu("MIG-bbbb-1", name="1g")),
)  # fmt: skip


def shown(visible_devices: str | None, gpus: tuple[Gpu, ...] = ALIKE, order: str = "") -> tuple[str, ...] | None:
    environ = {} if visible_devices is None else {"CUDA_VISIBLE_DEVICES": visible_devices}
    found = visible_gpus(gpus, environ | ({"CUDA_DEVICE_ORDER": order} if order else {}))
    return None if found is None else found.uuids


@pytest.mark.parametrize(
    ("visible_devices", "numbers"),
    [
        (None, (0, 1, 2, 3)),
        ("", ()),
        ("2,1", (2, 1)),
        ("0,2,-1,1", (0, 2)),
        ("0, 2", (0, 2)),
        ("1,4,2", (1,)),
        ("NoDevFiles", ()),
        ("-1", ()),
        ("1gpu2,2ampere", (1, 2)),
        ("1,,2", (1,)),
        ("1,2,1", ()),
        ("GPU-bbbb-1,GPU-aaaa-1", (1, 0)),
        ("GPU-b,GPU-d", (1, 3)),
        ("GPU-", ()),
        ("GPU-a,1", (0,)),
        ("1,GPU-a", (1,)),
        ("GPU-a,GPU-x,GPU-b", (0,)),
        ("GPU-a,GPU-aaaa-1", ()),
        ("MIG-a", ()),
    ],
)
def test_cuda_visible_devices_is_read_as_cudas_documentation_describes(
    visible_devices: str | None, numbers: tuple[int, ...]
) -> None:
    assert shown(visible_devices) == tuple(UUIDS[number] for number in numbers)


def test_device_numbers_follow_the_bus_with_order_pci_bus_id() -> None:
    gpus = (MIXED[1], *ALIKE)

    assert shown("2,3", gpus, "PCI_BUS_ID") == (UUIDS[2], MIXED[1].uuid)


def test_device_numbers_are_unknown_with_several_kinds_of_gpus() -> None:
    assert shown("0", MIXED) is None
    assert shown("GPU-e", MIXED) == ("GPU-eeee-1",)
    assert shown("-1", MIXED) == ()
    assert visible_gpus(MIXED, {}) == VisibleGpus((UUIDS[0], "GPU-eeee-1"), ordered=False)
    assert visible_gpus(MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == VisibleGpus((UUIDS[0], "GPU-eeee-1"))


def test_only_the_first_mig_device_is_visible() -> None:
    assert shown(None, (*ALIKE, SLICED)) == ("MIG-aaaa-1",)
    assert shown("4", (*ALIKE[:3], SLICED)) == ()
    assert shown("0,3", (*ALIKE[:3], SLICED)) == ("MIG-aaaa-1",)
    assert shown("0,1", (*ALIKE[:3], SLICED)) == UUIDS[:2]
    assert shown("MIG-b,MIG-a", (*ALIKE, SLICED)) == ("MIG-bbbb-1",)
    assert shown("GPU-f", (*ALIKE, SLICED)) == ("MIG-aaaa-1",)
    assert shown(None, (ALIKE[0], Gpu("GPU-g", name="H200", mig=()))) == UUIDS[:1]


def test_a_lost_gpu_is_not_visible() -> None:
    assert shown(None, (Gpu(UUIDS[0], present=False), ALIKE[1])) == (UUIDS[1],)


@given(st.text(st.sampled_from("0123-+,GPUMIabcdef \u0664x")), st.booleans())
def test_any_value_makes_each_device_visible_at_most_once(visible_devices: str, sliced: bool) -> None:
    found = shown(visible_devices, (*ALIKE, SLICED) if sliced else ALIKE)

    assert found is not None
    assert len(set(found)) == len(found)
    assert set(found) <= {*UUIDS, "MIG-aaaa-1", "MIG-bbbb-1"}


@pytest.mark.parametrize(
    ("bus_id", "read"),
    [
        ("0000:65:00.0", (0, 0x65, 0)),
        ("00000000:65:00.0", (0, 0x65, 0)),
        ("00010000:A5:1F.0", (0x10000, 0xA5, 0x1F)),
        ("65:00.0", None),
        ("gpu:65:00.0", None),
        ("", None),
        (None, None),
    ],
)
def test_bus_ids_of_cuda_and_nvml_are_parsed_alike(bus_id: str | None, read: tuple[int, ...] | None) -> None:
    assert pci_location(bus_id) == read
