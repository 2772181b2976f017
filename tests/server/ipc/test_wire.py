from __future__ import annotations

import contextlib
import os
import struct
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from penstock.backends.datatypes import DATATYPES
from penstock.server.ipc import wire as wire_module
from penstock.server.ipc.arena import MIN_SLOT_BYTES, SEGMENT_BYTES, Arena, WireError
from penstock.server.ipc.layout import NO_SLOT, pack_strings, unpack_strings
from penstock.server.ipc.wire import FIRST_KIND, INLINE_BYTES, LAST_KIND, Wire
from tests.processes import descriptors
from tests.server.ipc.wire_pairs import carry, mappings, memory_use, pair, same

HEADER = struct.Struct("<IHHQII")
SEGMENT, DROP, RELEASE, LAYOUT = 1, 2, 3, 4

strings = st.lists(st.binary(max_size=20), max_size=6).map(lambda values: np.array([*values, None], np.object_)[:-1])
numbers = st.sampled_from([row.dtype for row in DATATYPES.values() if not row.dtype.hasobject]).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)
large = st.integers(1, 60_000).map(lambda size: np.arange(size, dtype=np.float32))
odd = numbers.map(lambda array: array.astype(array.dtype.newbyteorder(">"))) | numbers.map(lambda array: array.T)
tensors = st.lists(st.none() | numbers | strings | large | odd, max_size=5)
messages = st.lists(
    st.tuples(
        st.integers(FIRST_KIND, LAST_KIND), st.integers(0, 2**64 - 1), st.binary(max_size=50), st.none() | tensors
    ),
    max_size=6,
)


def frame(
    kind: int, number: int = 0, body: bytes = b"", *, count: int = 0, layout: int = 0, rest: bytes = b""
) -> bytes:
    return HEADER.pack(len(body) + len(rest), kind, count, number, len(body), layout) + body + rest


def fed(raw: bytes, *sent: int) -> Any:
    wire = Wire(lambda: None)
    try:
        return wire.feed(memoryview(raw), sent)
    finally:
        wire.close()


@given(messages, st.lists(st.integers(0, 3000), max_size=30))
def test_messages_are_unchanged_when_received_in_any_pieces(messages: Any, pieces: list[int]) -> None:
    with pair() as both:
        for kind, number, body, arrays in messages:
            both.here.put(kind, number, body, arrays)

        come = both.pass_on(pieces)

        assert [message[:3] for message in come] == [message[:3] for message in messages]
        assert all(
            len(read_message[3]) == len(put[3] or ()) and all(map(same, put[3] or (), read_message[3]))
            for put, read_message in zip(messages, come, strict=True)
        )
        come.clear()
        both.pass_back()
        assert both.here.arena.leases == 0


@pytest.mark.parametrize("row", DATATYPES.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3), (100, 100)])
def test_every_datatype_is_transferred_in_every_shape(row: Any, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, row.dtype)
    array[...] = b"\x00\xffabc" if row.dtype.hasobject else 1
    with pair() as both:
        both.here.put(FIRST_KIND, 1, b"", [array, None, array])

        ((_, _, _, (first, second, third), _),) = both.pass_on()

        assert second is None
        assert same(array, first)
        assert same(array, third)
        first = third = None


def test_strings_of_other_types_are_received_as_bytes() -> None:
    with pair() as both:
        both.here.put(FIRST_KIND, 1, b"", [np.array(["ä", np.bytes_(b"\xff"), bytearray(b"x"), 7], np.object_)])

        ((_, _, _, (array,), _),) = both.pass_on()

        assert array is not None
        assert array.tolist() == ["ä".encode(), b"\xff", b"x", b"7"]


def texts(*values: bytes) -> Any:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array


def test_many_strings_are_written_and_read_without_a_call_for_each() -> None:
    many = texts(*(b"%d" % number for number in range(3000)))
    called = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal called
        called += event in {"call", "c_call"}

    with pair() as both:
        sys.setprofile(count)
        try:
            both.here.put(FIRST_KIND, 1, b"", [many])
            ((_, _, _, (array,), _),) = both.pass_on()
        finally:
            sys.setprofile(None)

        assert same(many, array)
        assert called < 1000


@pytest.mark.parametrize("size", [256, 1 << 20])
def test_long_strings_are_copied_once_when_they_are_read(size: int) -> None:
    count = (4 << 20) // size
    strings = texts(*(bytes([number % 256]) * size for number in range(count)))
    packed = memoryview(pack_strings(strings))
    tracemalloc.start()
    try:
        array = unpack_strings(packed, strings.shape)
        retained_bytes, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert same(strings, array)
    assert most_bytes < 1.5 * retained_bytes


