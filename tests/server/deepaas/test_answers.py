"""How values returned and exceptions raised by a model become answers."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.carrying.messages import read_answer
from penstock.server.deepaas.inside.answers import content_answer, error_answer, json_answer, write_json

TROUBLE = b"500 Internal Server Error\n\nServer got itself in trouble"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


def parsed(answer: bytes) -> tuple[int, str, str, bytes]:
    """Take an answer apart."""
    status, content_type, lines, body = read_answer(answer)
    return status, content_type.decode(), lines.decode(), body


class TestJson:
    @given(JSON)
    def test_write_json_writes_the_same_as_json_dumps(self, value: Any) -> None:
        assert write_json(value) == json.dumps(value)

    @pytest.mark.parametrize(
        ("value", "written"),
        [
            (np.float32(0.5), "0.5"), (np.int64(3), "3"), (np.bool_(True), "true"), (np.array([[1, 2]]), "[[1, 2]]"),
            ({"a": np.array([0.5], np.float32)}, '{"a": [0.5]}'), (np.float32(math.nan), "NaN"),
        ],
        ids=["float32", "int64", "bool", "array", "inside", "nan"],
    )  # fmt: skip
    def test_write_json_converts_numpy_values(self, value: Any, written: str) -> None:
        assert write_json(value) == written

    @pytest.mark.parametrize(
        "value", [b"x", {1}, 1j, np.complex64(1), np.datetime64("2020-01-01"), {(1,): 2}, np.array([b"x"])], ids=repr
    )
    def test_write_json_rejects_values_that_json_cannot_represent(self, value: Any) -> None:
        with pytest.raises(TypeError):
            write_json(value)

    def test_a_json_answer_has_the_json_content_type(self) -> None:
        assert parsed(json_answer({"é": 1})) == (200, "application/json; charset=utf-8", "", b'{"\\u00e9": 1}')


class TestContent:
    @pytest.mark.parametrize(
        "value",
        [
            b"h\xc3\xa9", bytearray(b"h\xc3\xa9"), memoryview(b"h\xc3\xa9"), "hé", io.BytesIO(b"h\xc3\xa9"),
            io.StringIO("hé"),
        ],
        ids=lambda value: type(value).__name__,
    )  # fmt: skip
    def test_bytes_and_strings_are_sent_unchanged(self, value: Any) -> None:
        assert parsed(content_answer(value, "text/csv")) == (200, "text/csv", "", b"h\xc3\xa9")

    def test_none_is_sent_as_an_empty_body(self) -> None:
        assert parsed(content_answer(None, "image/png")) == (200, "image/png", "", b"")

    @pytest.mark.parametrize("name", ["x.zip", 'é "q" a.png'])
    def test_a_file_is_sent_whole_with_its_name(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / name
        path.write_bytes(b"of the file")
        with path.open("rb") as file:
            file.read(3)
            found = parsed(content_answer(file, "application/zip"))
        filename = "x.zip" if name == "x.zip" else "%C3%A9%20%22q%22%20a.png"
        assert found == (
            200,
            "application/zip",
            f'Content-Disposition: attachment; filename="{filename}"\r\n',
            b"of the file",
        )

    @pytest.mark.parametrize("kind", [io.BytesIO, io.StringIO])
    def test_a_file_in_memory_is_sent_with_the_name_it_was_given(self, kind: type[Any]) -> None:
        buffer = kind()
        buffer.name = "/some/where/out put.pdf"
        disposition = 'Content-Disposition: attachment; filename="out%20put.pdf"\r\n'
        assert parsed(content_answer(buffer, "application/pdf")) == (200, "application/pdf", disposition, b"")

    @pytest.mark.parametrize("name", ["", "<stdout>", "<x", 7, None])
    def test_a_file_without_a_valid_name_is_sent_without_one(self, name: Any) -> None:
        buffer: Any = io.BytesIO()
        buffer.name = name
        assert parsed(content_answer(buffer, "image/png"))[2] == ""

    def test_a_closed_file_is_read_again_and_a_deleted_one_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_bytes(b"x")
        with path.open("rb") as file:
            pass
        assert parsed(content_answer(file, "image/png"))[3] == b"x"
        path.unlink()
        with pytest.raises(FileNotFoundError):
            content_answer(file, "image/png")

    @pytest.mark.parametrize("value", [{"a": 1}, 7, [1], object()], ids=lambda value: type(value).__name__)
    def test_values_that_are_not_content_are_rejected(self, value: Any) -> None:
        with pytest.raises(TypeError):
            content_answer(value, "image/png")

    def test_a_content_type_with_a_line_break_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="is not a content type"):
            content_answer(b"", "image/png\r\nX-More: 1")

    def test_a_string_is_encoded_in_the_charset_of_its_type(self) -> None:
        assert parsed(content_answer("é", "text/plain; charset=latin-1"))[3] == b"\xe9"


class TestErrors:
    def test_an_exception_is_answered_in_the_originals_words_and_logged(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert parsed(error_answer(ValueError("boom"))) == (500, "text/plain; charset=utf-8", "", TROUBLE)
        assert "ValueError: boom" in capsys.readouterr().err

    def test_an_exception_is_shown_to_the_client_if_configured(self) -> None:
        assert parsed(error_answer(ValueError("b\udce9m"), shown=True))[3] == TROUBLE + b"\n\nValueError: b?m"

    def test_an_exception_whose_text_cannot_be_made_is_answered(self) -> None:
        class MuteError(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        assert parsed(error_answer(MuteError(), shown=True))[3] == TROUBLE + b"\n\nMuteError: "

    def test_headers_of_an_http_exception_are_sent(self) -> None:
        error = web.HTTPMethodNotAllowed("GET", ["POST", "PUT"])
        assert parsed(error_answer(error))[2] == "Allow: POST,PUT\r\n"

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (web.HTTPBadRequest(reason="bad thing"), (400, "text/plain; charset=utf-8", "", b"400: bad thing")),
            (web.HTTPConflict(text="of its own"), (409, "text/plain; charset=utf-8", "", b"of its own")),
            (web.HTTPNoContent(), (204, "", "", b"")),
            (web.HTTPFound("/there"), (302, "text/plain; charset=utf-8", "Location: /there\r\n", b"302: Found")),
            (
                web.HTTPUnprocessableEntity(text="{}", content_type="application/json", headers={"X-More": "é"}),
                (422, "application/json; charset=utf-8", "X-More: é\r\n", b"{}"),
            ),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    def test_an_http_exception_is_answered_with_its_status_and_text(
        self, error: Exception, expected: tuple[int, str, str, bytes]
    ) -> None:
        assert parsed(error_answer(error)) == expected

    @pytest.mark.parametrize("odd", ["a\r\nb: c", "a\0b", "a\x7f"])
    def test_an_http_exception_with_control_characters_in_a_header_is_an_internal_error(self, odd: str) -> None:
        keyword_sets: list[dict[str, Any]] = [
            {"headers": {"X-More": odd}},
            {"headers": {odd: "x"}},
            {"content_type": odd},
        ]
        for keywords in keyword_sets:
            error = web.HTTPBadRequest(text="bad", **keywords)

            assert parsed(error_answer(error)) == (500, "text/plain; charset=utf-8", "", TROUBLE)

    def test_an_http_exception_without_a_status_is_answered_with_500(self) -> None:
        assert parsed(error_answer(web.HTTPException(reason="bad thing")))[::3] == (500, b"500: bad thing")

    @pytest.mark.parametrize(
        ("reason", "body"),
        [(ValueError("bad thing"), b"bad thing"), ("bad\nthing", b"bad\nthing"), (KeyError("k"), b"'k'")],
        ids=["an exception", "two lines", "a key"],
    )
    @pytest.mark.parametrize(
        ("kind", "status"), [(web.HTTPBadRequest, 400), (web.HTTPNotFound, 404), (web.HTTPException, 500)]
    )
    def test_an_http_exception_with_a_reason_that_aiohttp_rejects_is_answered(
        self, kind: type[web.HTTPException], status: int, reason: Any, body: bytes
    ) -> None:
        error = raised_by(lambda: kind(reason=reason))
        assert parsed(error_answer(error)) == (status, "text/plain; charset=utf-8", "", b"%d: %b" % (status, body))

    def test_an_exception_of_the_model_with_a_reason_is_not_an_http_exception(self) -> None:
        class Refused:
            def __init__(self, reason: str) -> None:
                raise ValueError(reason)

        assert parsed(error_answer(raised_by(lambda: Refused(reason="x"))))[3] == TROUBLE


def raised_by(do: Callable[[], Any]) -> Exception:
    """Return the exception that `do` raises, or its result, as with versions of aiohttp that take any reason."""
    try:
        result: Exception = do()
    except Exception as error:  # noqa: BLE001 - whichever it is
        return error
    return result
