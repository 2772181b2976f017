from __future__ import annotations

from penstock.server.http.answers import ResponseHeads

DATE = [(b"date", b"Sat, 01 Jan 2000 00:00:00 GMT")]


def test_an_answer_begins_with_its_status_and_the_default_fields() -> None:
    assert ResponseHeads().head(200, DATE) == b"HTTP/1.1 200 OK\r\ndate: Sat, 01 Jan 2000 00:00:00 GMT\r\n"
    assert ResponseHeads().head(503, []) == b"HTTP/1.1 503 Service Unavailable\r\n"


def test_a_status_without_a_name_has_an_empty_one() -> None:
    assert ResponseHeads().head(299, []) == b"HTTP/1.1 299 \r\n"


def test_a_loud_one_has_its_reason_in_capitals() -> None:
    assert ResponseHeads(uppercase=True).head(406, []) == b"HTTP/1.1 406 NOT ACCEPTABLE\r\n"
    assert ResponseHeads(uppercase=True).ok([], 0).startswith(b"HTTP/1.1 200 OK\r\n")


def test_the_usual_answer_lacks_its_body_only() -> None:
    assert ResponseHeads().ok(DATE, 7) == (
        b"HTTP/1.1 200 OK\r\ndate: Sat, 01 Jan 2000 00:00:00 GMT\r\n"
        b"content-type: application/json\r\ncontent-length: 7\r\n\r\n"
    )


def test_one_with_tensors_behind_its_json_says_where_they_begin() -> None:
    assert ResponseHeads().ok([], 19, 7) == (
        b"HTTP/1.1 200 OK\r\ninference-header-content-length: 7\r\n"
        b"content-type: application/octet-stream\r\ncontent-length: 19\r\n\r\n"
    )


def test_answers_of_every_size_have_their_own_length() -> None:
    answers = ResponseHeads()

    for size in [*range(3000), *range(3000)]:
        assert answers.ok([], size).endswith(b"\r\ncontent-length: %d\r\n\r\n" % size)


def test_a_percent_sign_in_a_default_field_stays_one() -> None:
    assert b"\r\nserver: 100%d%%\r\n" in ResponseHeads().ok([(b"server", b"100%d%%")], 0)


def test_everything_is_made_again_when_the_list_is_another_one() -> None:
    answers = ResponseHeads()
    before = answers.head(404, DATE), answers.ok(DATE, 1)
    later = [(b"date", b"Sat, 01 Jan 2000 00:00:01 GMT")]

    assert (answers.head(404, DATE), answers.ok(DATE, 1)) == before
    assert b"00:00:01" in answers.ok(later, 1)
    assert b"00:00:01" in answers.head(404, later)
    assert b"00:00:00" not in answers.head(404, later)
