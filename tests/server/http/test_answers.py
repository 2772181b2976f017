from __future__ import annotations

from penstock.server.http.answers import Answers

DATE = [(b"date", b"Sat, 01 Jan 2000 00:00:00 GMT")]


def test_an_answer_begins_with_its_status_and_the_default_fields() -> None:
    assert Answers().head(200, DATE) == b"HTTP/1.1 200 OK\r\ndate: Sat, 01 Jan 2000 00:00:00 GMT\r\n"
    assert Answers().head(503, []) == b"HTTP/1.1 503 Service Unavailable\r\n"


def test_a_status_without_a_name_has_an_empty_one() -> None:
    assert Answers().head(299, []) == b"HTTP/1.1 299 \r\n"


def test_a_loud_one_has_its_reason_in_capitals() -> None:
    assert Answers(loud=True).head(406, []) == b"HTTP/1.1 406 NOT ACCEPTABLE\r\n"
    assert Answers(loud=True).ok_json([]).startswith(b"HTTP/1.1 200 OK\r\n")


def test_the_usual_answer_lacks_its_length_only() -> None:
    assert Answers().ok_json(DATE) % 7 == (
        b"HTTP/1.1 200 OK\r\ndate: Sat, 01 Jan 2000 00:00:00 GMT\r\n"
        b"content-type: application/json\r\ncontent-length: 7\r\n\r\n"
    )


def test_a_percent_sign_in_a_default_field_stays_one() -> None:
    assert b"\r\nserver: 100%d%%\r\n" in Answers().ok_json([(b"server", b"100%d%%")]) % 0


def test_everything_is_made_again_when_the_list_is_another_one() -> None:
    answers = Answers()
    before = answers.head(404, DATE), answers.ok_json(DATE)
    later = [(b"date", b"Sat, 01 Jan 2000 00:00:01 GMT")]

    assert (answers.head(404, DATE), answers.ok_json(DATE)) == before
    assert b"00:00:01" in answers.ok_json(later)
    assert b"00:00:01" in answers.head(404, later)
    assert b"00:00:00" not in answers.head(404, later)
