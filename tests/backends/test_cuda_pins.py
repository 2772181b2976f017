"""Pinning clients' host memory for copies by a device, and unpinning it before it is unmapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.cuda_pins import PAGE_BYTES, Pins
from tests.backends.fake_cuda import FakeRuntime
from tests.shared import SharedArrays

SIZE = 2 * PAGE_BYTES


class Pinned(FakeRuntime):
    """`there`: how often unpinned memory was still mapped."""

    there = 0

    def unpin(self, pointer: int, device: int) -> None:
        super().unpin(pointer, device)
        self.there += f"{pointer:x}-" in Path("/proc/self/maps").read_text()


@pytest.fixture
def runtime() -> Pinned:
    return Pinned()


@pytest.fixture
def shared(tmp_path: Path) -> SharedArrays:
    arrays = SharedArrays(tmp_path)
    for name in "abc":
        arrays.hold(name, np.zeros(SIZE, np.uint8))
    return arrays


def memory(shared: SharedArrays, name: str) -> Any:
    return shared.regions.find(name, 0, 1)


def test_memory_is_pinned_once_in_whole_pages(runtime: Pinned, shared: SharedArrays) -> None:
    region = memory(shared, "a")
    for device in (0, 1, 0):
        assert runtime.pins.ensure_pinned(region, device)

    assert runtime.calls["cudaHostRegister"] == 1
    # it starts 40 bytes after the start of a page
    assert runtime._pins == {region.pointer - 40: SIZE + PAGE_BYTES}


def test_memory_is_unpinned_when_released_and_before_it_is_unmapped(runtime: Pinned, shared: SharedArrays) -> None:
    region = memory(shared, "a")
    assert runtime.pins.ensure_pinned(region, 0)
    shared.system.unregister("a")
    assert runtime.alive["pinned"] == 1
    del region

    assert (runtime.alive["pinned"], runtime.there) == (0, 1)
    assert runtime.pins._sizes == {}


def test_memory_that_cannot_be_pinned_is_not_retried(runtime: Pinned, shared: SharedArrays) -> None:
    runtime.fail("cudaHostRegister", 1)
    first, second, nowhere = (memory(shared, name) for name in "abc")
    nowhere.pointer = 0
    for _ in range(2):
        assert [runtime.pins.ensure_pinned(each, 0) for each in (first, second, nowhere)] == [False, True, False]

    assert runtime.calls["cudaHostRegister"] == 2
    shared.system.unregister()
    del first, second, nowhere
    assert runtime.alive["pinned"] == 0
    assert runtime.pins._sizes == {}


def test_no_more_memory_is_pinned_than_the_limit_until_some_is_released(runtime: Pinned, shared: SharedArrays) -> None:
    pins = Pins(runtime, 2 * (SIZE + PAGE_BYTES))
    first, second, third = (memory(shared, name) for name in "abc")
    assert [pins.ensure_pinned(each, 0) for each in (first, second, third)] == [True, True, False]

    shared.system.unregister("a")
    del first
    shared.hold("d", np.zeros(SIZE, np.uint8))
    assert pins.ensure_pinned(memory(shared, "d"), 0)
    assert not pins.ensure_pinned(third, 0)
