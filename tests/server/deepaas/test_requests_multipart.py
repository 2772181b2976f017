"""Multipart forms: their contents, and malformed ones."""

from __future__ import annotations

import base64
import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.deepaas.inside.forms import Form, MalformedFormError
from penstock.server.deepaas.inside.multipart import Upload, read_multipart

from .worker_calls import FORM, parts

NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)


def read(body: bytes, kind: str = FORM) -> Form:
    """Read a form that begins after a few other bytes."""
    return read_multipart(b"else\n" + body, 5, kind)


def part(headers: str, content: bytes = b"x") -> bytes:
    """Write a form of one part with these header lines."""
    lines = headers.encode("utf-8").replace(b"\n", b"\r\n")
    return b"--edge\r\n" + lines + b"\r\n\r\n" + content + b"\r\n--edge--\r\n"


def disposed(parameters: str) -> Upload:
    """Read a file whose Content-Disposition continues with this text."""
    found = read(part(f'Content-Disposition: form-data; name="a"; {parameters}'))["a"][0]
    assert isinstance(found, Upload)
    return found


@given(st.lists(st.tuples(NAMES, st.binary().filter(lambda content: b"--edge" not in content)), max_size=4))
def test_files_of_a_form_have_the_content_that_was_sent(files: list[tuple[str, bytes]]) -> None:
    found = read(parts(*((name, content, "f.bin") for name, content in files)))
    shown = {name: [bytes(value.content) for value in values] for name, values in found.items()}
    assert shown == {name: [content for other, content in files if other == name] for name, _ in files}


@given(st.lists(st.tuples(NAMES, st.text()), max_size=4))
def test_texts_of_a_form_are_those_that_were_sent(texts: list[tuple[str, str]]) -> None:
    clean = [(name, text.encode("utf-8", "replace").decode().replace("--edge", "")) for name, text in texts]
    found = read(parts(*((name, text.encode()) for name, text in clean)))
    expected = {name: [text for other, text in clean if other == name] for name, _ in clean}
    expected = {name: values for name, values in expected.items() if name != "_charset_"}
    assert found == expected


@given(st.binary(), st.integers(0, 400), st.integers(0, 400))
def test_a_damaged_form_is_either_read_or_malformed(bytes_: bytes, start: int, end: int) -> None:
    form = parts(("a", b"1"), ("b", b"2", "f.txt", "text/plain; charset=utf-8"), ("c", b"", "g"))
    with contextlib.suppress(MalformedFormError):
        read(form[:start] + bytes_ + form[end:])


@given(st.text())
def test_a_part_with_any_header_is_either_read_or_malformed(header: str) -> None:
    clean = header.encode("utf-8", "replace").decode()
    for headers in (f"Content-Disposition: {clean}", f'Content-Disposition: form-data; name="a"\n{clean}'):
        with contextlib.suppress(MalformedFormError):
            read(part(headers))


def test_a_form_may_be_empty_and_surrounded_by_other_text() -> None:
    assert read(b"--edge--\r\n") == {}
    assert read(b"before\r\n" + parts(("a", b"1")) + b"after") == {"a": ["1"]}
    assert read(b"before --edge\r\n" + parts(("a", b"1"))) == {"a": ["1"]}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"nonsense", b"--edge", b"--edge\r\n", b"--edge\r\n\r\nx\r\n--edge--\r\n",
        part("Content-Disposition: form-data"), part("Content-Type: text/plain"), part("nonsense"),
        part('Content-Disposition: form-data; name="a"\nContent-Type: multipart/mixed; boundary=in'),
        part('Content-Disposition: form-data; name="a"; name="b"'),
        part('Content-Disposition: form-data; name="a"\nContent-Transfer-Encoding: base64', b"a"),
        part('Content-Disposition: form-data; name="a"\nContent-Transfer-Encoding: none-such'),
        part('Content-Disposition: form-data; name="a"\nContent-Type: text/plain; charset=none-such'),
        part('Content-Disposition: form-data; name="a"', b"\xe9"),
        part('Content-Disposition: form-data; name="a"', b"x\r\n--edgeless"),
        part('Content-Disposition: form-data; name="a"')[:-12], parts(("a", b"1")).replace(b"\r\n", b"\n"),
    ],
)  # fmt: skip
def test_an_invalid_form_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedFormError):
        read(body)


