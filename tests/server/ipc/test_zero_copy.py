from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.server.ipc.arena import SEGMENT_BYTES
from penstock.server.ipc.channel import Channel
from penstock.server.ipc.layout import NO_SLOT
from penstock.server.ipc.wire import FIRST_KIND, INLINE_BYTES, Wire
from penstock.server.ipc.zero_copy import Form, ZeroCopyChannel, ZeroCopyWire
from tests.server.ipc.wire_pairs import carry, memory_use, same, sockets

PATIENCE_S = 10.0
FLOAT = np.dtype(np.float32)
LARGE: Form = ((FLOAT, (150_000,)),)
"""600 kB."""


@contextmanager
def wires(arena_bytes: int = 64 << 20) -> Iterator[tuple[ZeroCopyWire, Wire]]:
    here, there = ZeroCopyWire(arena_bytes), Wire(lambda: None)
    try:
        yield here, there
    finally:
        here.close()
        there.close()


def freed(there: Wire, here: ZeroCopyWire) -> None:
    """Have `there` report the slots that are no longer in use."""
    there.put_freed()
    carry(there, here)


def test_an_allocated_tensor_arrives_through_shared_memory_only() -> None:
    with wires() as (here, there):
        lent = here.allocate(LARGE)
        (array,) = lent.arrays
        assert array is not None
        array[...] = np.arange(array.size)
        here.put_allocated(FIRST_KIND, 7, b"body", lent)
        size = sum(map(len, here.out))
        ((kind, number, body, (come,), _),) = carry(here, there)

        assert (kind, number, body) == (FIRST_KIND, 7, b"body")
        assert same(array, come)
        assert size < 300
        array[0] = 5  # the same memory, in two mappings
        assert come is not None
        assert come[0] == 5
        del come


def test_a_slot_is_released_when_its_reader_is_done() -> None:
    with wires() as (here, there):
        lent = here.allocate(LARGE)
        here.put_allocated(FIRST_KIND, 1, b"", lent)
        messages = carry(here, there)
        assert here.arena.leases == 1
        messages.clear()
        freed(there, here)
        assert here.arena.leases == 0


def test_discarding_an_allocation_frees_its_slot_once() -> None:
    with wires() as (here, _):
        lent = here.allocate(LARGE)
        here.discard(lent)
        here.discard(lent)

        assert here.arena.leases == 0
        assert here.allocate(LARGE).slot != NO_SLOT


def test_discarding_a_sent_allocation_keeps_its_slot() -> None:
    with wires() as (here, there):
        lent = here.allocate(LARGE)
        here.put_allocated(FIRST_KIND, 1, b"", lent)
        here.discard(lent)

        assert here.arena.leases == 1
        carry(here, there).clear()


def test_an_allocation_sent_again_is_unchanged_after_its_slot_was_released() -> None:
    with wires() as (here, there):
        lent = here.allocate(LARGE)
        (array,) = lent.arrays
        assert array is not None
        array[...] = 3
        here.put_allocated(FIRST_KIND, 1, b"", lent)
        first = carry(here, there)
        here.put_allocated(FIRST_KIND, 2, b"", lent)
        second = carry(here, there)
        first.clear()
        freed(there, here)
        here.put_allocated(FIRST_KIND, 3, b"", lent)
        third = carry(here, there)

        assert same(array, second[0][3][0])
        assert same(array, third[0][3][0])
        del second, third


@pytest.mark.parametrize(
    "form",
    [
        ((FLOAT, (INLINE_BYTES // 4,)),),
        ((np.dtype(object), (5000,)),),
        ((FLOAT, (10_000,)), (np.dtype(object), (3,))),
        (None,),
        (),
        ((FLOAT, (0, 4)),),
    ],
)
def test_small_tensors_and_strings_are_allocated_in_plain_memory(form: Form) -> None:
    with wires() as (here, there):
        lent = here.allocate(form)
        assert lent.slot == NO_SLOT
        assert here.arena.leases == 0
        for array in lent.arrays:
            if array is not None:
                array[...] = b"text" if array.dtype.hasobject else 2
        here.put_allocated(FIRST_KIND, 1, b"", lent)
        ((_, _, _, come, _),) = carry(here, there)

        assert all(same(one, other) for one, other in zip(lent.arrays, come, strict=True))
        del come


def test_tensors_are_allocated_in_plain_memory_when_the_arena_is_full() -> None:
    with wires(SEGMENT_BYTES) as (here, there):
        held = [here.allocate(LARGE) for _ in range(20)]
        unplaced = [lent for lent in held if lent.slot == NO_SLOT]
        assert unplaced
        unplaced[0].arrays[0][...] = 4  # type: ignore[index]
        here.put_allocated(FIRST_KIND, 1, b"", unplaced[0])
        ((_, _, _, come, _),) = carry(here, there)

        assert same(unplaced[0].arrays[0], come[0])


_DTYPES = st.sampled_from([np.dtype(name) for name in ("f4", "f8", "i8", "u1", "?", "f2", "u2", "O")])
_FORMS = st.lists(
    st.none() | st.tuples(_DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40)), max_size=4
)


@given(st.lists(st.tuples(_FORMS, st.sampled_from(("send", "twice", "drop"))), max_size=6))
def test_any_allocation_arrives_as_filled_and_no_slot_stays_leased(steps: list[Any]) -> None:
    with wires() as (here, there):
        for number, (form, what) in enumerate(steps):
            lent = here.allocate(tuple(form))
            assert [None if each is None else (each.dtype, each.shape) for each in lent.arrays] == form
            for array in lent.arrays:
                if array is not None:
                    assert array.flags.c_contiguous
                    array[...] = str(number).encode() if array.dtype.hasobject else number
            if what == "drop":
                here.discard(lent)
                continue
            for _ in range(2 if what == "twice" else 1):
                here.put_allocated(FIRST_KIND, number, b"x", lent)
                ((_, _, _, come, _),) = carry(here, there)
                assert all(same(one, other) for one, other in zip(lent.arrays, come, strict=True))
                del come
                freed(there, here)
        assert here.arena.leases == 0


def test_allocated_tensors_make_a_round_trip_over_a_socket() -> None:
    before = memory_use()
    mine, other = sockets()
    here, there = ZeroCopyChannel(mine), Channel(other)

    def answer() -> None:
        for _ in range(20):
            ((kind, number, body, arrays, _),) = there.receive(PATIENCE_S)
            doubled = [None if array is None else array * 2 for array in arrays]
            arrays.clear()
            there.send(kind, number, body, doubled)

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(20):
        form: Form = ((FLOAT, (10, 300 * number)), None)
        here.discard(here.allocate(form))
        lent = here.allocate(form)
        (array, _) = lent.arrays
        assert array is not None
        array[...] = number
        here.send_allocated(FIRST_KIND, number, b"", lent)
        ((_, came, _, (doubled, nothing), _),) = here.receive(PATIENCE_S)
        assert (came, nothing) == (number, None)
        assert same(array * 2, doubled)
    thread.join(PATIENCE_S)
    assert here._wire.arena.leases == 0
    here.close()
    there.close()
    del lent, array, doubled
    assert memory_use() == before
