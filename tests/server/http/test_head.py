from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http.head import Head, HttpError, parse_head, sanitize_for_uvicorn
from penstock.server.http.limits import Limits

LIMITS = Limits(max_headers=4)


def head(*lines: str, first: str = "POST /v2/models/m/infer HTTP/1.1") -> Head:
    return parse_head("\r\n".join([first, *lines, "", ""]).encode("latin-1"), LIMITS)


def refused(*lines: str, first: str = "POST / HTTP/1.1") -> tuple[int, str]:
    with pytest.raises(HttpError) as caught:
        head(*lines, first=first)
    return caught.value.status, caught.value.text


def test_a_parsed_head_has_the_fields_that_the_fast_lane_needs() -> None:
    parsed = head("Host: x", "Content-Length: 12", "X-Request-ID: a", "x-request-id: b")

    assert (parsed.method, parsed.path, parsed.length) == (b"POST", b"/v2/models/m/infer", 12)
    assert parsed.header == {b"host": b"x", b"content-length": b"12", b"x-request-id": b"b"}
    assert (parsed.keep_alive, parsed.is_http10, parsed.expects_continue, parsed.route) == (True, False, False, None)


def test_all_header_fields_are_kept_in_order_and_a_lookup_by_name_finds_the_last() -> None:
    head = parse_head(b"GET / HTTP/1.1\r\nX-Twice: a\r\nHost: x\r\nx-twice: b\r\n\r\n", Limits())
    assert head.fields == [(b"x-twice", b"a"), (b"host", b"x"), (b"x-twice", b"b")]
    assert head.header == {b"x-twice": b"b", b"host": b"x"}


@pytest.mark.parametrize("around", [" ", "\t", " \t  "])
def test_blanks_around_a_header_value_are_stripped(around: str) -> None:
    parsed = head(f"Content-Length:{around}12{around}", f"X-Some:{around}a \tb{around}", f"X-None:{around}")

    assert parsed.fields == [(b"content-length", b"12"), (b"x-some", b"a \tb"), (b"x-none", b"")]
    assert parsed.length == 12


def test_the_query_is_separated_from_the_path() -> None:
    parsed = head(first="GET /v2/health/live?verbose=1&x=?/ HTTP/1.1")

    assert (parsed.path, parsed.query) == (b"/v2/health/live", b"verbose=1&x=?/")
    assert head(first="GET / HTTP/1.1").query == b""


def test_a_request_without_a_content_length_has_no_body() -> None:
    assert head("Host: x").length == 0


def test_a_chunked_body_has_the_length_minus_one() -> None:
    assert head("Transfer-Encoding: Chunked").length == -1


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        ("1.1", "Host: x", True),
        ("1.1", "Connection: close", False),
        ("1.1", "Connection: upgrade , Close", False),
        ("1.1", "Connection: keep-alive", True),
        ("1.0", "Host: x", False),
        ("1.0", "Connection: keep-alive", True),
    ],
)
def test_keep_alive_depends_on_the_version_and_the_connection_header(
    version: str, connection: str, keep_alive: bool
) -> None:
    parsed = head(connection, first=f"POST / HTTP/{version}")

    assert parsed.keep_alive is keep_alive
    assert parsed.is_http10 is (version == "1.0")


def test_100_continue_is_expected_only_in_http_1_1() -> None:
    assert head("Expect: 100-Continue").expects_continue
    assert not head("Expect:").expects_continue
    assert not head("Expect: 100-continue", first="POST / HTTP/1.0").expects_continue


