from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from penstock.server.ipc.arena import MAX_IDLE_BYTES, MIN_SLOT_BYTES, SEGMENT_BYTES, Arena, Mirror, WireError, slot_size
from tests.processes import descriptors
from tests.server.ipc.wire_pairs import mappings


@pytest.mark.parametrize(
    ("nbytes", "slot_bytes"),
    [
        (1, MIN_SLOT_BYTES),
        (MIN_SLOT_BYTES, MIN_SLOT_BYTES),
        (MIN_SLOT_BYTES + 1, 2 * MIN_SLOT_BYTES),
        (600_000, 1 << 20),
        (SEGMENT_BYTES, SEGMENT_BYTES),
        (SEGMENT_BYTES + 1, SEGMENT_BYTES + SEGMENT_BYTES // 8),
        (600 << 20, 640 << 20),
        (3 << 30, 3 << 30),
    ],
)
def test_a_slot_is_little_larger_than_its_tensor(nbytes: int, slot_bytes: int) -> None:
    assert slot_size(nbytes) == slot_bytes
    assert slot_size(slot_bytes) == slot_bytes
    assert slot_bytes % os.sysconf("SC_PAGE_SIZE") == 0


def test_segments_that_are_not_leased_are_removed_above_the_idle_limit() -> None:
    arena = Arena(1 << 30)
    slots = [slot for slot, _, _ in (arena.lease(SEGMENT_BYTES) or _nothing() for _ in range(40))]
    assert arena.total_bytes == arena.leased_bytes == 40 * SEGMENT_BYTES

    for slot in slots:
        arena.release(slot)

    assert arena.leased_bytes == 0
    assert arena.total_bytes == MAX_IDLE_BYTES
    assert len(arena.removed_segments) == 40 - MAX_IDLE_BYTES // SEGMENT_BYTES
    arena.close()


def test_an_idle_segment_is_removed_to_make_room_for_a_lease() -> None:
    arena = Arena(2 * SEGMENT_BYTES)
    small, _, _ = arena.lease(1) or _nothing()
    arena.lease(SEGMENT_BYTES)
    assert arena.lease(SEGMENT_BYTES) is None

    arena.release(small)

    assert arena.lease(SEGMENT_BYTES) is not None
    assert arena.lease(1) is None
    assert arena.total_bytes == 2 * SEGMENT_BYTES
    arena.close()


def test_a_slot_larger_than_the_arena_is_not_leased() -> None:
    arena = Arena(SEGMENT_BYTES)
    assert arena.lease(SEGMENT_BYTES + 1) is None
    assert arena.total_bytes == 0
    arena.close()


def test_segments_have_no_names_in_the_file_system() -> None:
    folders = Path("/dev/shm"), Path("/tmp")
    before = {path for folder in folders for path in folder.iterdir()}
    arena = Arena(1 << 30)
    for nbytes in (1, 100_000, 10_000_000):
        arena.lease(nbytes)
    assert mappings() >= 3
    came = {path for folder in folders for path in folder.iterdir()} - before
    assert not [path for path in came if "penstock" in path.name]
    arena.close()


def _nothing() -> Any:
    raise AssertionError("there is no room")


class Leases(RuleBasedStateMachine):
    """An Arena and its Mirror, with the messages between them delivered in order and at any time."""

    views = Bundle("views")

    @initialize(limit=st.integers(1, 6))
    def start(self, limit: int) -> None:
        self.before = descriptors()
        self.limit = limit * SEGMENT_BYTES
        self.arena = Arena(self.limit)
        self.mirror = Mirror(lambda: None)
        self.leased: dict[int, int] = {}
        self.alive = 0

    @rule(target=views, nbytes=st.sampled_from([1, 9000, MIN_SLOT_BYTES + 1, SEGMENT_BYTES // 2, SEGMENT_BYTES * 2]))
    def lease(self, nbytes: int) -> Any:
        leased = self.arena.lease(nbytes)
        while self.arena.removed_segments:
            self.mirror.drop(self.arena.removed_segments.pop())
        for segment in self.arena.new_segments:
            self.mirror.map(segment.number, segment.slot_bytes, segment.fd)
        self.arena.new_segments.clear()
        if leased is None:
            return multiple()
        slot, memory, start = leased
        assert slot not in self.leased
        self.leased[slot] = nbytes
        value = slot % 251
        np.ndarray(nbytes, np.uint8, memory, start)[...] = value
        self.alive += 1
        view = np.ndarray(nbytes, np.uint8, self.mirror.view(slot, nbytes))
        return [view, value]

    @rule(holder=views)
    def look(self, holder: Any) -> None:
        if holder:
            view, value = holder
            assert view.min() == view.max() == value

    @rule(holder=consumes(views))
    def let_go(self, holder: Any) -> None:
        if holder:
            holder.clear()
            self.alive -= 1

    @rule()
    def release(self) -> None:
        freed = self.mirror.freed
        while freed:
            slot = freed.popleft()
            del self.leased[slot]
            self.arena.release(slot)
            with pytest.raises(WireError):
                self.arena.release(slot)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "arena"):
            return
        arena = self.arena
        assert arena.leases == len(self.leased) == self.alive + len(self.mirror.freed)
        assert arena.leased_bytes == sum(map(slot_size, self.leased.values()))
        assert arena.leased_bytes <= arena.total_bytes <= self.limit
        assert arena.total_bytes == sum(segment.count * segment.slot_bytes for segment in arena._segments.values())

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        self.arena.close()
        self.mirror.close()


TestLeases = pytest.mark.slow(Leases.TestCase)
TestLeases.settings = settings(max_examples=40, stateful_step_count=40)
