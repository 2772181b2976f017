"""seldon.protos equals seldon-core's byte for byte, and coexists with other packages that have the same files.

RECORDED and DIGESTS were recorded from seldon-core 1.17.1 with protobuf 3.20.3.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import any_pb2, json_format, struct_pb2

from penstock.server.seldon import protos

DIGESTS = {
    "proto/prediction.proto": "0eefcffbe226770d54866041b48fc70d",
    "tensorflow/core/framework/tensor_shape.proto": "26507e61010313c7c964e077a33d401a",
    "tensorflow/core/framework/types.proto": "ac72a0e5d77b37dcb48919ac55b94d5e",
    "tensorflow/core/framework/resource_handle.proto": "55dcce14eecec65b3bace942ba160ec1",
    "tensorflow/core/framework/tensor.proto": "a6d7056424a2fb8984a1373c9689130b",
}
# name: message, as seldon-core's json_format printed it, and its bytes
RECORDED: dict[str, tuple[str, Any, str]] = {
    "status": (
        "Status",
        {"code": -1, "info": "noé", "reason": "R", "status": "FAILURE"},
        "08ffffffffffffffffff0112046e6fc3a91a01522001",
    ),
    "meta": (
        "Meta",
        {
            "metrics": [{"key": "k", "tags": {"t": "v"}, "type": "TIMER", "value": 20.2}, {"key": "c"}],
            "puid": "p1",
            "requestPath": {"m": "i:1"},
            "routing": {"r": -1, "s": 3},
            "tags": {"a": 1.0, "b": {"c": [True, None, "x"]}},
        },
        "0a027031120e0a0161120911000000000000f03f121d0a016212182a160a140a0163120f320d0a0220010a0208000a031a01781a0e0a017210ffffffffffffffffff011a050a0173100322080a016d1203693a312a120a016b10021d9a99a14122060a01741201762a030a0163",
    ),
    "tensor": (
        "Tensor",
        {"shape": [2, 2], "values": [1.5, -2.0, 0.0, 1e300]},
        "0a0202021220000000000000f83f00000000000000c000000000000000009c7500883ce4377e",
    ),
    "message of a tensor": (
        "SeldonMessage",
        {
            "data": {"names": ["a", "b"], "tensor": {"shape": [1, 2], "values": [1.0, 2.0]}},
            "meta": {"puid": "p"},
            "status": {"code": 200},
        },
        "0a0308c80112030a01701a1e0a01610a016212160a0201021210000000000000f03f0000000000000040",
    ),
    "message of an ndarray": (
        "SeldonMessage",
        {"data": {"names": ["a"], "ndarray": [[1.0, "x", None], [True]]}},
        "1a250a01611a200a1632140a0911000000000000f03f0a031a01780a0208000a0632040a022001",
    ),
    "message of a tftensor": (
        "SeldonMessage",
        {
            "data": {
                "tftensor": {
                    "boolVal": [True],
                    "dtype": "DT_FLOAT",
                    "floatVal": [1.5, 2.0],
                    "halfVal": [3],
                    "int64Val": ["5"],
                    "stringVal": ["YQ=="],
                    "tensorShape": {"dim": [{"size": "1"}, {"name": "n", "size": "2"}]},
                }
            }
        },
        "1a2722250801120b120208011205080212016e2a080000c03f000000404201615201055a01016a0103",
    ),
    "message of bytes": ("SeldonMessage", {"binData": "AAEC/w=="}, "2204000102ff"),
    "message of text": ("SeldonMessage", {"strData": "hé"}, "2a0368c3a9"),
    "message of JSON": (
        "SeldonMessage",
        {"jsonData": {"a": [1.0, 2.5, "x", None, {"b": False}]}},
        "32372a350a330a0161122e322c0a0911000000000000f03f0a091100000000000004400a031a01780a0208000a0b2a090a070a016212022000",
    ),
    "message of anything": (
        "SeldonMessage",
        {"customData": {"@type": "type.googleapis.com/seldon.protos.Tensor", "shape": [1], "values": [7.0]}},
        "3a390a28747970652e676f6f676c65617069732e636f6d2f73656c646f6e2e70726f746f732e54656e736f72120d0a010112080000000000001c40",
    ),
    "list": ("SeldonMessageList", {"seldonMessages": [{"strData": "a"}, {"strData": "b"}]}, "0a032a01610a032a0162"),
    "feedback": (
        "Feedback",
        {
            "request": {"strData": "q"},
            "response": {"meta": {"routing": {"0": 3}}},
            "reward": 0.1,
            "truth": {"data": {"ndarray": [1.0]}},
        },
        "0a032a0171120912071a050a013010031dcdcccc3d220f1a0d1a0b0a0911000000000000f03f",
    ),
    "exchange": (
        "RequestResponse",
        {"request": {"strData": "q"}, "response": {"strData": "r"}},
        "0a032a017112032a0172",
    ),
    "metadata request": ("SeldonModelMetadataRequest", {"name": "m"}, "0a016d"),
    "metadata": (
        "SeldonModelMetadata",
        {
            "custom": {"x": "y"},
            "inputs": [
                {
                    "datatype": "FP32",
                    "messagetype": "tensor",
                    "name": "i",
                    "schema": {"names": ["a"]},
                    "shape": ["1", "-1"],
                }
            ],
            "name": "m",
            "outputs": [{"name": "o"}],
            "platform": "p",
            "versions": ["v1", "v2"],
        },
        "0a016d12027631120276321a017022340a0674656e736f7212142a120a100a056e616d6573120732050a031a01611a01692204465033322a0b01ffffffffffffffffff012a031a016f32060a0178120179",
    ),
    "graph metadata": (
        "SeldonGraphMetadata",
        {"inputs": [{"name": "i"}], "models": {"m": {"name": "m"}}, "name": "g", "outputs": [{"name": "o"}]},
        "0a016712080a016d12030a016d1a031a016922031a016f",
    ),
}

SERVICES = {
    "Generic": ["TransformInput", "TransformOutput", "Route", "Aggregate", "SendFeedback"],
    "Model": ["Predict", "SendFeedback", "Metadata"],
    "Router": ["Route", "SendFeedback"],
    "Transformer": ["TransformInput"],
    "OutputTransformer": ["TransformOutput"],
    "Combiner": ["Aggregate"],
    "Seldon": ["Predict", "SendFeedback", "ModelMetadata", "GraphMetadata"],
}


@pytest.mark.parametrize("name", DIGESTS)
def test_each_proto_file_has_seldon_cores_descriptor(name: str) -> None:
    described = {file.name: file for file in (protos.file_proto(), *protos.tensorflow_protos())}

    assert hashlib.sha256(described[name].SerializeToString()).hexdigest()[:32] == DIGESTS[name]


@pytest.mark.parametrize("name", RECORDED)
def test_a_message_is_serialized_to_seldon_cores_bytes(name: str) -> None:
    kind, message_json, written = RECORDED[name]
    message = json_format.ParseDict(message_json, protos.message_class(kind)())

    assert message.SerializeToString(deterministic=True).hex() == written


@pytest.mark.parametrize("name", RECORDED)
def test_seldon_cores_bytes_are_parsed(name: str) -> None:
    kind, message_json, written = RECORDED[name]

    assert json_format.MessageToDict(protos.message_class(kind).FromString(bytes.fromhex(written))) == message_json


def test_every_message_type_has_a_recorded_case() -> None:
    assert {kind for kind, _, _ in RECORDED.values()} | {"DefaultData", "Metric", "SeldonMessageMetadata"} == set(
        protos.registered_file().message_types_by_name
    )


def test_the_services_have_seldon_cores_methods() -> None:
    services = protos.registered_file().services_by_name

    assert {name: [method.name for method in service.methods] for name, service in services.items()} == SERVICES


def test_reflection_finds_every_imported_file() -> None:
    files = {file.name: file for file in protos.files()}

    assert {needed for file in files.values() for needed in file.dependency} <= files.keys()
    assert {"proto/prediction.proto", "tensorflow/core/framework/types.proto", "google/protobuf/empty.proto"} <= (
        files.keys()
    )


def test_messages_of_google_protobuf_are_accepted_as_fields() -> None:
    message = protos.message_class("SeldonMessage")
    value = struct_pb2.Value(string_value="a")
    packed = any_pb2.Any()
    packed.Pack(protos.message_class("Tensor")(shape=[1], values=[2]))

    assert message(jsonData=value).jsonData == value
    assert message(customData=packed).customData.Is(protos.message_class("Tensor").DESCRIPTOR)
    assert json_format.MessageToDict(message(customData=packed))["customData"]["values"] == [2.0]


def test_nested_messages_share_the_class_of_their_message_type() -> None:
    assert protos.message_class("Feedback")().request.__class__ is protos.message_class("SeldonMessage")


def test_an_unknown_message_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        protos.message_class("Nothing")


def _run(program: str, *path: Path) -> str:
    lines = [f"sys.path.insert(0, {str(each)!r})" for each in path]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(["import sys", *lines, program])], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def _generated(folder: Path) -> None:
    """Make a TensorFlow whose TensorProto has one more field than ours."""
    from google.protobuf import descriptor_pb2

    place = folder / "tensorflow" / "core" / "framework"
    place.mkdir(parents=True)
    for each in (place, place.parent, place.parent.parent):
        (each / "__init__.py").write_text("")
    for file in protos.tensorflow_protos():
        stem = Path(file.name).stem
        if stem == "tensor":
            file.message_type[0].field.add(
                name="newer_val", number=99, label=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
            )
        imports = [f"from tensorflow.core.framework import {Path(each).stem}_pb2" for each in file.dependency]
        body = f"DESCRIPTOR = descriptor_pool.Default().AddSerializedFile({file.SerializeToString()!r})"
        lines = ["from google.protobuf import descriptor_pool", *imports, body]
        (place / f"{stem}_pb2.py").write_text("\n".join(lines))


USED = """
message = protos.message_class("SeldonMessage")()
message.data.tftensor.dtype = 1
print([field.name for field in message.data.tftensor.DESCRIPTOR.fields][-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["protos", "tensorflow"])
def test_a_tensorflow_with_extra_fields_can_be_imported_before_or_after_protos(tmp_path: Path, first: str) -> None:
    _generated(tmp_path)
    lines = {
        "protos": "from penstock.server.seldon import protos; protos.registered_file()",
        "tensorflow": "from tensorflow.core.framework import tensor_pb2",
    }
    order = [lines[first], *(line for name, line in lines.items() if name != first)]

    assert _run("\n".join([*order, USED]), tmp_path) == "newer_val"


@pytest.mark.slow
def test_protos_work_without_tensorflow() -> None:
    program = "from penstock.server.seldon import protos\nsys.modules['tensorflow'] = None" + USED

    assert _run(program) == "float8_val"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensors_made_by_the_installed_tensorflow_are_accepted() -> None:
    program = """
from penstock.server.seldon import protos
made = protos.message_class("DefaultData")
import tensorflow
print(tensorflow.make_ndarray(made(tftensor=tensorflow.make_tensor_proto([[1.5, 2.5]])).tftensor).tolist())
"""

    assert _run(program) == "[[1.5, 2.5]]"
