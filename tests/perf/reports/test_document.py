"""The document: what is written is read again, and nothing else is taken for it."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.reports import document as documents
from penstock.perf.reports.document import Document, DocumentError
from tests.perf.reports.sample_documents import run

_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=6),
    int: st.integers(-(2**63), 2**64),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    Any: st.none() | st.booleans() | st.integers() | st.text(max_size=4),
}


def _of(kind: Any, deep: int = 0) -> st.SearchStrategy[Any]:
    if kind in _SCALARS:
        return _SCALARS[kind]
    inner = typing.get_args(kind)
    most = 2 if deep < 3 else 0
    if isinstance(kind, types.UnionType):
        return st.none() | _of(inner[0], deep + 1) if most else st.none()
    if typing.get_origin(kind) is list:
        return st.lists(_of(inner[0], deep + 1) if most else st.nothing(), max_size=most)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(st.text(max_size=4), _of(inner[1], deep + 1) if most else st.nothing(), max_size=most)
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: _of(each, deep + 1) for name, each in hints.items() if name != "format"})


@settings(max_examples=25, deadline=None)
@given(st.deferred(lambda: _of(Document)))
def test_a_written_document_is_read_back(document: Document) -> None:
    assert _read(json.loads(documents.text(document))) == document


def _read(json_document: Any) -> Document:
    document: Document = documents._make(Document, json_document, "")
    return document


def test_an_arbitrary_document_survives_a_file(tmp_path: Path) -> None:
    document = run()

    documents.write(document, tmp_path / "a.json")

    assert documents.read(tmp_path / "a.json") == document


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an unknown field": (
        lambda json_document: json_document.update(colour="red"),
        "colour: not known; was it made by a later penstock?",
    ),
    "an unknown field inside": (
        lambda json_document: json_document["levels"][1]["client"].update(colour="red"),
        "levels[1].client.colour: not known",
    ),
    "a missing field": (lambda json_document: json_document["model"].pop("name"), "model.name: missing"),
    "a text for a number": (
        lambda json_document: json_document["levels"][0]["client"].update(requests="many"),
        'levels[0].client.requests must be a whole number, not "many"',
    ),
    "a truth for a number": (
        lambda json_document: json_document["levels"][0]["client"].update(seconds=True),
        "must be a number",
    ),
    "a number beyond any": (
        lambda json_document: json_document["levels"][0]["client"].update(seconds=10**400),
        "must be a number",
    ),
    "a fraction for a count": (
        lambda json_document: json_document["levels"][0].update(settled=1.5),
        "levels[0].settled must be a whole number, not 1.5",
    ),
    "null for an object": (lambda json_document: json_document.update(model=None), "model must be an object, not null"),
    "an object for a list": (lambda json_document: json_document.update(levels={}), "levels must be a list, not {}"),
    "a number within texts": (
        lambda json_document: json_document.update(command=["a", 1]),
        "command[1] must be a string, not 1",
    ),
    "a number for a truth": (
        lambda json_document: json_document.update(interrupted=0),
        "interrupted must be true or false, not 0",
    ),
    "another format": (
        lambda json_document: json_document.update(format="penstock-perf/2"),
        "not a report of `penstock perf`",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_file_is_rejected_naming_the_field(name: str, tmp_path: Path) -> None:
    spoil, message = WRONG[name]
    json_document = json.loads(documents.text(run(gpu=False)))
    spoil(json_document)
    (tmp_path / "a.json").write_text(json.dumps(json_document), "utf-8")

    with pytest.raises(DocumentError) as refused:
        documents.read(tmp_path / "a.json")

    assert message in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path / "a.json"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 200_000], ids=range(6))
def test_a_file_that_is_not_a_json_object_is_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)

    with pytest.raises(DocumentError):
        documents.read(tmp_path / "a.json")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
_FOUND = json.loads(documents.text(run(gpu=False, server=False)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([each.name for each in dataclasses.fields(Document)]), _JSON)
def test_any_json_in_place_of_a_field_is_read_or_rejected(name: str, value: Any) -> None:
    try:
        _read(copy.copy(_FOUND) | {name: value})
    except DocumentError as refused:
        assert str(refused).startswith(name)  # noqa: PT017 (either is right)


def test_a_file_without_later_fields_is_read() -> None:
    json_document = json.loads(documents.text(run()))
    for level in json_document["levels"]:
        del level["gpus"], level["notes"]
        del level["server"]["request_us"]

    assert _read(json_document).levels[0].notes == []


def test_values_that_json_cannot_represent_do_not_lose_a_run() -> None:
    document = run()
    document.levels[0].client.latency_us["mean"] = math.nan
    document.levels[0].client.requests_per_s = math.inf
    strange: dict[Any, Any] = {
        "csv": Path("a.csv"),
        "range": (1, 2),
        "rows": np.int64(3),
        "rate": np.float32(math.nan),
        4: None,
    }
    document.options = strange

    json_document = _read(json.loads(documents.text(document)))

    assert math.isnan(json_document.levels[0].client.latency_us["mean"])
    assert math.isnan(json_document.levels[0].client.requests_per_s)
    assert json_document.options == {"csv": "a.csv", "range": [1, 2], "rows": 3, "rate": None, "4": None}
