"""Placement: its backends are closed once no binding can use them, and it leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.backends.backend import Binding
from penstock.backends.errors import Code, DeviceLost, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.devices.placement import Devices, Placement, make_placements
from penstock.batching.devices.rate_limiter import RateLimiter
from penstock.batching.spec import InstanceGroup, ModelSpec, Resource
from tests.fakes import FakeBackend

SPEC = ModelSpec("m", 1, Path("m.onnx"))
GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), batched=True)


def fake() -> FakeBackend:
    return FakeBackend(GRAPH, lambda inputs: inputs)


def placed(reopened: list[FakeBackend]) -> tuple[Placement, FakeBackend]:
    """Make a Placement that reloads the first backend of the list, or raises DeviceLost if there is none."""

    def reopen(_: int) -> FakeBackend:
        if not reopened:
            raise DeviceLost(Code.NOT_READY, "gone")
        return reopened.pop(0)

    backend = fake()
    (placement,) = make_placements(SPEC, [backend], Devices(), reopen)
    return placement, backend


@pytest.mark.parametrize("option", ["intra_op_thread_count", "TF_NUM_INTRA_THREADS"])
def test_the_width_of_a_run_is_the_configured_thread_count_of_its_session(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.batching.devices.device.usable_cpus", lambda: 8)

    (at,) = make_placements(replace(SPEC, options={option: "2"}), [fake()], Devices(), lambda _: fake())

    assert at.share.width == 2


def test_a_replaced_backend_is_closed_when_its_last_binding_is_returned() -> None:
    new = fake()
    at, old = placed([new])
    first, second = at.bind(GRAPH, 8), at.bind(GRAPH, 8)

    at.rebind([first], GRAPH, 8)
    assert (at.backend, old.closed, new.closed) == (new, False, False)
    at.rebind([second], GRAPH, 8)
    assert (at.backend, old.closed, new.closed) == (new, True, False)
    at.close()
    assert new.closed


def test_a_replaced_backend_with_outstanding_bindings_is_closed_with_the_placement() -> None:
    new = fake()
    at, old = placed([new])
    first, _ = at.bind(GRAPH, 8), at.bind(GRAPH, 8)
    at.rebind([first], GRAPH, 8)

    at.close()

    assert old.closed
    assert new.closed


def test_a_binding_is_bound_for_as_long_as_its_backend_is_open() -> None:
    at, old = placed([fake()])
    first, second = at.bind(GRAPH, 8), at.bind(GRAPH, 8)
    (third,) = at.rebind([first], GRAPH, 8)

    assert at.is_bound(old, second)
    assert at.is_bound(at.backend, third)
    assert not at.is_bound(old, third)
    assert not at.is_bound(old, first)


def test_a_backend_that_cannot_be_reloaded_is_kept() -> None:
    at, old = placed([])
    lost = at.bind(GRAPH, 8)

    with pytest.raises(DeviceLost):
        at.rebind([lost], GRAPH, 8)

    assert at.backend is old
    assert at.is_bound(old, lost)
    assert not old.closed


ON_GPU = replace(SPEC, instances=(InstanceGroup(1, ("cuda:0",)),))


class TestGpuPlacement:
    def test_a_lost_backend_is_closed_before_it_is_reloaded(self) -> None:
        old, new = fake(), fake()
        closed: list[bool] = []

        def reopen(_: int) -> FakeBackend:
            closed.append(old.closed)
            return new

        (at,) = make_placements(ON_GPU, [old], Devices(), reopen)
        lost = [at.bind(GRAPH, 8), at.bind(GRAPH, 8)]
        bindings = at.rebind(lost, GRAPH, 8)

        assert closed == [True]
        assert at.backend is new
        assert at.bindings == bindings == new.bindings

    def test_a_reload_that_does_not_fit_leaves_no_binding_and_a_later_one_succeeds(self) -> None:
        new = [fake()]
        answers = [InferError(Code.OVERLOADED, "it does not fit"), None]

        def reopen(_: int) -> FakeBackend:
            error = answers.pop(0)
            if error is not None:
                raise error
            return new[0]

        (at,) = make_placements(ON_GPU, [fake()], Devices(), reopen)
        lost = [at.bind(GRAPH, 8)]
        with pytest.raises(InferError, match="does not fit"):
            at.rebind(lost, GRAPH, 8)
        assert not at.bindings

        assert at.rebind(lost, GRAPH, 8) == new[0].bindings
        assert at.backend is new[0]

    def test_a_reload_whose_second_binding_does_not_fit_leaves_no_binding(self) -> None:
        class Small(FakeBackend):
            most = 1

            def bind(self, signature: Signature, capacity_rows: int) -> Binding:
                if len(self.bindings) >= self.most:
                    raise InferError(Code.OVERLOADED, "it does not fit")
                return super().bind(signature, capacity_rows)

        small = Small(GRAPH, lambda inputs: inputs)
        (at,) = make_placements(ON_GPU, [fake()], Devices(), lambda _: small)
        lost = [at.bind(GRAPH, 8), at.bind(GRAPH, 8)]
        with pytest.raises(InferError, match="does not fit"):
            at.rebind(lost, GRAPH, 8)
        assert not at.bindings

        small.most = 3
        assert at.rebind(lost, GRAPH, 8) == small.bindings[1:]


def test_a_placement_leaves_the_rate_limiter_on_close_and_on_a_failed_load() -> None:
    devices = Devices(limiter := RateLimiter({("gpu", None): 4}))
    groups = [InstanceGroup(2, resources=(Resource("gpu", needed),)) for needed in (1, 9)]

    with pytest.raises(InferError):
        make_placements(replace(SPEC, instances=tuple(groups)), [fake(), fake()], devices, lambda _: fake())
    assert not limiter._claims

    (at,) = make_placements(replace(SPEC, instances=(groups[0],)), [fake()], devices, lambda _: fake())
    assert limiter._claims == at.claims
    at.close()
    assert not limiter._claims


def test_a_device_lost_for_the_process_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[str] = []
    devices = Devices()
    devices.on_lost = lambda: reasons.append(devices.lost_reason)
    devices.mark_lost("model 'a' lost its device")
    devices.mark_lost("model 'b' lost its device")

    assert reasons == ["model 'a' lost its device"]
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]
