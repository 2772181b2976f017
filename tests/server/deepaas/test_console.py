"""The API page: what it shows about models, how arguments are entered, and that no HTML is injected."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from penstock.server.deepaas import console
from penstock.server.deepaas.console import ModelState
from penstock.server.deepaas.messages import ModelDescription

EVIL = "<script>alert('\"x\"')</script>"
VOID = {"meta", "input", "link", "br"}


class Read(HTMLParser):
    """Reads a page strictly: every element is closed, in order. `found` is each element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Give the attributes of each element of a kind."""
        return [attributes for name, attributes in self.found if name == tag]


def shown(*parameters: dict[str, Any], trainings: Any = (), **fields: Any) -> str:
    """Render the page of a server with one model."""
    description = ModelDescription(predict_args={"parameters": list(parameters)}, **fields)
    models = [ModelState("m", description, {"description": "D"}, trainings)]
    return console.page("/base", models, predict=True, train=True).decode()


def entered(**parameter: Any) -> dict[str, str | None]:
    """Return the attributes of an argument's input element."""
    page = Read(shown({"name": "a", "in": "query", **parameter}))
    [found] = [each for _, each in page.found if "data-in" in each]
    return found


def test_the_page_is_well_formed_and_loads_no_external_resources() -> None:
    text = shown({"name": "a", "in": "query", "type": "string"})
    page = Read(text)

    assert not re.findall(r"(?:src|srcset)=|@import|url\(", text)
    assert not page.all("link")
    assert [each for each in page.all("script") if each] == []
    assert page.all("html") == [{"lang": "en"}]


def test_the_content_security_policy_allows_only_the_pages_own_script_and_style() -> None:
    text = shown()
    for kind in ("script", "style"):
        [content] = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest())
        assert b"%b-src 'sha256-%b'" % (kind.encode(), digest) in console.HEADER_LINES
    assert b"default-src 'none'" in console.HEADER_LINES
    assert console.HEADER_LINES.count(b"\r\n") == 1


def test_every_argument_has_a_label_and_a_description() -> None:
    page = Read(shown({"name": "a", "in": "query", "type": "string"}, {"name": "b", "in": "formData", "type": "file"}))
    identifiers = {each["id"] for _, each in page.found if "id" in each}

    fields = [each for _, each in page.found if "data-in" in each]
    assert [each["id"] for each in fields] == [each["for"] for each in page.all("label")]
    assert {each["aria-describedby"] for each in fields} <= identifiers


def test_a_browser_without_scripts_shows_a_note_about_empty_fields() -> None:
    [note] = re.findall(r"<noscript>(.*?)</noscript>", shown())
    assert "the empty ones as empty texts" in note


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"type": "integer"}, {"type": "number", "step": "1"}),
        ({"type": "number"}, {"type": "number", "step": "any"}),
        ({"type": "string"}, {"type": "text"}),
        ({"in": "formData", "type": "file"}, {"type": "file", "data-in": "form"}),
        ({"in": "query", "type": "file"}, {"type": "file", "data-in": "form"}),
        ({"in": "header", "type": "string"}, {"data-in": "header"}),
        ({"in": "cookie", "type": "string"}, {"disabled": None}),
        ({"required": True}, {"required": None}),
        ({"type": "array"}, {"data-kind": "array", "rows": "2"}),
    ],
    ids=str,
)
def test_an_argument_has_an_input_that_fits_its_type(field: Any, expected: Any) -> None:
    found = entered(**field)

    assert {name: found.get(name, "-") for name in expected} == expected


def test_choices_are_suggested_but_not_enforced() -> None:
    page = Read(shown({"name": "a", "in": "query", "type": "string", "enum": ["x", "y", None]}))

    [listed] = page.all("datalist")
    assert listed["id"] in {each.get("list") for each in page.all("input")}
    assert [each["value"] for each in page.all("option")] == ["x", "y", "None"]


def test_properties_of_a_json_body_are_entered_separately() -> None:
    properties = {"deep": {"type": "integer"}, "other": {}}
    schema = {"type": "object", "properties": properties, "required": ["deep"]}
    page = Read(shown({"name": "body", "in": "body", "schema": schema}))

    fields = [each for _, each in page.found if "data-in" in each]
    assert [(each["name"], each["data-in"], "required" in each) for each in fields] == [
        ("deep", "json", True),
        ("other", "json", False),
    ]


def test_text_from_models_and_clients_is_escaped() -> None:
    parameter = {
        "name": EVIL, "in": "query", "type": EVIL, "description": EVIL, "default": EVIL, "enum": [EVIL],
    }  # fmt: skip
    description = ModelDescription(predict_args={"parameters": [parameter]}, train_args={"parameters": [parameter]})
    metadata = dict.fromkeys(("description", "author", "license", "url", "version"), EVIL)
    training = dict.fromkeys(("uuid", "status", "date"), EVIL)
    models = [ModelState(EVIL, description, metadata, [training])]
    text = console.page("", models, predict=True, train=True).decode()

    Read(text)
    assert text.count("<script") == 1
    assert "alert('\"" not in text


@pytest.mark.parametrize("url", ["javascript:alert(1)", "data:text/html,x", 'http://x" onclick="y'])
def test_only_http_addresses_become_links(url: str) -> None:
    page = Read(
        console.page("", [ModelState("m", ModelDescription(), {"url": url})], predict=True, train=True).decode()
    )

    assert not [each for each in page.all("a") if str(each["href"]).startswith(("javascript", "data"))]
    assert not [each for each in page.all("a") if "onclick" in each]


def test_trainings_are_listed_with_links_to_their_pages() -> None:
    trainings = [
        {"uuid": "ab", "date": "2026-01-02", "status": "running"},
        {"uuid": "cd", "date": "2026-01-03", "status": "done"},
    ]
    text = shown(trainings=trainings)
    page = Read(text)

    links = [each["href"] for each in page.all("a")]
    assert "/base/v2/models/m/train/ab/page" in links
    assert [each["data-end"] for each in page.all("button") if "data-end" in each] == [
        "/base/v2/models/m/train/ab",
        "/base/v2/models/m/train/cd",
    ]
    assert ">Cancel</button>" in text
    assert ">Forget</button>" in text


def test_unsupported_and_disabled_methods_have_no_form() -> None:
    models = [ModelState("m", ModelDescription(predicts=False))]

    assert "calls return 501" in console.page("", models, predict=True, train=True).decode()
    assert not Read(console.page("", models, predict=False, train=False).decode()).all("form")


def test_a_models_name_is_percent_encoded_in_its_forms_action() -> None:
    page = Read(console.page("", [ModelState('a?#%/"é', ModelDescription())], predict=True, train=False).decode())

    assert page.all("form")[0]["action"] == "/v2/models/a%3F%23%25%2F%22%C3%A9/predict/"


def test_forms_have_the_correct_method_and_action_without_scripts() -> None:
    [form, other] = Read(shown({"name": "a", "in": "query", "type": "string"})).all("form")

    assert (form["method"], form["enctype"]) == ("post", "multipart/form-data")
    assert form["action"] == "/base/v2/models/m/predict/"
    assert other["action"] == "/base/v2/models/m/train/"