def test_tensors_of_one_message_do_not_overlap() -> None:
    with pair() as both:
        both.here.put(FIRST_KIND, 1, b"", [np.zeros(3, np.uint8), np.zeros(5000, np.float64), np.zeros(7, np.uint8)])
        ((_, _, _, arrays, _),) = both.pass_on()

        for value, array in enumerate(arrays, 1):
            assert array is not None
            array[...] = value  # the receiver may write to them

        assert [set(array.tolist()) for array in arrays if array is not None] == [{1}, {2}, {3}]
        del arrays, array


def test_layouts_above_the_cache_limit_are_sent_again() -> None:
    with pair() as both:
        for turn in range(2):
            for size in range(1500):
                both.here.put(FIRST_KIND, size, b"", [np.full(size, turn, np.uint8)])
            come = both.pass_on()
            assert [len(message[3][0]) for message in come] == list(range(1500))  # type: ignore[arg-type]
        assert len(both.here._sent_layouts) <= 1024
        assert len(both.there._received_layouts) <= 1024


def test_a_tensor_is_read_correctly_after_its_layout_was_evicted() -> None:
    alone = np.arange(3, dtype=np.float32)
    with pair() as both:
        for _ in range(3):
            both.here.put(FIRST_KIND, 0, b"", [alone])
        for size in range(1500):
            both.here.put(FIRST_KIND, 1, b"", [np.zeros(size, np.uint8), None])
        both.here.put(FIRST_KIND, 2, b"", [alone])
        come = both.pass_on()

        for _, _, _, arrays, _ in (*come[:3], come[-1]):
            assert arrays[0] is not None
            assert (arrays[0].dtype, arrays[0].tolist()) == (np.dtype(np.float32), [0.0, 1.0, 2.0])


@given(st.lists(st.sampled_from([(1, "f4"), (4, "f4"), (4, "i8"), (0, "f4"), (3, ">f4"), (5000, "f4")]), max_size=20))
def test_a_tensor_is_read_correctly_after_any_other_tensors(forms: list[tuple[int, str]]) -> None:
    with pair() as both:
        for number, (size, dtype) in enumerate(forms):
            both.here.put(FIRST_KIND, number, b"body", [np.full(size, number, dtype)])
        for (kind, number, body, arrays, _), (size, dtype) in zip(both.pass_on(), forms, strict=True):
            assert (kind, body, len(arrays)) == (FIRST_KIND, b"body", 1)
            assert arrays[0] is not None
            assert arrays[0].dtype == np.dtype(dtype).newbyteorder("=")
            assert arrays[0].tolist() == [number] * size
            arrays.clear()


def test_a_tensor_is_copied_when_put_on_a_wire() -> None:
    for size in (4, 100_000):
        array = np.ones(size, np.float32)
        with pair() as both:
            both.here.put(FIRST_KIND, 1, b"", [array])
            array[...] = 2
            ((_, _, _, (come,), _),) = both.pass_on()
            assert come is not None
            assert set(come.tolist()) == {1.0}
            come = None


def test_small_tensors_are_inline_and_large_tensors_take_a_slot() -> None:
    with pair() as both:
        both.here.put(FIRST_KIND, 1, b"", [np.zeros(INLINE_BYTES, np.uint8)])
        assert both.here.arena.leases == 0
        both.here.put(FIRST_KIND, 1, b"", [np.zeros(INLINE_BYTES + 1, np.uint8), np.zeros(3)])
        assert both.here.arena.leases == 1


def test_a_large_tensor_is_copied_by_its_sender_but_not_by_its_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def copyto(target: Any, source: Any) -> None:
        copied.append(source.nbytes)
        copy(target, source)

    copy = np.copyto
    monkeypatch.setattr(np, "copyto", copyto)
    with pair() as both:
        for _ in range(3):
            both.here.put(FIRST_KIND, 1, b"", [np.ones(150_000, np.float32)])
            assert sum(map(len, both.here.out)) < 500  # none of the tensor's bytes are in the frame
            ((_, _, _, (array,), _),) = both.pass_on()
            segment = np.frombuffer(both.there.mirror._segments[0][0], np.uint8)
            assert array is not None
            assert np.shares_memory(array, segment)
            del array, segment
    assert copied == [600_000] * 3


