"""Cache and Keys: the budget, the eviction order, and that different requests have different keys."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Array
from penstock.backends.datatypes import DATATYPES
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.caching.cache import ARRAY_BYTES, ENTRY_BYTES, Cache, Keys, array_bytes
from tests.clients.tensors import VALUES

ONE = ENTRY_BYTES + ARRAY_BYTES + 4
"""What an answer of one FP32 number takes."""
NUMBERS = [datatype for datatype in DATATYPES if datatype != "BYTES"]


def number(value: float) -> list[Array]:
    return [np.array([value], np.float32)]


def key(value: int) -> bytes:
    return value.to_bytes(32, "little")


def is_cached(cache: Cache, value: int) -> bool:
    return cache.find(key(value)) is not None


def signature(*datatypes: str, names: str = "abcdef") -> Signature:
    inputs = tuple(TensorSpec(name, datatype, (-1, -1)) for name, datatype in zip(names, datatypes, strict=False))
    return Signature(inputs, (TensorSpec("y", "FP32", (-1, 1)), TensorSpec("z", "FP32", (-1, 1))), batched=True)


def keys(*datatypes: str) -> Keys:
    return Cache(1).make_keys("m", "1", signature(*datatypes))


def of(key_maker: Keys, *arrays: Array | None, positions: tuple[int, ...] = (0,)) -> bytes:
    return key_maker.key_for(list(arrays), positions)


def carried(datatype: str) -> Array:
    """Two rows of three values in the internal representation: BF16 as its bits, and strings as bytes."""
    values = VALUES[datatype]
    if datatype == "BF16":
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    if datatype == "BYTES":
        array = np.empty(values.size, np.object_)
        array[:] = [text.encode() for text in values.ravel().tolist()]
        return array.reshape(values.shape)
    return values


class TestBudget:
    def test_an_inserted_answer_is_found_again(self) -> None:
        cache = Cache(ONE)
        assert cache.insert(key(1), number(1.5), set())

        answer = cache.find(key(1))

        assert answer is not None
        assert [array.tolist() for array in answer] == [[1.5]]
        assert cache.used_bytes == ONE

    def test_the_least_recently_used_entry_is_evicted_first(self) -> None:
        cache, owner = Cache(3 * ONE), set[bytes]()
        for value in (1, 2, 3):
            cache.insert(key(value), number(value), owner)
        cache.find(key(1))
        cache.insert(key(4), number(4), owner)

        assert [is_cached(cache, value) for value in (1, 2, 3, 4)] == [True, False, True, True]
        assert owner == {key(1), key(3), key(4)}

    def test_as_many_entries_are_evicted_as_a_new_entry_needs(self) -> None:
        cache, owner = Cache(4 * ONE), set[bytes]()
        for value in (1, 2, 3, 4):
            cache.insert(key(value), number(value), owner)
        cache.insert(key(5), [np.zeros(ONE + 5, np.uint8)], owner)

        assert [is_cached(cache, value) for value in (1, 2, 3, 4, 5)] == [False, False, False, True, True]

    def test_an_answer_larger_than_the_cache_evicts_nothing(self) -> None:
        cache, owner = Cache(2 * ONE), set[bytes]()
        cache.insert(key(1), number(1), owner)

        assert not cache.insert(key(2), [np.zeros(2 * ONE, np.uint8)], owner)
        assert is_cached(cache, 1)
        assert owner == {key(1)}

    @pytest.mark.parametrize("output", [[{0: 1.0}], "text", None])
    def test_an_output_that_is_not_a_tensor_is_not_cached(self, output: Any) -> None:
        cache = Cache(1 << 20)

        assert not cache.insert(key(1), [output], set())
        assert cache.used_bytes == 0

    def test_inserting_an_existing_key_replaces_its_entry(self) -> None:
        cache, owner = Cache(10 * ONE), set[bytes]()
        cache.insert(key(1), number(1), owner)
        cache.insert(key(1), number(2), owner)

        answer = cache.find(key(1))

        assert answer is not None
        assert answer[0].tolist() == [2]
        assert (len(cache), cache.used_bytes, len(owner)) == (1, ONE, 1)

    def test_entries_of_one_model_are_removed_in_several_passes(self) -> None:
        cache, removed, other = Cache(100 * ONE), set[bytes](), set[bytes]()
        for value in range(10):
            cache.insert(key(value), number(value), removed)
        cache.insert(key(99), number(99), other)

        turns = 1
        while cache.remove_some(removed, 4):
            turns += 1

        assert turns == 3
        assert (len(cache), cache.used_bytes) == (1, ONE)
        assert is_cached(cache, 99)

    @settings(deadline=None)
    @given(
        size=st.integers(0, 20 * ONE),
        steps=st.lists(
            st.tuples(st.sampled_from(["keep", "find", "forget"]), st.integers(0, 12), st.integers(0, 3000))
        ),
    )
    def test_cached_bytes_never_exceed_the_budget(self, size: int, steps: list[tuple[str, int, int]]) -> None:
        cache, owners = Cache(size), (set[bytes](), set[bytes]())
        model: dict[int, tuple[int, int]] = {}
        for what, value, nbytes in steps:
            if what == "keep":
                entry = ENTRY_BYTES + ARRAY_BYTES + nbytes
                inserted = cache.insert(key(value), [np.zeros(nbytes, np.uint8)], owners[value % 2])
                assert inserted == (entry <= size)
                if inserted:
                    model.pop(value, None)
                    while sum(each for each, _ in model.values()) + entry > size:
                        del model[next(iter(model))]
                    model[value] = entry, nbytes
            elif what == "find":
                answer = cache.find(key(value))
                assert (None if answer is None else answer[0].size) == model.get(value, (0, None))[1]
                if value in model:
                    model[value] = model.pop(value)
            else:
                cache.remove_some(owners[value % 2], 100)
                model = {each: entry for each, entry in model.items() if each % 2 != value % 2}
            assert cache.used_bytes == sum(each for each, _ in model.values()) <= size
            assert owners[0] | owners[1] == {key(each) for each in model}
            assert len(cache) == len(model)

    @pytest.mark.parametrize("outputs", [1, 3])
    @pytest.mark.parametrize("text", [False, True])
    def test_an_entry_is_charged_for_all_memory_that_it_takes(self, outputs: int, *, text: bool) -> None:
        count, cache, owner = 3000, Cache(1 << 40), set[bytes]()
        gc.collect()
        tracemalloc.start()
        try:
            for value in range(count):
                answer = [np.full(5, value, np.float32) for _ in range(outputs)]
                if text:
                    answer = [np.array([b"%d" % value] * 5 + [b"%d more" % value], np.object_) for _ in range(outputs)]
                cache.insert(key(value), answer, owner)
                del answer
            allocated, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert allocated <= cache.used_bytes
        assert cache.used_bytes <= 2.5 * allocated  # and not much more


class TestOwnership:
    def test_a_cached_answer_does_not_change_with_the_batch_it_was_copied_from(self) -> None:
        cache, batch = Cache(1 << 20), np.arange(8, dtype=np.float32)
        cache.insert(key(1), [batch[2:4]], set())
        batch[:] = -1

        answer = cache.find(key(1))

        assert answer is not None
        assert answer[0].tolist() == [2, 3]

    def test_writing_into_a_returned_answer_does_not_change_the_cached_one(self) -> None:
        cache = Cache(1 << 20)
        cache.insert(key(1), [np.array([b"a"], np.object_), np.zeros(1)], set())
        first = cache.find(key(1))
        assert first is not None
        first[0][0], first[1][0] = b"b", 9

        again = cache.find(key(1))

        assert again is not None
        assert (again[0].tolist(), again[1].tolist()) == ([b"a"], [0])

    def test_caching_a_slice_does_not_keep_the_whole_batch_in_memory(self) -> None:
        cache = Cache(1 << 20)
        cache.insert(key(1), [np.zeros((1000, 10))[3:4]], set())

        assert cache.used_bytes == ENTRY_BYTES + ARRAY_BYTES + 80
        output = next(iter(cache._entries.values())).outputs[0]
        assert output.base is None


class TestKeys:
    @pytest.mark.parametrize("datatype", DATATYPES)
    def test_equal_requests_share_a_key(self, datatype: str) -> None:
        key_maker, array = keys(datatype), carried(datatype)

        assert of(key_maker, array) == of(key_maker, array.copy())
        assert len(of(key_maker, array)) == 32

    @pytest.mark.parametrize("datatype", NUMBERS)
    def test_a_single_flipped_bit_changes_the_key(self, datatype: str) -> None:
        key_maker, array = keys(datatype), np.ascontiguousarray(carried(datatype))
        found_keys = {of(key_maker, array)}
        raw = np.frombuffer(array.tobytes(), np.uint8)
        bits = raw.size * 8 if datatype != "BOOL" else raw.size
        for bit in range(bits):
            flipped = raw.copy()
            # only one bit of a BOOL counts
            where, mask = (bit, 1) if datatype == "BOOL" else (bit // 8, 1 << bit % 8)
            flipped[where] ^= mask
            found_keys.add(of(key_maker, flipped.view(array.dtype).reshape(array.shape)))

        assert len(found_keys) == bits + 1

    def test_values_that_compare_equal_but_differ_in_bits_have_different_keys(self) -> None:
        key_maker = keys("FP32")
        nans = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32).view(np.float32)

        assert of(key_maker, np.array([[0.0]], np.float32)) != of(key_maker, np.array([[-0.0]], np.float32))
        assert len({of(key_maker, nans[i : i + 1].reshape(1, 1)) for i in range(3)}) == 3

    @settings(deadline=None)
    @given(
        first=st.lists(st.binary(max_size=6), min_size=1, max_size=4),
        second=st.lists(st.binary(max_size=6), min_size=1, max_size=4),
    )
    def test_strings_share_a_key_only_if_all_are_equal(self, first: list[bytes], second: list[bytes]) -> None:
        key_maker = keys("BYTES")
        arrays = []
        for texts in (first, second):
            array = np.empty((1, len(texts)), np.object_)
            array[0, :] = texts
            arrays.append(array)

        assert (of(key_maker, arrays[0]) == of(key_maker, arrays[1])) == (first == second)

    def test_a_string_and_its_utf8_bytes_have_the_same_key(self) -> None:
        key_maker = keys("BYTES")

        assert of(key_maker, np.array([["ä"]], np.object_)) == of(key_maker, np.array([["ä".encode()]], np.object_))

    def test_bytes_moved_from_one_input_to_the_next_change_the_key(self) -> None:
        key_maker = keys("BYTES", "BYTES")
        a, b = (np.array([[text]], np.object_) for text in (b"ab", b"c"))
        c, d = (np.array([[text]], np.object_) for text in (b"a", b"bc"))

        assert of(key_maker, a, b) != of(key_maker, c, d)

    def test_shape_rows_and_absent_inputs_are_part_of_the_key(self) -> None:
        key_maker, six = keys("FP32", "FP32"), np.zeros(6, np.float32)
        found_keys = {
            of(key_maker, *arrays)
            for arrays in (
                (six.reshape(2, 3), None), (six.reshape(3, 2), None), (six.reshape(1, 6), None),
                (None, six.reshape(1, 6)), (six.reshape(1, 6), six.reshape(1, 6)), (six[:0].reshape(0, 6), None),
                (six[:0].reshape(1, 0), None),
            )
        }  # fmt: skip

        assert len(found_keys) == 7

    def test_the_requested_outputs_and_their_order_are_part_of_the_key(self) -> None:
        key_maker, one = keys("FP32"), np.zeros((1, 1), np.float32)

        assert len({of(key_maker, one, positions=positions) for positions in ((0,), (1,), (0, 1), (1, 0))}) == 4

    def test_model_name_version_load_and_signature_are_part_of_the_key(self) -> None:
        cache, one = Cache(1), np.zeros((1, 1), np.float32)
        found_keys = {
            key_maker.key_for([one], (0,))
            for key_maker in (
                cache.make_keys("m", "1", signature("FP32")), cache.make_keys("m", "1", signature("FP32")),
                cache.make_keys("m", "2", signature("FP32")), cache.make_keys("m1", "", signature("FP32")),
                cache.make_keys("m", "1", signature("INT32")), cache.make_keys("m", "1", signature("FP32", names="x")),
                Cache(1).make_keys("m", "1", signature("FP32")),
            )
        }  # fmt: skip

        assert len(found_keys) == 7

    def test_version_11_of_load_1_and_version_1_of_load_11_have_different_keys(self) -> None:
        cache, x = Cache(1), np.zeros((1, 1), np.float32)
        key_makers = [cache.make_keys("m", "11" if load == 1 else "1", signature("FP32")) for load in range(12)]

        assert key_makers[1].key_for([x], (0,)) != key_makers[11].key_for([x], (0,))

    @pytest.mark.parametrize("columns", [4, 400])
    def test_the_memory_layout_of_an_array_does_not_change_its_key(self, columns: int) -> None:
        key_maker, array = keys("FP32"), np.arange(3 * columns, dtype=np.float32).reshape(3, columns)

        assert of(key_maker, array) == of(key_maker, np.asfortranarray(array))
        assert of(key_maker, array[:, ::2]) == of(key_maker, array[:, ::2].copy())
        assert of(key_maker, array) != of(key_maker, np.ascontiguousarray(array[::-1]))

    def test_remembered_key_prefixes_are_bounded_and_do_not_change_keys(self) -> None:
        key_maker = keys("UINT8")
        first = of(key_maker, np.zeros((1, 0), np.uint8))
        for size in range(1, 600):
            of(key_maker, np.zeros((1, size), np.uint8))

        assert len(key_maker._heads) <= 256
        assert of(key_maker, np.zeros((1, 0), np.uint8)) == first


def test_array_bytes_of_strings_includes_the_contents_of_the_strings() -> None:
    assert array_bytes(np.array([b"x" * 10_000], np.object_)) > 10_000 + ARRAY_BYTES
    assert array_bytes(np.zeros((), np.float32)) == ARRAY_BYTES + 4
