"""Finishing outputs: classes in Triton's format, and shared memory that is rejected if it is too small."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.backends.datatypes import DATATYPES
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec
from penstock.server.listening.mapped_buffer import LargeAnswerEncoder
from penstock.server.v2.call_parameters import BINARY, JSON, MAX_CLASSES, Classes, PerOutputPlan
from penstock.server.v2.finish import classify, finish, finish_all
from penstock.server.v2.regions import Regions
from penstock.server.v2.system_regions import SystemRegions
from tests.fakes import PATIENCE_S, FakeBackend

SCORES = np.array([[0.1, 0.7, 0.2], [0.5, 0.25, 0.25]], np.float32)
CLASSIFIED = ["FP32", "FP64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"]


def model(*outputs: TensorSpec, labels: dict[str, tuple[str, ...]] | None = None) -> Model:
    signature = Signature((TensorSpec("x", "FP32", (-1, 4)),), outputs, batched=True)
    spec = ModelSpec("m", 1, Path("model"), signature=signature, labels=labels or {})
    return Model(spec, [FakeBackend(signature, list)], lambda *_: None)


def texts(*args: Any, **options: Any) -> Any:
    return classify(*args, **options).tolist()


class TestClassification:
    def test_classes_are_value_index_and_label_sorted_per_row(self) -> None:
        assert texts("FP32", SCORES, 2, ("cat", "", "dog"), batched=True) == [
            [b"0.700000:1", b"0.200000:2:dog"],
            [b"0.500000:0:cat", b"0.250000:1"],
        ]

    def test_classes_have_no_row_axis_if_the_model_is_not_batched(self) -> None:
        found = classify("FP32", SCORES, 2, (), batched=False)

        assert found.tolist() == [b"0.700000:1", b"0.500000:3"]
        assert found.shape == (2,)

    def test_the_number_of_classes_is_limited_to_the_number_of_values(self) -> None:
        assert classify("FP32", SCORES, 1000, (), batched=True).shape == (2, 3)
        assert classify("FP32", SCORES[:0], 1000, (), batched=True).shape[0] == 0
        assert classify("FP32", SCORES[:, :0], 1000, (), batched=True).shape == (2, 0)

    def test_classes_of_an_integer_output_are_written_as_integers(self) -> None:
        assert texts("INT64", np.array([[-(2**62), 2**62 + 1]]), 2, (), batched=True) == [
            [b"%d:1" % (2**62 + 1), b"%d:0" % -(2**62)]
        ]

    def test_infinity_sorts_first_and_nan_is_omitted_from_the_top_classes(self) -> None:
        row = np.array([[np.nan, np.inf, 1.5, -np.inf]], np.float64)

        assert texts("FP64", row, 2, (), batched=True) == [[b"inf:1", b"1.500000:2"]]

    @pytest.mark.parametrize("datatype", sorted(DATATYPES.keys() - set(CLASSIFIED)))
    def test_classification_of_an_unsupported_datatype_is_rejected(self, datatype: str) -> None:
        with pytest.raises(InferError, match=f"unsupported type '{datatype}'"):
            classify(datatype, np.zeros((1, 3), DATATYPES[datatype].dtype), 1, (), batched=True)

    def test_classification_beyond_the_maximum_number_of_values_is_rejected(self) -> None:
        with pytest.raises(InferError, match="maximum is 1000000"):
            classify("UINT8", np.zeros((1, MAX_CLASSES + 1), np.uint8), 1, (), batched=True)
        with pytest.raises(InferError, match="maximum is 1000000"):
            classify("UINT8", np.zeros((2000, 1000), np.uint8), 1000, (), batched=True)

    @given(
        values=arrays.arrays(
            st.sampled_from([DATATYPES[name].dtype for name in CLASSIFIED]),
            st.tuples(st.integers(1, 3), st.integers(1, 60)),
        ),
        count=st.integers(1, 70),
    )
    def test_the_top_classes_equal_those_found_by_sorting_all_values(self, values: Any, count: int) -> None:
        if values.dtype.kind == "f":
            values = np.nan_to_num(values, nan=0.0)
        datatype = next(name for name in CLASSIFIED if DATATYPES[name].dtype == values.dtype)
        found = classify(datatype, values, count, (), batched=True)

        for row, classes in zip(values.tolist(), found.tolist(), strict=True):
            order = sorted(range(len(row)), key=lambda index: (-row[index], index))[:count]
            assert [int(text.rpartition(b":")[2]) for text in classes] == order


class TestSharedMemoryOutputs:
    def lease(self, folder: Path, offset: int, byte_size: int) -> Any:
        (folder / "key").write_bytes(bytes(64))
        system = SystemRegions(Regions(allowed=True), folder)
        system.register("r", "key", 0, 64)
        return system.regions.lease("r", offset, byte_size)

    def test_an_output_is_written_into_its_region_without_touching_other_bytes(self, tmp_path: Path) -> None:
        done = finish(model(), ("y", "FP32"), self.lease(tmp_path, 8, 32), SCORES)

        assert (done.name, done.datatype, done.shape, done.array) == ("y", "FP32", (2, 3), None)
        assert (tmp_path / "key").read_bytes() == bytes(8) + SCORES.tobytes() + bytes(32)

    def test_strings_are_written_with_their_lengths(self, tmp_path: Path) -> None:
        words = np.array([b"a", b"", b"bcd"], np.object_)
        finish(model(), ("y", "BYTES"), self.lease(tmp_path, 0, 64), words)

        assert (tmp_path / "key").read_bytes()[:16] == b"\1\0\0\0a\0\0\0\0\3\0\0\0bcd"

    def test_a_thread_does_not_write_into_the_region_after_its_client_has_disconnected(self, tmp_path: Path) -> None:
        lease = self.lease(tmp_path, 0, 64)

        async def main() -> None:
            answers, begun, go_on = LargeAnswerEncoder(), threading.Event(), threading.Event()

            def encode() -> None:
                begun.set()
                go_on.wait(PATIENCE_S)
                finish(model(), ("y", "FP32"), lease, SCORES)

            cancelled = asyncio.ensure_future(answers.encode(9 << 20, encode))
            assert await asyncio.to_thread(begun.wait, PATIENCE_S)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            go_on.set()
            await answers.encode(9 << 20, int)  # the same thread, which has finished the other answer

        asyncio.run(main())
        assert (tmp_path / "key").read_bytes() == bytes(64)

    def test_a_region_that_is_too_small_is_rejected_and_not_written(self, tmp_path: Path) -> None:
        with pytest.raises(InferError) as caught:
            finish(model(), ("y", "FP32"), self.lease(tmp_path, 0, 23), SCORES)

        assert caught.value.code is Code.INVALID
        assert caught.value.message == (
            "shared memory size specified with the request for output 'y' (23 bytes) should be at least 24 bytes to "
            "hold the results"
        )
        assert (tmp_path / "key").read_bytes() == bytes(64)

    def test_the_lease_is_released_whether_or_not_the_output_fits(self, tmp_path: Path) -> None:
        labeled = model(TensorSpec("y", "FP32", (-1, 3)), labels={"y": ("a",)})
        for size in (64, 1):
            lease = self.lease(tmp_path, 0, size)
            try:
                finish_all(labeled, (0,), PerOutputPlan((lease,)), [SCORES])
            except InferError:
                assert size == 1
            with pytest.raises(InferError, match="after its release"):
                lease.read()


def test_each_output_is_returned_in_its_requested_form() -> None:
    names = "abc"
    labeled = model(*[TensorSpec(name, "FP32", (-1, 3)) for name in names], labels={"b": ("one", "two")})
    done = finish_all(labeled, (2, 1, 0), PerOutputPlan((BINARY, Classes(1, binary=True), JSON)), [SCORES] * 3)

    assert [(each.name, each.datatype, each.shape, each.binary) for each in done] == [
        ("c", "FP32", (2, 3), True), ("b", "BYTES", (2, 1), True), ("a", "FP32", (2, 3), False)
    ]  # fmt: skip
    assert done[1].array is not None
    assert done[1].array.tolist() == [[b"0.700000:1:two"], [b"0.500000:0:one"]]
    assert [each.name for each in finish_all(labeled, (0,), None, [SCORES])] == ["a"]


@pytest.mark.parametrize("width", [4, 400])
@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_nan_sorts_last_even_after_minus_infinity(datatype: str, width: int) -> None:
    values = np.full((1, width), np.nan, DATATYPES[datatype].dtype)
    values[0, 1:4] = np.inf, -np.inf, 0
    found = classify(datatype, values, 4, (), batched=True)

    assert found.tolist() == [[b"inf:1", b"0.000000:3", b"-inf:2", b"nan:0"]]


@pytest.mark.parametrize(
    ("datatype", "lowest", "highest"),
    [("INT8", -128, 127), ("UINT8", 0, 255), ("INT64", -(2**63), 2**63 - 1), ("UINT64", 0, 2**64 - 1)],
)
def test_the_extremes_of_an_integer_type_are_sorted_correctly(datatype: str, lowest: int, highest: int) -> None:
    values = np.array([lowest, 5, highest, 5], DATATYPES[datatype].dtype)
    found = classify(datatype, values, 4, (), batched=False)

    assert found.tolist() == [f"{highest}:2".encode(), b"5:1", b"5:3", f"{lowest}:0".encode()]
