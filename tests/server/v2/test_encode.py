from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Array
from penstock.backends.datatypes import DATATYPES
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.request import InferRequest
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.server.listening.mapped_buffer import Body
from penstock.server.v2.call_parameters import PerOutputPlan
from penstock.server.v2.encode import Encoder, encode_outputs
from penstock.server.v2.finish import Finished
from penstock.server.v2.regions import Regions
from penstock.server.v2.rpc import encode as rpc
from penstock.server.v2.system_regions import SystemRegions
from penstock.server.v2.tensors import from_binary, from_json
from tests.fakes import NoSink, fake_model
from tests.server.v2.documents import TEXTS, same, tensors
from tests.server.v2.rpc.calls import pb

OUTPUTS = [(f"out {name}", name) for name in DATATYPES]
IN_JSON = [position for position, (_, name) in enumerate(OUTPUTS) if name not in {"FP16", "BF16"}]


def encoder() -> Encoder:
    return Encoder('m"é', "3", OUTPUTS)


def read(body: Body, json_bytes: int) -> tuple[dict[str, Any], list[Array]]:
    """Parse an answer as a client does, with the functions of the decoder."""
    document = json.loads(bytes(body[: json_bytes or len(body)]))
    position, arrays = json_bytes, []
    for entry in document["outputs"]:
        spec, shape = TensorSpec(entry["name"], entry["datatype"], (-1,)), entry["shape"]
        if "parameters" in entry:
            end = position + entry["parameters"]["binary_data_size"]
            arrays.append(from_binary("m", spec, shape, math.prod(shape), memoryview(body)[position:end]))
            position = end
        else:
            arrays.append(from_json(spec, shape, math.prod(shape), entry["data"]))
    assert position == (len(body) if json_bytes else 0)
    return document, arrays


class TestRoundTrip:
    @given(st.data(), TEXTS)
    @settings(max_examples=60)
    def test_any_outputs_in_any_mixture_of_json_and_binary_round_trip(
        self, data: st.DataObject, request_id: str
    ) -> None:
        positions = tuple(data.draw(st.lists(st.integers(0, len(OUTPUTS) - 1), unique=True, max_size=4)))
        arrays = [data.draw(tensors(OUTPUTS[position][1])) for position in positions]
        plan = tuple(position not in IN_JSON or data.draw(st.booleans()) for position in positions)
        v2_encoder = encoder()
        for _ in range(2):
            document, found = read(*v2_encoder.encode_mixed(request_id, positions, plan, arrays))

            assert [entry["name"] for entry in document["outputs"]] == [OUTPUTS[position][0] for position in positions]
            assert all(same(left, right) for left, right in zip(found, arrays, strict=True))
            assert document.get("id", "") == request_id

    @given(st.data(), TEXTS)
    @settings(max_examples=60)
    def test_a_mapped_answer_has_the_same_bytes_as_an_ordinary_one(self, data: st.DataObject, request_id: str) -> None:
        positions = tuple(data.draw(st.lists(st.integers(0, len(OUTPUTS) - 1), unique=True, max_size=4)))
        arrays = [data.draw(tensors(OUTPUTS[position][1])) for position in positions]
        outputs = []
        for position, array in zip(positions, arrays, strict=True):
            binary, there = position not in IN_JSON or data.draw(st.booleans()), data.draw(st.booleans())
            outputs.append(Finished(*OUTPUTS[position], array.shape, array if there else None, binary))
        parameters = data.draw(st.sampled_from([None, {"a": 1}]))

        v2_encoder = encoder()
        assert v2_encoder.encode_mapped(request_id, outputs, parameters) == v2_encoder.encode_finished(
            request_id, outputs, parameters
        )

    @given(st.data(), TEXTS)
    @settings(max_examples=60)
    def test_any_outputs_round_trip_as_json(self, data: st.DataObject, request_id: str) -> None:
        positions = tuple(data.draw(st.lists(st.sampled_from(IN_JSON), unique=True, max_size=3)))
        arrays = [data.draw(tensors(OUTPUTS[position][1])) for position in positions]
        v2_encoder = encoder()
        for _ in range(2):
            document, found = read(v2_encoder.encode_json(request_id, positions, arrays), 0)

            assert all(same(left, right) for left, right in zip(found, arrays, strict=True))
            assert (document["model_name"], document["model_version"]) == ('m"é', "3")

    @given(st.data())
    @settings(max_examples=30)
    def test_the_id_precedes_the_cached_part_of_the_answer(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(OUTPUTS) - 1))
        v2_encoder, array = encoder(), data.draw(tensors(OUTPUTS[position][1]))
        for request_id in ("", "1", 'a"é', ""):
            document, [found] = read(*v2_encoder.encode_mixed(request_id, (position,), (True,), [array]))
            assert document.get("id", "") == request_id
            assert list(document) == ["id"] * bool(request_id) + ["model_name", "model_version", "outputs"]
            assert same(found, array)

    @given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=6))
    def test_a_cached_part_of_one_answer_never_appears_in_another(self, shapes: list[list[int]]) -> None:
        v2_encoder = encoder()
        for number, shape in enumerate(shapes):
            array = np.full(shape, number, np.float32)
            position = [name for _, name in OUTPUTS].index("FP32")
            binary = bool(number % 2)
            document, [found] = read(*v2_encoder.encode_mixed("", (position,), (binary,), [array]))

            assert same(found, array)
            assert ("parameters" in document["outputs"][0]) == binary


