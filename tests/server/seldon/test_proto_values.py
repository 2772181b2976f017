"""Values in messages of seldon.protos are read and written as by protobuf and by seldon-core."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format, struct_pb2

from penstock.backends.backend import Array
from penstock.server.seldon.inside import proto_bytes, proto_values
from penstock.server.seldon.inside.proto_bytes import datadef_of, json_bytes, list_bytes, list_value_of, meta_bytes, pb
from penstock.server.seldon.inside.proto_values import array_of, json_of, meta_of, payload_of, value_of

SHAPES: list[tuple[int, ...]] = [
    (3,), (0,), (2, 2), (0, 3), (2, 0), (2, 0, 3), (17,), (60,), (50, 7), (1, 1, 60), (3, 4, 5, 6), (2, 700),
]  # fmt: skip
KINDS = ["float64", "float32", "float16", "int64", "int8", "uint64", ">f8", ">i4"]


def numbers(shape: tuple[int, ...], kind: str = "float64") -> Array:
    return np.arange(1, math.prod(shape) + 1).reshape(shape).astype(kind)


def tensor(shape: list[int], values: list[float]) -> Any:
    return pb.DefaultData(tensor=pb.Tensor(shape=shape, values=values))


def nested(values: Any) -> Any:
    data = pb.DefaultData()
    data.ndarray.extend(values)
    return data


# -- numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists_of_numbers_are_written_as_protobuf_writes_them(shape: tuple[int, ...]) -> None:
    array = numbers(shape)
    theirs = struct_pb2.ListValue()
    theirs.extend(array.tolist())
    assert list_bytes(array) == theirs.SerializeToString(deterministic=True)
    assert list_value_of(array) == theirs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists_of_numbers_are_read_as_if_converted_element_by_element(shape: tuple[int, ...]) -> None:
    data = pb.DefaultData(ndarray=list_value_of(numbers(shape)))
    one_by_one = np.array(json_format.MessageToDict(data.ndarray))
    found = array_of(data)
    assert (found.dtype, found.shape) == (one_by_one.dtype, one_by_one.shape)
    assert found.tolist() == one_by_one.tolist()
    assert found.flags.writeable


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 3), (), (5, 9), (0,)], ids=str)
def test_tensors_are_written_as_protobuf_writes_them(shape: tuple[int, ...], kind: str) -> None:
    array = numbers(shape, kind)
    theirs = pb.DefaultData(
        names=["a", "é"], tensor=pb.Tensor(shape=array.shape, values=array.ravel().astype(np.float64).tolist())
    )
    assert proto_bytes.data_bytes("tensor", array, ["a", "é"]) == theirs.SerializeToString(deterministic=True)


def test_an_array_view_is_written_in_the_order_of_the_view() -> None:
    array = numbers((4, 3)).T[::2]
    assert list(datadef_of("tensor", array).tensor.values) == array.ravel().tolist()
    assert array_of(datadef_of("ndarray", array)).tolist() == array.tolist()


@pytest.mark.parametrize("values", [
    [[1.0] * 60, ["a"] * 60], [1.0] * 60 + ["a"], [[1.0] * 60, [None] * 60], [True] * 120, [{"a": 1}] * 60,
    [[[1.0] * 20] * 3, [[1.0] * 20, [2.0] * 20, ["a"] * 20]],
], ids=["text row", "text last", "null row", "bools", "dicts", "deep text"])  # fmt: skip
def test_lists_with_other_elements_are_read_as_if_converted_element_by_element(values: list[Any]) -> None:
    data = nested(values)
    one_by_one = np.array(json_format.MessageToDict(data.ndarray))
    assert array_of(data).dtype == one_by_one.dtype
    assert array_of(data).tolist() == one_by_one.tolist()


@pytest.mark.parametrize("values", [[[1.0] * 60, [1.0] * 59], [[1.0, [2.0]]] * 30], ids=["rows", "depth"])
def test_ragged_lists_raise_numpys_error(values: list[Any]) -> None:
    with pytest.raises(ValueError, match="inhomogeneous"):
        array_of(nested(values))


@pytest.mark.parametrize("count", [1, 100])
def test_nan_and_infinity_in_a_list_are_read_as_text_unless_exact_is_off(count: int) -> None:
    data = nested([math.nan, math.inf, -math.inf] * count)
    assert array_of(data).tolist() == ["NaN", "Infinity", "-Infinity"] * count
    assert np.array_equal(
        array_of(data, exact=False), np.array([math.nan, math.inf, -math.inf] * count), equal_nan=True
    )
    assert array_of(tensor([1], [math.inf])).tolist() == [math.inf]


def test_an_array_read_from_a_tensor_is_writable() -> None:
    found = array_of(tensor([1, 2], [1, 2]))
    found += 1
    assert found.tolist() == [[2.0, 3.0]]
    assert array_of(tensor([0], [])).shape == (0,)
    assert array_of(pb.DefaultData()).tolist() == []


@pytest.mark.parametrize(("shape", "values", "error", "text"), [
    ([1, 3], [1, 2], ValueError, "buffer is smaller than requested size"),
    ([1, 1, 1, 1, 1, 1, 1, 2], [1], ValueError, "buffer is smaller than requested size"),
    ([], [1], TypeError, "slice indices must be integers or None or have an __index__ method"),
    ([-1, 2], [1, 2], ValueError, "buffer size must be a multiple of element size"),
    ([-1, -2], [1, 2], ValueError, "can only specify one unknown dimension"),
], ids=["too few", "within the head", "no shape", "negative", "twice negative"])  # fmt: skip
def test_a_tensor_whose_shape_does_not_fit_its_values_is_an_error(
    shape: list[int], values: list[float], error: Any, text: str
) -> None:
    with pytest.raises(error, match=f"^{text}$"):
        array_of(tensor(shape, values))


def test_surplus_values_of_a_tensor_are_dropped_from_the_front_unless_exact_is_off() -> None:
    assert array_of(tensor([2], [1, 2, 3])).tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match=r"tensor of shape \[2\] has 3 values"):
        array_of(tensor([2], [1, 2, 3]), exact=False)
    assert array_of(tensor([], [3]), exact=False).shape == ()


# -- JSON values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [
    None, True, False, "", "é", 0, -1, 2**60, 1.5, [], {}, [1, [None, {"a": "b"}]], {"a": {"b": [1, 2]}, "": ""},
    np.float64(1.5), math.inf,
], ids=repr)  # fmt: skip
def test_values_are_written_as_protobufs_json_format_writes_them(value: Any) -> None:
    written = struct_pb2.Value.FromString(json_bytes(value))
    theirs = struct_pb2.Value()
    json_format.ParseDict(value, theirs)
    assert written == theirs


def test_a_value_that_json_cannot_represent_is_an_error_that_names_its_position() -> None:
    with pytest.raises(json_format.ParseError) as raised:
        json_bytes({"a": [1, {"b": np.int64(2)}]})
    assert str(raised.value) == "Value 2 has unexpected type <class 'numpy.int64'> at Value.a[1].b"
    with pytest.raises(json_format.ParseError, match="unexpected type <class 'tuple'>"):
        json_bytes({"a": (1, 2)})
    with pytest.raises(TypeError, match=r"^1 has type int, but expected one of: bytes, unicode$"):
        json_bytes({1: 2})


def test_numpy_values_are_written_when_exact_is_off() -> None:
    value = {"a": np.int64(1), "b": np.arange(2), "c": (np.float32(0.5), np.bool_(True)), 3: None}
    written = struct_pb2.Value.FromString(json_bytes(value, exact=False))
    assert value_of(written) == {"a": 1.0, "b": [0.0, 1.0], "c": [0.5, True], "3": None}


@pytest.mark.parametrize("array", [
    np.array([b"x"]), np.array([1 + 1j]), np.array(["2020-01-01"], "datetime64[D]"), np.array([[object()]]),
    np.array([(1, 2.5)], dtype=[("a", int), ("b", float)]), np.array([0.5], np.longdouble),
], ids=["bytes", "complex", "dates", "objects", "records", "longdouble"])  # fmt: skip
def test_arrays_of_unsupported_dtypes_cannot_be_written_as_a_list(array: Array) -> None:
    with pytest.raises(ValueError, match=r"^Unexpected type$"):
        list_bytes(array)


def test_a_zero_dimensional_array_cannot_be_written_as_a_list() -> None:
    with pytest.raises(TypeError, match="iteration over a 0-d array"):
        list_bytes(np.array(1.0))


def test_complex_numbers_and_timedeltas_cannot_be_written_as_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"\(1\+2j\) has type complex, but expected one of: int, float"):
        datadef_of("tensor", np.array([1 + 2j]))
    with pytest.raises(TypeError, match=r"timedelta\(seconds=5\) has type datetime.timedelta, but expected"):
        datadef_of("tensor", np.array([5], "timedelta64[s]"))
    assert datadef_of("tensor", np.array([5], "timedelta64[ns]")).tensor.values == [5.0]
    assert not datadef_of("tensor", np.array([], np.complex128)).tensor.values


@pytest.mark.parametrize("names", [["a"], ("a",), np.array(["a"]), "a", [b"a"]], ids=repr)
def test_names_may_be_any_iterable_of_texts(names: Any) -> None:
    assert list(datadef_of("tensor", np.zeros((1, 1)), names).names) == ["a"]
    assert list(datadef_of("tensor", np.zeros((1, 1)), iter(names)).names) == ["a"]


@pytest.mark.parametrize(("names", "text"), [
    ([1], "1 has type int"), ([["a"]], r"\['a'\] has type list"), ([None], "None has type NoneType"),
], ids=["int", "list", "None"])  # fmt: skip
def test_names_that_are_not_texts_are_an_error(names: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"^{text}, but expected one of: bytes, unicode$"):
        datadef_of("tensor", np.zeros((1, 1)), names)


# -- meta ------------------------------------------------------------------------------------------------------

META = {
    "puid": "p",
    "tags": {"a": 3.0, "l": [1.0, None, "x"], "s": {"t": True}, "e": None},
    "routing": {"q": 0, "r": -1},
    "requestPath": {"x": "y"},
    "metrics": [
        {"key": "k", "value": 0.1},
        {"key": "t", "type": "TIMER", "value": 1e10, "tags": {"a": ""}},
        {"type": "GAUGE"},
    ],
}


def test_meta_is_read_as_protobufs_json_format_reads_meta() -> None:
    message = json_format.ParseDict(META, pb.Meta())
    assert meta_of(message) == json_format.MessageToDict(message)
    assert meta_of(message) == META
    assert meta_of(pb.Meta()) == {}


def test_metrics_with_an_unknown_type_or_an_infinite_value_are_read() -> None:
    message = pb.Meta()
    message.metrics.add(key="z", type=7, value=math.inf)
    assert meta_of(message) == {"metrics": [{"key": "z", "type": 7, "value": "Infinity"}]}


@pytest.mark.parametrize("names", [["tags"], ["requestPath"], ["metrics"], ["tags", "metrics", "requestPath"]], ids=str)
def test_meta_is_written_as_protobufs_json_format_writes_meta(names: list[str]) -> None:
    meta = {name: META[name] for name in names}
    theirs = json_format.ParseDict({**meta, "puid": "é"}, pb.Meta())
    assert pb.Meta.FromString(meta_bytes(meta, "é")) == theirs


@pytest.mark.parametrize(("meta", "text"), [
    ({"tags": {"a": np.int64(1)}},
     "Failed to parse tags field: Value 1 has unexpected type <class 'numpy.int64'> at Meta.tags[a]."),
    ({"tags": {1: 2}}, "Failed to parse tags field: expected string or bytes-like object."),
    ({"metrics": [{"key": "k", "value": 1e300}]}, "Float value too large"),
    ({"metrics": [{"key": "k", "value": math.nan}]}, "Couldn't parse NaN"),
    ({"metrics": [{"key": "k", "extra": 1}]}, 'no field named "extra"'),
], ids=["tag", "key", "large", "nan", "extra"])  # fmt: skip
def test_invalid_meta_is_a_parse_error(meta: dict[str, Any], text: str) -> None:
    with pytest.raises(json_format.ParseError) as raised:
        meta_bytes(meta)
    assert text in str(raised.value)


def test_metrics_with_numpy_values_are_written() -> None:
    metrics = [{"key": "k", "type": "GAUGE", "value": np.float32(0.5)}, {"key": "b", "value": True}]
    meta = pb.Meta.FromString(meta_bytes({"metrics": metrics}))
    assert [(each.key, each.type, each.value) for each in meta.metrics] == [("k", 1, 0.5), ("b", 0, 1.0)]
    assert pb.Meta.FromString(meta_bytes({"metrics": metrics}, exact=False)) == meta


# -- messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [
    {"strData": "é"}, {"binData": "MTIz"}, {"jsonData": {"a": [1.0, None]}}, {"meta": {}}, {"meta": META},
    {"data": {"names": ["a"], "tensor": {"shape": [2], "values": [1.0, 0.5]}}}, {"data": {"tensor": {"shape": [0]}}},
    {"data": {"ndarray": [[1.0, "a"], []]}}, {"data": {"names": ["a"]}}, {"data": {"ndarray": []}},
    {"status": {"code": 3, "info": "x", "status": "FAILURE"}},
], ids=json.dumps)  # fmt: skip
def test_messages_convert_to_the_json_of_protobufs_json_format(message: dict[str, Any]) -> None:
    proto = json_format.ParseDict(message, pb.SeldonMessage())
    assert json_of(proto) == message == json.loads(json_format.MessageToJson(proto))


def test_nan_and_infinity_become_texts_in_json() -> None:
    proto = pb.SeldonMessage(data=tensor([2], [math.nan, -math.inf]))
    assert json_of(proto) == {"data": {"tensor": {"shape": [2], "values": ["NaN", "-Infinity"]}}}
    proto = pb.SeldonMessage(data=nested([math.nan]))
    assert json_of(proto) == {"data": {"ndarray": ["NaN"]}}


def test_the_payload_of_a_message_is_the_field_that_is_set() -> None:
    assert payload_of(pb.SeldonMessage(strData="")) == ""
    assert payload_of(pb.SeldonMessage(binData=b"x")) == b"x"
    assert payload_of(json_format.ParseDict({"jsonData": {"a": 1}}, pb.SeldonMessage())) == {"a": 1.0}
    custom = pb.SeldonMessage()
    custom.customData.Pack(struct_pb2.Value(string_value="x"))
    assert payload_of(custom).Is(struct_pb2.Value.DESCRIPTOR)
    with pytest.raises(LookupError, match="Unknown data in SeldonMessage"):
        payload_of(pb.SeldonMessage())


def test_the_shortest_decimal_of_a_float32_is_found() -> None:
    assert [proto_values.shortest_float(each) for each in (0.10000000149011612, 16777216.0, math.inf)] == [
        0.1, 16777216.0, math.inf,
    ]  # fmt: skip
