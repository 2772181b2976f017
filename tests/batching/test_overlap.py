"""Overlap: when the next Batch is taken, and how two Batches on one device end."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Binding
from penstock.backends.errors import Code, DeviceLost, InferError, OutOfMemory, ProcessLost
from penstock.backends.signature import Signature
from penstock.batching.devices.device import Device
from penstock.batching.devices.placement import Devices
from penstock.batching.devices.rate_limiter import RateLimiter
from penstock.batching.request import InferRequest, Key
from penstock.batching.running import reload_backoff
from penstock.batching.running.lead import Lead
from penstock.batching.running.overlap import NextAction, next_action
from penstock.batching.running.watchdog import Watchdog
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.spec import BatchPolicy, InstanceGroup, Resource
from tests.batching.overlapping_device import LONG_NS, ROWS, House, Stream, opened
from tests.fakes import PATIENCE_S, fake_model, fake_request

NS = st.integers(0, 1 << 50)
MS = 1_000_000
MODEL = fake_model()


class TestNextAction:
    @given(NS, NS, st.booleans(), st.booleans(), st.booleans())
    def test_the_next_action_follows_from_time_waiting_requests_and_the_end_of_the_run(
        self, now_ns: int, take_ns: int, over: bool, waiting: bool, full: bool
    ) -> None:
        step = next_action(now_ns, take_ns, ended=over, waiting=waiting, full=full)

        if over:
            assert step is NextAction.END  # its answers go first
        elif waiting and full:
            assert step is NextAction.TAKE
        elif now_ns < take_ns:
            assert step is NextAction.WAIT
        else:
            assert step is (NextAction.TAKE if waiting else NextAction.END)

    @given(NS, st.integers(1, 1 << 40), st.booleans(), st.booleans())
    def test_a_batch_is_taken_or_ended_in_bounded_time(
        self, now_ns: int, cost_ns: int, waiting: bool, full: bool
    ) -> None:
        lead = Lead()
        take_ns = lead.take_ns(now_ns + cost_ns, cost_ns)

        assert next_action(now_ns + cost_ns, take_ns, ended=False, waiting=waiting, full=full) is not NextAction.WAIT


class Exact(CostModel):
    """A cost model that predicts the same time for any number of rows."""

    def __init__(self, ns: int) -> None:
        super().__init__()
        self.ns = ns

    def predict_ns(self, key: Key, rows: int) -> float:
        return self.ns


@dataclass
class Ran:
    """One batch in virtual time: when it was taken, could be computed, began and ended, and the rows it has."""

    taken: int
    there: int
    begun: int
    ended: int
    arrivals: list[int]


class Simulated:
    """One Instance under a virtual clock, with a real Scheduler: the arrivals, and the batches that ran."""

    def __init__(self, arrivals: list[int], cost_ns: int, gather_ns: int, most: int) -> None:
        self.scheduler = Scheduler(BatchPolicy(max_batch_rows=most), Exact(cost_ns))
        self.arrivals = sorted(arrivals)
        self.cost_ns, self.gather_ns = cost_ns, gather_ns
        self.lead = Lead()
        self.lead.learn_gather(gather_ns)
        self.ran: list[Ran] = []
        self._came = 0

    def run(self) -> None:
        now_ns, running = 0, None
        while running is not None or self._came < len(self.arrivals) or self.scheduler.request_count:
            self._come(now_ns)
            if running is None:
                running = self._take(now_ns, 0)
                now_ns = self.arrivals[self._came] if running is None else running.taken + self.gather_ns
                continue
            running = self._take_late(now_ns, running)
            now_ns = self.ran[-1].ended if running is None else running.taken + self.gather_ns

    def _come(self, now_ns: int) -> None:
        while self._came < len(self.arrivals) and self.arrivals[self._came] <= now_ns:
            request = fake_request(MODEL)
            request.enqueued_ns = self.arrivals[self._came]
            self.scheduler.add(request)
            self._came += 1

    def _take(self, now_ns: int, free_ns: int) -> Ran | None:
        batch = self.scheduler.take(now_ns, 0, free_ns)
        if batch is None:
            return None
        there = now_ns + 2 * self.gather_ns
        begun = max(there, self.ran[-1].ended if self.ran else 0)
        self.ran.append(Ran(now_ns, there, begun, begun + self.cost_ns, [each.enqueued_ns for each in batch.requests]))
        return self.ran[-1]

    def _take_late(self, now_ns: int, running: Ran) -> Ran | None:
        """Take the next batch on an arrival or when it is time; None if nothing arrived before the run ended."""
        take_ns = int(self.lead.take_ns(running.ended, self.cost_ns))
        looks = [now_ns, *(each for each in self.arrivals if now_ns < each < take_ns), max(take_ns, now_ns)]
        for look_ns in looks:
            self._come(look_ns)
            full = self.scheduler.free_batch_rows(look_ns) <= 0
            over = look_ns >= running.ended
            step = next_action(look_ns, take_ns, ended=over, waiting=self.scheduler.request_count > 0, full=full)
            if step is NextAction.TAKE:
                return self._take(look_ns, running.ended)
            if step is NextAction.END:
                break
        self._come(running.ended)
        return self._take(running.ended, 0)


class TestInVirtualTime:
    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.integers(0, 100 * MS), min_size=1, max_size=40),
        st.integers(MS, 20 * MS),
        st.integers(0, MS // 8),
        st.integers(1, 8),
    )
    def test_the_device_never_idles_while_requests_wait_and_batches_are_as_full_as_possible(
        self, arrivals: list[int], cost_ns: int, gather_ns: int, most: int
    ) -> None:
        simulated = Simulated(arrivals, cost_ns, gather_ns, most)
        simulated.run()
        ran = simulated.ran

        assert sorted(each for batch in ran for each in batch.arrivals) == sorted(arrivals)
        lead_ns = cost_ns - simulated.lead.take_ns(cost_ns, cost_ns)
        for before, after in pairwise(ran):
            assert after.taken >= before.taken + gather_ns  # the thread does one thing at a time
            if min(after.arrivals) <= before.ended - lead_ns - gather_ns:
                assert after.begun == before.ended  # it was there when the device was free
        for at, batch in enumerate(ran):
            if len(batch.arrivals) < most:
                # no request that had arrived was left behind, and the batch did not close too early
                later = [each for other in ran[at + 1 :] for each in other.arrivals]
                assert all(each > batch.taken for each in later)
                assert at == 0 or batch.taken >= ran[at - 1].ended - lead_ns - 1


def names(house: House) -> list[tuple[str, int]]:
    """The actions on each Binding, without filling."""
    return [(what, number) for what, number, _ in house.stream.events if what != "acquire"]


def answers(requests: list[InferRequest]) -> list[float]:
    return [float(np.asarray((request.outputs or [])[0])[0, 0]) for request in requests]


class Waited(Device):
    """A Device that reports requests for turns, and counts the batches that were charged."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.calls = threading.Semaphore(0)
        self.charged = 0

    def begin_batch(self, share: Any, cost_ns: float) -> None:
        super().begin_batch(share, cost_ns)
        self.charged += 1

    def request_turn(self, share: Any, waiter: Any) -> None:
        super().request_turn(share, waiter)
        self.calls.release()


