"""The messages and services of seldon.protos, described by hand: no generated code, and no compiler, is needed.

`inside/protobuf.py` and the importable `seldon_core.proto` take the messages from here, `rpc.py` the content of
reflection. All is registered in protobuf's default pool, which has the classes of google.protobuf that user code uses.
A file that is already there is used as it is; what is registered is equal to the original's, to the byte, so that it
does not conflict with other copies of these files. Source: seldon-core 1.17.1, proto/prediction.proto.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, empty_pb2, struct_pb2

FILE = "proto/prediction.proto"
_WELL_KNOWN = (any_pb2, struct_pb2, empty_pb2)
_MESSAGE, _ENUM = 11, 14
_OPTIONAL, _REPEATED = 1, 3
_SCALARS = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13,
}  # fmt: skip

# Of a field: its number, name and type. Before the type, "*" is repeated, "!" is repeated with an explicit packed
# option, "?" is of the message's one oneof, and "%" a map from strings. A message or enum is found in the file, or in
# _FOREIGN.
_ONEOF = "data_oneof"
_FOREIGN = {
    "Value": ".google.protobuf.Value",
    "ListValue": ".google.protobuf.ListValue",
    "Any": ".google.protobuf.Any",
    "Empty": ".google.protobuf.Empty",
    "TensorProto": ".tensorflow.TensorProto",
    "TensorShapeProto": ".tensorflow.TensorShapeProto",
    "ResourceHandleProto": ".tensorflow.ResourceHandleProto",
}
_FOREIGN_ENUMS = {"DataType": ".tensorflow.DataType"}

_MESSAGES = {
    "SeldonMessage": "1 status Status; 2 meta Meta; 3 data ?DefaultData; 4 binData ?bytes; 5 strData ?string; "
    "6 jsonData ?Value; 7 customData ?Any",
    "DefaultData": "1 names *string; 2 tensor ?Tensor; 3 ndarray ?ListValue; 4 tftensor ?TensorProto",
    "Tensor": "1 shape !int32; 2 values !double",
    "Meta": "1 puid string; 2 tags %Value; 3 routing %int32; 4 requestPath %string; 5 metrics *Metric",
    "Metric": "1 key string; 2 type MetricType; 3 value float; 4 tags %string",
    "SeldonMessageList": "1 seldonMessages *SeldonMessage",
    "Status": "1 code int32; 2 info string; 3 reason string; 4 status StatusFlag",
    "Feedback": "1 request SeldonMessage; 2 response SeldonMessage; 3 reward float; 4 truth SeldonMessage",
    "RequestResponse": "1 request SeldonMessage; 2 response SeldonMessage",
    "SeldonModelMetadataRequest": "1 name string",
    "SeldonMessageMetadata": "1 messagetype string; 2 schema Value; 3 name string; 4 datatype string; 5 shape *int64",
    "SeldonModelMetadata": "1 name string; 2 versions *string; 3 platform string; 4 inputs *SeldonMessageMetadata; "
    "5 outputs *SeldonMessageMetadata; 6 custom %string",
    "SeldonGraphMetadata": "1 name string; 2 models %SeldonModelMetadata; 3 inputs *SeldonMessageMetadata; "
    "4 outputs *SeldonMessageMetadata",
}
_ENUMS = {"Metric": ("MetricType", "COUNTER GAUGE TIMER"), "Status": ("StatusFlag", "SUCCESS FAILURE")}
_FEEDBACK = ("SendFeedback", "Feedback", "SeldonMessage")
_SERVICES = {
    "Generic": (
        ("TransformInput", "SeldonMessage", "SeldonMessage"),
        ("TransformOutput", "SeldonMessage", "SeldonMessage"),
        ("Route", "SeldonMessage", "SeldonMessage"),
        ("Aggregate", "SeldonMessageList", "SeldonMessage"),
        _FEEDBACK,
    ),
    "Model": (
        ("Predict", "SeldonMessage", "SeldonMessage"),
        _FEEDBACK,
        ("Metadata", "Empty", "SeldonModelMetadata"),
    ),
    "Router": (("Route", "SeldonMessage", "SeldonMessage"), _FEEDBACK),
    "Transformer": (("TransformInput", "SeldonMessage", "SeldonMessage"),),
    "OutputTransformer": (("TransformOutput", "SeldonMessage", "SeldonMessage"),),
    "Combiner": (("Aggregate", "SeldonMessageList", "SeldonMessage"),),
    "Seldon": (
        ("Predict", "SeldonMessage", "SeldonMessage"),
        _FEEDBACK,
        ("ModelMetadata", "SeldonModelMetadataRequest", "SeldonModelMetadata"),
        ("GraphMetadata", "Empty", "SeldonGraphMetadata"),
    ),
}

# TensorFlow's files, in case it is not installed: name of the file, its messages, its dependencies, its class in Java.
_TENSORFLOW: tuple[tuple[str, dict[str, str], tuple[str, ...], str], ...] = (
    (
        "tensor_shape",
        {"TensorShapeProto": "2 dim *TensorShapeProto.Dim; 3 unknown_rank bool", ".Dim": "1 size int64; 2 name string"},
        (),
        "TensorShapeProtos",
    ),
    ("types", {"SerializedDType": "1 datatype DataType"}, (), "TypesProtos"),
    (
        "resource_handle",
        {
            "ResourceHandleProto": "1 device string; 2 container string; 3 name string; 4 hash_code uint64; "
            "5 maybe_type_name string; 6 dtypes_and_shapes *ResourceHandleProto.DtypeAndShape",
            ".DtypeAndShape": "1 dtype DataType; 2 shape TensorShapeProto",
        },
        ("tensor_shape", "types"),
        "ResourceHandle",
    ),
    (
        "tensor",
        {
            "TensorProto": "1 dtype DataType; 2 tensor_shape TensorShapeProto; 3 version_number int32; "
            "4 tensor_content bytes; 13 half_val !int32; 5 float_val !float; 6 double_val !double; 7 int_val !int32; "
            "8 string_val *bytes; 9 scomplex_val !float; 10 int64_val !int64; 11 bool_val !bool; "
            "12 dcomplex_val !double; 14 resource_handle_val *ResourceHandleProto; "
            "15 variant_val *VariantTensorDataProto; 16 uint32_val !uint32; 17 uint64_val !uint64; 18 float8_val bytes",
            "VariantTensorDataProto": "1 type_name string; 2 metadata bytes; 3 tensors *TensorProto",
        },
        ("resource_handle", "tensor_shape", "types"),
        "TensorProtos",
    ),
)
_DATA_TYPES = (
    "FLOAT DOUBLE INT32 UINT8 INT16 INT8 STRING COMPLEX64 INT64 BOOL QINT8 QUINT8 QINT32 BFLOAT16 QINT16 QUINT16 "
    "UINT16 COMPLEX128 HALF RESOURCE VARIANT UINT32 UINT64 FLOAT8_E5M2 FLOAT8_E4M3FN"
)
_GO = "github.com/tensorflow/tensorflow/tensorflow/go/core/framework/{}_go_proto"


@cache
def registered_file() -> Any:
    """Return the FileDescriptor of seldon.protos in protobuf's default pool, after registering it and its imports."""
    pool = descriptor_pool.Default()
    for stem, messages, dependencies, java_class in _TENSORFLOW:
        name = _tensorflow_name(stem)
        if not _is_registered(pool, name):
            pool.AddSerializedFile(
                _installed_proto(stem)
                or _tensorflow_proto(stem, messages, dependencies, java_class).SerializeToString()
            )
    if not _is_registered(pool, FILE):
        pool.AddSerializedFile(file_proto().SerializeToString())
    return pool.FindFileByName(FILE)


