from __future__ import annotations

from penstock.server.http.response_heads import ResponseHeads

DATE = [(b"date", b"Sat, 01 Jan 2000 00:00:00 GMT")]


def test_an_answer_begins_with_its_status_and_the_default_fields() -> None:
    assert ResponseHeads().head(200, DATE) == b"HTTP/1.1 200 OK\r\ndate: Sat, 01 Jan 2000 00:00:00 GMT\r\n"
    assert ResponseHeads().head(503, []) == b"HTTP/1.1 503 Service Unavailable\r\n"


def test_an_unknown_status_has_an_empty_reason_phrase() -> None:
    assert ResponseHeads().head(299, []) == b"HTTP/1.1 299 \r\n"


def test_the_reason_phrase_is_in_capitals_if_uppercase_is_set() -> None:
    assert ResponseHeads(uppercase=True).head(406, []) == b"HTTP/1.1 406 NOT ACCEPTABLE\r\n"
    assert ResponseHeads(uppercase=True).ok([], 0).startswith(b"HTTP/1.1 200 OK\r\n")


def test_an_ok_answer_has_a_complete_head_with_its_content_length() -> None:
    assert ResponseHeads().ok(DATE, 7) == (
        b"HTTP/1.1 200 OK\r\ndate: Sat, 01 Jan 2000 00:00:00 GMT\r\n"
        b"content-type: application/json\r\ncontent-length: 7\r\n\r\n"
    )


def test_an_answer_with_binary_tensors_has_the_length_of_its_json_header() -> None:
    assert ResponseHeads().ok([], 19, 7) == (
        b"HTTP/1.1 200 OK\r\ninference-header-content-length: 7\r\n"
        b"content-type: application/octet-stream\r\ncontent-length: 19\r\n\r\n"
    )


def test_answers_of_every_size_have_the_right_content_length() -> None:
    answers = ResponseHeads()

    for size in [*range(3000), *range(3000)]:
        assert answers.ok([], size).endswith(b"\r\ncontent-length: %d\r\n\r\n" % size)


def test_percent_signs_in_a_default_field_are_kept() -> None:
    assert b"\r\nserver: 100%d%%\r\n" in ResponseHeads().ok([(b"server", b"100%d%%")], 0)


def test_cached_heads_are_rebuilt_when_the_list_of_default_fields_is_replaced() -> None:
    answers = ResponseHeads()
    before = answers.head(404, DATE), answers.ok(DATE, 1)
    later = [(b"date", b"Sat, 01 Jan 2000 00:00:01 GMT")]

    assert (answers.head(404, DATE), answers.ok(DATE, 1)) == before
    assert b"00:00:01" in answers.ok(later, 1)
    assert b"00:00:01" in answers.head(404, later)
    assert b"00:00:00" not in answers.head(404, later)