class Tight(Stream):
    """It has memory for one Binding."""

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        if self.bindings:
            raise OutOfMemory(Code.OVERLOADED, "2 MB are wanted and 1 MB is free")
        return super().bind(signature, capacity_rows)


class TestTwoBatchesInFlight:
    def test_the_next_batch_begins_before_the_current_one_ends(self) -> None:
        with opened(Stream(ROWS, list)) as house:
            first, second = house.put_two([1, 2], [3])
            house.ended(first, second)

            assert names(house) == [("begin", 0), ("begin", 1), ("end", 0), ("end", 1)]
            assert answers([*first, *second]) == [1, 2, 3]

    def test_the_next_batch_is_timed_by_device_time_and_not_by_batch_cost(self) -> None:
        stream = Stream(ROWS, list, held=True)
        with opened(stream, predicted_ns=LONG_NS) as house:
            alone = house.put(1)
            stream.let_end()
            house.ended(alone)

            first, second = house.put_two([2], [3])
            for _ in (alone, first, second):
                stream.wait_begun()  # the last while the one before it is held
            stream.let_end(2)
            house.ended(first, second)

    def test_bindings_alternate_while_requests_arrive(self) -> None:
        stream = Stream(ROWS, list)
        with opened(stream, max_batch_rows=1) as house:
            requests, then = house.put_two([1, 2, 3], [4, 5, 6])
            house.ended(requests, then)

            begun = [number for what, number in names(house) if what == "begin"]
            assert begun == [0, 1, 0, 1, 0, 1]
            assert names(house)[1:-1] == [
                (what, at) for at in (1, 0, 1, 0, 1) for what, at in (("begin", at), ("end", 1 - at))
            ]
            assert answers([*requests, *then]) == [1, 2, 3, 4, 5, 6]

    def test_a_single_request_begins_at_once_and_its_answer_is_not_delayed(self) -> None:
        with opened(Stream(ROWS, list)) as house:
            for value in (1, 2):
                request = house.put(value)
                house.ended(request)

            assert names(house) == [("begin", 0), ("end", 0), ("begin", 0), ("end", 0)]

    def test_the_next_batch_grows_during_a_run_and_is_taken_when_it_is_full(self) -> None:
        stream = Stream(ROWS, list, held=True)
        with opened(stream, predicted_ns=LONG_NS, max_batch_rows=4) as house:
            first = house.put(0)
            stream.wait_begun()
            house.put(1)
            second = house.put(2, 3)
            assert [request.waiting for request in second] == [True, True]
            house.put(4)
            stream.wait_begun()

            assert [each for each in stream.events if each[0] == "begin"] == [("begin", 0, 1), ("begin", 1, 4)]
            stream.let_end()
            house.ended(first)

    def test_the_cost_model_learns_how_long_a_batch_kept_the_device_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = Stream(ROWS, list)
        with opened(stream) as house:
            learned: list[int] = []
            monkeypatch.setattr(house.model.scheduler, "learn", lambda key, rows, ns, now_ns, _: learned.append(ns))
            first, second = house.put_two([1], [2])
            before, after = house.next(), house.next()

            assert (before.requests, after.requests) == (first, second)
            assert after.exec_start_ns < before.exec_end_ns == after.device_free_ns
            assert learned == [before.exec_end_ns - before.exec_start_ns, after.exec_end_ns - before.exec_end_ns]

    def test_device_time_is_counted_by_device_name(self) -> None:
        with opened(Stream(ROWS, list)) as house:
            first, second = house.put_two([1, 2, 3], [4])
            house.ended(first, second)

            assert house.model.device_ns == {"cuda:0": 4_000}

    def test_batches_run_one_after_another_if_memory_holds_only_one_binding(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with opened(Tight(ROWS, list)) as house:
            first, second = house.put_two([1, 2], [3])
            house.ended(first, second)

            assert names(house) == [("begin", 0), ("end", 0), ("begin", 0), ("end", 0)]
            assert answers([*first, *second]) == [1, 2, 3]
        assert "model m: not enough memory for two batches in flight" in caplog.text

    def test_both_batches_are_run_on_one_thread(self) -> None:
        with opened(Stream(ROWS, list)) as house:
            first, second = house.put_two([1], [2])
            house.ended(first, second)

            assert house.stream.threads == {"m/1#0"}
            assert house.model.loop_binding is None

    def test_both_batches_share_a_turn_if_no_other_model_waits(self) -> None:
        device = Waited(1)
        with opened(Stream(ROWS, list), device=device) as house, opened(Stream(ROWS, list), device=device) as other:
            assert device.contended
            for _ in range(2):
                first, second = house.put_two([1], [2])
                house.ended(first, second)
                other.ended(other.put(3))

            assert names(house) == [("begin", 0), ("begin", 1), ("end", 0), ("end", 1)] * 2
            assert device.charged == 6  # each batch, in a turn of its own or not

    def test_a_model_under_the_rate_limiter_has_one_batch_at_a_time(self) -> None:
        group = InstanceGroup(1, ("cuda:0",), resources=(Resource("R", 1),))
        devices = Devices(RateLimiter({("R", None): 1}))
        with opened(Stream(ROWS, list), None, devices, group=group) as house:
            first, second = house.put_two([1], [2])
            house.ended(first, second)

            assert len(house.stream.bindings) == 1

    def test_requests_left_when_the_next_batch_is_taken_wake_another_instance(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(Stream(ROWS, list), max_batch_rows=1) as house:
            woken: list[int] = []
            wake_one = house.model.wake_one

            def wake() -> None:
                if threading.current_thread().name == "m/1#0":
                    woken.append(house.model.scheduler.request_count)
                wake_one()

            monkeypatch.setattr(house.model, "wake_one", wake)
            first, second = house.put_two([1], [2, 3])
            house.ended(first, second)

            assert woken == [2, 1]  # as they come, while the first is begun, and as one of them is taken

    def test_a_call_passed_to_a_thread_waiting_for_a_turn_runs_even_without_a_batch(self) -> None:
        device = Waited(1)
        share = device.join(1, 1)
        device.request_turn(share, Mock())
        with opened(Stream(ROWS, list), device=device) as house:
            (waiting,) = house.model.thread_instances
            done = [waiting.run_on_thread(lambda: 1)]
            assert all(device.calls.acquire(timeout=PATIENCE_S) for _ in range(2))  # the test has, and now it does
            asking = threading.Thread(target=lambda: done.append(waiting.run_on_thread(lambda: 2)))
            asking.start()
            while waiting._pending_call is None or waiting.wakeup._value:
                time.sleep(0)
            device.end_turn(share, 0, 0, more=False)
            asking.join(PATIENCE_S)

            assert done == [1, 2]

    def test_the_next_batch_is_not_taken_while_another_model_waits_for_a_turn(self) -> None:
        device = Waited(1)
        with opened(Stream(ROWS, list), device=device) as house, opened(Stream(ROWS, list), device=device) as other:
            second: list[InferRequest] = []
            third: list[InferRequest] = []

            def come() -> None:
                second.extend(house.put(2))
                third.extend(other.put(3))
                assert all(device.calls.acquire(timeout=PATIENCE_S) for _ in range(2))

            house.stream.begins = come
            first = house.put(1)
            house.ended(first, second)
            other.ended(third)

            assert names(house) == [("begin", 0), ("end", 0)] * 2


GUILTY, BROKEN = -1.0, -2.0


def faulty(inputs: list[Any]) -> list[Any]:
    if (inputs[0] == GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    if (inputs[0] == BROKEN).any():
        raise DeviceLost(Code.NOT_READY, "CUDA failure 700")
    return inputs


class Reopening:
    """Reloads the model after a number of failures. `before`: whether the old backend was closed by then."""

    def __init__(self, first: Stream, failures: int = 0, error: InferError | None = None) -> None:
        self.streams = [first]
        self.failures = failures
        self.error = error or InferError(Code.OVERLOADED, "it does not fit the device")
        self.calls = 0
        self.before: list[bool] = []

    def __call__(self, position: int) -> Stream:
        self.calls += 1
        self.before.append(self.streams[-1].closed)
        if self.calls <= self.failures:
            raise self.error
        self.streams.append(Stream(ROWS, self.streams[0].function))
        return self.streams[-1]


def ends(requests: list[InferRequest]) -> list[str]:
    """The result of each request: its answer or its error."""
    assert all((request.error is None) != (request.outputs is None) for request in requests)
    return [request.error.message if request.error else f"{answers([request])[0]:g}" for request in requests]


class TestFaults:
    @pytest.mark.parametrize(
        ("first", "second"),
        [([GUILTY, 2, 3], [4, 5]), ([1, 2], [3, GUILTY, 5]), ([1, GUILTY], [GUILTY, 4]), ([GUILTY], [GUILTY])],
    )
    def test_the_invalid_request_is_found_in_either_batch(self, first: list[float], second: list[float]) -> None:
        with opened(Stream(ROWS, faulty)) as house:
            requests, then = house.put_two(first, second)
            house.ended(requests, then)

            expected = ["a guilty row" if value == GUILTY else f"{value:g}" for value in (*first, *second)]
            assert ends([*requests, *then]) == expected

    def test_when_one_batch_fails_the_other_is_ended_and_delivered_first(self) -> None:
        with opened(Stream(ROWS, faulty)) as house:
            first, second = house.put_two([1, GUILTY], [3])
            delivered = house.next()
            house.ended(first)

            assert delivered.requests == second
            assert names(house)[:4] == [("begin", 0), ("begin", 1), ("end", 0), ("end", 1)]

    @pytest.mark.parametrize("error", [InferError(Code.INTERNAL, "refused"), MemoryError(), ValueError("a bug")])
    def test_a_batch_that_cannot_begin_beside_another_is_run_by_itself(self, error: Exception) -> None:
        with opened(Stream(ROWS, faulty)) as house:
            second: list[InferRequest] = []

            def fail() -> None:
                raise error

            def follow() -> None:
                second.extend(house.put(2))
                house.stream.begins = fail

            house.stream.begins = follow
            first = house.put(1)
            house.ended(first, second)

            assert ends([*first, *second]) == ["1", "2"]
            assert names(house)[:3] == [("begin", 0), ("begin", 1), ("end", 0)]
            assert [batch.device_free_ns for batch in house.batches] == [0, 0]  # both had the device for themselves

    def test_a_batch_that_does_not_fit_in_memory_is_halved_and_later_batches_are_smaller(self) -> None:
        def fits(inputs: list[Any]) -> list[Any]:
            if len(inputs[0]) > 2:
                raise OutOfMemory(Code.OVERLOADED, "CUDA failure 2", 1)
            return inputs

        with opened(Stream(ROWS, fits)) as house:
            first, second = house.put_two([1, 2, 3, 4], [5, 6, 7])
            house.ended(first, second)
            cap = house.model.scheduler.memory_cap.rows
            alone, then = house.put_two([8], [9])
            house.ended(alone)
            house.ended(then)

            assert ends([*first, *second, *alone, *then]) == [str(value) for value in range(1, 10)]
            assert cap in (1, 2)
            assert (
                names(house)[-4:] == [("begin", 0), ("end", 0)] * 2
            )  # two batches at a time may have exhausted the memory

    def test_both_batches_of_a_lost_device_are_retried_after_a_reload(self) -> None:
        stream = Stream(ROWS, faulty)
        reopen = Reopening(stream)
        with opened(stream, reopen) as house:
            first, second = house.put_two([1, BROKEN], [3, 4])
            house.ended(first, second)
            new = reopen.streams[1]

            assert ends([*first, *second]) == ["1", "CUDA failure 700", "3", "4"]
            assert reopen.before == [True, True]
            # the first one's requests one after another, since one of them is guilty; the second's had not begun
            assert [rows for what, _, rows in new.events if what == "begin"] == [1, 1]
            assert [rows for what, _, rows in reopen.streams[2].events if what == "begin"] == [2]
            assert len(new.bindings) == 2

    def test_a_request_that_breaks_the_device_fails_alone(self) -> None:
        stream = Stream(ROWS, faulty)
        reopen = Reopening(stream)
        with opened(stream, reopen) as house:
            first, second = house.put_two([1, BROKEN, 3], [4, BROKEN])
            house.ended(first, second)

            assert ends([*first, *second]) == ["1", "CUDA failure 700", "3", "4", "CUDA failure 700"]
            assert all(reopen.before)
            assert house.model.healthy

    def test_both_batches_fail_if_the_device_is_gone_and_later_ones_run_once_it_returns(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reload_backoff, "MIN_RETRY_NS", 0)
        monkeypatch.setattr(reload_backoff, "MAX_RETRY_NS", 0)
        stream = Stream(ROWS, faulty)
        reopen = Reopening(stream, failures=2)
        with opened(stream, reopen) as house:
            first, second = house.put_two([BROKEN], [2])
            house.ended(first, second)
            outcomes = ends([*first, *second])
            served = ""
            while served != "5":
                later = house.put(5)
                house.ended(later)
                (served,) = ends(later)

            assert outcomes == ["CUDA failure 700", "model 'm' lost its device: it does not fit the device"]
            assert house.model.healthy
            assert reopen.before == [True] * 3

    def test_a_device_lost_for_the_process_is_logged_once_and_not_retried(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(reload_backoff, "MIN_RETRY_NS", 0)
        monkeypatch.setattr(reload_backoff, "MAX_RETRY_NS", 0)
        stream = Stream(ROWS, faulty)
        reopen = Reopening(stream, failures=99, error=ProcessLost(Code.NOT_READY, "CUDA failure 700 at load"))
        devices, lost_calls = Devices(), threading.Semaphore(0)
        devices.on_lost = lost_calls.release
        with opened(stream, reopen, devices) as house:
            first, second = house.put_two([1, BROKEN], [3])
            house.ended(first, second)
            assert lost_calls.acquire(timeout=PATIENCE_S)
            for value in range(5):
                house.ended(house.put(value))
            refused = [request for request in house.out.values() if request.error is not None]

            assert len(refused) == 8
            assert {request.error.code for request in refused if request.error} == {Code.NOT_READY}
            assert not house.model.healthy
            assert reopen.calls == 1
            assert devices.lost_reason == "model 'm' lost its device: CUDA failure 700 at load"
        assert not lost_calls.acquire(blocking=False)
        assert [record.levelname for record in caplog.records].count("CRITICAL") == 1

    def test_a_device_lost_again_in_a_worker_process_is_not_lost_for_the_server(self) -> None:
        stream = Stream(ROWS, faulty)
        reopen = Reopening(stream, failures=1, error=DeviceLost(Code.NOT_READY, "its process has ended"))
        devices = Devices()
        with opened(stream, reopen, devices) as house:
            lost = house.put(BROKEN)
            house.ended(lost)

            assert not devices.lost_reason

    def test_closing_a_model_ends_and_delivers_both_batches(self) -> None:
        stream = Stream(ROWS, faulty, held=True)
        with opened(stream) as house:
            first, second = house.put_two([1], [2])
            stream.wait_begun()
            stream.wait_begun()
            closing = threading.Thread(target=house.model.close)
            closing.start()
            stream.let_end(2)
            closing.join(PATIENCE_S)

            assert not closing.is_alive()
            assert ends([*first, *second]) == ["1", "2"]
            assert stream.closed

    def test_closing_a_model_does_not_wait_for_further_requests(self) -> None:
        stream = Stream(ROWS, faulty, held=True)
        with opened(stream, predicted_ns=LONG_NS) as house:
            first = house.put(1)
            stream.wait_begun()
            stream.let_end()
            house.model.close()

            assert ends(first) == ["1"]


class Limits(Watchdog):
    """A Watchdog that records its calls, and whose runs the test can stop."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[tuple[int, int]] = []
        self.watched = threading.Semaphore(0)
        self.over: dict[int, Any] = {}

    def begin(self, binding: Any, limit_ns: int, now_ns: int) -> None:
        self.limits.append((binding.number, limit_ns // MS))
        self.over[binding.number] = binding
        self.watched.release()

    def end(self, binding: Any) -> None:
        self.limits.append((binding.number, 0))
        del self.over[binding.number]


class TestLimits:
    def test_a_runs_time_limit_starts_when_the_device_begins_it(self) -> None:
        with opened(Stream(ROWS, faulty), run_limit_us=1000) as house:
            house.model.watchdog = limits = Limits()
            first, second = house.put_two([1], [2])
            house.ended(first, second)

            assert limits.limits == [(0, 1), (1, 2), (0, 0), (1, 1), (1, 0)]

    def test_a_run_that_hangs_is_stopped_and_the_next_batch_is_served(self) -> None:
        stream = Stream(ROWS, faulty, held=True)
        with opened(stream, run_limit_us=1000) as house:
            house.model.watchdog = limits = Limits()
            first, second = house.put_two([1], [2])
            stream.wait_begun()
            stream.wait_begun()
            limits.over[0].stop()
            stream.let_end()
            house.ended(first, second)

            assert ends([*first, *second]) == ["model 'm': run exceeded its limit of 1 ms", "2"]
            assert house.model.event_counts["runs_stopped"] == 1
            assert limits.over == {}

    def test_other_requests_of_a_stopped_batch_are_served(self) -> None:
        stream = Stream(ROWS, faulty, held=True)
        with opened(stream, run_limit_us=1000) as house:
            house.model.watchdog = Limits()
            limits = house.model.watchdog
            first, second = house.put_two([1, 2], [3])
            stream.wait_begun()
            stream.wait_begun()
            stream.held = False
            limits.over[0].stopped.set()
            stream.let_end()
            house.ended(first, second)

            assert ends([*first, *second]) == ["1", "2", "3"]


class TestLedger:
    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.sampled_from([1.0, 2.0, 3.0, GUILTY, BROKEN]), min_size=1, max_size=24), st.integers(1, 4))
    def test_every_request_ends_exactly_once_with_its_own_result(self, values: list[float], rows: int) -> None:
        stream = Stream(ROWS, faulty)
        with opened(stream, Reopening(stream), max_batch_rows=rows) as house:
            half = len(values) // 2
            if half:
                requests, then = house.put_two(values[:half], values[half:])
                house.ended(requests, then)
                requests += then
            else:
                requests = house.put(*values)
                house.ended(requests)
            outcomes = ends(requests)

            assert house.finished.empty()
            assert house.model.scheduler.request_count == 0
        # the second is the end of who comes after the device was lost so often that it is left alone for a while
        lost = ("CUDA failure 700", "model 'm' lost its device: CUDA failure 700")
        for value, end in zip(values, outcomes, strict=True):
            if value > 0:
                assert end in (f"{value:g}", *lost)
            elif value == GUILTY:
                assert end in ("a guilty row", *lost)
            else:
                assert end in lost