def test_an_expectation_other_than_100_continue_is_rejected() -> None:
    assert refused("Expect: a-miracle") == (417, "unsupported Expect header, only 100-continue is supported")


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 5"),
        ("Content-Length: 5", "Content-Length: 5"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5, 5",),
        ("Content-Length: +5",),
        ("Content-Length: -5",),
        ("Content-Length: 0x5",),
        ("Content-Length: 5 5",),
        ("Content-Length:",),
        ("Content-Length: 9223372036854775808",),
        ("Content-Length: " + "9" * 500,),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: identity",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding : chunked",),
        ("Transfer-Encoding:\r\n chunked",),
        ("Content-Length: 5\r\n folded",),
    ],
)
def test_a_request_whose_body_length_is_ambiguous_or_invalid_is_rejected(lines: tuple[str, ...]) -> None:
    status, text = refused(*lines)

    assert status == 400
    assert text.startswith("invalid HTTP request")


def test_a_chunked_body_in_http_1_0_is_rejected() -> None:
    assert refused("Transfer-Encoding: chunked", first="POST / HTTP/1.0")[0] == 400


@pytest.mark.parametrize("version", ["0.9", "2.0"])
def test_http_versions_other_than_1_0_and_1_1_are_not_supported(version: str) -> None:
    assert refused(first=f"GET / HTTP/{version}") == (505, f"HTTP version {version} is not supported")


def test_the_http_2_preface_is_answered_505() -> None:
    assert refused(first="PRI * HTTP/2.0")[0] == 505


@pytest.mark.parametrize(
    "first",
    [
        "GET / HTTP/1.2",
        "GET / HTTP/9.9",
        "GET  HTTP/1.1",
        "get / HTTP/1.1",
        "GET /\x00 HTTP/1.1",
        "\x16\x03\x01",
        "GET",
    ],
)
def test_an_invalid_request_line_is_rejected(first: str) -> None:
    assert refused(first=first)[0] in {400, 505}


@pytest.mark.parametrize("line", ["no colon", ": no name", "a b: c", "a: \x00", "a: b\rc", "a: b\nc: d", "\x01: b"])
def test_an_invalid_header_line_is_rejected(line: str) -> None:
    assert refused(line)[0] == 400


def test_more_header_fields_than_the_limit_are_rejected() -> None:
    assert head(*[f"a{i}: b" for i in range(4)]).length == 0
    assert refused(*[f"a{i}: b" for i in range(5)]) == (431, "request has more than 4 header fields")


def test_a_request_to_upgrade_is_parsed_as_an_ordinary_request() -> None:
    parsed = head("Connection: upgrade", "Upgrade: h2c", first="GET / HTTP/1.1")

    assert parsed.length == 0


@pytest.mark.parametrize("target", ["a:443", "/v2"])
def test_a_connect_request_is_rejected(target: str) -> None:
    assert refused(first=f"CONNECT {target} HTTP/1.1") == (405, "Method Not Allowed")


@given(st.binary(max_size=200), st.sampled_from([b"", b"POST /a HTTP/1.1\r\n", b"POST /a HTTP/1.1\r\nHost: x\r\n"]))
def test_arbitrary_bytes_are_either_parsed_or_rejected_with_an_http_error(rest: bytes, start: bytes) -> None:
    raw = (start + rest).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    try:
        parse_head(raw, LIMITS)
        status = 200
    except HttpError as error:
        status = error.status

    assert status in {200, 400, 405, 417, 431, 505}


def test_only_upgrade_fields_and_trailing_blanks_are_removed_from_a_head_for_uvicorn() -> None:
    raw = b"GET /upgrade: HTTP/1.1\r\nUpgrade: h2c\r\nconnection: Upgrade\r\nx: upgrade: a\r\nUPGRADE:b\r\n\r\n"

    assert sanitize_for_uvicorn(raw) == b"GET /upgrade: HTTP/1.1\r\nconnection: Upgrade\r\nx: upgrade: a\r\n\r\n"
    assert sanitize_for_uvicorn(b"GET / HTTP/1.1\r\na: b \t\r\nc:\td e\r\nf: \r\n\r\n") == (
        b"GET / HTTP/1.1\r\na: b\r\nc:\td e\r\nf:\r\n\r\n"
    )
