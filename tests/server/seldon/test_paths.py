"""Which URL is for what, as the original answered."""

from __future__ import annotations

import pytest

from penstock.server.seldon.messages import Endpoint
from penstock.server.seldon.paths import (
    METADATA,
    NOT_ALLOWED,
    NOT_FOUND,
    OPENAPI,
    OPTIONS,
    PING,
    Purpose,
    is_penstock_path,
    methods_of,
    purpose_of,
    split_target,
)

CALLED = {
    b"/predict": Endpoint.PREDICT,
    b"/send-feedback": Endpoint.FEEDBACK,
    b"/transform-input": Endpoint.TRANSFORM_INPUT,
    b"/transform-output": Endpoint.TRANSFORM_OUTPUT,
    b"/route": Endpoint.ROUTE,
    b"/aggregate": Endpoint.AGGREGATE,
}
POSTED = {
    b"/api/v1.0/predictions": Endpoint.PREDICT,
    b"/api/v0.1/predictions": Endpoint.PREDICT,
    b"/api/v1.0/feedback": Endpoint.FEEDBACK,
    b"/api/v0.1/feedback": Endpoint.FEEDBACK,
}
READ: dict[bytes, Purpose] = {
    b"/health/status": Endpoint.HEALTH,
    b"/api/v1.0/health/status": Endpoint.HEALTH,
    b"/health/ping": PING,
    b"/metadata": METADATA,
    b"/api/v1.0/metadata": METADATA,
    b"/seldon.json": OPENAPI,
}


def purposes(path: bytes, *, strict: bool = True) -> list[Purpose]:
    """Give what becomes of each method."""
    return [purpose_of(method, path, strict=strict) for method in (b"GET", b"HEAD", b"POST", b"PUT", b"OPTIONS")]


@pytest.mark.parametrize("path", sorted(CALLED))
def test_a_method_of_the_class_is_called_by_get_and_post(path: bytes) -> None:
    assert purposes(path) == [CALLED[path]] * 3 + [NOT_ALLOWED, OPTIONS]
    assert purposes(path, strict=False) == purposes(path)


@pytest.mark.parametrize("path", sorted(POSTED))
def test_the_external_names_are_posted_to(path: bytes) -> None:
    assert purposes(path) == [NOT_FOUND, NOT_FOUND, POSTED[path], NOT_ALLOWED, OPTIONS]
    assert purposes(path, strict=False) == [NOT_ALLOWED, NOT_ALLOWED, POSTED[path], NOT_ALLOWED, OPTIONS]


@pytest.mark.parametrize("path", sorted(READ))
def test_what_tells_of_the_component_is_read(path: bytes) -> None:
    assert purposes(path) == [READ[path]] * 2 + [NOT_ALLOWED] * 2 + [OPTIONS]
    assert purposes(path, strict=False) == purposes(path)


@pytest.mark.parametrize("path", [b"/nope", b"/predict/", b"/Predict", b"/health//ping", b"/*", b"/combine", b"/\xff"])
def test_at_any_other_path_stood_a_folder_that_does_not_exist(path: bytes) -> None:
    assert purposes(path) == [NOT_FOUND, NOT_FOUND, NOT_ALLOWED, NOT_ALLOWED, OPTIONS]
    assert purposes(path, strict=False) == [NOT_FOUND] * 5


def test_but_at_the_root() -> None:
    assert purposes(b"/") == purposes(b"/", strict=False) == [NOT_FOUND] * 5


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (b"/predict", b"OPTIONS, GET, POST, HEAD"),
        (b"/api/v1.0/predictions", b"OPTIONS, POST, GET, HEAD"),
        (b"/health/ping", b"OPTIONS, GET, HEAD"),
        (b"/nope", b"OPTIONS, GET, HEAD"),
    ],
)
def test_the_methods_of_a_path_are_told_with_those_of_the_folder(path: bytes, allowed: bytes) -> None:
    assert methods_of(path, strict=True) == allowed


def test_or_without_them() -> None:
    assert methods_of(b"/api/v1.0/predictions", strict=False) == b"OPTIONS, POST"


@pytest.mark.parametrize(
    ("target", "query", "found"),
    [
        (b"/predict", b"a=b", (b"/predict", b"a=b")),
        (b"//predict", b"", (b"/predict", b"")),
        (b"/%70redict", b"json=%7b", (b"/predict", b"json=%7b")),
        (b"/%2Fpredict", b"", (b"/predict", b"")),
        (b"/predict#x", b"json=1", (b"/predict", b"")),
        (b"/predict", b"json=1#x", (b"/predict", b"json=1")),
        (b"http://x:80/predict", b"", (b"/predict", b"")),
        (b"https://x//predict", b"", (b"/predict", b"")),
        (b"http://x", b"", (b"/", b"")),
        (b"*", b"", (b"/*", b"")),
        (b"/a/../predict", b"", (b"/a/../predict", b"")),
    ],
)
def test_a_target_has_a_path_and_a_query(target: bytes, query: bytes, found: tuple[bytes, bytes]) -> None:
    assert split_target(target, query) == found


@pytest.mark.parametrize("path", [b"/v2", b"/v2/models/m/infer", b"/docs", b"/openapi.json", b"/metrics"])
def test_our_own_paths_stay_ours(path: bytes) -> None:
    assert is_penstock_path(path)


@pytest.mark.parametrize("path", [*sorted((*CALLED, *POSTED, *READ)), b"/", b"/v2x", b"/metricsx", b"/static/v2"])
def test_and_hide_none_of_the_original(path: bytes) -> None:
    assert not is_penstock_path(path)
