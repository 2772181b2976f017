"""The seed's own examples, as printed, installed as a user's package is, on a live server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.deepaas.serving import served
from tests.originals import FORM, JSON, multipart

pytestmark = pytest.mark.slow
TRAINED = '"status": "running"'


@contextmanager
def model(point: str) -> Iterator[str]:
    """Serve one entry point as my_model. Yields: its URL."""
    with served({"models": {"my_model": point}, "arguments": []}) as port:
        yield f"http://127.0.0.1:{port}/v2/models/my_model"


def response_of(url: str, content: bytes | None = None, kind: str = JSON) -> Any:
    """Ask. Returns: the answer, read; bytes if it is no JSON."""
    request = urllib.request.Request(url, content, {"Content-Type": kind} if content else {})
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    with answer:
        body = answer.read()
        return (
            json.loads(body) if answer.headers.get_content_type() == JSON else (answer.headers.get_content_type(), body)
        )


def test_metadata_is_what_get_metadata_returns_and_where_it_is() -> None:
    with model("seed_arguments") as url:
        assert response_of(f"{url}/") == {
            "id": "my_model",
            "name": "my_model",
            "links": [{"rel": "self", "href": "/v2/models/my_model"}],
            "author": "Author name",
            "description": "Model description",
            "license": "Model's license",
            "url": "URL for the model (e.g. GitHub repository)",
            "version": "Model version",
        }


def test_arguments_have_the_default_that_they_say_even_outside_their_choices() -> None:
    with model("seed_arguments") as url:
        assert response_of(f"{url}/predict/", b"{}") == {"status": "OK", "predictions": {"arg1": "foo"}}
        assert response_of(f"{url}/predict/?arg1=choice2", b"{}")["predictions"] == {"arg1": "choice2"}
        begun = response_of(f"{url}/train/?arg1=choice1", b"{}")
        assert (begun["args"], begun["status"]) == ({"arg1": "choice1"}, "running")


def test_a_file_is_an_object_with_a_name_a_file_name_a_content_type_and_its_first_name() -> None:
    part = multipart(("data", "to infer", "input.txt", "text/plain"))
    with model("seed_file") as url:
        assert response_of(f"{url}/predict/", part, FORM)["predictions"] == {
            "name": "data",
            "content_type": "text/plain",
            "original": "input.txt",
            "content": "to infer",
        }
        assert response_of(f"{url}/predict/", b"{}")["predictions"] is None


def test_a_url_is_checked_and_given_as_it_is() -> None:
    with model("seed_url") as url:
        assert response_of(f"{url}/predict/?url=https%3A%2F%2Fexample.com%2Fa.png", b"{}")["predictions"] == {
            "url": "https://example.com/a.png"
        }
        assert response_of(f"{url}/predict/?url=nonsense", b"{}") == (422, {"url": ["Not a valid URL."]})


def test_accept_chooses_what_is_returned() -> None:
    with model("seed_accept") as url:
        assert response_of(f"{url}/predict/", b"{}") == ("application/zip", b"PK\x05\x06" + bytes(18))
        assert response_of(f"{url}/predict/?accept=image%2Fpng", b"{}") == ("image/png", b"\x89PNG\r\n\x1a\n")
        assert response_of(f"{url}/predict/", b'{"accept": "application/json"}') == {
            "status": "OK",
            "predictions": {"some": "json"},
        }


@pytest.mark.parametrize("point", ["seed_schemas:OfADict", "seed_schemas:OfAClass"])
def test_a_schema_gives_the_answer_its_own_form(point: str) -> None:
    with model(point) as url:
        assert response_of(f"{url}/predict/", b"{}") == {
            "status": "OK",
            "predictions": [{"label": "foo", "probability": 1.0}, {"label": "bar", "probability": 0.5}],
        }


def test_an_object_of_a_class_is_created_once_and_kept() -> None:
    with model("forms:Whole") as url:
        assert response_of(f"{url}/")["author"] == "of a class"
        assert response_of(f"{url}/predict/?a-hyphen=2", b"{}")["predictions"] == {"calls": 101, "a-hyphen": 2}
        assert response_of(f"{url}/predict/", b"{}")["predictions"] == {"calls": 102, "a-hyphen": 1}
