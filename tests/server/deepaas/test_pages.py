"""Answers that the server gives without a model, and the log of its debug endpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.deepaas import debugging, pages
from penstock.server.deepaas.debugging import DebugLog
from penstock.server.http.head import HttpError, TooLargeError
from penstock.server.workers.order import WorkerLost

logger = logging.getLogger("penstock.tests")


def test_the_versions_answer_links_to_the_documentation() -> None:
    assert pages.write_json(pages.versions("", documents=True)).decode() == (
        '{"versions": [{"version": "stable", "id": "v2", "links": [{"rel": "self", "type": "application/json", '
        '"href": "/v2/"}]}], "links": [{"rel": "help", "type": "text/html", "href": "/api"}, '
        '{"rel": "describedby", "type": "application/json", "href": "/swagger.json"}]}'
    )


def test_without_documentation_the_versions_answer_has_no_link_to_it() -> None:
    assert [link["rel"] for link in pages.versions("", documents=False)["links"]] == ["describedby"]


def test_links_include_the_base_path() -> None:
    document = pages.versions("/a/b", documents=True)

    assert [link["href"] for link in document["links"]] == ["/a/b/api", "/a/b/swagger.json"]
    assert document["versions"] == [pages.version("/a/b")]
    assert pages.link_of("/a/b", "m") == "/a/b/v2/models/m"


@pytest.mark.parametrize(
    ("status", "text"),
    [(302, b"302: Found"), (308, b"308: Permanent Redirect"), (402, b"402: Payment Required"),
     (404, b"404: Not Found"), (405, b"405: Method Not Allowed")],
)  # fmt: skip
def test_a_status_answer_has_the_originals_text(status: int, text: bytes) -> None:
    assert pages.status_text(status) == text


def test_internal_errors_and_lost_workers_have_the_originals_error_text() -> None:
    for error in (InferError(Code.INTERNAL, "secret"), WorkerLost("killed"), WorkerLost("too long", Code.EXPIRED)):
        assert pages.error_text(error) == (500, b"500 Internal Server Error\n\nServer got itself in trouble")


def test_not_ready_and_overloaded_answers_have_the_reason() -> None:
    assert pages.error_text(InferError(Code.NOT_READY, "'m' is loading")) == (503, b"503: 'm' is loading")
    assert pages.error_text(InferError(Code.OVERLOADED, "full")) == (503, b"503: full")


def test_a_body_above_the_limit_is_rejected_in_the_originals_words() -> None:
    status, content_type, text = pages.malformed_answer(TooLargeError("ours"), 300)

    assert (status, text) == (413, b"Maximum request body size 300 exceeded.")
    assert content_type == b"text/plain; charset=utf-8"
    assert pages.malformed_answer(HttpError(431, "too many"), 300)[::2] == (431, b"431: too many")


@pytest.fixture
def debug_log() -> Iterator[DebugLog]:
    """Keep the log for as long as a test lasts."""
    logging.getLogger("penstock").setLevel(logging.INFO)
    keeps = DebugLog()
    yield keeps
    keeps.close()


def test_the_debug_log_is_shown_with_a_marker_for_each_request(debug_log: DebugLog) -> None:
    logger.info("model %s has said %r", "m", "hello")
    first, second = debug_log.text().decode(), debug_log.text().decode()

    assert "penstock.tests - INFO - model m has said 'hello'\n--- DEBUG MARKER 2" in first
    assert second.startswith(first)
    assert second.count("--- DEBUG MARKER ") == 2


def test_the_debug_log_is_bounded(debug_log: DebugLog) -> None:
    for number in range(200):
        logger.info("%d %s", number, "x" * 20_000)

    text = debug_log.text().decode()
    assert len(text) < debugging.MAX_CHARS + 1000
    assert " 199 x" in text
    assert " 1 x" not in text


def test_a_log_record_that_cannot_be_formatted_raises_nothing(
    debug_log: DebugLog, capsys: pytest.CaptureFixture[str]
) -> None:
    debug_log.handle(logging.LogRecord("x", logging.INFO, "x.py", 1, "%d", ("no number",), None))

    assert "no number" in capsys.readouterr().err
    assert b"x.py" not in debug_log.text()


def test_a_closed_debug_log_keeps_no_records(debug_log: DebugLog) -> None:
    debug_log.close()
    logger.info("afterwards")

    assert b"afterwards" not in debug_log.text()
