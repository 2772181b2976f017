"""Iterative requests, each a sequence that runs until its model is done, in a Scheduler. No clock, no threads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.backends.errors import InferError
from penstock.batching.request import InferRequest, InSequence
from penstock.batching.running.batch import Batch
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.sequences.iterations import SequenceIds
from penstock.batching.sequences.sequences import Sequences
from penstock.batching.spec import BatchPolicy, Control, SequenceSpec
from tests.fakes import fake_model, fake_request

A = ((4,),)
MODEL = fake_model()
DIRECT = SequenceSpec(iterative=True)
OLDEST = SequenceSpec(direct=False, iterative=True)
IDLE_NS = DIRECT.idle_us * 1000
both = pytest.mark.parametrize("spec", [DIRECT, OLDEST], ids=["direct", "oldest"])


def scheduler_of(spec: SequenceSpec, rows: int = 2, instances: int = 1, *, remembers: bool = False) -> Scheduler:
    sequences = Sequences("m", spec, rows, instances, model_keeps_state=remembers)
    return Scheduler(BatchPolicy(max_batch_rows=rows), CostModel(), 0, instances, sequences)


def add(scheduler: Scheduler, sequence: InSequence | None = None, now_ns: int = 1) -> InferRequest:
    request = fake_request(MODEL, 1, A)
    request.enqueued_ns = request.start_ns = now_ns
    request.sequence = sequence
    scheduler.add(request)
    return request


def run(scheduler: Scheduler, *again: InferRequest, now_ns: int = 1, own: tuple[int] | None = None) -> Batch:
    """Run a batch, and queue some of its requests again."""
    batch = scheduler.take(now_ns, pin=own)
    assert batch is not None
    batch.rerun_requests = again
    scheduler.record_ended(batch, now_ns)
    return batch


@both
def test_a_request_without_a_sequence_becomes_one_of_its_own(spec: SequenceSpec) -> None:
    scheduler = scheduler_of(spec)

    requests = [add(scheduler), add(scheduler)]

    assert [request.sequence for request in requests] == [InSequence(1, start=True), InSequence(2, start=True)]
    assert run(scheduler).requests == requests


@both
def test_a_repeated_request_is_neither_the_start_nor_the_end_of_its_sequence(spec: SequenceSpec) -> None:
    scheduler = scheduler_of(spec)
    request = add(scheduler, InSequence(7, start=True, end=True))

    run(scheduler, request, now_ns=5)

    assert (request.sequence, request.enqueued_ns, request.waiting) == (InSequence(7), 5, True)
    assert (scheduler.request_count, scheduler.rows) == (1, 1)
    assert run(scheduler).requests == [request]
    assert (scheduler.request_count, scheduler.rows, len(scheduler.sequences or "")) == (0, 0, 0)


@both
def test_a_batch_combines_repeated_and_new_requests(spec: SequenceSpec) -> None:
    scheduler = scheduler_of(spec)
    first = add(scheduler)
    run(scheduler, first)

    second = add(scheduler)

    assert set(run(scheduler, first, second).requests) == {first, second}
    assert set(run(scheduler, second).requests) == {first, second}
    assert run(scheduler).requests == [second]


@both
def test_a_finished_requests_slot_is_given_to_a_waiting_request(spec: SequenceSpec) -> None:
    scheduler = scheduler_of(spec, rows=1)
    first, second = add(scheduler), add(scheduler)
    run(scheduler, first)
    run(scheduler, first)

    assert run(scheduler).requests == [first]
    assert run(scheduler).requests == [second]


@both
def test_a_repeated_request_stays_on_the_instance_that_keeps_its_state(spec: SequenceSpec) -> None:
    scheduler = scheduler_of(spec, rows=1, instances=2, remembers=True)
    here, there = add(scheduler), add(scheduler)

    for _ in range(3):
        assert run(scheduler, here, own=(0,)).requests == [here]
        assert run(scheduler, there, own=(1,)).requests == [there]

    assert here.key == (*A, (0,))


@both
def test_an_iterative_request_never_becomes_idle_and_is_forgotten_when_finished(spec: SequenceSpec) -> None:
    scheduler = scheduler_of(spec)
    request = add(scheduler)
    run(scheduler, request)

    scheduler.expire(1 + 2 * IDLE_NS)
    assert run(scheduler).requests == [request]

    with pytest.raises(InferError, match="must specify the START flag"):
        add(scheduler, request.sequence)


@both
def test_a_request_canceled_between_two_runs_frees_its_slot(spec: SequenceSpec) -> None:
    scheduler = scheduler_of(spec, rows=1)
    first, second = add(scheduler), add(scheduler)
    run(scheduler, first)

    scheduler.remove(first, 2)

    assert (first.waiting, scheduler.request_count) == (False, 1)
    assert run(scheduler).requests == [second]


@both
def test_a_timeout_applies_only_until_a_requests_first_run(spec: SequenceSpec) -> None:
    scheduler = scheduler_of(spec, rows=1)
    request = fake_request(MODEL, 1, A)
    request.enqueued_ns, request.deadline_ns = 1, 10
    scheduler.add(request)
    run(scheduler, request)

    assert scheduler.expire(20) == []
    assert run(scheduler, now_ns=20).requests == [request]


def test_ordered_answers_wait_for_a_request_that_is_repeated() -> None:
    sequences = Sequences("m", OLDEST, 2, 1)
    scheduler = Scheduler(BatchPolicy(max_batch_rows=2, preserve_ordering=True), CostModel(), 0, 1, sequences)
    first, second = add(scheduler), add(scheduler)
    run(scheduler, first)
    assert scheduler.ordering is not None
    assert scheduler.ordering.record_ended([second]) == []

    run(scheduler)

    assert scheduler.ordering.record_ended([first]) == [first, second]


def test_generated_sequence_ids_avoid_active_ids_and_are_strings_if_the_model_takes_strings() -> None:
    assert [
        SequenceIds({2}, as_text=False).begin_sequence().id,
        SequenceIds({"1"}, as_text=True).begin_sequence().id,
    ] == [1, "2"]
    spec = replace(OLDEST, controls=(Control("c", "corrid", "BYTES"),))
    assert add(scheduler_of(spec)).sequence == InSequence("1", start=True)
