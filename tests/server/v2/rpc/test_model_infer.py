"""ModelInfer over a fake call and an Engine that answers on demand."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.server.grpc.method import Status
from penstock.server.v2.regions import Regions
from penstock.server.v2.rpc import encode, inference, outputs
from penstock.server.v2.rpc.wire import field
from penstock.server.v2.system_regions import SystemRegions
from penstock.server.v2.tensors import to_binary
from tests.fakes import fake_model
from tests.server.v2.held_engine import ROW
from tests.server.v2.rpc.calls import FakeHooks, Services, answer, pb, request, settled, stream_answers

NAMES = [("m", "1"), ("n", ""), ("m", ""), ("n", "1"), ("m", "2")]


def two_outputs(datatype: str = "FP32") -> Model:
    signature = Signature(
        (TensorSpec("x", "FP32", (-1, 4)),),
        (TensorSpec("y", "FP32", (-1, 4)), TensorSpec("z", datatype, (-1, 4))),
        batched=True,
    )
    return fake_model(signature=signature)


@pytest.mark.parametrize("request_id", ["", "seven", "ü" * 100])
def test_an_answer_has_the_bytes_that_protobuf_would_write(request_id: str) -> None:
    for _ in range(2):
        services = Services()
        call = services.call("ModelInfer", request(id=request_id))
        services.engine.let_go()
        expected = pb.ModelInferResponse(
            model_name="m", model_version="1", id=request_id,
            outputs=[{"name": "y", "datatype": "FP32", "shape": [1, 4]}], raw_output_contents=[ROW.tobytes()],
        )  # fmt: skip
        assert call.status is Status.OK
        assert call.sent == [expected.SerializeToString()]


def test_several_outputs_have_their_raw_contents_in_the_requested_order() -> None:
    services = Services(two_outputs())
    message = request(id="a", outputs=[{"name": "z"}, {"name": "y"}])
    for _ in range(2):
        call = services.call("ModelInfer", message)
        services.engine.let_go()
        found = answer(call)
        assert [output.name for output in found.outputs] == ["z", "y"]
        assert [len(raw) for raw in found.raw_output_contents] == [16, 16]


def test_string_outputs_are_encoded_with_their_lengths() -> None:
    services = Services(two_outputs("BYTES"))
    words = np.array([[b"a", b"", b"xyz", b"\xff"]], np.object_)
    call = services.call("ModelInfer", request(outputs=[{"name": "z"}]))
    services.engine.let_go(words)

    expected = b"".join(len(word).to_bytes(4, "little") + word for word in words.ravel().tolist())
    assert answer(call).raw_output_contents[0] == expected


def test_a_long_answer_of_strings_is_encoded_on_a_thread() -> None:
    async def main() -> None:
        services = Services(two_outputs("BYTES"))
        call = services.call("ModelInfer", request(outputs=[{"name": "z"}]))
        services.engine.let_go(np.full((1, 20_000), b"word", np.object_))
        assert not call.ended
        await settled()
        assert len(answer(call).raw_output_contents[0]) == 160_000

    asyncio.run(main())


@pytest.mark.parametrize("rpc", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize(("columns", "here"), [(500_000, True), (600_000, False)])
@pytest.mark.parametrize("hooked", [True, False])
def test_a_large_answer_is_encoded_on_a_thread(
    monkeypatch: pytest.MonkeyPatch, rpc: str, columns: int, *, here: bool, hooked: bool
) -> None:
    where = set()

    def noted(datatype: str, array: Array) -> bytes | memoryview:
        where.add(threading.current_thread() is threading.main_thread())
        return to_binary(datatype, array)

    for module in (encode, outputs):
        monkeypatch.setattr(module, "to_binary", noted)
    values = np.arange(columns, dtype=np.float32).reshape(1, columns)

    async def main() -> None:
        services = Services(two_outputs("FP32"), hooks=FakeHooks(lambda _: {"z": values}) if hooked else None)
        message = request(outputs=[{"name": "z"}])
        for _ in range(2):  # the layout of the second one is cached
            if rpc == "ModelInfer":
                call = services.call(rpc, message)
            else:
                call, reader = services.open(rpc)
                reader.on_message(message.SerializeToString())
            if not hooked:
                services.engine.let_go(values)
            await settled()

            raw = answer(call).raw_output_contents[0] if rpc == "ModelInfer" else stream_answers(call)[0][2]
            assert raw == values.tobytes()

    asyncio.run(main())
    assert where == {here}


def test_a_request_with_a_cached_layout_is_decoded_without_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Services()
    services.call("ModelInfer", request(id="1"))
    monkeypatch.setattr(inference, "parse_message", None)

    services.call("ModelInfer", request(np.array([[5, 6, 7, 8]], np.float32), id="another"))
    first, second = services.engine.held
    assert (first.id, second.id) == ("1", "another")
    assert second.inputs[0] is not None
    assert second.inputs[0].tolist() == [[5, 6, 7, 8]]
    assert (second.rows, second.key, second.output_positions) == (first.rows, first.key, first.output_positions)
    assert second.nbytes == len(request(id="another").SerializeToString())


def sharing(directory: Path) -> tuple[Services, Any]:
    """Serve a model, and return a request whose two tensors are in the shared memory `key`."""
    (directory / "key").write_bytes(ROW.tobytes() + bytes(16))
    regions = Regions(allowed=True)
    SystemRegions(regions, directory).register("r", "key", 0, 32)
    message = pb.ModelInferRequest(model_name="m")
    for tensor, offset in (
        (message.inputs.add(name="x", datatype="FP32", shape=[1, 4]), 0),
        (message.outputs.add(name="y"), 16),
    ):
        tensor.parameters["shared_memory_region"].string_param = "r"
        tensor.parameters["shared_memory_byte_size"].int64_param = 16
        tensor.parameters["shared_memory_offset"].int64_param = offset
    return Services(regions=regions), message


def test_repeated_shared_memory_requests_are_accounted_for_and_answered_in_shared_memory(tmp_path: Path) -> None:
    services, message = sharing(tmp_path)
    for number in (1, 2):
        message.id = str(number)
        call = services.call("ModelInfer", message)
        (held,) = services.engine.held
        assert held.nbytes == len(message.SerializeToString()) + 16
        services.engine.let_go(ROW * number)

        found = answer(call)
        assert (found.id, list(found.raw_output_contents)) == (str(number), [b""])
        assert (tmp_path / "key").read_bytes()[16:] == (ROW * number).tobytes()


def test_no_output_is_written_into_shared_memory_after_the_client_has_disconnected(tmp_path: Path) -> None:
    services, message = sharing(tmp_path)
    call = services.call("ModelInfer", message)
    call.lose()
    services.engine.let_go()

    assert (tmp_path / "key").read_bytes()[16:] == bytes(16)


def test_the_layouts_of_a_model_are_discarded_when_the_model_is_replaced() -> None:
    services = Services()
    services.call("ModelInfer", request())
    services.engine.loaded, services.engine.generation = [fake_model(version=2)], 2
    services.call("ModelInfer", request())

    assert [each.model.version for each in services.engine.held] == ["1", "2"]


@pytest.mark.parametrize("extra", [field(1, b"n"), field(2, b"2"), field(1, b"m") + field(2, b"2"), field(2, b"")])
def test_a_message_with_two_model_names_does_not_misroute_later_messages(extra: bytes) -> None:
    services = Services(fake_model("m"), fake_model("n"), fake_model("m", 2))
    services.engine.loaded.sort(key=lambda model: -int(model.version))
    messages = {(name, version): request(model_name=name, model_version=version) for name, version in NAMES}
    raw = field(7, ROW.tobytes())
    for (name, version), message in messages.items():
        serialized = message.SerializeToString()
        for at in (len(serialized) - len(raw), len(serialized)):
            services.call("ModelInfer", serialized[:at] + extra + serialized[at:])
            services.call("ModelInfer", request(model_name="n"))
            services.engine.held.clear()
            for _ in range(2):
                services.call("ModelInfer", message)
            expected = services.engine.model(name, version)
            assert [each.model for each in services.engine.held] == [expected, expected]
            services.engine.held.clear()


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        (request(model_name="no"), Status.NOT_FOUND, "Request for unknown model: 'no' is not found"),
        (request(model_version="x"), Status.INVALID_ARGUMENT, "failed to get model version from specified version"),
        (b"\x0a\xff", Status.INVALID_ARGUMENT, "failed to parse the request as inference.ModelInferRequest"),
        (request(name="w", id="7"), Status.INVALID_ARGUMENT, "[request id: 7] unexpected inference input 'w'"),
        (request(datatype="INT8"), Status.INVALID_ARGUMENT, "data-type is 'INT8', but model 'm' expects 'FP32'"),
        (b"", Status.NOT_FOUND, "Request for unknown model: '' is not found"),
    ],
)
def test_an_invalid_request_is_rejected_with_its_status(message: Any, status: Status, text: str) -> None:
    call = Services().call("ModelInfer", message)

    assert call.status is status
    assert text in call.text


def test_an_inference_error_becomes_the_status() -> None:
    services = Services()
    call = services.call("ModelInfer", request())
    services.engine.fail(InferError(Code.EXPIRED, "Request timeout expired"))

    assert (call.status, call.text) == (Status.UNAVAILABLE, "Request timeout expired")


def test_an_error_at_admission_becomes_the_status() -> None:
    services = Services()
    services.engine.failure = InferError(Code.OVERLOADED, "Exceeds maximum queue size")
    call = services.call("ModelInfer", request())

    assert (call.status, call.text) == (Status.UNAVAILABLE, "Exceeds maximum queue size")


def test_an_answer_that_cannot_be_encoded_does_not_affect_others_of_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    services = Services()
    calls = [services.call("ModelInfer", request()) for _ in range(2)]
    batch, services.engine.held = services.engine.held, []
    batch[0].outputs, batch[1].outputs = [object()], [ROW]
    with caplog.at_level(logging.ERROR):
        batch[0].sink.deliver(batch)

    assert [call.status for call in calls] == [Status.INTERNAL, Status.OK]
    assert calls[0].text.startswith("internal error, request id ")
    assert "object" in caplog.text


def test_a_call_that_is_lost_cancels_its_request() -> None:
    services = Services()
    call = services.call("ModelInfer", request())
    call.lose()

    assert services.engine.cancelled == services.engine.held


def test_an_answered_call_holds_no_request() -> None:
    services = Services()
    call = services.call("ModelInfer", request())
    services.engine.let_go()

    assert call.on_cancel is None


def test_a_large_message_is_decoded_on_a_thread_and_its_layout_is_cached() -> None:
    async def main() -> None:
        signature = Signature((TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, -1)),), batched=True)
        services = Services(fake_model(signature=signature))
        large = np.arange(100_000, dtype=np.float32).reshape(1, -1)
        call = services.call("ModelInfer", request(large))
        await settled()
        services.call("ModelInfer", request(large))
        assert len(services.engine.held) == 2
        assert services.engine.loaded[0].hold_count == 0
        services.engine.let_go(large)
        assert answer(call).raw_output_contents[0] == large.tobytes()

    asyncio.run(main())


def test_a_model_with_hooks_returns_the_outputs_of_its_hooks() -> None:
    def post(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"label": np.array([b"cat"], np.object_), "doubled": inputs["x"] * 2}

    async def main() -> None:
        services = Services(hooks=FakeHooks(post))
        call = services.call("ModelInfer", request(id="h"))
        await settled()
        found = answer(call)
        assert found.id == "h"
        assert [(output.name, output.datatype, list(output.shape)) for output in found.outputs] == [
            ("label", "BYTES", [1]),
            ("doubled", "FP32", [1, 4]),
        ]
        assert list(found.raw_output_contents) == [b"\3\0\0\0cat", (ROW * 2).tobytes()]

    asyncio.run(main())


def test_an_output_added_by_a_hook_is_returned_unless_the_call_names_other_outputs() -> None:
    def post(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": inputs["x"], "label": np.array([b"cat"], np.object_)}

    async def main() -> None:
        services = Services(hooks=FakeHooks(post))
        unnamed, named = request(), request()
        named.outputs.add(name="y")
        calls = [services.call("ModelInfer", each) for each in (unnamed, named)]
        await settled()
        output_names = [[output.name for output in answer(call).outputs] for call in calls]
        assert output_names == [["y", "label"], ["y"]]

    asyncio.run(main())


@pytest.mark.parametrize("lost", [True, False])
def test_a_model_is_held_until_its_hooks_have_run(lost: bool) -> None:
    async def main() -> None:
        services = Services(hooks=FakeHooks(dict))
        (model,) = services.engine.loaded
        call = services.call("ModelInfer", request())
        stream, reader = services.open()
        reader.on_message(request().SerializeToString())
        assert model.hold_count == 2
        if lost:
            call.lose()
            stream.lose()
        await settled()
        assert model.hold_count == 0
        reader.on_half_close()

    asyncio.run(main())


def test_a_call_can_bypass_hooks_and_a_hooks_error_becomes_the_status() -> None:
    def post(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise InferError(Code.INVALID, "not with me")

    async def main() -> None:
        services = Services(hooks=FakeHooks(post))
        refused = services.call("ModelInfer", request())
        services.call("ModelInfer", request(parameters={"hooks": {"bool_param": False}}))
        await settled()
        assert (refused.status, refused.text) == (Status.INVALID_ARGUMENT, "not with me")
        assert len(services.engine.held) == 1

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["answered", "refused", "lost", "failed"])
def test_a_finished_call_is_freed_without_garbage_collection(ending: str) -> None:
    services = Services()
    gc.collect()
    gc.disable()
    try:
        if ending == "refused":
            services.engine.failure = InferError(Code.OVERLOADED, "Exceeds maximum queue size")
        call = services.call("ModelInfer", request())
        if ending == "answered":
            services.engine.let_go()
        elif ending == "lost":
            call.lose()
            services.engine.held.clear()
            services.engine.cancelled.clear()
        elif ending == "failed":
            services.engine.fail(InferError(Code.EXPIRED, "Request timeout expired"))
        elif ending == "refused":
            call.on_cancel = services.engine.failure = None  # as the lane does; the error has the frames
        call_ref = weakref.ref(call)
        del call
        assert call_ref() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("field_of", [b"\x2a\x00", b"\x32\x00", b"\x3a\x00", b"\x7a\x00"])
def test_a_message_with_too_many_fields_is_rejected_without_being_parsed(
    field_of: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.server.v2.rpc.calls._MAX_ELEMENTS", 0)
    monkeypatch.setattr("penstock.server.v2.rpc.calls.has_more_elements", None)

    async def main() -> None:
        call = Services().call("ModelInfer", request().SerializeToString() + field_of * (1 << 18))
        await settled()

        assert (call.status, call.text) == (Status.INVALID_ARGUMENT, "ModelInferRequest has more than 65536 fields")

    asyncio.run(main())


@pytest.mark.parametrize(
    "inside", [b"\x1a\x80\x80\x80\x04" + b"\1" * (8 << 20), b"\x2a\x80\x80\x80\x04" + b"\x42\0" * (4 << 20)]
)
def test_a_message_with_millions_of_dims_or_strings_is_rejected_without_being_parsed(inside: bytes) -> None:
    """Parsed, a dim of 1 byte takes 16 and a string of 2 takes 80; compressed, the message shrinks a thousandfold."""

    async def main() -> None:
        call = Services().call("ModelInfer", request().SerializeToString() + field(5, inside))
        await settled()

        assert call.status is Status.INVALID_ARGUMENT
        assert "more dims, parameters and elements in 'contents' than can be parsed" in call.text

    asyncio.run(main())