@cache
def files() -> tuple[Any, ...]:
    """Return the FileDescriptorProtos that a reflection client needs: seldon.protos, and all that it imports."""
    found: dict[str, Any] = {}
    pending = [registered_file()]
    while pending:
        descriptor = pending.pop()
        if descriptor.name not in found:
            found[descriptor.name] = descriptor_pb2.FileDescriptorProto.FromString(descriptor.serialized_pb)
            pending += descriptor.dependencies
    return tuple(found.values())


@cache
def message_class(name: str) -> Any:
    """Return a message's class by its name in seldon.protos. Raises: KeyError."""
    descriptor = registered_file().message_types_by_name[name]
    try:
        from google.protobuf.message_factory import GetMessageClass
    except ImportError:  # before protobuf 4.22
        from google.protobuf.reflection import MakeClass as GetMessageClass
    return GetMessageClass(descriptor)


def file_proto() -> Any:
    """Make the FileDescriptorProto of seldon.protos."""
    file = descriptor_pb2.FileDescriptorProto(name=FILE, package="seldon.protos", syntax="proto3")
    file.dependency.extend(module.DESCRIPTOR.name for module in _WELL_KNOWN)
    file.dependency.append(_tensorflow_name("tensor"))
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in _ENUMS:
            _add_enum(message, *_ENUMS[name])
        _add_fields(message, f".seldon.protos.{name}", fields)
    for name, methods in _SERVICES.items():
        service = file.service.add(name=name)
        for method, request, response in methods:
            added = service.method.add(
                name=method, input_type=_full_name(file, request), output_type=_full_name(file, response)
            )
            added.options.SetInParent()
    file.options.java_package, file.options.java_outer_classname = "io.seldon.protos", "PredictionProtos"
    file.options.go_package = "github.com/seldonio/seldon-core/incubating/wrappers/s2i/go/pkg/api"
    return file


