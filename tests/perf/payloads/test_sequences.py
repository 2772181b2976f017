"""Sequences: begun and ended as they should be, and ids that no two share."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.payloads.sequences import Ids, Lengths, Sequences, ids
from penstock.perf.payloads.tensors import InputError, InputTensor, Step
from penstock.perf.payloads.writing import FIRST, LAST, Template

SentRequest = tuple[int, str, int]
"""An id, the step it was said with, and FIRST | LAST."""


class Plain:
    """Writes id, step and mark as three words."""

    def whole(self, step: Step) -> bytes:
        return step[0].name.encode()

    def identity(self, number: int) -> bytes:
        return b"%d" % number

    def template(self, step: Step) -> Template:
        return lambda identity, mark: b"%b %b %d" % (identity, step[0].name.encode(), mark)


def parse_request(request: bytes) -> SentRequest:
    identity, step, mark = request.decode().split()
    return int(identity), step, int(mark)


def stream(*names: str) -> tuple[Step, ...]:
    return tuple((InputTensor(name, "BYTES", (1,)),) for name in names)


def sequences(*streams: tuple[Step, ...], lengths: Lengths, shared: Ids | None = None, seed: int = 0) -> Sequences:
    return Sequences(Plain(), streams or (stream("a"),), shared or ids(1, 0, 8), lengths, seed=seed)


def take(generated: Sequences, slot: int, count: int) -> list[SentRequest]:
    return [parse_request(request) for request in itertools.islice(generated.stream(slot), count)]


def test_a_sequence_begins_continues_and_ends_and_the_next_has_another_id() -> None:
    assert take(sequences(lengths=Lengths(3)), 0, 5) == [
        (1, "a", FIRST), (1, "a", 0), (1, "a", LAST), (9, "a", FIRST), (9, "a", 0)
    ]  # fmt: skip


def test_a_sequence_of_one_request_begins_and_ends_at_once() -> None:
    assert take(sequences(lengths=Lengths(1)), 2, 2) == [(3, "a", FIRST | LAST), (11, "a", FIRST | LAST)]


def test_new_sequences_take_the_streams_in_turn_with_their_lengths() -> None:
    generated = sequences(stream("a", "b"), stream("c"), lengths=Lengths(None))

    assert [step for _, step, _ in take(generated, 0, 6)] == ["a", "b", "c", "a", "b", "c"]
    assert [step for _, step, _ in take(generated, 1, 3)] == ["c", "a", "b"]


def test_a_specified_length_repeats_the_steps_of_a_stream() -> None:
    generated = sequences(stream("a", "b"), lengths=Lengths(5))

    assert [step for _, step, _ in take(generated, 0, 6)] == ["a", "b", "a", "b", "a", "a"]


@given(st.integers(1, 40), st.floats(0, 100), st.integers(0, 5), st.integers(1, 200))
def test_starts_and_ends_are_well_formed_and_lengths_vary_within_bounds(
    base: int, variation: float, slot: int, count: int
) -> None:
    open_id, length = 0, 0
    for identity, _, mark in take(sequences(lengths=Lengths(base, variation)), slot, count):
        assert bool(mark & FIRST) == (open_id == 0)
        if mark & FIRST:
            open_id, length = identity, 0
        assert identity == open_id
        length += 1
        if mark & LAST:
            assert abs(length - base) <= base * variation / 100 or length == 1
            open_id = 0


@settings(max_examples=50)
@given(st.integers(1, 2**63), st.integers(0, 60), st.integers(1, 20))
def test_no_two_slots_share_an_id(first: int, more: int, slots: int) -> None:
    shared = ids(first, slots + more, slots)
    every = [{shared.of(slot, number) for number in range(50)} for slot in range(slots)]

    assert sum(map(len, every)) == len(set().union(*every))
    assert min(map(min, every)) >= first
    assert max(map(max, every)) < first + slots + more


def test_all_ids_of_a_range_are_used_before_any_repeats() -> None:
    shared = ids(10, 7, 3)

    assert [[shared.of(slot, number) for number in range(4)] for slot in range(3)] == [
        [10, 13, 16, 10], [11, 14, 11, 14], [12, 15, 12, 15]
    ]  # fmt: skip


def test_ids_of_an_unbounded_range_fit_in_32_bits() -> None:
    assert ids(1, 0, 4) == Ids(1, 4_294_967_295, 4)
    assert ids(1, 0, 0).slots > 10_000
    assert ids(1, 5, 0).slots == 5


@pytest.mark.parametrize("id_range", [(0, 5, 1), (5, -4, 1), (1, 3, 4)])
def test_an_unusable_id_range_is_rejected(id_range: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match=r"^--sequence-id-range"):
        ids(*id_range)


def test_a_slot_without_ids_is_rejected() -> None:
    with pytest.raises(InputError, match="8 sequences"):
        sequences(lengths=Lengths(1)).stream(8)


def test_an_open_sequence_is_ended_once() -> None:
    generated = sequences(stream("a", "b", "c"), lengths=Lengths(3))
    assert generated.ending(0) is None
    take(generated, 0, 2)

    ended = generated.ending(0)

    assert ended is not None
    assert parse_request(ended) == (1, "c", LAST)
    assert generated.ending(0) is None
    assert take(generated, 0, 1) == [(9, "a", FIRST)]


def test_a_finished_sequence_is_not_ended_again() -> None:
    generated = sequences(lengths=Lengths(2))
    take(generated, 0, 2)

    assert generated.ending(0) is None


def test_a_slot_that_starts_again_begins_a_new_sequence() -> None:
    generated = sequences(lengths=Lengths(3))
    take(generated, 0, 2)

    assert take(generated, 0, 1) == [(9, "a", FIRST)]


def test_lengths_are_determined_by_the_seed_and_differ_between_slots() -> None:
    def lengths(slot: int, seed: int) -> list[int]:
        marks = [mark for _, _, mark in take(sequences(lengths=Lengths(20, 50), seed=seed), slot, 500)]
        return [index for index, mark in enumerate(marks) if mark & LAST]

    assert lengths(0, 1) == lengths(0, 1)
    assert lengths(0, 1) != lengths(1, 1)
    assert lengths(0, 1) != lengths(0, 2)


def test_the_length_of_a_stream_is_not_varied() -> None:
    assert Lengths(None, 50).draw(random.Random(0), 7) == 7
