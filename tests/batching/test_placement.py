"""Placement: what it has loaded is closed when nobody can be using it any more, and it leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.backends.errors import Code, DeviceLost, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.placement import Devices, Placement, place
from penstock.batching.rates import RateLimiter
from penstock.batching.spec import InstanceGroup, ModelSpec, Resource
from tests.fakes import FakeBackend

SPEC = ModelSpec("m", 1, Path("m.onnx"))
GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), batched=True)


def fake() -> FakeBackend:
    return FakeBackend(GRAPH, lambda inputs: inputs)


def placed(reopened: list[FakeBackend]) -> tuple[Placement, FakeBackend]:
    """Give a Placement that loads again what is first in the list, or else says that it is lost."""

    def reopen(_: int) -> FakeBackend:
        if not reopened:
            raise DeviceLost(Code.NOT_READY, "gone")
        return reopened.pop(0)

    backend = fake()
    (made,) = place(SPEC, [backend], Devices(), reopen)
    return made, backend


def test_a_backend_that_was_replaced_is_closed_when_the_last_of_its_bindings_is_back() -> None:
    new = fake()
    at, old = placed([new])
    first, second = at.bind(GRAPH, 8), at.bind(GRAPH, 8)

    at.replace(first, GRAPH, 8)
    assert (at.backend, old.closed, new.closed) == (new, False, False)
    at.replace(second, GRAPH, 8)
    assert (at.backend, old.closed, new.closed) == (new, True, False)
    at.close()
    assert new.closed


def test_what_was_replaced_and_not_given_back_is_closed_at_the_end() -> None:
    new = fake()
    at, old = placed([new])
    first, _ = at.bind(GRAPH, 8), at.bind(GRAPH, 8)
    at.replace(first, GRAPH, 8)

    at.close()

    assert old.closed
    assert new.closed


def test_a_binding_is_known_for_as_long_as_its_backend_is_there() -> None:
    at, old = placed([fake()])
    first, second = at.bind(GRAPH, 8), at.bind(GRAPH, 8)
    third = at.replace(first, GRAPH, 8)

    assert at.is_bound(old, second)
    assert at.is_bound(at.backend, third)
    assert not at.is_bound(old, third)
    assert not at.is_bound(old, first)


def test_one_that_cannot_be_loaded_again_keeps_what_it_has() -> None:
    at, old = placed([])
    lost = at.bind(GRAPH, 8)

    with pytest.raises(DeviceLost):
        at.replace(lost, GRAPH, 8)

    assert at.backend is old
    assert at.is_bound(old, lost)
    assert not old.closed


def test_it_leaves_the_limiter_also_where_a_later_one_can_never_run() -> None:
    devices = Devices(limiter := RateLimiter({("gpu", None): 4}))
    groups = [InstanceGroup(2, resources=(Resource("gpu", needed),)) for needed in (1, 9)]

    with pytest.raises(InferError):
        place(replace(SPEC, instances=tuple(groups)), [fake(), fake()], devices, lambda _: fake())
    assert not limiter._claims

    (at,) = place(replace(SPEC, instances=(groups[0],)), [fake()], devices, lambda _: fake())
    assert limiter._claims == at.claims
    at.close()
    assert not limiter._claims
