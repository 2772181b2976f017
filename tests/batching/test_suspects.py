"""Suspects: which requests of a failed batch run together next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.running.suspects import Suspects


def settle(guilt: list[bool], *, cheap: bool = False) -> tuple[list[int], list[int]]:
    """Settle a failed batch. Returns: the sizes of the runs that succeeded and of those that failed."""
    suspects = Suspects(len(guilt), cheap=cheap)
    passed: list[int] = []
    failed: list[int] = []
    while suspects.remaining:
        count = suspects.next_count()
        first = len(guilt) - suspects.remaining
        tried = guilt[first : first + count]
        assert len(tried) == count > 0
        if not any(tried):
            passed.append(count)
            suspects.record_success(count)
        else:
            failed.append(count)
            if count > 1:
                suspects.record_failure(count)
            else:
                suspects.record_single_failure()
    return passed, failed


@given(st.integers(2, 300), st.data())
def test_one_failing_request_is_found_in_few_runs(count: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, count - 1))

    passed, failed = settle([position == guilty for position in range(count)])

    depth = (count - 1).bit_length()
    assert sum(passed) == count - 1
    assert len(failed) <= depth + 1
    assert len(passed) <= 2 * depth + 1


@given(st.integers(2, 300), st.data())
def test_if_failures_are_cheap_few_runs_succeed(count: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, count - 1))

    passed, failed = settle([position == guilty for position in range(count)], cheap=True)

    depth = (count - 1).bit_length()
    assert sum(passed) == count - 1
    assert len(passed) <= depth + 1
    assert len(failed) <= 2 * depth + 1


@given(st.lists(st.booleans(), min_size=2, max_size=120), st.booleans())
def test_the_number_of_runs_per_request_is_bounded_for_any_failing_requests(guilt: list[bool], cheap: bool) -> None:
    passed, failed = settle(guilt, cheap=cheap)

    assert sum(passed) == guilt.count(False)
    assert len(passed) <= len(guilt)
    assert len(passed) + len(failed) <= (3 if cheap else 2) * len(guilt)


@given(st.lists(st.booleans(), min_size=2, max_size=120).filter(any))
def test_a_request_named_as_the_culprit_is_found_at_once(guilt: list[bool]) -> None:
    suspects, runs = Suspects(len(guilt)), 0
    suspects.record_culprit(guilt.index(True))
    while suspects.remaining:
        count, first = suspects.next_count(), len(guilt) - suspects.remaining
        tried = guilt[first : first + count]
        runs += 1
        if not any(tried):
            suspects.record_success(count)
        elif count > 1:
            suspects.record_culprit(tried.index(True))
        else:
            suspects.record_single_failure()

    assert runs <= 3 * sum(guilt) + 2


def test_a_request_before_the_named_culprit_may_also_fail() -> None:
    suspects = Suspects(8)
    suspects.record_culprit(5)
    assert suspects.next_count() == 5
    suspects.record_failure(5)
    assert suspects.next_count() < 5


def test_requests_soon_run_alone_when_all_of_them_fail() -> None:
    passed, failed = settle([True] * 64)

    assert passed == []
    assert len(failed) < 64 + 16


def test_no_run_is_as_large_again_when_only_the_number_of_requests_is_at_fault() -> None:
    suspects = Suspects(64)
    sizes = []
    while suspects.remaining:
        count = suspects.next_count()
        sizes.append(count)
        if count > 16:
            suspects.record_failure(count)
        else:
            suspects.record_success(count)

    assert sum(size for size in sizes if size <= 16) == 64
    assert len([size for size in sizes if size > 16]) == 2


def test_a_batch_that_is_too_large_is_halved_until_it_fits() -> None:
    suspects = Suspects(64)
    suspects.record_too_many(64)
    assert suspects.next_count() == 32
    suspects.record_too_many(32)
    assert suspects.next_count() == 16
    suspects.record_success(16)
    assert suspects.next_count() == 16
