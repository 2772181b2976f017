from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.generator.http_answers import TEXT_BYTES, Answer, BadAnswerError


def spelled(name: str) -> st.SearchStrategy[str]:
    """Give a header's name in any case."""
    return st.lists(st.booleans(), min_size=len(name), max_size=len(name)).map(
        lambda upper: "".join(c.upper() if up else c for c, up in zip(name, upper, strict=True))
    )


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, int, bytes, bool]:
    """Give an answer's bytes, and its status, body, and whether the connection lives on."""
    status = draw(st.sampled_from([200, 204, 304, 400, 503]))
    body = b"" if status in {204, 304} else draw(st.binary(max_size=600))
    before = b"".join(draw(st.lists(st.sampled_from([b"HTTP/1.1 100 Continue\r\n\r\n", EARLY]), max_size=2)))
    lines = [f"HTTP/1.1 {status} Fine", *draw(st.lists(st.just("X-Other: a b"), max_size=2))]
    close = draw(st.booleans())
    lines += [f"{draw(spelled('connection'))}:{draw(st.sampled_from(['', ' ']))}close"] * close
    if status in {204, 304}:
        sent_body = b""
    elif draw(st.booleans()):
        lines.append(f"{draw(spelled('transfer-encoding'))}: {draw(st.sampled_from(['chunked', 'Chunked']))}")
        sent_body = chunked(body, draw(st.integers(1, 300)), draw(st.sampled_from([b"", b";a=b"])))
    else:
        lines.append(f"{draw(spelled('content-length'))}: {len(body)}")
        sent_body = body
    return before + "\r\n".join(lines).encode() + b"\r\n\r\n" + sent_body, status, body, not close


EARLY = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"


def chunked(body: bytes, size: int, extension: bytes) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%X%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
    return chunks + b"0\r\n" + b"Trailer: x\r\n" * (size % 2) + b"\r\n"


@given(answers(), st.lists(st.integers(0, 2000), max_size=6), st.binary(max_size=9))
def test_an_answer_is_parsed_alike_in_pieces_of_any_size(
    case: tuple[bytes, int, bytes, bool], cuts: list[int], behind: bytes
) -> None:
    data, status, body, keeps_alive = case
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[a:b] for a, b in pairwise(places)]
    pieces[-1] += behind
    answer = Answer()

    rests = [answer.feed(piece) for piece in pieces]

    assert rests == [None] * (len(pieces) - 1) + [behind]
    assert (answer.status, answer.text, answer.keeps_alive) == (status, body[:TEXT_BYTES], keeps_alive)


@given(answers())
def test_an_answer_may_arrive_byte_by_byte(case: tuple[bytes, int, bytes, bool]) -> None:
    data, status, body, _ = case
    answer = Answer()

    rests = [answer.feed(data[at : at + 1]) for at in range(len(data))]

    assert rests == [None] * (len(data) - 1) + [b""]
    assert (answer.status, answer.text) == (status, body[:TEXT_BYTES])


@given(st.binary(max_size=300), st.integers(0, 300))
def test_a_body_without_a_length_ends_with_the_connection(body: bytes, cut: int) -> None:
    answer = Answer()

    data = b"HTTP/1.1 200 OK\r\n\r\n" + body

    assert answer.feed(data[:cut]) is None
    assert answer.feed(data[cut:]) is None
    assert (answer.ends_with_connection(), answer.keeps_alive, answer.text) == (True, False, body[:TEXT_BYTES])


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_a_bad_answer(data: bytes) -> None:
    answer = Answer()

    with suppress(BadAnswerError):
        rest = answer.feed(b"HTTP/1.1 200 OK\r\n" + data)
        assert rest is None or data.endswith(rest)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "head_bytes"),
    [
        (HEAD + b"ok", len(HEAD)),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"ok", 0),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 0),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 0),
    ],
    ids=["plain", "after another", "chunked", "no body"],
)
def test_only_an_answer_with_one_head_and_a_length_may_be_recognized_by_its_head(data: bytes, head_bytes: int) -> None:
    answer = Answer()

    assert (answer.feed(data), answer.plain_bytes) == (b"", head_bytes)


def test_a_large_body_is_not_kept() -> None:
    answer = Answer()
    answer.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
    piece = bytes(1_000_000)

    rests = [answer.feed(piece) for _ in range(100)]

    assert rests == [None] * 99 + [b""]
    assert len(answer.text) == TEXT_BYTES


def test_an_http_1_0_answer_ends_the_connection_unless_it_keeps_it_alive() -> None:
    old, keeping = Answer(), Answer()

    old.feed(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
    keeping.feed(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: Keep-Alive\r\n\r\n")

    assert (old.keeps_alive, keeping.keeps_alive) == (False, True)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * (1 << 18),
    ],
)
def test_bytes_that_are_no_answer_raise_a_named_error(data: bytes) -> None:
    with pytest.raises(BadAnswerError):
        Answer().feed(data)
