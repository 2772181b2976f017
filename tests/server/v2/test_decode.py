from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.server.v2.call_parameters import Options
from penstock.server.v2.decode import decode
from penstock.server.v2.layout import Layouts
from penstock.server.v2.parsing import SIMD_BYTES
from penstock.server.v2.regions import DISABLED_TEXT
from penstock.server.v2.tensors import to_binary, to_json
from tests.fakes import FakeBackend
from tests.server.v2.documents import ANYTHING, decode_remembered, mutated, same, tensors

ZIPMAP = "seq(map(int64,tensor(float)))"
ONE = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), batched=True)
MANY = Signature(
    (
        TensorSpec("i", "INT64", (-1, -1)),
        TensorSpec("s", "BYTES", (-1, -1)),
        TensorSpec("h", "FP16", (-1, 2)),
        TensorSpec("o", "BOOL", (-1, 1), optional=True),
    ),
    (TensorSpec("a", "INT64", (-1, -1)), TensorSpec("b", "BYTES", (-1,)), TensorSpec("z", ZIPMAP, ())),
    batched=True,
)
TWO = Signature((MANY.inputs[0], MANY.inputs[2]), (MANY.outputs[0],), batched=True)
PAIR = Signature((*ONE.inputs, TensorSpec("z", "FP32", (-1, 4))), ONE.outputs, batched=True)
FREE = Signature((TensorSpec("f", "FP64", (-1, -1, 2)),), (TensorSpec("g", "FP64", ()),))


class Nobody:
    def deliver(self, requests: Any) -> None:
        raise AssertionError("nothing is delivered here")


SINK = Nobody()


def model(signature: Signature = ONE) -> Model:
    spec = ModelSpec("m", 1, Path("model"), signature=signature, policy=BatchPolicy(max_batch_rows=64))
    return Model(spec, [FakeBackend(signature, list)], lambda *_: None)


