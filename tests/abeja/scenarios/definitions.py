"""Functions with which tests/abeja/scenarios/*.py define the requests. Runs on Python 3.8 too."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.originals import Group, RecordedRequest, get, post

HANDLERS = Path(__file__).parent.parent / "handlers"
TEXT = "text/plain"


def table(module: str, name: str) -> list[str]:
    """Give the names of the cases that a module of handlers/ lists."""
    import sys

    sys.path.insert(0, str(HANDLERS))
    try:
        named: dict[str, Any] = runpy.run_path(str(HANDLERS / f"{module}.py"))[name]
    finally:
        sys.path.remove(str(HANDLERS))
    return list(named)


def group(
    name: str, handler: str, requests: Sequence[RecordedRequest], environment: dict[str, str] | None = None
) -> Group:
    """Give the requests to the server of one handler, as the proxy and the runtime together answer them."""
    server = {"from": "proxy+runtime", "handler": handler, "environment": environment or {}}
    return Group(name, server, requests)


def by_name(names: Sequence[str], **options: Any) -> list[RecordedRequest]:
    """Give one request for each name, with the name as the query."""
    return [get(name, "/?" + name, **options) for name in names]


def text(name: str, body: Any = "hello", kind: str = TEXT, method: str = "POST", **options: Any) -> RecordedRequest:
    """Give a request that sends a text."""
    options.setdefault("headers", {})
    request = post(name, options.pop("path", "/"), body, kind, **options)
    return RecordedRequest(**{**vars(request), "method": method})