class TestAnswerFormat:
    def test_members_of_an_answer_are_in_tritons_order(self) -> None:
        body = Encoder("m", "1", [("y", "INT32")]).encode_json("7", (0,), [np.array([[1, 2]], np.int32)])

        assert body == (
            b'{"id":"7","model_name":"m","model_version":"1",'
            b'"outputs":[{"name":"y","datatype":"INT32","shape":[1,2],"data":[1,2]}]}'
        )

    def test_an_answer_to_a_request_without_an_id_has_no_id(self) -> None:
        assert b'"id"' not in Encoder("m", "1", [("y", "INT32")]).encode_json("", (0,), [np.array([1], np.int32)])

    def test_an_output_as_json_has_no_parameters(self) -> None:
        # the C++ client takes an output with parameters for a binary one
        body, _ = Encoder("m", "1", [("y", "INT32"), ("z", "INT32")]).encode_mixed(
            "", (0, 1), (False, True), [np.array([1], np.int32), np.array([2], np.int32)]
        )

        assert body == (
            b'{"model_name":"m","model_version":"1","outputs":['
            b'{"name":"y","datatype":"INT32","shape":[1],"data":[1]},'
            b'{"name":"z","datatype":"INT32","shape":[1],"parameters":{"binary_data_size":4}}]}\x02\x00\x00\x00'
        )

    def test_binary_outputs_without_bytes_make_a_json_answer(self) -> None:
        body, json_bytes = Encoder("m", "1", [("y", "FP32")]).encode_mixed(
            "", (0,), (True,), [np.zeros((0, 4), np.float32)]
        )

        assert json_bytes == 0
        assert json.loads(body)["outputs"][0]["parameters"] == {"binary_data_size": 0}

    def test_nan_and_infinity_are_written_as_pythons_json_module_reads_them(self) -> None:
        body = Encoder("m", "1", [("y", "FP32")]).encode_json(
            "", (0,), [np.array([np.nan, np.inf, -np.inf], np.float32)]
        )

        assert body.endswith(b'"data":[NaN,Infinity,-Infinity]}]}')

    @pytest.mark.parametrize("datatype", ["FP16", "BF16"])
    def test_half_floats_are_rejected_as_json(self, datatype: str) -> None:
        array = np.zeros(1, DATATYPES[datatype].dtype)
        for request_id in ("", "7"):
            with pytest.raises(InferError) as caught:
                Encoder("m", "1", [("y", datatype)]).encode_json(request_id, (0,), [array])
            assert caught.value.code is Code.INVALID


