"""Header fields that become parameters."""

from __future__ import annotations

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.settings import SettingError, resolve
from penstock.server.v2.forwarding import Forwarding


def test_names_with_a_match_are_forwarded_in_any_case() -> None:
    found = Forwarding("^(X-Tenant|trace)")

    assert found.parameters({b"x-tenant": b"a", b"tracestate": b"b", b"host": b"c"}) == {
        "x-tenant": "a",
        "tracestate": "b",
    }
    assert found.parameters_of({"X-TENANT": "ä"}) == {"X-TENANT": "ä"}


def test_an_empty_pattern_forwards_nothing() -> None:
    assert Forwarding.of("") is None
    assert Forwarding.of("x") is not None


@pytest.mark.parametrize("name", ["priority", "timeout", "headers", "sequence_id", "triton_x"])
def test_reserved_names_are_refused_when_they_match(name: str) -> None:
    with pytest.raises(InferError) as caught:
        Forwarding(".*").parameters({name.encode(): b"1"})

    assert caught.value.code is Code.INVALID
    assert Forwarding("^x-").parameters({name.encode(): b"1"}) == {}


@pytest.mark.parametrize("name", ["http_header_forward_pattern", "grpc_header_forward_pattern"])
def test_a_pattern_that_is_none_stops_the_start(name: str) -> None:
    with pytest.raises(SettingError, match="wanted a regular expression"):
        resolve({name: "("}, {})