def test_a_form_needs_a_boundary_of_limited_length() -> None:
    with pytest.raises(MalformedFormError, match="no boundary"):
        read(parts(("a", b"1")), "multipart/form-data")
    for length in (70, 71):
        edge = b"x" * length
        form, kind = parts(("a", b"1")).replace(b"edge", edge), f"multipart/form-data; boundary={edge.decode()}"
        if length == 70:
            assert read(form, kind) == {"a": ["1"]}
        else:
            with pytest.raises(MalformedFormError, match="too long"):
                read(form, kind)


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ('filename="f.txt"', "f.txt"), ("filename=f.txt", "f.txt"), ('filename="a;b.txt"', "a;b.txt"),
        (r'filename="a\"b.txt"', 'a"b.txt'), ('filename="../a/b.txt"', "../a/b.txt"), ('filename="/etc/x"', "etc/x"),
        ('filename="a%20b.txt"', "a%20b.txt"), ("filename*=UTF-8''%C3%A9.txt", "é.txt"), ('filename="é.txt"', "é.txt"),
        ("filename=\"e.txt\"; filename*=UTF-8''%C3%A9.txt", "é.txt"), ("filename=\"e\"; filename*=no''%C3", "e"),
        ('filename*0="a b"; filename*1=c', "a bc"), ("filename*0*=UTF-8''%C3%A9; filename*1*=%41", "éA"),
        ("filename=e; filename*=UTF-8''../x", "e"), ("filename=e; filename*=UTF-8''a'b", "e"),
        (r'filename="C:\a\b.txt"', "C:ab.txt"), ('FILENAME="f.txt" ;', "f.txt"),
    ],
)  # fmt: skip
def test_a_file_has_the_name_that_its_client_sent(parameters: str, name: str) -> None:
    assert disposed(parameters).filename == name


def test_a_file_has_its_declared_type_or_is_an_octet_stream() -> None:
    assert disposed('filename="a.png"').content_type == "application/octet-stream"
    assert read(parts(("a", b"x", "f", "")))["a"][0].content_type == ""
    found = read(parts(("a", b"x", "f", "text/plain; charset=x")))["a"][0]
    assert isinstance(found, Upload)
    assert found.content_type == "text/plain; charset=x"


def test_a_file_with_an_empty_name_is_a_text() -> None:
    assert read(parts(("a", b"x", "")))["a"] == ["x"]


def test_an_upload_has_the_attributes_of_aiohttps() -> None:
    found = disposed('filename="f"')
    assert (found.name, found.file.read()) == ("a", b"x")


def test_texts_of_a_form_are_decoded_in_their_charset() -> None:
    assert read(
        part('Content-Disposition: form-data; name="a"\nContent-Type: text/plain; charset=latin-1', b"\xe9")
    ) == {"a": ["é"]}
    first = b'--edge\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\nlatin-1\r\n'
    assert read(first + part('Content-Disposition: form-data; name="a"', b"\xe9")) == {"a": ["é"]}
    assert read(parts(("a", b"1"), ("_charset_", b"latin-1"), ("b", b"2"))) == {
        "a": ["1"],
        "_charset_": ["latin-1"],
        "b": ["2"],
    }


def test_a_part_that_is_neither_text_nor_file_is_bytes() -> None:
    assert read(part('Content-Disposition: form-data; name="a"\nContent-Type: application/json', b"{}")) == {
        "a": [bytearray(b"{}")]
    }


@pytest.mark.parametrize(
    ("coding", "content"), [("base64", base64.b64encode(b"h=i")), ("quoted-printable", b"h=3Di"), ("BINARY", b"h=i")]
)
def test_contents_are_decoded_by_their_transfer_encoding(coding: str, content: bytes) -> None:
    part_head = f"CONTENT-DISPOSITION: FORM-DATA; NAME=a\nContent-Transfer-Encoding: {coding}"
    assert read(part(part_head, content)) == {"a": ["h=i"]}


DISPOSITION = 'Content-Disposition: form-data; name="a"\n'


@pytest.mark.parametrize(
    "body",
    [
        (b"--edge" + b"x" * 1000) * 8000,
        part(DISPOSITION + 'Content-Type: text/plain; "' + ";" * 80_000),
        part(DISPOSITION + "Content-Type: text/plain; charset=punycode", b"a" * 160_000 + b"-" + b"9" * 160_000),
    ],
    ids=["boundaries in a line", "parameters", "punycode"],
)
def test_a_malformed_form_is_rejected_in_linear_time(body: bytes) -> None:
    start = time.process_time()
    with pytest.raises(MalformedFormError):
        read(body)

    assert time.process_time() - start < 2.0


def test_a_part_has_the_same_limits_on_headers_as_in_aiohttp() -> None:
    assert read(part(DISPOSITION + "\n".join(["X: y"] * 127)))["a"] == ["x"]
    assert read(part(DISPOSITION + "X: " + "y" * 8187))["a"] == ["x"]
    for headers in (DISPOSITION + "\n".join(["X: y"] * 128), DISPOSITION + "X: " + "y" * 8188):
        with pytest.raises(MalformedFormError, match="too many headers, or one that is too long"):
            read(part(headers))


@pytest.mark.parametrize("odd", ["X: a\0b", "X: \x7f", 'Content-Disposition: form-data; name="a\x01"'])
def test_a_form_with_a_control_character_in_a_part_header_is_malformed(odd: str) -> None:
    with pytest.raises(MalformedFormError, match="control character"):
        read(part(DISPOSITION + odd))


@pytest.mark.parametrize("name", ["", "X ", " X", "X Y", "X\0", "X\x7f", "X[]", "\u00e9"])
def test_a_form_with_an_invalid_header_name_in_a_part_is_malformed(name: str) -> None:
    with pytest.raises(MalformedFormError, match="does not begin with a name and a colon"):
        read(part(DISPOSITION + name + ": y"))
