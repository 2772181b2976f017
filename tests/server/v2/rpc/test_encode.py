"""Encoded answers: with or without cached parts of earlier ones, protobuf parses their bytes correctly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.backend import Array
from penstock.backends.signature import Signature, TensorSpec
from penstock.server.listening.mapped_buffer import LARGE_BYTES
from penstock.server.v2.call_parameters import Classes, PerOutputPlan
from penstock.server.v2.finish import Finished
from penstock.server.v2.rpc.encode import (
    FINAL,
    LargeAnswer,
    RpcEncoder,
    encode_id_and_mark,
    stream_answer,
    stream_error,
)
from penstock.server.v2.rpc.outputs import is_large
from penstock.server.v2.rpc.wire import varint
from tests.server.v2.rpc.calls import pb

NAMES = (("y", "FP32"), ("flags", "BOOL"), ("ü", "INT64"))
SIGNATURE = Signature((), tuple(TensorSpec(name, datatype, (-1, -1)) for name, datatype in NAMES), batched=True)
SHAPES = st.sampled_from([(1, 3), (0, 4), (2, 0), (3, 1), (200, 130)])
IDS = st.sampled_from(["", "7", "ü" * 63, "x" * 127, "x" * 128, "x" * 5000])


def array_of(shape: tuple[int, ...], datatype: str) -> Array:
    dtype = {"FP32": np.float32, "BOOL": np.bool_, "INT64": np.int64}[datatype]
    return np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)


def expected(positions: tuple[int, ...], arrays: list[Array], request_id: str, *, final: bool) -> Any:
    answer = pb.ModelInferResponse(model_name="m", model_version="12", id=request_id)
    for position, array in zip(positions, arrays, strict=True):
        name, datatype = NAMES[position]
        answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
        answer.raw_output_contents.append(array.tobytes())
    if final:
        answer.parameters["triton_final_response"].bool_param = True
    return answer


@given(st.lists(st.tuples(st.permutations([0, 1, 2]), st.integers(1, 3), SHAPES, IDS, st.booleans()), max_size=5))
def test_plain_answers_have_the_bytes_that_protobuf_writes(
    sent: list[tuple[list[int], int, tuple[int, int], str, bool]],
) -> None:
    encoder = RpcEncoder("m", "12", SIGNATURE)
    for order, count, shape, request_id, final in (*sent, *sent):
        positions = tuple(order[:count])
        arrays = [array_of(shape, NAMES[position][1]) for position in positions]
        written = encoder.encode_plain(positions, arrays, encode_id_and_mark(request_id, FINAL if final else b""))
        assert written == expected(positions, arrays, request_id, final=final).SerializeToString(deterministic=True)


@pytest.mark.parametrize("columns", [4, 40_000])
def test_a_noncontiguous_array_is_written_row_by_row(columns: int) -> None:
    array = array_of((columns, 2), "FP32").T
    answer = pb.ModelInferResponse.FromString(RpcEncoder("m", "12", SIGNATURE).encode_plain((0,), [array]))

    assert answer.raw_output_contents[0] == array.tobytes()


def test_an_output_in_shared_memory_has_no_raw_data() -> None:
    outputs = [
        Finished("classes", "BYTES", (1, 1), np.array([[b"1:0"]], np.object_), False),
        Finished("y", "FP32", (1, 2), None, False),
    ]
    answer = pb.ModelInferResponse.FromString(RpcEncoder("m", "12", SIGNATURE).encode_finished(outputs))

    assert [(output.name, list(output.shape)) for output in answer.outputs] == [("classes", [1, 1]), ("y", [1, 2])]
    assert list(answer.raw_output_contents) == [b"\3\0\0\x001:0", b""]


def test_an_answer_of_a_model_without_outputs_is_empty() -> None:
    assert pb.ModelInferResponse.FromString(RpcEncoder("m", "12", SIGNATURE).encode_plain((), [])).model_name == "m"


@given(st.binary(max_size=300), st.text(max_size=200), IDS)
def test_stream_answers_and_errors_are_parsed_by_protobuf(content: bytes, text: str, request_id: str) -> None:
    array = np.frombuffer(content, np.bool_).reshape(1, -1)
    answer = expected((1,), [array], request_id, final=True).SerializeToString()
    wrapped = pb.ModelStreamInferResponse.FromString(stream_answer(answer))
    assert wrapped.infer_response.raw_output_contents[0] == content
    refused = pb.ModelStreamInferResponse.FromString(stream_error(text, encode_id_and_mark(request_id, FINAL)))
    assert refused.error_message == text.encode("utf-8", "replace").decode()
    assert refused.infer_response.id == request_id


@given(st.integers(0, 2**63 - 1))
def test_varints_are_written_as_protobuf_reads_them(number: int) -> None:
    raw = b"\x10" + varint(number)

    assert pb.InferParameter.FromString(raw).int64_param == number


@pytest.mark.parametrize(
    ("shape", "count", "large"), [((), 1, False), ((3, 2), 5000, False), ((5000,), 1, True), ((200, 100), 1, True)]
)
def test_many_classes_are_encoded_on_a_thread(shape: tuple[int, ...], count: int, large: bool) -> None:
    assert is_large(PerOutputPlan((Classes(count, binary=False),)), [np.zeros(shape, np.float32)]) == large


@pytest.mark.parametrize("outputs", [1, 2])
def test_an_answer_is_left_to_a_thread_from_a_total_size_on(outputs: int) -> None:
    positions, flags = (1, 0)[:outputs], np.zeros((1, LARGE_BYTES - 4 * (outputs - 1)), np.bool_)
    arrays = [flags, np.zeros((1, 1), np.float32)][:outputs]
    encoder = RpcEncoder("m", "12", SIGNATURE)
    with pytest.raises(LargeAnswer) as large:
        encoder.encode_plain(positions, arrays)
    arrays[0] = flags[:, 1:]

    assert len(large.value.encode()) > LARGE_BYTES
    assert pb.ModelInferResponse.FromString(bytes(encoder.encode_plain(positions, arrays))) == expected(
        positions, arrays, "", final=False
    )
