"""RpcLayouts: decoding with a cached layout gives the same result as decoding in full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.server.v2.call_parameters import Options
from penstock.server.v2.rpc.calls import parse_message
from penstock.server.v2.rpc.decode import decode
from penstock.server.v2.rpc.layout import RpcLayouts, encode_names, read_head
from penstock.server.v2.rpc.wire import field
from tests.fakes import NoSink, fake_model
from tests.server.v2.held_engine import ROW
from tests.server.v2.rpc.calls import pb, request

MIXED = Signature(
    (
        TensorSpec("a", "FP32", (-1, -1)), TensorSpec("b", "BYTES", (-1, -1), optional=True),
        TensorSpec("c", "BOOL", (-1, 2), optional=True),
    ),
    (TensorSpec("y", "FP32", (-1, 4)), TensorSpec("z", "FP32", (-1, 4))),
    batched=True,
)  # fmt: skip


def in_full(model: Model, message: bytes) -> tuple[InferRequest, Options]:
    return decode(model, parse_message(pb.ModelInferRequest, message), NoSink(), None)


def remembered(layouts: RpcLayouts, model: Model, message: bytes) -> None:
    found, options = in_full(model, message)
    found.nbytes = len(message)
    layouts.add(found, options, message, read_head(message)[1], parse_message(pb.ModelInferRequest, message))


def found(layouts: RpcLayouts, model: Model, message: bytes) -> tuple[InferRequest, Options] | None:
    try:
        _, start, request_id = read_head(message)
    except (IndexError, UnicodeDecodeError):
        return None
    return layouts.find(model, message, start, request_id, NoSink())


def facts(request: InferRequest, options: Options) -> Any:
    arrays = [None if each is None else (each.dtype, each.shape, repr(each.tolist())) for each in request.inputs]
    return request.id, arrays, request.rows, request.key, request.output_positions, options


def tensors(draw: Any, rows: int) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    width = draw(st.integers(0, 3))
    values = draw(st.lists(st.integers(0, 255), min_size=4 * rows * width, max_size=4 * rows * width))
    entries = [("a", "FP32", (rows, width), bytes(values))]
    if draw(st.booleans()):
        words = draw(st.lists(st.binary(max_size=3), min_size=rows, max_size=rows))
        raw = b"".join(len(word).to_bytes(4, "little") + word for word in words)
        entries.append(("b", "BYTES", (rows, 1), raw))
    if draw(st.booleans()):
        entries.append(
            ("c", "BOOL", (rows, 2), bytes(draw(st.lists(st.integers(0, 2), min_size=2 * rows, max_size=2 * rows))))
        )
    return draw(st.permutations(entries))  # type: ignore[no-any-return]


@st.composite
def messages(draw: Any) -> bytes:
    """Draw a message that is likely to resemble an earlier one."""
    message = pb.ModelInferRequest(model_name="m", model_version=draw(st.sampled_from(["", "1"])))
    message.id = draw(st.sampled_from(["", "1", "22", "ü"]))
    for name, datatype, shape, raw in tensors(draw, draw(st.integers(1, 2))):
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    if draw(st.booleans()):
        message.outputs.add(name=draw(st.sampled_from("yz")))
    if draw(st.booleans()):
        message.parameters["timeout"].int64_param = draw(st.integers(0, 3))
    return bytes(message.SerializeToString())


EXTRAS = [
    b"", field(3, b"late"), field(1, b"n"), field(1, b""), field(2, b"1"), field(3, b""), field(7, b""),
    field(6, field(1, b"z")), field(99, b"unknown"), b"\x28", field(4, field(1, b"hooks") + field(2, b"\x08\x00")),
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.lists(messages(), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(EXTRAS), st.booleans()), max_size=6),
)
def test_a_cached_layout_decodes_like_decoding_in_full(
    kinds: list[bytes], changes: list[tuple[int, bytes, bool]]
) -> None:
    model = fake_model(signature=MIXED)
    layouts = RpcLayouts()
    sent = [*kinds, *kinds]
    for position, extra, twice in changes:
        message = kinds[position % len(kinds)]
        at = position % (len(message) + 1)
        altered = message[:at] + extra + message[at:]
        sent += [altered, altered] if twice else [altered, message]
    for message in sent:
        hit = found(layouts, model, message)
        try:
            full = in_full(model, message)
        except InferError:
            assert hit is None
            continue
        if hit is not None:
            assert facts(*hit) == facts(*full)
        else:
            try:
                remembered(layouts, model, message)
            except (IndexError, UnicodeDecodeError):
                continue


@pytest.mark.parametrize("count", [1, 2])
def test_a_request_that_differs_only_in_id_and_values_matches_the_cached_layout(count: int) -> None:
    model = fake_model(signature=MIXED)
    layouts = RpcLayouts()
    message = request(ROW, "a", id="first")
    if count == 2:
        message.inputs.add(name="c", datatype="BOOL", shape=[1, 2])
        message.raw_input_contents.append(b"\1\0")
    remembered(layouts, model, message.SerializeToString())
    message.id, message.raw_input_contents[0] = "", (ROW * 2).tobytes()

    hit = found(layouts, model, message.SerializeToString())
    assert hit is not None
    assert hit[0].inputs[0] is not None
    assert hit[0].inputs[0].tolist() == (ROW * 2).tolist()


@pytest.mark.parametrize(
    "message",
    [
        field(3, b"id first") + request().SerializeToString(),
        request().SerializeToString() + field(6, field(1, b"y")),
        field(7, ROW.tobytes()) + request().SerializeToString()[: -len(field(7, ROW.tobytes()))],
        request(model_name="m" * 200).SerializeToString(),
        request(id="i" * 200).SerializeToString(),
        request(parameters={"mine": {"string_param": "x" * 5000}}).SerializeToString(),
    ],
)
def test_a_message_in_an_unusual_encoding_is_not_cached(message: bytes) -> None:
    layouts = RpcLayouts()
    try:
        remembered(layouts, fake_model(), message)
    except (IndexError, UnicodeDecodeError):
        pass
    else:
        assert len(layouts) == 0


def test_the_layout_cache_is_bounded() -> None:
    layouts, model = RpcLayouts(), fake_model(signature=MIXED)
    for rows in range(1, 40):
        for name in ("timeout", "priority", "aaaaaaa", "bbbbbbb", "ccccccc", "ddddddd"):
            array = np.zeros((1, rows), np.float32)
            remembered(layouts, model, request(array, "a", parameters={name: {"int64_param": 1}}).SerializeToString())

    assert len(layouts) <= 256 * 4
    assert all(len(alike) <= 4 for alike in layouts._by_size.values())


@pytest.mark.parametrize("version", ["", "1", "v" * 127])
def test_model_name_and_version_are_encoded_as_protobuf_encodes_them(version: str) -> None:
    message = pb.ModelInferRequest(model_name="m", model_version=version)

    assert encode_names(message) == message.SerializeToString()
    assert read_head(request(model_version=version).SerializeToString())[0] == len(encode_names(message))
    assert encode_names(pb.ModelInferRequest(model_name="m" * 128)) == b""