def test_a_slot_is_held_until_the_last_view_of_its_tensors_is_gone() -> None:
    with pair() as both:
        both.here.put(FIRST_KIND, 1, b"", [np.zeros(9000), np.zeros(9000)])
        ((_, _, _, arrays, _),) = both.pass_on()
        held = [arrays[1][3:5].reshape(2, 1)]  # type: ignore[index]
        arrays.clear()
        both.pass_back()
        assert both.here.arena.leases == 1
        held.clear()
        both.pass_back()
        assert both.here.arena.leases == 0


def test_tensors_are_sent_inline_when_the_arena_is_full() -> None:
    held = []
    with pair(arena_bytes=2 * SEGMENT_BYTES) as both:
        for value in range(8):
            both.here.put(FIRST_KIND, value, b"", [np.full(2_500_000, value, np.uint8), np.array([b"x" * 100], object)])
            held += both.pass_on([10, 1000, 70_000, 1_000_000])
        assert both.here.arena.total_bytes <= 2 * SEGMENT_BYTES
        assert both.here.arena.leases == 2
        for value, message in enumerate(held):
            assert same(np.full(2_500_000, value, np.uint8), message[3][0])
            assert message[3][1].tolist() == [b"x" * 100]  # type: ignore[union-attr]
        del message
        held.clear()
        both.pass_back()
        assert both.here.arena.leases == 0


def test_tensors_are_sent_inline_when_no_file_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pair() as both:
        both.here.put(FIRST_KIND, 1, b"", [np.ones(100_000)])
        ((_, _, _, (array,), _),) = both.pass_on()
        assert same(np.ones(100_000), array)


def test_a_segment_may_reuse_the_number_of_a_removed_segment() -> None:
    with pair(arena_bytes=2 * SEGMENT_BYTES) as both:
        for size in (20_000, 100_000, 20_000, 400_000, 5_000_000, 20_000) * 3:
            both.here.put(FIRST_KIND, 1, b"", [np.full(size, 7, np.uint8)])
            ((_, _, _, (array,), _),) = both.pass_on()
            assert same(np.full(size, 7, np.uint8), array)
            array = None
            both.pass_back()
        assert both.here.arena.leases == 0
        assert both.here.arena.total_bytes <= 2 * SEGMENT_BYTES


def test_unsupported_tensors_are_rejected_and_nothing_is_sent() -> None:
    before = memory_use()
    with pair() as both, open("/dev/null") as file:  # noqa: PTH123 - the test needs its descriptor
        wrong = [
            [np.zeros(2, np.complex64)],
            [np.zeros(2, "datetime64[s]")],
            [np.zeros(2, "S3")],
            [np.array(["\ud800"], object)],
            [np.zeros(1)] * 5000,
        ]
        for arrays in wrong:
            with pytest.raises((TypeError, ValueError)):
                both.here.put(FIRST_KIND, 1, b"", arrays, [file.fileno()])
        with pytest.raises(OSError, match="Bad file descriptor"):
            both.here.put(FIRST_KIND, 1, b"", None, [file.fileno(), 99_999])

        assert both.pass_on() == []
        both.here.put(FIRST_KIND, 1, b"still works")
        assert both.pass_on()[0][2] == b"still works"
    assert memory_use() == before


def test_a_message_too_long_for_a_frame_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "_MAX_BYTES", 100_000)
    with pair(arena_bytes=0) as both:
        for arrays in ([np.zeros(200_000, np.uint8)], [np.array([b"x" * 150_000], object)]):
            with pytest.raises(ValueError, match="too long, and there is no room for it in shared memory"):
                both.here.put(FIRST_KIND, 1, b"", arrays)
        with pytest.raises(ValueError, match="a message of 100001 bytes is too long"):
            both.here.put(FIRST_KIND, 1, bytes(100_001))
        assert both.pass_on() == []


def test_descriptors_arrive_with_their_message() -> None:
    before = memory_use()
    with pair() as both:
        ends = [os.pipe() for _ in range(3)]
        for number, (reading, _) in enumerate(ends):
            both.here.put(FIRST_KIND, number, b"", [np.zeros(20_000)], [reading])
        come = both.pass_on()
        for message, (reading, writing) in zip(come, ends, strict=True):
            number, (descriptor,) = message[1], message[4]
            os.write(writing, b"%d" % number)
            assert os.read(descriptor, 10) == b"%d" % number
            for each in (descriptor, reading, writing):
                os.close(each)
        del message
        come.clear()
    assert memory_use() == before