def tensorflow_protos() -> Iterator[Any]:
    """Make the FileDescriptorProtos of what seldon.protos imports from TensorFlow, each after those it imports."""
    return (_tensorflow_proto(*each) for each in _TENSORFLOW)


def _tensorflow_proto(stem: str, messages: dict[str, str], dependencies: tuple[str, ...], java_class: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=_tensorflow_name(stem), package="tensorflow", syntax="proto3")
    file.dependency.extend(_tensorflow_name(each) for each in dependencies)
    for name, fields in messages.items():
        container = file.message_type[-1].nested_type if name.startswith(".") else file.message_type
        outer_scope = f".{file.message_type[-1].name}" if name.startswith(".") else ""
        _add_fields(container.add(name=name.lstrip(".")), f".tensorflow{outer_scope}.{name.lstrip('.')}", fields)
    if stem == "types":
        _add_enum(file, "DataType", "INVALID", "DT_")
        names = _DATA_TYPES.split()
        for number, name in enumerate((*names, *(f"{each}_REF" for each in names)), start=1):
            offset = 100 - len(names) if number > len(names) else 0
            file.enum_type[0].value.add(name=f"DT_{name}", number=number + offset)
    if stem == "resource_handle":
        file.message_type[0].reserved_range.add(start=7, end=8)
    options = file.options
    options.java_package, options.java_outer_classname = "org.tensorflow.framework", java_class
    options.java_multiple_files = options.cc_enable_arenas = True
    options.go_package = _GO.format(stem)
    return file


def _installed_proto(stem: str) -> bytes | None:
    """Return a file's descriptor as the installed TensorFlow will register it; None if there is none.

    It is read from the source of the generated module: importing it would import TensorFlow, which takes seconds.
    """
    try:
        found = importlib.util.find_spec("tensorflow")
    except (ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations if found else None) or ():
        path = Path(folder, "core", "framework", f"{stem}_pb2.py")
        if path.is_file():
            start = _tensorflow_name(stem).encode()
            for node in ast.walk(ast.parse(path.read_bytes())):
                # a descriptor begins with its own name
                if isinstance(node, ast.Constant) and isinstance(node.value, bytes) and start in node.value[:64]:
                    return node.value
    return None


def _add_fields(message: Any, scope: str, fields: str) -> None:
    for number, name, marked_type in (field.split() for field in fields.split("; ")):
        mark, kind = (marked_type[0], marked_type[1:]) if marked_type[0] in "*!?%" else ("", marked_type)
        field = message.field.add(
            name=name, number=int(number), label=_REPEATED if mark in {"*", "!", "%"} else _OPTIONAL
        )
        if mark == "%":
            entry = f"{name[0].upper()}{name[1:]}Entry"
            entry_type = message.nested_type.add(name=entry)
            _add_fields(entry_type, f"{scope}.{entry}", f"1 key string; 2 value {kind}")
            entry_type.options.map_entry = True
            field.type, field.type_name = _MESSAGE, f"{scope}.{entry}"
            continue
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type, field.type_name = _field_type(kind, scope)
        if mark == "!":
            field.options.packed = True
        if mark == "?":
            if not message.oneof_decl:
                message.oneof_decl.add(name=_ONEOF)
            field.oneof_index = 0


def _field_type(kind: str, scope: str) -> tuple[int, str]:
    """Return the type of a nonscalar field, and its full name."""
    if kind in _FOREIGN_ENUMS:
        return _ENUM, _FOREIGN_ENUMS[kind]
    if any(kind == enum for enum, _ in _ENUMS.values()):
        return _ENUM, f"{scope}.{kind}"
    return _MESSAGE, _FOREIGN.get(kind, f"{_package(scope)}.{kind}")


def _add_enum(container: Any, name: str, values: str, prefix: str = "") -> None:
    enum = container.enum_type.add(name=name)
    for number, value in enumerate(values.split()):
        enum.value.add(name=prefix + value, number=number)


def _package(scope: str) -> str:
    return ".seldon.protos" if scope.startswith(".seldon.protos.") else ".tensorflow"


def _full_name(file: Any, name: str) -> str:
    return _FOREIGN.get(name, f".{file.package}.{name}")


def _tensorflow_name(stem: str) -> str:
    return f"tensorflow/core/framework/{stem}.proto"


def _is_registered(pool: Any, name: str) -> bool:
    try:
        pool.FindFileByName(name)
    except KeyError:
        return False
    return True