def read(loaded_model: Model, document: Any, tail: bytes = b"", *, pad: int = 0) -> tuple[InferRequest, Options]:
    """Decode a document; with `tail`, binary tensors follow."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    text += b" " * pad
    return decode(loaded_model, text + tail, len(text) if tail else -1, 100, SINK)


def refused(document: Any, tail: bytes = b"", signature: Signature = ONE) -> tuple[Code, str]:
    with pytest.raises(InferError) as caught:
        read(model(signature), document, tail)
    return caught.value.code, caught.value.message


def entry(name: str = "x", datatype: str = "FP32", shape: Any = (1, 4), **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), **more}


def good(**more: Any) -> dict[str, Any]:
    return {"inputs": [entry(data=[1.5, 2, 3, 4])], **more}


def one(**changes: Any) -> dict[str, Any]:
    """Return a valid document whose one input has these members; None removes one."""
    tensor = {**entry(data=[1.5, 2, 3, 4]), **changes}
    return {"inputs": [{key: value for key, value in tensor.items() if value is not None}]}


UNKNOWN = "[request id: <id_unknown>] "
MISSING = (
    "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) ['x']. "
    "Please provide all required input(s)."
)
OVERFLOW = (
    "shape [4294967296,4294967296] of input 'x' causes total element count to exceed maximum size of "
    "9223372036854775807"
)
ONLY_ONE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)
RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
WRONG_KIND = "parameter 'x' has invalid type. It should be either 'int', 'bool', 'string' or 'double'."


class TestValidRequests:
    def test_a_request_with_json_data_is_decoded(self) -> None:
        request, options = read(model(), good())

        [array] = request.inputs
        assert array is not None
        assert array.tolist() == [[1.5, 2, 3, 4]]
        assert (request.rows, request.key, request.output_positions, request.id) == (1, ((4,),), (0,), "")
        assert options == Options()

    @given(st.data())
    @settings(max_examples=40)
    def test_tensors_in_any_mixture_of_forms_and_any_order_are_decoded(self, data: st.DataObject) -> None:
        rows, width = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
        shapes = {"i": [rows, width], "s": [rows, width], "h": [rows, 2], "o": [rows, 1]}
        specs = [spec for spec in MANY.inputs if not spec.optional or data.draw(st.booleans())]
        arrays = {spec.name: data.draw(tensors(spec.datatype, st.just(shapes[spec.name]))) for spec in specs}
        entries, tail = [], b""
        for spec in data.draw(st.permutations(specs)):
            array = arrays[spec.name]
            tensor = entry(spec.name, spec.datatype, array.shape)
            if spec.datatype == "FP16" or data.draw(st.booleans()):
                raw = bytes(to_binary(spec.datatype, array))
                tensor["parameters"] = {"binary_data_size": len(raw)}
                tail += raw
            else:
                tensor["data"] = json.loads(to_json(spec.datatype, spec.name, array))
            entries.append(tensor)
        text = json.dumps({"inputs": entries, "id": "é"}).encode() + b" " * data.draw(st.sampled_from([0, SIMD_BYTES]))
        request, _ = decode(model(MANY), text + tail, len(text), 100, SINK)

        assert request.rows == rows
        assert request.id == "é"
        assert request.nbytes == len(text + tail)
        for spec, found in zip(MANY.inputs, request.inputs, strict=True):
            assert (found is None) == (spec.name not in arrays)
            assert found is None or same(found, arrays[spec.name])

    @given(st.data())
    @settings(max_examples=40)
    def test_a_request_decoded_from_the_cached_layout_equals_one_decoded_in_full(self, data: st.DataObject) -> None:
        two_inputs, layouts = model(TWO), Layouts()
        count = data.draw(st.integers(0, 2))
        in_json = entry("i", "INT64", (1, count), data=[7] * count)
        in_bytes = entry("i", "INT64", (1, count), parameters={"binary_data_size": 8 * count})
        first = data.draw(st.sampled_from([in_json, in_bytes]))
        halves = entry("h", "FP16", (1, 2), parameters={"binary_data_size": 4})
        entries = data.draw(st.permutations([first, halves]))
        text = json.dumps({"id": data.draw(st.sampled_from(["", "a"])), "inputs": entries}).encode()
        size = 4 + 8 * count * (first is in_bytes)
        for _ in range(3):
            body = text + data.draw(st.binary(min_size=size, max_size=size))
            expected, _ = decode(two_inputs, body, len(text), 100, SINK)
            found, _ = decode_remembered(two_inputs, body, len(text), 100, SINK, layouts)

            assert (found.id, found.key, found.rows) == (expected.id, expected.key, expected.rows)
            assert found.nbytes == expected.nbytes
            for left, right in zip(found.inputs, expected.inputs, strict=True):
                assert left is not None
                assert right is not None
                assert same(left, right)
        assert len(layouts) == (first is in_bytes and count > 0)

    @given(
        st.lists(
            st.floats(width=32)
            | st.integers(-9, 2**70)
            | st.sampled_from([None, True, False, 1e39, -1e39, "1", [1], [[2, 3]], [], 2**53 + 1]),
            max_size=5,
        ),
        st.sampled_from([",", "," + " " * 400]),
    )
    @settings(max_examples=200)
    @np.errstate(over="ignore")  # as in the server
    def test_json_data_decoded_from_the_cached_layout_equals_data_decoded_in_full(
        self, values: list[Any], comma: str
    ) -> None:
        one_input, layouts = model(), Layouts()
        decode_remembered(
            one_input, json.dumps({"inputs": [entry(data=[1, 2, 3, 4])]}).encode(), -1, 100, SINK, layouts
        )
        assert len(layouts) == 1
        # large bodies are parsed differently from small ones
        body = (
            json.dumps({"inputs": [entry(data=[])]}).replace("[]", f"[{comma.join(map(json.dumps, values))}]").encode()
        )
        try:
            expected, _ = decode(one_input, body, -1, 100, SINK)
        except InferError as error:
            with pytest.raises(InferError, match=re.escape(error.message)):
                decode_remembered(one_input, body, -1, 100, SINK, layouts)
            return
        found, _ = decode_remembered(one_input, body, -1, 100, SINK, layouts)

        left, right = found.inputs[0], expected.inputs[0]
        assert left is not None
        assert right is not None
        assert same(left, right)
        assert (found.id, found.key, found.rows, found.nbytes) == (
            expected.id,
            expected.key,
            expected.rows,
            expected.nbytes,
        )

    @pytest.mark.parametrize(
        "body",
        [
            rb'{"id":"\"data\":[1]","inputs":[%b]}',
            rb'{"parameters":{"x":"\"data\":[]"},"inputs":[%b]}',
            b'{"inputs":[%b],"data":[1,2,3,4]}',
        ],
    )
    def test_a_list_inside_a_string_or_parameter_is_not_mistaken_for_tensor_data(self, body: bytes) -> None:
        one_input, layouts = model(), Layouts()
        for data in ([1, 2, 3, 4], [5, 6, 7, 8]):
            full_body = body % json.dumps(entry(data=data)).encode()
            found, _ = decode_remembered(one_input, full_body, -1, 100, SINK, layouts)
            expected, _ = decode(one_input, full_body, -1, 100, SINK)

            left, right = found.inputs[0], expected.inputs[0]
            assert left is not None
            assert right is not None
            assert same(left, right)

    @given(st.lists(st.text(max_size=4), min_size=2, max_size=4), st.sampled_from([(",", ":"), (", ", ": ")]))
    @settings(max_examples=60)
    def test_a_leading_id_is_read_from_each_request_and_not_from_the_cached_layout(
        self, names: list[str], separators: tuple[str, str]
    ) -> None:
        one_input, layouts = model(), Layouts()
        for name in names:
            for form in ({"data": [1, 2, 3, 4]}, {"parameters": {"binary_data_size": 16}}):
                text = json.dumps({"id": name, "inputs": [entry(**form)]}, separators=separators).encode()
                body, header_bytes = (text, -1) if "data" in form else (text + bytes(16), len(text))
                found, _ = decode_remembered(one_input, body, header_bytes, 100, SINK, layouts)
                assert (found.id, found.nbytes) == (name, len(body))
        usual = [name for name in names if re.fullmatch(r"[ !#-\[\]-~]+", name)]
        assert len(layouts) <= 2 * (len(set(names) - set(usual)) + bool(usual))

    @pytest.mark.parametrize("again", ["a", "c", "\\u0061"])
    def test_the_last_of_several_ids_is_used(self, again: str) -> None:
        one_input, layouts = model(), Layouts()
        for first in ("a", "b"):
            inputs = json.dumps([entry(parameters={"binary_data_size": 16})])
            text = f'{{"id":"{first}","id":"{again}","inputs":{inputs}}}'.encode()
            found, _ = decode_remembered(one_input, text + bytes(16), len(text), 100, SINK, layouts)
            assert found.id == json.loads(f'"{again}"')

    def test_the_json_after_an_id_is_not_accepted_as_a_request(self) -> None:
        one_input, layouts = model(), Layouts()
        text = json.dumps({"id": "1", "inputs": [entry(parameters={"binary_data_size": 16})]}).encode()
        decode_remembered(one_input, text + bytes(16), len(text), 100, SINK, layouts)
        for cut in (len(b'{"id": "1"'), 1):
            rest = text[cut:]
            with pytest.raises(InferError, match="failed to parse the request JSON buffer"):
                decode_remembered(one_input, rest + bytes(16), len(rest), 100, SINK, layouts)

    def test_json_with_nan_is_never_cached_as_a_layout(self) -> None:
        one_input, layouts = model(), Layouts()
        document = {"parameters": {"x": float("nan")}, "inputs": [entry(parameters={"binary_data_size": 16})]}
        text = json.dumps(document).encode()
        for _ in range(2):
            found, options = decode_remembered(one_input, text + bytes(16), len(text), 100, SINK, layouts)
            assert found.rows == 1
            assert options.parameters is not None
        assert len(layouts) == 0

    @pytest.mark.parametrize(
        ("signature", "document"),
        [
            (PAIR, {"inputs": [entry("x", data=[1, 2, 3, 4]), entry("z", data=[5, 6, 7, 8])]}),
            (ONE, {"inputs": [entry(shape=(0, 4), data=[])]}),
        ],
        ids=["two inputs", "no values"],
    )
    def test_json_data_is_cached_only_for_a_single_input_with_values(self, signature: Signature, document: Any) -> None:
        one_input, layouts = model(signature), Layouts()
        found, _ = decode_remembered(one_input, json.dumps(document).encode(), -1, 100, SINK, layouts)

        assert [array is not None for array in found.inputs] == [True] * len(signature.inputs)
        assert len(layouts) == 0

    def test_a_layout_is_cached_even_if_the_binary_tensor_looks_like_json_data(self) -> None:
        one_input, layouts = model(), Layouts()
        text = json.dumps({"inputs": [entry(parameters={"binary_data_size": 16})]}).encode()
        decode_remembered(one_input, text + b'"data":[1,2,3,4]', len(text), 100, SINK, layouts)

        assert len(layouts) == 1

    def test_a_body_longer_or_shorter_than_its_cached_layout_is_rejected(self) -> None:
        one_input, layouts = model(), Layouts()
        text = json.dumps({"inputs": [entry(parameters={"binary_data_size": 16})]}).encode()
        decode_remembered(one_input, text + bytes(16), len(text), 100, SINK, layouts)
        assert len(layouts) == 1
        for size in (15, 17):
            with pytest.raises(InferError):
                decode_remembered(one_input, text + bytes(size), len(text), 100, SINK, layouts)

    def test_a_cached_layout_is_not_found_when_the_json_length_exceeds_the_body(self) -> None:
        one_input, layouts = model(), Layouts()
        text = json.dumps({"inputs": [entry(data=[1, 2, 3, 4])]}).encode()
        decode_remembered(one_input, text, -1, 100, SINK, layouts)
        assert layouts.find(one_input, text, len(text), SINK) is not None
        assert layouts.find(one_input, text, len(text) + 1, SINK) is None

    def test_the_layout_cache_is_bounded_when_the_json_always_differs(self) -> None:
        one_input, layouts = model(), Layouts()
        for number in range(600):
            document = {"parameters": {"n": number}, "inputs": [entry(parameters={"binary_data_size": 16})]}
            text = json.dumps(document).encode()
            decode_remembered(one_input, text + bytes(16), len(text), 100, SINK, layouts)
        text = json.dumps(document).encode() + b" " * 5000
        decode_remembered(one_input, text + bytes(16), len(text), 100, SINK, layouts)

        assert len(layouts) <= 256

    def test_the_cache_of_admitted_shapes_is_bounded_when_shapes_always_differ(self) -> None:
        free_model = model(FREE)
        for number in range(600):
            read(free_model, {"inputs": [entry("f", "FP64", (number, 0, 2), data=[])]})

        assert len(free_model.admitted_shapes) <= 256

    @pytest.mark.parametrize(
        ("more", "positions", "plan"),
        [
            ({}, (0, 1), None),
            ({"outputs": []}, (0, 1), None),
            ({"outputs": None}, (0, 1), None),
            ({"outputs": [{"name": "b"}, {"name": "a"}]}, (1, 0), None),
            ({"outputs": [{"name": "b", "parameters": {"binary_data": True}}, {"name": "a"}]}, (1, 0), (True, False)),
            ({"outputs": [{"name": "a", "parameters": {"classification": 0}}]}, (0,), None),
            ({"parameters": {"binary_data_output": True}}, (0, 1), (True, True)),
            ({"parameters": {"binary_data_output": True}, "outputs": [{"name": "a"}]}, (0,), None),
        ],
    )
    def test_only_the_requested_outputs_are_returned(self, more: Any, positions: Any, plan: Any) -> None:
        entries = [
            entry("i", "INT64", (1, 0), data=[]),
            entry("s", "BYTES", (1, 0), data=[]),
            entry("h", "FP16", (1, 2), parameters={"binary_data_size": 4}),
        ]
        request, options = read(model(MANY), {"inputs": entries, **more}, b"abcd")

        assert (request.output_positions, options.plan) == (positions, plan)

    @pytest.mark.parametrize(
        ("parameters", "timeout_us", "hooks"),
        [
            ({}, 0, True),
            ({"timeout": 5, "priority": 3, "sequence_id": 1, "sequence_start": True, "x": 1.5}, 5, True),
            ({"timeout": 2**64 - 1, "hooks": False, "sequence_id": "a"}, 2**53, False),
        ],
    )
    def test_protocol_parameters_are_parsed_and_unknown_parameters_are_ignored(
        self, parameters: Any, timeout_us: int, hooks: bool
    ) -> None:
        options = read(model(), good(parameters=parameters))[1]

        assert (options.timeout_us, options.hooks) == (timeout_us, hooks)


class TestHostileDocuments:
    @given(ANYTHING, st.sampled_from([ONE, MANY, FREE]), st.sampled_from([0, SIMD_BYTES]))
    @settings(max_examples=60)
    def test_arbitrary_json_is_rejected(self, document: Any, signature: Signature, pad: int) -> None:
        with pytest.raises(InferError) as caught:
            read(model(signature), document, pad=pad)

        assert caught.value.code is Code.INVALID

    @given(st.data(), st.sampled_from([0, SIMD_BYTES]))
    @settings(max_examples=150)
    @pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
    def test_a_mutated_valid_document_is_decoded_or_rejected_whatever_the_padding(
        self, data: st.DataObject, pad: int
    ) -> None:
        document = good(id="1", parameters={"timeout": 1}, outputs=[{"name": "y", "parameters": {"binary_data": True}}])
        text = json.dumps(data.draw(mutated(document))).encode()
        found: list[Any] = []
        for padding in (0, pad):
            try:
                request, options = read(model(), text, pad=padding)
                found.append((request.id, str(request.inputs), request.output_positions, options))
            except InferError as error:
                found.append((error.code, error.message))

        assert found[0][0] in {Code.INVALID, Code.UNSUPPORTED} or len(found[0]) == 4
        # with both JSON parsers
        assert found[0] == found[1]

    @given(st.data())
    @settings(max_examples=100)
    @pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
    def test_a_mutated_document_with_binary_tensors_is_decoded_or_rejected(self, data: st.DataObject) -> None:
        document = {
            "inputs": [
                entry("i", "INT64", (1, 2), parameters={"binary_data_size": 16}),
                entry("s", "BYTES", (1, 1), parameters={"binary_data_size": 5}),
                entry("h", "FP16", (1, 2), parameters={"binary_data_size": 4}),
            ]
        }
        text = json.dumps(data.draw(mutated(document))).encode()
        tail = data.draw(st.binary(max_size=40) | st.just(bytes(16) + b"\1\0\0\0x" + bytes(4)))
        header = data.draw(st.just(len(text)) | st.integers(1, len(text + tail)))
        try:
            request, _ = decode(model(MANY), text + tail, header, 100, SINK)
        except InferError as error:
            assert error.code in {Code.INVALID, Code.UNSUPPORTED}  # noqa: PT017 - most are refused, some are not
        else:
            assert request.rows >= 0

    @given(st.binary(max_size=80))
    def test_arbitrary_bytes_are_rejected(self, body: bytes) -> None:
        assert refused(body)[0] is Code.INVALID

    @pytest.mark.parametrize("document", [[], "text", 1, None, True])
    def test_a_document_that_is_not_an_object_is_rejected(self, document: Any) -> None:
        assert refused(document) == (
            Code.INVALID, "failed to parse the request JSON buffer: the request must be a JSON object",
        )  # fmt: skip


class TestErrorMessages:
    @pytest.mark.parametrize(
        ("document", "text"),
        [
            ({}, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
            ({"inputs": {}}, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
            ({"inputs": ["x"]}, "Unable to parse 'inputs': attempt to access JSON non-object as object"),
            (good(id=1), "Unable to parse 'id': attempt to access JSON non-string as string"),
            (one(name=1), "Unable to parse 'name': attempt to access JSON non-string as string"),
            (one(name=None), "Unable to parse 'name': attempt to access non-existing object member 'name'"),
            (one(datatype=[]), "Unable to parse 'datatype': attempt to access JSON non-string as string"),
            (one(datatype=None), "Unable to parse 'datatype': attempt to access non-existing object member 'datatype'"),
            (one(shape=4), "Unable to parse 'shape': attempt to access JSON non-array as array"),
            (one(shape=None), "Unable to parse 'shape': attempt to access non-existing object member 'shape'"),
            (one(data="abcd"), "Unable to parse 'data': attempt to access JSON non-array as array"),
            (one(data=[1, 2, 3]), "Unable to parse 'data': Shape does not match true shape of 'data' field"),
            (one(data=[1, 2, 3, 4, 5]), "Unable to parse 'data': Shape does not match true shape of 'data' field"),
            (good(parameters=[]), "Unable to parse 'parameters': attempt to access JSON non-object as object"),
            (good(outputs={"name": "y"}), "Unable to parse 'outputs': attempt to access JSON non-array as array"),
            (good(outputs=""), "Unable to parse 'outputs': attempt to access JSON non-array as array"),
            (
                good(parameters={"timeout": -1}),
                "Unable to parse 'timeout': attempt to access JSON non-unsigned-integer as unsigned-integer",
            ),
            (
                good(parameters={"binary_data_output": 1}),
                "Unable to parse 'binary_data_output': attempt to access JSON non-boolean as boolean",
            ),
            (
                one(data=None, parameters={"binary_data_size": "16"}),
                "Unable to parse 'binary_data_size': attempt to access JSON non-unsigned-integer as unsigned-integer",
            ),
        ],
    )
    def test_a_document_that_cannot_be_parsed_is_rejected_with_tritons_message(self, document: Any, text: str) -> None:
        assert refused(document) == (Code.INVALID, text)

    @pytest.mark.parametrize("dim", [-1, 1.0, True, "1", None, [1], 2**63, 2**64 - 1, 1e30])
    def test_a_dim_that_is_not_an_unsigned_integer_is_rejected(self, dim: Any) -> None:
        assert refused(one(shape=[1, dim])) == (
            Code.INVALID,
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
        )

    @pytest.mark.parametrize(
        ("document", "text"),
        [
            ({"inputs": []}, MISSING),
            (one(name="q"), "unexpected inference input 'q' for model 'm'"),
            (
                {"inputs": [entry(data=[1, 2, 3, 4]), entry("q", data=[1, 2, 3, 4])]},
                MISSING.replace("got 0", "got 2").replace("[]", "['x','q']").replace("['x'].", "[]."),
            ),
            (one(name="a\0b"), "unexpected inference input 'a\0b' for model 'm'"),
            ({"inputs": [entry(data=[1, 2, 3, 4])] * 2}, "input 'x' already exists in request"),
            (one(datatype="FP64"), "inference input 'x' data-type is 'FP64', but model 'm' expects 'FP32'"),
            (one(data=None), ONLY_ONE + "no field is set"),
            (one(parameters={"binary_data_size": 16}), ONLY_ONE + "set 'data' 'binary_data_size'"),
            (one(data=None, parameters={"binary_data_size": 16}),
             "unexpected size for input 'x', expecting 16 additional bytes for model 'm'"),
            (one(shape=[1] * 33), "unexpected shape for input 'x' for model 'm': 33 dims"),
            (one(shape=[2**32, 2**32]), OVERFLOW),
            (one(shape=[100_000, 4], data=[0] * 400_000), "inference request batch-size must be <= 64 for 'm'"),
            (one(shape=[], data=[1]), "input 'x' has no shape but model requires batch dimension for 'm'"),
            (good(parameters={"triton_x": 1}), RESERVED),
            (good(parameters={"x": None}), WRONG_KIND),
            (good(outputs=[{"name": "q"}]), "unexpected inference output 'q' for model 'm'"),
            (good(outputs=[{"name": "y"}, {"name": "y"}]), "Duplicate output name 'y' is not allowed in a request"),
        ],
    )  # fmt: skip
    def test_the_error_of_a_document_that_does_not_fit_the_model_has_the_request_id(
        self, document: Any, text: str
    ) -> None:
        code, message = refused(document)

        assert code is Code.INVALID
        assert message == UNKNOWN + text
        assert refused({**document, "id": "7"})[1] == "[request id: 7] " + text

    def test_surplus_binary_data_is_rejected(self) -> None:
        document = one(data=None, parameters={"binary_data_size": 16})

        assert refused(document, bytes(17)) == (
            Code.INVALID, UNKNOWN + "unexpected additional input data for model 'm'"
        )  # fmt: skip

    @pytest.mark.parametrize(("missing", "size"), [(1, 16), (2**63 - 1 - 15, 2**63 - 1)])
    def test_missing_binary_data_is_rejected_with_the_number_of_missing_bytes(self, missing: int, size: int) -> None:
        document = one(data=None, parameters={"binary_data_size": size})

        assert refused(document, bytes(15)) == (
            Code.INVALID,
            f"{UNKNOWN}unexpected size for input 'x', expecting {missing} additional bytes for model 'm'",
        )

    def test_the_error_for_missing_inputs_lists_the_received_and_the_missing_inputs(self) -> None:
        document = {"inputs": [entry("s", "BYTES", (1, 1), data=["a"])]}

        assert refused(document, signature=MANY)[1] == (
            f"{UNKNOWN}expected number of inputs between 3 and 4 but got 1 inputs for model 'm'. Got input(s) ['s'], "
            "but missing required input(s) ['i','h']. Please provide all required input(s)."
        )

    def test_inputs_with_different_batch_sizes_are_rejected(self) -> None:
        entries = [
            entry("i", "INT64", (2, 0), data=[]),
            entry("s", "BYTES", (1, 1), data=["a"]),
            entry("h", "FP16", (2, 2), parameters={"binary_data_size": 8}),
        ]

        assert refused({"inputs": entries}, bytes(8), MANY)[1] == (
            f"{UNKNOWN}input 's' batch size does not match other inputs for 'm'"
        )

    @pytest.mark.parametrize(
        ("document", "signature"),
        [
            (one(data=None, parameters={"shared_memory_region": "r"}), ONE),
            (good(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r"}}]), ONE),
        ],
    )
    def test_shared_memory_is_unsupported_while_it_is_disabled(self, document: Any, signature: Signature) -> None:
        code, message = refused(document, signature=signature)

        assert code is Code.UNSUPPORTED
        assert message == DISABLED_TEXT

    def test_an_output_that_is_not_a_tensor_is_unsupported(self) -> None:
        entries = [
            entry("i", "INT64", (1, 0), data=[]),
            entry("s", "BYTES", (1, 0), data=[]),
            entry("h", "FP16", (1, 2), parameters={"binary_data_size": 4}),
        ]
        code, message = refused({"inputs": entries, "outputs": [{"name": "z"}]}, bytes(4), MANY)

        assert code is Code.UNSUPPORTED
        assert message.startswith("output 'z' of model 'm' is not a tensor, only hooks receive it. It is a ZipMap: ")
        assert "options={'zipmap': False}" in message


class TestTensorSizes:
    @pytest.mark.parametrize("shape", [[2**40, 0, 2], [0, 2**62, 2], [1 << 21, 0, 2]])
    def test_an_empty_tensor_with_a_huge_dim_is_rejected(self, shape: list[int]) -> None:
        # otherwise a model might produce an output of that size although no byte was sent
        code, message = refused({"inputs": [entry("f", "FP64", shape, data=[])]}, signature=FREE)

        assert code is Code.INVALID
        assert "shape" in message.lower()

    def test_an_empty_tensor_with_ordinary_dims_is_accepted(self) -> None:
        request, _ = read(model(FREE), {"inputs": [entry("f", "FP64", (1000, 0, 2), data=[])]})

        assert request.key == ((1000, 0, 2),)

    def test_a_shape_of_a_million_dims_is_rejected_without_computing_its_product(self) -> None:
        # the product would have 64 million bits
        assert refused(one(shape=[2**63 - 1] * 1_000_000))[1] == (
            f"{UNKNOWN}unexpected shape for input 'x' for model 'm': 1000000 dims"
        )

    def test_a_binary_tensor_is_a_view_of_the_body_and_not_a_copy(self) -> None:
        text = json.dumps({"inputs": [entry(parameters={"binary_data_size": 16})]}).encode()
        body = text + bytes(16)
        request, _ = decode(model(), body, len(text), 100, SINK)
        [array] = request.inputs

        assert array is not None
        assert np.shares_memory(array, np.frombuffer(body, np.uint8))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ([1 << 14], "unexpected shape for input 's' for model 'm'. Expected [-1,2], got [16384]"),
        ([1 << 14, 1], "unexpected shape for input 's' for model 'm'. Expected [-1,2], got [16384,1]"),
        ([1 << 14, 2], "inference request batch-size must be <= 64 for 'm'"),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_strings_of_a_tensor_whose_shape_does_not_fit_are_not_parsed(
    shape: list[int], text: str, batched: bool
) -> None:
    texts = (TensorSpec("s", "BYTES", (-1, 2)),)
    entry = {"name": "s", "datatype": "BYTES", "shape": shape, "parameters": {"binary_data_size": 9}}
    with pytest.raises(InferError) as caught:
        read(model(Signature(texts, ONE.outputs, batched=batched)), {"inputs": [entry]}, b"no length")

    fits = not batched and shape == [1 << 14, 2]
    assert ("incomplete string" if fits else text) in caught.value.message
