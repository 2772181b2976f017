from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.server import json_text
from penstock.server.v2 import parsing
from penstock.server.v2.parsing import SIMD_BYTES, parse, parse_numbers
from tests.server.v2.documents import ANYTHING, SCALARS, TEXTS

PADDING = b" " * SIMD_BYTES
DEPTH = 100


def refused(text: bytes, max_depth: int = DEPTH) -> str:
    with pytest.raises(InferError) as caught:
        parse(text, max_depth)
    assert caught.value.code is Code.INVALID
    return caught.value.message


def flat(value: Any) -> Any:
    """Flatten the data of inputs, as simdjson does: the nesting of numbers has no meaning."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for each in value:
        inner = flat(each)
        found += inner if isinstance(inner, list) else [inner]
    return found


def comparable(document: Any) -> Any:
    """Normalize the results of both parsers: lists of data become flat, and arrays become lists."""
    if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        return document
    return document | {
        "inputs": [
            entry | {"data": flat(entry["data"])} if isinstance(entry, dict) and "data" in entry else entry
            for entry in document["inputs"]
        ]
    }


def both(text: bytes) -> tuple[Any, Any]:
    """Parse below and above the size from which simdjson is used; None stands for a rejection."""
    assert len(text) < SIMD_BYTES
    found = []
    for padded in (text, text + PADDING):
        try:
            found.append(comparable(parse(padded, DEPTH)))
        except InferError as error:
            found.append(None if error.code is Code.INVALID else error)
    return found[0], found[1]


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
DATA = st.recursive(NUMBERS | SCALARS, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
ENTRIES = st.dictionaries(
    st.sampled_from(["name", "data", "datatype", "shape", "parameters", "data "]), DATA | ANYTHING, max_size=4
)
DOCUMENTS = st.fixed_dictionaries({}, optional={"inputs": st.lists(ENTRIES, max_size=3), "id": TEXTS, "x": ANYTHING})
SMALL = DOCUMENTS.map(lambda document: json.dumps(document).encode()).filter(lambda text: len(text) < SIMD_BYTES)


class TestBothParsers:
    @given(SMALL)
    def test_both_parsers_return_the_same_document(self, text: bytes) -> None:
        below, above = both(text)

        assert below is not None
        assert below == above

    @given(SMALL, st.data())
    def test_both_parsers_accept_and_reject_the_same_mutated_texts(self, text: bytes, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(text)))
        removed = data.draw(st.integers(0, 3))
        put = data.draw(st.binary(max_size=3) | st.sampled_from([b'"', b"[", b"}", b",", b"\\", b"NaN", b"\xff", b"1"]))
        below, above = both((text[:at] + put + text[at + removed :])[: SIMD_BYTES - 1])

        assert below == above or (repr(below) == repr(above))

    @pytest.mark.parametrize(
        "text",
        [
            b'{"inputs":[{"data":[[1,2],[3]]}]}',
            b'{"inputs":[{"data":[1,[2,[3,[]]],[[4]]]}]}',
            b'{"inputs":[{"data":[18446744073709551615,1]}]}',
            b'{"inputs":[{"data":[18446744073709551615,-1]}]}',
            b'{"inputs":[{"data":[9007199254740993]}]}',
            b'{"inputs":[{"data":[true,1]}]}',
            b'{"inputs":[{"data":[1,2.5]}]}',
            b'{"inputs":[{"data":["a",["b"]]}]}',
            b'{"inputs":[{"data":5}]}',
            b'{"inputs":[{"data":[100000000000000000000]}]}',
            b'{"inputs":[{"name":"first","name":"last"}]}',
            b'{"id":"first","id":"last","inputs":[1],"inputs":[]}',
            b'{"inputs":[{"data":[1],"data":[2]}]}',
            b'{"a\\u0041\\n":1}',
            b"[1,2]",
            b'"text"',
            b"{}",
        ],
    )
    def test_both_parsers_agree_on_documents_that_parsers_often_treat_differently(self, text: bytes) -> None:
        below, above = both(text)

        assert below is not None
        assert below == above

    def test_a_byte_order_mark_is_skipped_as_in_triton(self) -> None:
        assert both(b'\xef\xbb\xbf{"a":[1,2]}') == ({"a": [1, 2]}, {"a": [1, 2]})

    @pytest.mark.parametrize("zeros", [b"\0", b" \0\0"])
    def test_zero_bytes_after_the_document_are_ignored_as_in_triton(self, zeros: bytes) -> None:
        assert parse(b'{"a":1}' + zeros, DEPTH) == {"a": 1}
        assert parse(b'{"a":1}' + PADDING + zeros, DEPTH) == {"a": 1}
        assert parse(b'{"a":Infinity}' + zeros, DEPTH) == {"a": math.inf}

    def test_the_last_of_several_equal_keys_is_used(self) -> None:
        assert parse(b'{"id":"first","id":"last"}' + PADDING, DEPTH) == {"id": "last"}

    @pytest.mark.parametrize(
        "text",
        [
            b"", b" ", b"{", b"}", b"nul", b"{'a':1}", b'{"a":1,}', b"[1,]", b'{"a":1}{}', b'{"a":1}\x00x', b'{"a":01}',
            b'{"a":1.}', b'{"a":.5}', b'{"a":+1}', b'{"a":1e400}', b'{"a":"\x01"}', b'{"a":"\xff"}',
            b'{"a":"\xed\xa0\x80"}', b'{"a":"\\ud800"}', b'{"a":"\\x41"}', b"\xff\xfe{}",
            b'\xef\xbb\xbf\xef\xbb\xbf{"a":1}',
            b'{"a":nan}', b'{"a":-nan}', b'{"a":inf}', b'{"a":undefined}', b'{"a":1 /* */}', b"[" + b"1" * 400 + b"]",
        ],
    )  # fmt: skip
    def test_both_parsers_reject_invalid_json(self, text: bytes) -> None:
        assert both(text) == (None, None)
        assert refused(text).startswith("failed to parse the request JSON buffer: ")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (b"", "The document is empty. at 0"),
            (b" ", "The document is empty. at 0"),
            (b"AAAA", "Invalid value. at 0"),
            (b'{"a":x}', "Invalid value. at 5"),
            (b"{a:1}", "Missing a name for object member. at 1"),
            (b'{"a" 1}', "Missing a colon after a name of object member. at 5"),
            (b"[1 2]", "Missing a comma or ] after an array element. at 3"),
            (b'{"a":1 2}', "Missing a comma or } after an object member. at 7"),
            (b"{}x", "The document root must not be followed by other values. at 2"),
        ],
    )
    def test_the_most_common_syntax_errors_are_reported_with_tritons_messages(self, text: bytes, message: str) -> None:
        assert refused(text) == f"failed to parse the request JSON buffer: {message}"


class TestNumberArrays:
    @pytest.mark.parametrize(
        ("datatype", "data", "values"),
        [
            ("INT32", [1, [2, 3]], [1, 2, 3]),
            ("UINT64", [2**64 - 1, 0], [2**64 - 1, 0]),
            ("FP32", [1, 2.5], [1.0, 2.5]),
            ("FP64", [], []),
        ],
    )
    def test_tensor_data_of_a_large_document_is_parsed_into_an_array(
        self, datatype: str, data: Any, values: Any
    ) -> None:
        text = json.dumps({"inputs": [{"name": "x", "datatype": datatype, "data": data}]}).encode() + PADDING
        found = parse(text, DEPTH)["inputs"][0]["data"]

        assert isinstance(found, np.ndarray)
        assert found.tolist() == values

    def test_many_inputs_with_few_numbers_are_parsed_as_lists(self) -> None:
        entries = [{"name": f"x{number}", "datatype": "FP32", "data": [1.5] * 4} for number in range(80)]
        text = json.dumps({"inputs": entries}).encode()
        assert len(text) > SIMD_BYTES

        assert parse(text, DEPTH) == {"inputs": entries}

    def test_tensor_data_is_parsed_as_lists_if_simd_is_off(self) -> None:
        text = b'{"inputs":[{"data":[1,2]}]}' + PADDING

        assert parse(text, DEPTH, simd=False) == {"inputs": [{"data": [1, 2]}]}


class TestNestingDepth:
    @given(ANYTHING)
    def test_nesting_depth_counts_brackets_outside_strings(self, document: Any) -> None:
        def depth(value: Any) -> int:
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
            return 0 if inner is None else 1 + max(map(depth, inner), default=0)

        text, deepest = json.dumps(document).encode(), depth(document)

        parse(text, deepest)
        if deepest:
            assert refused(text, deepest - 1) == f"JSON nesting depth exceeds maximum allowed limit ({deepest - 1})"

    @pytest.mark.parametrize("text", [b'"[[["', b'"\\"[[["', b'"\\\\",[[1]]', b'"{","[[[[[[[[[[[["', b'"\\u005b[[["'])
    def test_brackets_inside_strings_do_not_count_toward_the_depth(self, text: bytes) -> None:
        assert parse(b"[" + text + b"]", 3) == json.loads(b"[" + text + b"]")

    @pytest.mark.parametrize("opened", [b"[", b'{"a":', b"[{"])
    def test_a_document_with_250000_levels_is_rejected_before_it_is_parsed(self, opened: bytes) -> None:
        assert refused(opened * 250_000) == "JSON nesting depth exceeds maximum allowed limit (100)"

    @pytest.mark.parametrize("end", [b"", b"\\", b"\\\\", b'"', b"x"])
    @pytest.mark.parametrize("inside", [b'\\"', b"\\\\", b'"a', b'"', b"a"])
    def test_an_unterminated_string_is_scanned_in_linear_time(self, inside: bytes, end: bytes) -> None:
        start = time.process_time()
        refused(b"[" * 101 + b'"' + inside * 100_000 + end)

        # a pattern that starts again at every quote would take minutes
        assert time.process_time() - start < 1.0


class TestNanAndInfinity:
    def test_the_nan_and_infinity_tokens_of_pythons_json_module_are_parsed(self) -> None:
        found = parse(b'{"inputs":[{"data":[NaN,Infinity,-Infinity,1.5,-2]}],"id":"NaN"}', DEPTH)

        assert math.isnan(found["inputs"][0]["data"][0])
        assert found["inputs"][0]["data"][1:] == [math.inf, -math.inf, 1.5, -2]
        assert found["id"] == "NaN"

    @pytest.mark.parametrize(
        "text",
        [
            b'{"id":"\\ud800","a":NaN}', b'{"id":"\xed\xa0\x80","a":NaN}', b'{"id":"\xff","a":NaN}',
            b'\xef\xbb\xbf\xef\xbb\xbf{"a":NaN}', '{"a":NaN}'.encode("utf-16"), b'{"a":-NaN}', b'{"a":NaN,}',
            b'["\x01",NaN]',
            b'{"\\udc00":NaN}', b"NaNNaN", b'{"a":NaN}x', b"[NaN,1e400]", b"[-1e400,Infinity]",
            b"[NaN,%b]" % (b"9" * 400), b"[NaN,-%b]" % (b"9" * 5000),
        ],
    )  # fmt: skip
    def test_a_document_with_nan_is_otherwise_checked_strictly(self, text: bytes) -> None:
        assert refused(text).startswith("failed to parse the request JSON buffer: ")

    def test_integers_beyond_64_bits_become_floats_in_a_document_with_nan(self) -> None:
        digits = [str(2**64 - 1), str(2**64), str(-(2**63)), str(-(2**63) - 1), "9" * 300]
        found = parse(f"[NaN,{','.join(digits)}]".encode(), DEPTH)

        assert found[1:] == [2**64 - 1, 2.0**64, -(2**63), -(2.0**63), 1e300]
        assert [type(each) for each in found[1:]] == [int, float, int, float, float]


@pytest.fixture
def no_simdjson(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "simdjson", None)
    parsing._simdjson.cache_clear()
    yield
    parsing._simdjson.cache_clear()


@pytest.mark.usefixtures("no_simdjson")
def test_documents_are_parsed_without_simdjson_which_has_no_wheels_for_python_3_14() -> None:
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, 2]}]}
    text = json.dumps(document).encode() + PADDING

    assert parse(text, DEPTH) == document
    assert parse_numbers(b"[1.5, 2]") is None
    assert refused(text + b"x").startswith("failed to parse the request JSON buffer: ")


def test_an_object_with_many_keys_is_parsed_in_linear_time() -> None:
    keys = b",".join(b'"%d":1' % number for number in range(50_000))
    start = time.process_time()
    for text in (b"{" + keys + b"}", b'{"inputs":[{' + keys + b"}]}"):
        parse(text, DEPTH)

    assert time.process_time() - start < 2.0


def test_a_list_with_more_elements_than_simdjson_can_count_is_rejected() -> None:
    # simdjson would write beyond the end of its own list
    assert refused(b'{"outputs":[' + b"0," * (1 << 24) + b"1]}").startswith("JSON has more than 4194304 values")


def test_thousands_of_inputs_are_not_converted_one_by_one() -> None:
    with patch.object(parsing, "_convert_entry", None):
        found = parse(b'{"inputs":[' + b"{}," * 9_999 + b"{}]}", DEPTH)

    assert found == {"inputs": [{}] * 10_000}


class TestValueLimit:
    """The limit is lowered for these tests; test_json_text.py tests what counts as a value."""

    MOST = 2000

    @pytest.fixture(autouse=True)
    def _few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parsing, "MAX_VALUES", self.MOST)
        for name in ("has_more_values", "may_have_more_values"):
            monkeypatch.setattr(parsing, name, partial(getattr(json_text, name), max_values=self.MOST))

    @pytest.mark.parametrize("simd", [True, False])
    @pytest.mark.parametrize(
        "text",
        [
            b'{"inputs":[{"datatype":"BYTES","data":[%b]}]}' % b",".join([b'""'] * 2001),
            b'{"inputs":[{"datatype":"BYTES","data":[%b]}]}' % b",".join([b'[""]'] * 1001),
            b'{"inputs":[{"datatype":"INT32","data":[%btrue]}]}' % (b"1," * 2001),
            b'{"inputs":[{"data":[{"a":[%b0]}]}]}' % (b"0," * 2001),
            b'{"inputs":[%b]}' % b",".join([b'{"data":["",""],"shape":[1,2]}'] * 500),
            b'{"inputs":[],"parameters":{%b}}' % b",".join(b'"%d":1' % number for number in range(2001)),
            b"{%b}" % b",".join(b'"%d":1' % number for number in range(2001)),
            b"[%b]" % b",".join([b"{}"] * 2001),
        ],
    )
    def test_a_document_with_too_many_values_is_rejected_before_it_is_built(self, text: bytes, simd: bool) -> None:
        with pytest.raises(InferError, match="JSON has more than 4194304 values") as caught:
            parse(text + PADDING, DEPTH, simd=simd)
        assert caught.value.code is Code.INVALID

    @pytest.mark.parametrize("rows", [[1.5] * 5000, [[1], [2]] * 2500])
    def test_numbers_of_tensors_do_not_count_toward_the_limit(self, rows: Any) -> None:
        document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": rows}], "id": "x," * 5000}
        found = parse(json.dumps(document).encode(), DEPTH)

        assert found["inputs"][0]["data"].tolist() == flat(rows)
        assert found["id"] == document["id"]

    def test_a_string_with_commas_counts_as_one_value(self) -> None:
        text = b'{"inputs":[{"datatype":"BYTES","data":["%b","[{"]}]}' % (b"," * 5000)

        assert parse(text, DEPTH) == parse(text, DEPTH, simd=False) == json.loads(text)


def test_a_tensor_with_more_numbers_than_simdjson_can_count_is_parsed() -> None:
    numbers = (1 << 24) + 1
    text = b'{"inputs":[{"datatype":"UINT8","data":[%b7]}]}' % (b"1," * (numbers - 1))
    found = parse(text, DEPTH)["inputs"][0]["data"]

    assert (found.size, int(found[-1]), int(found.sum())) == (numbers, 7, numbers + 6)
