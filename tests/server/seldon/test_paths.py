"""Which URL serves which purpose, as in seldon-core."""

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
    """Return the purpose of each HTTP method."""
    return [purpose_of(method, path, strict=strict) for method in (b"GET", b"HEAD", b"POST", b"PUT", b"OPTIONS")]


@pytest.mark.parametrize("path", sorted(CALLED))
def test_component_methods_are_called_by_get_and_post(path: bytes) -> None:
    assert purposes(path) == [CALLED[path]] * 3 + [NOT_ALLOWED, OPTIONS]
    assert purposes(path, strict=False) == purposes(path)


@pytest.mark.parametrize("path", sorted(POSTED))
def test_external_api_paths_accept_only_post(path: bytes) -> None:
    assert purposes(path) == [NOT_FOUND, NOT_FOUND, POSTED[path], NOT_ALLOWED, OPTIONS]
    assert purposes(path, strict=False) == [NOT_ALLOWED, NOT_ALLOWED, POSTED[path], NOT_ALLOWED, OPTIONS]


@pytest.mark.parametrize("path", sorted(READ))
def test_health_metadata_and_openapi_paths_accept_only_get(path: bytes) -> None:
    assert purposes(path) == [READ[path]] * 2 + [NOT_ALLOWED] * 2 + [OPTIONS]
    assert purposes(path, strict=False) == purposes(path)


@pytest.mark.parametrize("path", [b"/nope", b"/predict/", b"/Predict", b"/health//ping", b"/*", b"/combine", b"/\xff"])
def test_an_unknown_path_is_not_found_or_not_allowed_as_in_seldon_core(path: bytes) -> None:
    assert purposes(path) == [NOT_FOUND, NOT_FOUND, NOT_ALLOWED, NOT_ALLOWED, OPTIONS]
    assert purposes(path, strict=False) == [NOT_FOUND] * 5


def test_the_root_path_is_not_found_for_every_method() -> None:
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
def test_allowed_methods_include_those_of_the_static_folder_when_strict_is_on(path: bytes, allowed: bytes) -> None:
    assert methods_of(path, strict=True) == allowed


def test_allowed_methods_exclude_those_of_the_static_folder_when_strict_is_off() -> None:
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
def test_a_request_target_is_split_into_a_path_and_a_query(
    target: bytes, query: bytes, found: tuple[bytes, bytes]
) -> None:
    assert split_target(target, query) == found


@pytest.mark.parametrize("path", [b"/v2", b"/v2/models/m/infer", b"/docs", b"/openapi.json", b"/metrics"])
def test_penstock_paths_are_recognized(path: bytes) -> None:
    assert is_penstock_path(path)


@pytest.mark.parametrize("path", [*sorted((*CALLED, *POSTED, *READ)), b"/", b"/v2x", b"/metricsx", b"/static/v2"])
def test_penstock_paths_hide_no_seldon_path(path: bytes) -> None:
    assert not is_penstock_path(path)
