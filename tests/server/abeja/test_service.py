"""AbejaService: which requests are answered from their head alone, and what the worker gets of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.abeja.messages import read_head, split_call
from penstock.server.abeja.service import AbejaService
from penstock.server.http.head import parse_head
from penstock.server.http.limits import Limits
from penstock.server.workers.order import WorkerLost
from tests.fakes import fake_model

NOBODY: Any = None


class Connection:
    """Records the answers."""

    def __init__(self) -> None:
        self.answers: list[tuple[Any, ...]] = []

    def answer(self, *answer: Any) -> None:
        self.answers.append(answer)


def service(*, ready: bool = True, hidden: tuple[str, ...] = ("Authorization",)) -> AbejaService:
    return AbejaService(NOBODY, NOBODY, lambda: ready, hidden)


def claimed(method: str, target: str = "/", *lines: str, of: AbejaService | None = None) -> Any:
    """Give the claim of a head."""
    head = "\r\n".join([f"{method} {target} HTTP/1.1", "Host: x", *lines, "", ""])
    return (of or service()).claim(parse_head(head.encode("latin-1"), Limits()))


def head_of(claim: Any) -> dict[str, Any]:
    """Give the head that the worker gets."""
    return dict(read_head(split_call(claim.packed_head)[0]))


def test_the_worker_gets_the_headers_sorted_with_all_their_values() -> None:
    claim = claimed(
        "POST", "/any/path?x", "Content-Type:  text/plain; a=b ", "X-Many: one", "accept: */*", "x-many:  two, 2 ",
        "Content-Length: 2", "X-Empty:", "AUTHORIZATION: Bearer t", "X-Bytes: \xe9\xe6\x97\xa5",
    )  # fmt: skip

    assert head_of(claim) == {
        "method": "POST",
        "type": "text/plain; a=b",
        "headers": [
            ["accept", ["*/*"]], ["content-length", ["2"]], ["content-type", ["text/plain; a=b"]],
            ["x-bytes", ["\ufffd日"]], ["x-empty", [""]], ["x-many", ["one", "two, 2"]],
        ],
        "boundary": None,
    }  # fmt: skip
    assert claim.query is None


def test_a_trailer_header_is_passed_on_only_without_a_chunked_body() -> None:
    assert head_of(claimed("GET", "/", "Trailer: x"))["headers"] == [["trailer", ["x"]]]
    chunked = claimed("POST", "/", "Trailer: x", "Transfer-Encoding: chunked", "Content-Type: text/plain")
    assert head_of(chunked)["headers"] == [["content-type", ["text/plain"]]]


def test_the_hidden_headers_are_configurable() -> None:
    claim = claimed("GET", "/", "Authorization: t", "X-Key: k", of=service(hidden=("x-key",)))

    assert head_of(claim)["headers"] == [["authorization", ["t"]]]


def test_the_body_of_a_get_is_its_query_for_any_content_type() -> None:
    claim = claimed("GET", "/a?b=%20c+d?e", "Content-Type: multipart/form-data; boundary=x")

    assert (claim.query, head_of(claim)["type"]) == (b"b=%20c+d?e", "application/x-www-form-urlencoded")
    assert head_of(claim)["boundary"] is None


def test_a_handler_gets_the_query_of_a_get_instead_of_the_body() -> None:
    sent: list[Any] = []
    model: Any = fake_model()
    engine: Any = SimpleNamespace(generation=1, model=lambda _name: model, submit=sent.append)
    of, connection = AbejaService(engine, NOBODY, lambda: True, ()), Connection()
    for method, target in (("GET", "/a?b=c"), ("POST", "/a?b=c")):
        of.answer(connection, claimed(method, target, "Content-Type: text/plain", of=of), b"body")  # type: ignore[arg-type]

    assert [split_call(call.body)[1] for call in sent] == [b"b=c", b"body"]


def test_the_worker_gets_the_boundary_of_a_form() -> None:
    assert head_of(claimed("PUT", "/", 'Content-Type: Multipart/Form-Data; BOUNDARY="a b"'))["boundary"] == "a b"
    assert head_of(claimed("POST", "/", "Content-Type: multipart/mixed; boundary=a"))["boundary"] is None


@pytest.mark.parametrize(
    ("method", "lines", "kind"),
    [
        ("PATCH", ["Content-Type: text/plain"], "text/plain"), ("DELETE", [], ""), ("OPTIONS", [], ""),
        ("HEAD", [], ""), ("POST", [], ""), ("PUT", ["Content-Type: text/"], "text/"),
        ("POST", ["Content-Type: bad;;", "Content-Type: a/b"], "bad;;"),
        ("POST", ["Content-Type: multipart/form-data; boundary="], "multipart/form-data; boundary="),
    ],
)  # fmt: skip
def test_unsupported_methods_and_content_types_are_answered_501(method: str, lines: list[str], kind: str) -> None:
    claim, connection = claimed(method, "/", *lines), Connection()
    service().answer(connection, claim, b"")  # type: ignore[arg-type]

    text = f'{{"status":"Content-Type: [{kind}] is not supported"}}'
    assert connection.answers == [(501, text.encode(), b"application/json")]


def test_a_form_without_a_boundary_is_rejected_with_503() -> None:
    claim = claimed("POST", "/", "Content-Type: multipart/form-data")

    assert claim.rejection == (503, b'{"status":": no multipart boundary param in Content-Type"}')


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "HEAD"])
@pytest.mark.parametrize(
    ("ready", "answer"), [(True, (200, b'{"status":"ok"}')), (False, (503, b'{"status":"service unavailable"}'))]
)
def test_health_check_is_answered_for_any_method(method: str, ready: bool, answer: tuple[int, bytes]) -> None:
    connection = Connection()
    service(ready=ready).answer(connection, claimed(method, "/health_check?x"), b"")  # type: ignore[arg-type]

    assert connection.answers == [(*answer, b"application/json")]
    assert claimed("GET", "/health_check/").lookup is not None


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (WorkerLost("it ended"), 500, "Internal Server Error: unexpected error of communication with runtime"),
        (InferError(Code.INTERNAL, "x"), 500, "Internal Server Error: unexpected error of communication with runtime"),
        (InferError(Code.NOT_READY, "x"), 503, "service unavailable"),
        (InferError(Code.OVERLOADED, "the queue is full"), 503, "the queue is full"),
        (WorkerLost("a call took longer", Code.EXPIRED), 503, "a call took longer"),
    ],
)
def test_the_status_of_a_failed_call_follows_from_the_error(error: InferError, status: int, text: str) -> None:
    connection = Connection()
    service().answer_failure(connection, NOBODY, error)  # type: ignore[arg-type]

    assert connection.answers[0][:2] == (status, f'{{"status":"{text}"}}'.encode())