def test_a_closed_wire_leaves_no_descriptors_or_mappings() -> None:
    before = memory_use()
    with pair() as both:
        both.here.put(FIRST_KIND, 1, b"", [np.zeros(3_000_000)])
        held = both.pass_on()
        both.here.put(FIRST_KIND, 1, b"", [np.zeros(20_000)], [0])  # not sent
        assert mappings() > before[1]
    assert held[0][3][0].sum() == 0.0  # type: ignore[union-attr]
    held.clear()
    assert memory_use() == before


def _sealed(size: int) -> int:
    arena = Arena(1 << 30)
    arena.lease(size)
    (segment,) = arena.new_segments
    arena.new_segments.clear()
    return segment.fd


def _unsealed(size: int) -> int:
    descriptor = os.memfd_create("penstock", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


STRINGS_LAYOUT = frame(LAYOUT, 1, b'[["<f4", [4]], ["O", [2]]]')
LIES = {
    "a body longer than its frame": HEADER.pack(4, FIRST_KIND, 0, 0, 5, 0) + b"1234",
    "descriptors that did not come": frame(FIRST_KIND, 1, count=1),
    "a kind that nobody knows": frame(9),
    "a kind of nothing": frame(0),
    "a slot that was never leased": frame(RELEASE, 1, struct.pack("<I", 5)),
    "half a slot": frame(RELEASE, 1, b"abc"),
    "a segment without a descriptor": frame(SEGMENT, 0, struct.pack("<I", MIN_SLOT_BYTES)),
    "a segment that goes and was not there": frame(DROP, 3),
    "a layout that was not told": frame(FIRST_KIND, 1, layout=7, rest=b"1234"),
    "a layout that is no JSON": frame(LAYOUT, 1, b"\xff["),
    "a layout that is a number": frame(LAYOUT, 1, b"7"),
    "a layout of brackets": frame(LAYOUT, 1, b"[" * 100_000),
    "a layout of names": frame(LAYOUT, 1, b'["ab"]'),
    "a layout with the number of none": frame(LAYOUT, 0, b"[]"),
    "a layout with a number that none has": frame(LAYOUT, 2**40, b"[]"),
    "a layout of too many": frame(LAYOUT, 1, b"[null" + b",null" * 5000 + b"]"),
    "a datatype that is none": frame(LAYOUT, 1, b'[["nope", [1]]]'),
    "a datatype of no size": frame(LAYOUT, 1, b'[["<f7", [1]]]'),
    "a datatype of records": frame(LAYOUT, 1, b'[["f4,f4", [1]]]'),
    "a dimension below zero": frame(LAYOUT, 1, b'[["<f4", [-1]]]'),
    "a dimension without end": frame(LAYOUT, 1, b'[["<f4", [1e999]]]'),
    "more axes than there are": frame(LAYOUT, 1, b'[["<f4", [1' + b",1" * 99 + b"]]]"),
    "no tensors at all": STRINGS_LAYOUT + frame(FIRST_KIND, 1, layout=1),
    "tensors that are too short": STRINGS_LAYOUT
    + frame(FIRST_KIND, 1, layout=1, rest=struct.pack("<I", NO_SLOT) + bytes(8)),
    "tensors in a slot of no segment": STRINGS_LAYOUT
    + frame(FIRST_KIND, 1, layout=1, rest=struct.pack("<III", 0, 10, 0)),
    "strings that end too early": STRINGS_LAYOUT
    + frame(FIRST_KIND, 1, layout=1, rest=struct.pack("<II", NO_SLOT, 5) + bytes(64 + 64)),
    "strings longer than they are": STRINGS_LAYOUT
    + frame(FIRST_KIND, 1, layout=1, rest=struct.pack("<II", NO_SLOT, 8) + bytes(64) + b"\xff\xff\0\0" * 2 + bytes(56)),
    "a tensor larger than memory": frame(LAYOUT, 1, b'[["<f8", [4611686018427387904, 9]]]')
    + frame(FIRST_KIND, 1, layout=1, rest=struct.pack("<I", NO_SLOT)),
    "a tensor of nothing that is too wide": frame(LAYOUT, 1, b'[["<f8", [0, 99999999999999999999]]]')
    + frame(FIRST_KIND, 1, layout=1, rest=struct.pack("<I", NO_SLOT)),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_invalid_frame_is_an_error(lie: str) -> None:
    before = descriptors()
    with pytest.raises(WireError):
        fed(LIES[lie])
    assert descriptors() <= before


@pytest.mark.parametrize(
    ("number", "slot_bytes", "size", "make"),
    [
        (0, MIN_SLOT_BYTES, SEGMENT_BYTES, _unsealed),
        (0, MIN_SLOT_BYTES, SEGMENT_BYTES // 2, _unsealed),
        (0, MIN_SLOT_BYTES, 2 * SEGMENT_BYTES, _sealed),
        (0, 2 * SEGMENT_BYTES, MIN_SLOT_BYTES, _sealed),
        (0, 12_345, MIN_SLOT_BYTES, _sealed),
        (0, 0, MIN_SLOT_BYTES, _sealed),
        (0, MIN_SLOT_BYTES - 1, MIN_SLOT_BYTES, _sealed),
        (1 << 16, MIN_SLOT_BYTES, MIN_SLOT_BYTES, _sealed),
        (0, MIN_SLOT_BYTES, 0, lambda _: os.open("/dev/null", os.O_RDWR)),
        (0, MIN_SLOT_BYTES, 0, lambda _: os.open("/proc/self/exe", os.O_RDONLY)),
    ],
)
def test_an_unsealed_or_wrongly_sized_segment_is_not_mapped(number: int, slot_bytes: int, size: int, make: Any) -> None:
    before = descriptors()
    with pytest.raises(WireError):
        fed(frame(SEGMENT, number, struct.pack("<I", slot_bytes), count=1), make(size))
    assert descriptors() <= before


def test_announcing_a_segment_twice_or_releasing_a_slot_twice_is_an_error() -> None:
    announced = frame(SEGMENT, 0, struct.pack("<I", MIN_SLOT_BYTES), count=1)
    with pytest.raises(WireError):
        fed(announced + announced, _sealed(10), _sealed(10))

    wire = Wire(lambda: None)
    wire.put(FIRST_KIND, 1, b"", [np.zeros(10_000)])
    released = frame(RELEASE, 1, struct.pack("<I", 0))
    assert wire.feed(memoryview(released)) == []
    with pytest.raises(WireError, match="was not leased"):
        wire.feed(memoryview(released))
    wire.close()


def test_a_tensor_outside_its_slot_is_an_error() -> None:
    before = memory_use()
    layout = frame(LAYOUT, 1, b'[["u1", [%d]]]' % (MIN_SLOT_BYTES + 1))
    for slot in (0, 255, 256, 0xFFFF, 1 << 16):
        tensors = frame(FIRST_KIND, 1, layout=1, rest=struct.pack("<I", slot))
        with pytest.raises(WireError, match="is nowhere"):
            fed(frame(SEGMENT, 0, struct.pack("<I", MIN_SLOT_BYTES), count=1) + layout + tensors, _sealed(10))
    assert memory_use() == before


def test_descriptors_of_rejected_and_incomplete_frames_are_closed() -> None:
    before = memory_use()
    good = frame(FIRST_KIND, 1, count=1)
    with pytest.raises(WireError):
        fed(good + frame(9, count=1), os.dup(0), os.dup(0), os.dup(0))
    assert fed(b"", *[os.dup(0) for _ in range(5)]) == []
    assert fed(good[:10], os.dup(0)) == []
    assert memory_use() == before

    monkey = [os.dup(0) for _ in range(1025)]
    with pytest.raises(WireError, match="belong to no message"):
        fed(b"", *monkey)
    assert memory_use() == before


@given(st.binary(max_size=200), st.data())
def test_any_bytes_are_messages_or_a_wire_error(noise: bytes, data: st.DataObject) -> None:
    with pair() as both:
        both.here.put(FIRST_KIND, 1, b"abc", [np.zeros(4, np.float32), np.array([b"x"], object)])
        both.here.put(FIRST_KIND, 2, b"abc", [np.zeros(5000, np.float32)])
        raw = bytearray(b"".join(both.here.out))
        both.here.out.clear()
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + len(noise)] = noise
        sent, both.here.descriptors[:] = both.here.descriptors[:], []
        with contextlib.suppress(WireError):
            both.there.feed(memoryview(raw), sent)


def test_a_release_of_a_slot_reaches_its_owner_among_messages() -> None:
    with pair() as both:
        both.here.put(FIRST_KIND, 1, b"", [np.zeros(10_000)])
        both.pass_on().clear()
        both.there.put(FIRST_KIND, 5, b"answer")
        both.there.put_freed()
        assert carry(both.there, both.here)[0][1:3] == (5, b"answer")
        assert both.here.arena.leases == 0
