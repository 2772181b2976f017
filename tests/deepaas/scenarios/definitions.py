"""The words in which this folder says what a server of DEEPaaS models is asked."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from tests.originals import FORM, URLENCODED, Group, RecordedRequest, multipart, post

__all__ = ["RecordedRequest", "encoded", "form", "group", "parts", "predict", "urlencoded"]


def group(name: str, requests: list[RecordedRequest], *arguments: str, models: dict[str, str], **server: Any) -> Group:
    """Say a group. models: name -> module[:attribute]. server: environment, files (name -> text, in {folder})."""
    return Group(name, {"models": models, "arguments": list(arguments), **server}, requests)


def predict(name: str, model: str, query: str = "", value: Any = None, **options: Any) -> RecordedRequest:
    """Post to a model's predict."""
    return post(name, f"/v2/models/{model}/predict/{query}", value, **options)


def form(name: str, model: str, *fields: Any, query: str = "", **options: Any) -> RecordedRequest:
    """Post a form of several parts."""
    return predict(name, model, query, multipart(*fields), kind=FORM, **options)


def urlencoded(name: str, model: str, text: str | bytes, query: str = "", **options: Any) -> RecordedRequest:
    """Post a form of one line."""
    return predict(name, model, query, text, kind=URLENCODED, **options)


def parts(text: bytes | str) -> bytes:
    """Give a form as it is, with its line ends."""
    content = text if isinstance(text, bytes) else text.encode()
    return content.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def encoded(**arguments: str) -> str:
    """Write a query."""
    return "?" + "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in arguments.items())
