"""Forms are read as the original's proxy read them; those that made it drop the connection are rejected."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.abeja.inside.multipart import MultipartPart, parts_of
from penstock.server.abeja.messages import CallRefusedError


def form(*parts: tuple[str, bytes], newline: str = "\r\n") -> bytes:
    """Write a form of parts: their headers, without the last newline, and their contents."""
    line = newline.encode()
    written = [
        b"--edge" + line + headers.replace("\n", newline).encode() + line + line + content + line
        for headers, content in parts
    ]
    return b"".join([*written, b"--edge--", line])


def part(headers: str, content: bytes = b"1") -> MultipartPart:
    """Read a form of one part."""
    (read,) = parts_of(form((headers, content)), b"edge")
    return read


def names_in(disposition: str) -> tuple[str | None, str | None]:
    """Give form name and file name."""
    read = part(f"Content-Disposition: {disposition}")
    return read.form_name, read.file_name


@given(st.lists(st.binary(max_size=40).filter(lambda content: b"--edge" not in content), max_size=5))
def test_the_parts_of_a_form_are_read_in_order(contents: list[bytes]) -> None:
    parts = [(f'Content-Disposition: form-data; name="n{at}"', content) for at, content in enumerate(contents)]

    assert parts_of(form(*parts), b"edge") == [
        MultipartPart(None, None, f"n{at}", content) for at, content in enumerate(contents)
    ]


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_body_is_read_or_rejected(noise: bytes, at: int) -> None:
    form_body = form(("Content-Type: a/b", b"x"), ('Content-Disposition: form-data; name="a"', noise))
    for body in (form_body[:at], form_body[:at] + noise + form_body[at:], b"--edge" + noise):
        with contextlib.suppress(CallRefusedError):
            parts_of(body, b"edge")


def test_form_names_and_file_names_are_read_and_folders_are_removed() -> None:
    assert names_in('form-data; name="a"; filename="../b/c.txt"') == ("a", "c.txt")
    assert names_in('attachment; name="a"; filename="b"') == (None, "b")
    assert names_in("form-data; name=a; filename=b") == ("a", "b")
    assert names_in('form-data; name=""; filename=""') == (None, None)
    assert names_in('form-data; name="a"; filename="/"') == ("a", "/")
    assert names_in('form-data; name="日本"; filename="é/日.jpg"') == ("日本", "日.jpg")
    assert names_in("form-data; name=a; filename=b; filename*=utf-8''%e6%97%a5") == ("a", "日")
    assert names_in('form-data; name="a') == (None, None)


def test_part_headers_are_read_as_the_original_read_them() -> None:
    assert part("content-TYPE:  a/b; c=d ").content_type == "a/b; c=d"
    assert part("Content-Type:").content_type is None
    assert part('Content-Disposition: form-data;\n  name="a"\nX: y').form_name == "a"
    assert part("Content-Type: a\n \nX: y").content_type == "a "
    assert part("Content-Type: first\nContent-Type: second").content_type == "first"
    assert part(": nameless\nContent-Type: a").content_type == "a"


def test_quoted_printable_is_decoded_and_base64_is_not() -> None:
    assert part("Content-Transfer-Encoding: Quoted-Printable", b"a=3Db=\r\nc \t\n \t").content == b"a=bc\n"
    assert part("Content-Transfer-Encoding: base64", b"YQ==").content == b"YQ=="


def test_lines_can_end_with_a_line_feed_alone() -> None:
    assert [each.content for each in parts_of(form(("X: y", b"1\r"), ("X: y", b"\n"), newline="\n"), b"edge")] == [
        b"1\r", b"\n",
    ]  # fmt: skip


def test_text_before_and_after_the_parts_is_skipped() -> None:
    body = b"ignore\r\n--edgeless\r\n" + form(("X: y", b"1")) + b"and this"

    assert [each.content for each in parts_of(body, b"edge")] == [b"1"]


def test_a_boundary_must_be_followed_by_a_blank_a_newline_or_two_dashes() -> None:
    for content in (b"--edg\r\n--edges\r\n --edge", b"--edge-x\r\n--edge-\r\n", b"\r\n--edge-"):
        assert part("X: y", content).content == content
    assert parts_of(b"--edge  \r\nX: y\r\n\r\n1\r\n--edge-- \t", b"edge")[0].content == b"1"
    assert parts_of(b"--edge\r\nX: y\r\n\r\n--edge--", b"edge")[0].content == b""


@pytest.mark.parametrize("body", [b"--edge--\r\n", b"--edge--", b"--edge-- \r\n", b"--edge\r\nContent-Dispo: x"])
def test_a_form_can_have_no_parts(body: bytes) -> None:
    assert parts_of(body, b"edge") == []


@pytest.mark.parametrize("cut", [10, 20, 30])
def test_a_truncated_form_is_rejected_with_the_error_of_the_original(cut: int) -> None:
    body = form(("X: y", b"0123456789" * 5))[:-cut]

    with pytest.raises(CallRefusedError) as caught:
        parts_of(body, b"edge")
    assert (caught.value.status, caught.value.text) == (503, ": unexpected EOF")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "it does not contain its boundary"),
        (b"hello", "it does not contain its boundary"),
        (b"--else\r\n\r\n1\r\n--else--", "it does not contain its boundary"),
        (b"--edge", "it does not contain its boundary"),
        (b"--edge\r\nno colon\r\n\r\n1\r\n--edge--", "a header of a part has no colon"),
        (b"--edge\r\nContent-Dispo", "a header of a part has no colon"),
        (b"--edge\r\n X: y\r\n\r\n1\r\n--edge--", "the headers of a part begin with a blank"),
        (b"--edge\r\nX: y\r\n\r\n1\r\n--edge--x\r\n", "what follows its boundary is neither a part nor the end"),
        (b"--edge\r\nX: y\r\n\r\n1\r\n--edge", "what follows its boundary is neither a part nor the end"),
    ],
)
def test_a_form_that_made_the_original_drop_the_connection_is_rejected_with_400(body: bytes, text: str) -> None:
    with pytest.raises(CallRefusedError) as caught:
        parts_of(body, b"edge")
    assert (caught.value.status, caught.value.text) == (400, f"the form cannot be read: {text}")


def test_an_empty_boundary_is_rejected() -> None:
    with pytest.raises(CallRefusedError, match="its boundary is empty"):
        parts_of(b"--\r\n", b"")


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        ("X: y" + ("\n " + "a" * 1000) * 2000, b"1"),
        ("Content-Disposition: form-data" + "".join(f'; n{at}="{"a" * 1000}"' for at in range(2000)), b"1"),
        ("Content-Transfer-Encoding: quoted-printable", b" " * 30_000 + b"x"),
    ],
    ids=["lines that go on", "parameters", "blanks"],
)
def test_a_form_is_parsed_in_linear_time(headers: str, content: bytes) -> None:
    start = time.process_time()

    assert part(headers, content).content == content
    assert time.process_time() - start < 2.0
