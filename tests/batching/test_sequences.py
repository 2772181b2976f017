"""Sequences in a Scheduler: which requests run when, and what the others wait for. No clock, no threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, InSequence, Key
from penstock.batching.running.batch import Batch
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.sequences.sequences import Sequences
from penstock.batching.spec import BatchPolicy, Control, SequenceSpec, State
from tests.fakes import fake_model, fake_request

A, B = ((4,),), ((5,),)
MODEL = fake_model()
US = 1_000
OLDEST = SequenceSpec(direct=False, max_candidates=2)


def scheduler_of(spec: SequenceSpec, rows: int = 4, instances: int = 1, **policy: Any) -> Scheduler:
    sequences = Sequences("m", spec, rows, instances)
    return Scheduler(replace(BatchPolicy(max_batch_rows=rows), **policy), CostModel(), 0, instances, sequences)


def request_of(identity: int | str, flags: str = "", key: Key = A, now_ns: int = 1, **members: Any) -> InferRequest:
    """A request of a sequence; `flags`: "s" for its first, "e" for its last."""
    request = fake_request(MODEL, 1, key)
    request.enqueued_ns = request.start_ns = now_ns
    request.sequence = InSequence(identity, "s" in flags, "e" in flags)
    for name, value in members.items():
        setattr(request, name, value)
    return request


def add(scheduler: Scheduler, identity: int | str, flags: str = "", key: Key = A, now_ns: int = 1) -> InferRequest:
    request = request_of(identity, flags, key, now_ns)
    scheduler.add(request)
    return request


def take(scheduler: Scheduler, now_ns: int = 1) -> Batch:
    batch = scheduler.take(now_ns)
    assert batch is not None
    return batch


def run(scheduler: Scheduler, now_ns: int = 1) -> list[int | str]:
    """Run a batch. Returns: the sequences of its requests."""
    batch = take(scheduler, now_ns)
    scheduler.record_ended(batch, now_ns)
    return [request.sequence.id for request in batch.requests if request.sequence]


@pytest.mark.parametrize("direct", [True, False])
def test_no_sequence_starts_on_an_unavailable_instance_and_waiting_ones_start_when_it_returns(direct: bool) -> None:
    sequences = Sequences("m", replace(OLDEST, direct=direct, max_candidates=2), 2, 2, model_keeps_state=True)
    sequences.set_available(1, 1, available=False)
    went = [request for identity in range(1, 5) for request in sequences.admit(request_of(identity, "s"), 1)]
    assert {request.key[-1] for request in went} == {(0,)}
    assert sequences.backlog_requests == 2

    sequences.set_available(1, 2, available=True)

    assert sequences.next_reap_ns() <= 2
    assert [request.key[-1] for request in sequences.reap(2)] == [(1,), (1,)]
    assert sequences.backlog_requests == 0


class TestDirect:
    def test_each_sequence_keeps_its_row(self) -> None:
        scheduler = scheduler_of(SequenceSpec())
        for identity in (1, 2, 3, 4):
            add(scheduler, identity, "s")
        assert run(scheduler) == [1, 2, 3, 4]

        add(scheduler, 4)
        add(scheduler, 2)
        batch = take(scheduler)

        assert [request.active_sequence.id for request in batch.requests] == [2, 4]
        assert (batch.row_positions, batch.rows) == ([1, 3], 2)

    def test_a_batch_of_consecutive_rows_has_no_row_positions(self) -> None:
        scheduler = scheduler_of(SequenceSpec())
        add(scheduler, 1, "s")
        add(scheduler, 2, "s")

        assert take(scheduler).row_positions is None

    def test_the_next_sequence_gets_the_first_row_that_becomes_free(self) -> None:
        scheduler = scheduler_of(SequenceSpec())
        for identity, flags in ((1, "s"), (2, "se"), (3, "s")):
            add(scheduler, identity, flags)
        run(scheduler)

        assert add(scheduler, 4, "s").active_sequence.row == 1

    def test_sequences_are_spread_over_instances(self) -> None:
        scheduler = scheduler_of(SequenceSpec(), rows=2, instances=2)
        places = [add(scheduler, identity, "s").active_sequence for identity in (1, 2, 3, 4)]

        assert [(place.row, place.instance) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [run(scheduler), run(scheduler)] == [[1, 3], [2, 4]]

    def test_an_instance_runs_one_batch_at_a_time(self) -> None:
        scheduler = scheduler_of(SequenceSpec())
        add(scheduler, 1, "s")
        batch = take(scheduler)
        add(scheduler, 2, "s")
        add(scheduler, 1)
        assert scheduler.take(1) is None

        scheduler.record_ended(batch, 1)

        assert run(scheduler) == [1, 2]

    def test_all_rows_run_together_whatever_size_would_be_fastest(self) -> None:
        scheduler = scheduler_of(SequenceSpec())
        for rows, run_us in ((1, 10), (2, 20), (4, 40)):
            scheduler.learn(A, rows, run_us * US, 1)
        for identity in (1, 2, 3, 4):
            add(scheduler, identity, "s")

        assert run(scheduler) == [1, 2, 3, 4]

    def test_requests_of_different_shapes_do_not_share_a_batch(self) -> None:
        scheduler = scheduler_of(SequenceSpec())
        for identity, key in ((1, A), (2, B), (3, A)):
            add(scheduler, identity, "s", key)

        batch = take(scheduler)

        assert (batch.key, batch.row_positions, batch.span_rows) == (A, [0, 2], 3)

    def test_rows_of_sequences_with_other_shapes_are_part_of_the_run(self) -> None:
        scheduler = scheduler_of(SequenceSpec())
        for identity, key in ((1, A), (2, A), (3, B)):
            add(scheduler, identity, "s", key)

        batch = take(scheduler)

        assert (batch.key, batch.row_positions, batch.span_rows, batch.rows) == (A, [0, 1], 3, 2)

    def test_a_batch_is_held_until_enough_rows_are_waiting(self) -> None:
        scheduler = scheduler_of(SequenceSpec(max_delay_us=5, min_utilization=0.5))
        add(scheduler, 1, "s")
        assert scheduler.take(1) is None
        assert scheduler.nearest_deadline_ns() == 1 + 5 * US

        add(scheduler, 2, "s")

        assert run(scheduler) == [1, 2]

    def test_a_held_batch_runs_when_its_delay_is_over(self) -> None:
        scheduler = scheduler_of(SequenceSpec(max_delay_us=5, min_utilization=1.0))
        add(scheduler, 1, "s")
        add(scheduler, 2, "s", now_ns=4 * US)
        scheduler.expire(5 * US)
        assert scheduler.take(5 * US) is None

        scheduler.expire(1 + 5 * US)

        assert run(scheduler, 6 * US) == [1, 2]

    def test_canceled_requests_do_not_count_toward_the_utilization_of_a_held_batch(self) -> None:
        scheduler = scheduler_of(SequenceSpec(max_delay_us=5, min_utilization=0.5))
        for request in [add(scheduler, identity, "s") for identity in (1, 2)]:
            scheduler.remove(request, 1)
        add(scheduler, 3, "s")

        assert scheduler.take(1) is None


class TestOldest:
    def test_a_batch_has_several_sequences_but_only_one_request_of_each(self) -> None:
        scheduler = scheduler_of(OLDEST)
        for identity, flags in ((1, "s"), (1, ""), (2, "s"), (1, "e"), (2, "e")):
            add(scheduler, identity, flags)

        assert [run(scheduler), run(scheduler), run(scheduler)] == [[1, 2], [1, 2], [1]]
        assert not len(scheduler.sequences or ())

    def test_a_sequence_waits_while_its_previous_request_runs(self) -> None:
        scheduler = scheduler_of(OLDEST)
        add(scheduler, 1, "s")
        batch = take(scheduler)
        add(scheduler, 1)
        assert scheduler.take(1) is None
        add(scheduler, 2, "s")
        assert run(scheduler) == [2]

        scheduler.record_ended(batch, 1)

        assert run(scheduler) == [1]

    def test_the_default_number_of_candidates_is_the_maximum_batch_size(self) -> None:
        scheduler = scheduler_of(SequenceSpec(direct=False), rows=3)

        places = [add(scheduler, identity, "s").active_sequence.row for identity in (1, 2, 3, 4)]

        assert places == [0, 1, 2, -1]

    def test_sequences_with_states_of_different_shapes_do_not_share_a_batch(self) -> None:
        spec = replace(OLDEST, max_candidates=4, states=(State("i", "o", "FP32", (-1,)),))
        scheduler = scheduler_of(spec)
        for identity in (1, 2, 3):
            add(scheduler, identity, "s")
        batch = take(scheduler)
        for length, request in zip((2, 3, 2), batch.requests, strict=True):
            request.active_sequence.states["o"] = fake_request(MODEL, length).inputs[0]  # type: ignore[assignment]
        scheduler.record_ended(batch, 1)
        for identity, flags in ((1, ""), (2, ""), (3, ""), (4, "s")):
            add(scheduler, identity, flags)

        assert [run(scheduler), run(scheduler), run(scheduler)] == [[1, 3], [2], [4]]

    def test_a_restarted_sequence_shares_a_batch_with_new_sequences(self) -> None:
        scheduler = scheduler_of(replace(OLDEST, states=(State("i", "o", "FP32", (-1,)),)))
        first = add(scheduler, 1, "s")
        run(scheduler)
        first.active_sequence.states["o"] = fake_request(MODEL, 3).inputs[0]  # type: ignore[assignment]
        add(scheduler, 1, "s")
        add(scheduler, 2, "s")

        assert run(scheduler) == [1, 2]


class TestAdmission:
    def test_ids_of_different_types_are_different_sequences(self) -> None:
        scheduler = scheduler_of(OLDEST)

        assert add(scheduler, 1, "s").active_sequence is not add(scheduler, "1", "s").active_sequence

    @pytest.mark.parametrize("identity", [0, ""])
    def test_a_request_with_an_empty_id_is_rejected(self, identity: int | str) -> None:
        with pytest.raises(InferError, match="must specify a non-zero or non-empty correlation ID") as caught:
            add(scheduler_of(OLDEST), identity, "s")
        assert caught.value.code is Code.INVALID

    def test_a_request_without_a_sequence_is_rejected(self) -> None:
        with pytest.raises(InferError, match="must specify a non-zero or non-empty correlation ID"):
            scheduler_of(OLDEST).add(request_of(0, sequence=None))

    @pytest.mark.parametrize(("datatype", "identity", "id_datatype"), [("BYTES", 1, "UINT64"), ("INT32", "a", "BYTES")])
    def test_an_id_must_have_the_datatype_of_the_control(
        self, datatype: str, identity: int | str, id_datatype: str
    ) -> None:
        scheduler = scheduler_of(replace(OLDEST, controls=(Control("c", "corrid", datatype),)))

        with pytest.raises(
            InferError, match=f"control 'c' data-type is '{id_datatype}', but model 'm' expects '{datatype}'"
        ):
            add(scheduler, identity, "s")

    def test_a_sequence_must_start_again_after_its_end_was_received(self) -> None:
        scheduler = scheduler_of(OLDEST)
        add(scheduler, 1, "se")

        with pytest.raises(
            InferError, match="inference request for sequence 1 to model 'm' must specify the START flag"
        ):
            add(scheduler, 1)
        assert add(scheduler, 1, "s").active_sequence.row == 1

    def test_a_sequence_started_again_keeps_its_slot(self, caplog: pytest.LogCaptureFixture) -> None:
        scheduler = scheduler_of(OLDEST)

        assert add(scheduler, 1, "s").active_sequence is add(scheduler, 1, "s").active_sequence
        assert "The previous sequence did not end before this sequence start" in caplog.text

    def test_a_full_backlog_does_not_reject_requests_of_active_sequences(self) -> None:
        scheduler = scheduler_of(SequenceSpec(), rows=1, max_queue_rows=2)
        add(scheduler, 1, "s")
        for identity in (2, 3):
            add(scheduler, identity, "s")
        with pytest.raises(InferError, match="Exceeds maximum queue size"):
            add(scheduler, 4, "s")
        assert not scheduler.is_full()

        add(scheduler, 1, "e")

        assert [run(scheduler) for _ in range(3)] == [[1], [1], [2]]

    def test_a_rejected_start_request_begins_no_sequence(self) -> None:
        scheduler = scheduler_of(OLDEST, max_queue_requests=1)
        add(scheduler, 1, "s")
        with pytest.raises(InferError, match="Exceeds maximum queue size"):
            add(scheduler, 2, "s")
        assert len(scheduler.sequences or ()) == 1

        with pytest.raises(InferError, match="must specify the START flag"):
            add(scheduler, 2)

    def test_a_sequence_that_gets_a_free_slot_does_not_count_as_backlog(self) -> None:
        scheduler = scheduler_of(OLDEST, max_queue_requests=2)
        add(scheduler, 1, "s")
        add(scheduler, 2, "se")
        run(scheduler)
        add(scheduler, 1)
        add(scheduler, 1)

        with pytest.raises(InferError, match="Exceeds maximum queue size"):
            add(scheduler, 3, "s")

    def test_waiting_requests_are_limited_by_bytes_rows_and_number(self) -> None:
        for bound in ({"max_queue_bytes": 2 * 16}, {"max_queue_rows": 2}, {"max_queue_requests": 2}):
            scheduler = scheduler_of(OLDEST, **bound)
            add(scheduler, 1, "s")
            add(scheduler, 1)
            with pytest.raises(InferError, match="Exceeds maximum queue size"):
                add(scheduler, 1)
            assert run(scheduler) == [1]
            add(scheduler, 1)

    def test_a_latency_target_does_not_shorten_the_queue_delay(self) -> None:
        scheduler = scheduler_of(OLDEST, max_queue_delay_us=100)
        scheduler.learn(A, 1, 10 * US, 1)
        scheduler.add(request_of(1, "s", target_ns=30 * US))

        assert scheduler.due_ns(2) == 100 * US + 1


class TestBacklog:
    def test_sequences_start_in_the_order_in_which_they_arrived(self) -> None:
        scheduler = scheduler_of(OLDEST, rows=1)
        for identity in (1, 2, 3, 4, 5):
            add(scheduler, identity, "se")

        assert [run(scheduler) for _ in range(5)] == [[1], [2], [3], [4], [5]]
        assert scheduler.request_count == 0

    def test_a_starting_sequence_brings_all_of_its_waiting_requests(self) -> None:
        scheduler = scheduler_of(SequenceSpec(), rows=1)
        for identity, flags in ((1, "s"), (2, "s"), (2, ""), (2, "e"), (1, "e")):
            add(scheduler, identity, flags)

        assert [run(scheduler) for _ in range(5)] == [[1], [1], [2], [2], [2]]

    @pytest.mark.parametrize("direct", [True, False])
    @pytest.mark.parametrize(
        ("remembers", "runs"), [(True, [[1, 2], [1, 2], [1], [1]]), (False, [[1, 1, 1, 2], [1, 2]])]
    )
    def test_a_restarted_sequence_waits_for_its_previous_run_if_the_model_keeps_state(
        self, direct: bool, remembers: bool, runs: list[list[int]]
    ) -> None:
        sequences = Sequences("m", SequenceSpec(direct=direct), 4, 1, model_keeps_state=remembers)
        scheduler = Scheduler(BatchPolicy(max_batch_rows=4), CostModel(), 0, 1, sequences)
        first = add(scheduler, 1, "s")
        batch = take(scheduler)
        for flags in ("e", "s", "e", "se"):
            add(scheduler, 1, flags)
        add(scheduler, 2, "s")
        add(scheduler, 2, "e")
        assert batch.requests == [first]
        scheduler.record_ended(batch, 1)

        assert [sorted(run(scheduler)) for _ in runs] == runs
        assert (scheduler.request_count, len(sequences)) == (0, 0)


@pytest.mark.parametrize("direct", [True, False])
def test_requests_held_for_a_test_run_as_in_triton(direct: bool) -> None:
    scheduler = scheduler_of(SequenceSpec(direct), hold_requests=12)
    for flags in ("s", "", "e"):
        for identity in (1, 2, 3, 4):
            assert scheduler.take(1) is None
            add(scheduler, identity, flags)

    assert [run(scheduler) for _ in range(3)] == [[1, 2, 3, 4]] * 3
    assert scheduler.request_count == 0


def test_a_test_may_also_wait_for_a_backlog() -> None:
    scheduler = scheduler_of(SequenceSpec(hold_backlog=1), rows=2, hold_requests=2)
    for identity, flags in ((1, "se"), (2, "s")):
        add(scheduler, identity, flags)
    assert scheduler.take(1) is None
    add(scheduler, 3, "s")

    assert [run(scheduler), run(scheduler)] == [[1, 2], [3]]


class TestLeaving:
    def test_canceling_a_request_cancels_later_requests_of_its_sequence(self) -> None:
        scheduler = scheduler_of(OLDEST)
        requests = [add(scheduler, 1, flags) for flags in ("s", "", "", "e")]

        scheduler.remove(requests[2], 1)

        assert scheduler.orphaned == requests[3:]
        assert [run(scheduler), run(scheduler)] == [[1], [1]]
        assert not len(scheduler.sequences or ())
        assert (scheduler.request_count, scheduler.rows, scheduler.nbytes) == (0, 0, 0)

    def test_canceling_a_request_of_a_waiting_sequence_cancels_the_whole_sequence(self) -> None:
        scheduler = scheduler_of(SequenceSpec(), rows=1)
        add(scheduler, 1, "s")
        waiting = [add(scheduler, 2, flags) for flags in ("s", "", "")]

        scheduler.remove(waiting[1], 1)

        assert scheduler.orphaned == [waiting[0], waiting[2]]
        with pytest.raises(InferError, match="must specify the START flag"):
            add(scheduler, 2)

    def test_the_next_sequence_gets_the_slot_of_a_canceled_one(self) -> None:
        scheduler = scheduler_of(SequenceSpec(), rows=1)
        first = add(scheduler, 1, "s")
        add(scheduler, 2, "s")

        scheduler.remove(first, 1)

        assert run(scheduler) == [2]

    def test_a_timeout_applies_only_until_a_sequence_has_a_slot(self) -> None:
        scheduler = scheduler_of(SequenceSpec(), rows=1)
        for identity, flags in ((1, "s"), (1, ""), (2, "s"), (2, "")):
            scheduler.add(request_of(identity, flags, deadline_ns=5))

        expired = scheduler.expire(5)

        assert [request.active_sequence.id for request in expired] == [2, 2]
        assert [run(scheduler, 6), run(scheduler, 6)] == [[1], [1]]

    def test_draining_removes_all_sequences_and_their_requests(self) -> None:
        scheduler = scheduler_of(OLDEST)
        requests = [add(scheduler, identity, flags) for identity in (1, 2, 3) for flags in ("s", "")]

        assert set(scheduler.drain()) == set(requests)
        assert (len(scheduler.sequences or ()), scheduler.request_count, scheduler.orphaned) == (0, 0, [])


class TestIdleness:
    def test_a_sequence_is_forgotten_after_its_idle_time(self) -> None:
        scheduler = scheduler_of(replace(OLDEST, idle_us=10))
        add(scheduler, 1, "s")
        assert scheduler.nearest_deadline_ns() == 0
        run(scheduler, 100)
        assert scheduler.nearest_deadline_ns() == 100 + 10 * US

        scheduler.expire(99 + 10 * US)
        assert len(scheduler.sequences or ()) == 1
        scheduler.expire(100 + 10 * US)

        assert len(scheduler.sequences or ()) == scheduler.nearest_deadline_ns() == 0

    def test_the_slot_of_an_idle_sequence_goes_to_a_waiting_one(self) -> None:
        scheduler = scheduler_of(SequenceSpec(idle_us=10), rows=1)
        add(scheduler, 1, "s")
        run(scheduler, 1)
        add(scheduler, 2, "s")
        assert scheduler.take(2) is None

        scheduler.expire(1 + 10 * US)

        assert run(scheduler, 20 * US) == [2]

    def test_a_waiting_or_running_sequence_is_not_idle(self) -> None:
        scheduler = scheduler_of(SequenceSpec(idle_us=10), rows=1)
        add(scheduler, 1, "s")
        add(scheduler, 2, "s")
        batch = take(scheduler)
        scheduler.expire(50 * US)
        scheduler.record_ended(batch, 50 * US)
        scheduler.expire(51 * US)

        assert len(scheduler.sequences or ()) == 2


class TestExpediting:
    """Batches and slots held for further requests, once no more will arrive."""

    def test_rows_held_for_more_sequences_run_when_expedited(self) -> None:
        scheduler = scheduler_of(SequenceSpec(max_delay_us=10, min_utilization=0.5))
        add(scheduler, 1, "s")
        assert scheduler.take(1) is None

        scheduler.expedite(2, end_idle=False)
        scheduler.expire(2)

        assert run(scheduler, 2) == [1]
        assert len(scheduler.sequences or ()) == 1

    def test_the_slot_of_an_idle_sequence_goes_to_a_waiting_one_when_expedited(self) -> None:
        scheduler = scheduler_of(SequenceSpec(), rows=1)
        add(scheduler, 1, "s")
        run(scheduler, 1)
        add(scheduler, 2, "s")
        add(scheduler, 3, "s")

        scheduler.expedite(2, end_idle=True)
        scheduler.expire(2)
        assert run(scheduler, 3) == [2]
        scheduler.expire(3)
        assert run(scheduler, 4) == [3]
        scheduler.expire(4)

        assert (len(scheduler.sequences or ()), scheduler.nearest_deadline_ns()) == (0, 0)