@pytest.mark.parametrize("transport", ["http", "grpc"])
@pytest.mark.parametrize("request_id", ["", "7"])
def test_an_answer_whose_outputs_are_all_in_shared_memory_equals_the_general_form(
    tmp_path: Path, transport: str, request_id: str
) -> None:
    (tmp_path / "key").write_bytes(bytes(32))
    system = SystemRegions(Regions(allowed=True), tmp_path)
    system.register("r", "key", 0, 32)
    specs = TensorSpec("y", "INT32", (-1, 2)), TensorSpec("z", "FP32", (-1, 1))
    model = fake_model(signature=Signature((), specs, batched=True))
    http = Encoder("m", "1", [(spec.name, spec.datatype) for spec in specs])
    grpc = rpc.RpcEncoder("m", "1", model.signature)
    for number in (1, 2):
        answers: list[tuple[Body, int]] = []
        for stored in (True, False):
            request = InferRequest(model, [], 1, (), (1, 0), NoSink())
            request.id, request.outputs = request_id, [np.full((1, 1), number, "f4"), np.full((1, 2), number, "i4")]
            plan = PerOutputPlan((system.regions.lease("r", 0, 4), system.regions.lease("r", 8, 16)), stored)
            if transport == "http":
                answers.append(encode_outputs(http, request, plan, large=False))
            else:
                answers.append((rpc.encode_outputs(grpc, plan, request, rpc.encode_id_and_mark(request_id)), 0))
            assert (tmp_path / "key").read_bytes()[:16] == b"".join(
                [np.float32(number).tobytes(), bytes(4), np.full(2, number, "i4").tobytes()]
            )
            with pytest.raises(InferError, match="after its release"):
                plan.modes[0].read()  # type: ignore[union-attr]
        assert answers[0] == answers[1]


def test_an_output_too_large_for_its_region_is_rejected_and_the_leases_are_released(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(8))
    system = SystemRegions(Regions(allowed=True), tmp_path)
    system.register("r", "key", 0, 8)
    model = fake_model(signature=Signature((), (TensorSpec("y", "FP32", (-1, 4)),), batched=True))
    request = InferRequest(model, [], 1, (), (0,), NoSink())
    request.outputs = [np.zeros((1, 4), np.float32)]
    plan = PerOutputPlan((system.regions.lease("r", 0, 8),), all_shared=True)
    with pytest.raises(InferError, match=r"for output 'y' \(8 bytes\) should be at least 16 bytes"):
        encode_outputs(Encoder("m", "1", [("y", "FP32")]), request, plan, large=False)
    with pytest.raises(InferError, match="after its release"):
        plan.modes[0].read()  # type: ignore[union-attr]


def test_leases_are_released_if_the_parameters_of_an_answer_cannot_be_encoded(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(8))
    system = SystemRegions(Regions(allowed=True), tmp_path)
    system.register("r", "key", 0, 8)
    model = fake_model(signature=Signature((), (TensorSpec("y", "FP32", (-1, 2)),), batched=True))
    request = InferRequest(model, [], 1, (), (0,), NoSink())
    request.outputs = CustomOutputs([np.zeros((1, 2), np.float32)], {"text": "\ud800"})
    plan = PerOutputPlan((system.regions.lease("r", 0, 8),), all_shared=True)
    with pytest.raises(ValueError, match=r"surrogates|UTF-8"):
        rpc.encode_outputs(rpc.RpcEncoder("m", "1", model.signature), plan, request, b"")
    with pytest.raises(InferError, match="after its release"):
        plan.modes[0].read()  # type: ignore[union-attr]


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_parameters_of_user_code_are_returned_though_all_outputs_are_in_shared_memory(
    tmp_path: Path, transport: str
) -> None:
    (tmp_path / "key").write_bytes(bytes(8))
    system = SystemRegions(Regions(allowed=True), tmp_path)
    system.register("r", "key", 0, 8)
    model = fake_model(signature=Signature((), (TensorSpec("y", "FP32", (-1, 2)),), batched=True))
    request = InferRequest(model, [], 1, (), (0,), NoSink())
    request.outputs = CustomOutputs([np.ones((1, 2), np.float32)], {"note": "n"})
    plan = PerOutputPlan((system.regions.lease("r", 0, 8),), all_shared=True)

    if transport == "http":
        body, _ = encode_outputs(Encoder("m", "1", [("y", "FP32")]), request, plan, large=False)
        assert json.loads(bytes(body))["parameters"] == {"note": "n"}
    else:
        message = bytes(rpc.encode_outputs(rpc.RpcEncoder("m", "1", model.signature), plan, request, b""))
        assert pb.ModelInferResponse.FromString(message).parameters["note"].string_param == "n"
