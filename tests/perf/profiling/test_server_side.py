"""The server's side of a measurement: what two answers of the statistics extension say of the time between them."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.profiling.server_side import statistics_between

TIMED = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


def stats(version: str = "1", rows: int = 0, batches: int = 0, **timed: tuple[int, int]) -> dict[str, Any]:
    """Write one entry of `model_stats`; `timed`: count and microseconds in all."""
    spent = {name: timed.get(name, (0, 0)) for name in TIMED}
    return {
        "name": "m",
        "version": version,
        "inference_count": rows,
        "execution_count": batches,
        "inference_stats": {name: {"count": count, "ns": us * 1000} for name, (count, us) in spent.items()},
        "batch_stats": [],
    }


def served(count: int, each_us: int = 100, version: str = "1", rows: int = 1) -> dict[str, Any]:
    """Write what a version says that has served `count` requests of so many rows, each alone."""
    quarter = (count, count * each_us // 4)
    return stats(
        version, count * rows, count, success=(count, count * each_us), queue=quarter, compute_input=(count, 0),
        compute_infer=quarter, compute_output=(count, 0),
    )  # fmt: skip


IDLE = stats()


def test_times_are_means_over_the_requests_between_two_answers() -> None:
    before = served(1000, 1_000_000)
    after = copy.deepcopy(before)
    for name, (count, us) in {
        "success": (10, 1500), "queue": (10, 200), "compute_input": (10, 100), "compute_infer": (10, 800),
        "compute_output": (10, 50),
    }.items():  # fmt: skip
        after["inference_stats"][name]["count"] += count
        after["inference_stats"][name]["ns"] += us * 1000
    after["inference_count"] += 40
    after["execution_count"] += 5

    side, reason = statistics_between([{"m": [before]}, {"m": [after]}], "m")

    assert side is not None
    assert not reason
    assert (side.requests, side.inferences, side.executions, side.rows_per_batch) == (10, 40, 5, 8.0)
    assert (side.request_us, side.queue_us, side.compute_infer_us) == (150.0, 20.0, 80.0)
    assert side.overhead_us == pytest.approx(150 - 20 - 10 - 80 - 5)


def test_counters_that_a_server_lacks_are_zero() -> None:
    after = served(4)
    for name in ("fail", "cache_hit", "cache_miss"):
        del after["inference_stats"][name]

    side, _ = statistics_between([{"m": [IDLE]}, {"m": [after]}], "m")

    assert side is not None
    assert (side.failed, side.cache_hits, side.cache_misses, side.overhead_us) == (0, 0, 0, 50)


def test_overhead_is_never_negative() -> None:
    after = stats(success=(1, 10), queue=(1, 50), compute_infer=(1, 50))

    side, _ = statistics_between([{"m": [IDLE]}, {"m": [after]}], "m")

    assert side is not None
    assert side.overhead_us == 0


def test_a_cache_hit_counts_towards_overhead_and_not_towards_compute_times() -> None:
    after = stats(
        rows=1,
        batches=1,
        success=(4, 400),
        queue=(4, 40),
        compute_infer=(1, 100),
        cache_hit=(3, 30),
        cache_miss=(1, 20),
    )

    side, _ = statistics_between([{"m": [IDLE]}, {"m": [after]}], "m")

    assert side is not None
    assert (side.cache_hits, side.cache_misses, side.cache_hit_us, side.cache_miss_us) == (3, 1, 10.0, 20.0)
    assert side.compute_infer_us == 100
    assert side.overhead_us == pytest.approx(100 - 10 - (100 + 30 + 20) / 4)


def test_executions_are_counted_by_their_rows() -> None:
    before, after = copy.deepcopy(IDLE), copy.deepcopy(IDLE)
    after["inference_stats"]["queue"]["count"] = 9
    before["batch_stats"] = [{"batch_size": 2, "compute_infer": {"count": 5, "ns": 1}}]
    after["batch_stats"] = [
        {"batch_size": rows, "compute_infer": {"count": count, "ns": 9}}
        for rows, count in ((16, 3), (2, 5), (4, 1), (1, 9))
    ]

    side, _ = statistics_between([{"m": [before]}, {"m": [after]}], "m")

    assert side is not None
    assert list(side.batches.items()) == [("1", 9), ("4", 1), ("16", 3)]


def test_by_default_the_version_is_the_highest_that_took_a_request() -> None:
    before = {"m": [served(5, version=version) for version in ("2", "9", "10", "11")]}
    after = {"m": [served(5 + more, version=version) for version, more in (("2", 1), ("9", 2), ("10", 3), ("11", 0))]}

    side, reason = statistics_between([before, after], "m")

    assert side is not None
    assert (side.version, side.requests) == ("10", 3)
    assert "3 versions had requests" in reason


def test_a_requested_version_is_used_even_if_others_took_more_requests() -> None:
    after = {"m": [served(1, version="1"), served(9, version="2")]}

    side, reason = statistics_between([{"m": [served(0, version="1"), served(0, version="2")]}, after], "m", "1")

    assert side is not None
    assert (side.requests, reason) == (1, "")


def test_requests_that_all_failed_are_reported_as_failures() -> None:
    side, reason = statistics_between([{"m": [IDLE]}, {"m": [stats(fail=(7, 70))]}], "m")

    assert side is not None
    assert (side.failed, side.requests, side.queue_us, reason) == (7, 0, 0.0, "")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([{"m": []}, {"m": []}], "gives no statistics"),
        ([{}, {}], "gives no statistics"),
        ([{"m": [served(1)]}], "gives no statistics"),
        ([{"m": []}, {"m": [served(9)]}], "gives no statistics"),
        ([{"m": [served(3)]}, {"m": [served(3)]}], "no version of it counted a request"),
        ([{"m": [served(3)]}, {"m": [served(2)]}], "began anew"),
        ([{"m": [served(3)]}, {"m": [served(0)]}, {"m": [served(9)]}], "began anew"),
        ([{"m": [served(3)]}, {"m": [served(3, version="2")]}, {"m": [served(9)]}], "began anew"),
    ],
    ids=["empty", "absent", "one answer", "first missing", "no request", "restarted", "and caught up", "loaded again"],
)
def test_inconsistent_statistics_give_a_reason_instead_of_a_guess(answers: list[dict[str, Any]], reason: str) -> None:
    side, message = statistics_between(answers, "m")

    assert side is None
    assert reason in message


def test_a_version_that_was_unloaded_is_reported() -> None:
    side, reason = statistics_between([{"m": [served(3)]}, {"m": [served(3, version="2")]}], "m", "1")

    assert side is None
    assert "version 1, which was unloaded" in reason


def test_a_version_loaded_in_between_counts_from_zero() -> None:
    side, _ = statistics_between([{"m": [served(4)]}, {"m": [served(4), served(6, version="2")]}], "m")

    assert side is not None
    assert (side.version, side.requests) == ("2", 6)


def test_a_missing_answer_in_between_changes_nothing() -> None:
    side, reason = statistics_between([{"m": [served(1)]}, {"m": []}, {"m": [served(5)]}], "m")

    assert side is not None
    assert (side.requests, reason) == (4, "")


def test_an_ensemble_has_the_times_of_its_models_besides_their_own_figures() -> None:
    after = {"m": [served(10, 300)], "a": [served(10, 100)], "b": [served(20, 40)]}
    before = {name: [served(0)] for name in after}

    side, reason = statistics_between([before, after], "m", "", (("a", ""), ("b", "1")))

    assert side is not None
    assert not reason
    assert (side.queue_us, side.compute_infer_us) == (25 + 10, 25 + 10)
    assert side.overhead_us == 300 - 70
    assert {name: part.requests for name, part in side.composing.items()} == {"a": 10, "b": 20}


def test_time_spent_on_the_caches_of_composing_models_is_not_overhead() -> None:
    statistics = stats(success=(4, 200), queue=(4, 0), cache_hit=(1, 8), cache_miss=(3, 12))
    before, after = {"m": [served(0)], "a": [stats()]}, {"m": [served(4, 100)], "a": [statistics]}

    side, _ = statistics_between([before, after], "m", "", (("a", ""),))

    assert side is not None
    assert side.overhead_us == pytest.approx(100 - 8 * 1 / 4 - 4 * 3 / 4)


def test_a_composing_model_that_was_not_called_is_omitted_and_noted() -> None:
    side, reason = statistics_between(
        [{"m": [served(0)], "a": []}, {"m": [served(10)], "a": []}], "m", "", (("a", ""),)
    )

    assert side is not None
    assert side.composing == {}
    assert "a: the server gives no statistics" in reason


def test_counts_may_be_text_and_missing_ones_are_omitted() -> None:
    after = {"version": 1, "inference_stats": {"success": {"count": "4", "ns": "4000"}, "queue": {"count": "4"}}}

    side, _ = statistics_between([{"m": [{"version": 1}]}, {"m": [after]}], "m")

    assert side is not None
    assert (side.requests, side.request_us, side.queue_us, side.rows_per_batch) == (4, 1.0, 0.0, 0.0)


counts = st.integers(0, 10**12)
entries = st.builds(
    lambda rows, batches, timed, sizes: {
        "version": "1",
        "inference_count": rows,
        "execution_count": batches,
        "inference_stats": {name: {"count": count, "ns": ns} for name, (count, ns) in timed.items()},
        "batch_stats": [{"batch_size": size, "compute_infer": {"count": n, "ns": n}} for size, n in sizes.items()],
    },
    counts,
    counts,
    st.dictionaries(st.sampled_from(TIMED), st.tuples(counts, counts)),
    st.dictionaries(st.integers(1, 64), counts, max_size=3),
)


@given(st.lists(entries, min_size=2, max_size=4))
def test_no_figure_is_ever_negative(entries: list[dict[str, Any]]) -> None:
    side, reason = statistics_between([{"m": [entry]} for entry in entries], "m")

    assert side is not None or reason
    if side is not None:
        figures = [getattr(side, name) for name in side.__slots__ if isinstance(getattr(side, name), int | float)]
        assert min(figures + list(side.batches.values())) >= 0


junk = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*TIMED, "count", "ns"]), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["version", "inference_count", "execution_count", "inference_stats"]), junk),
    st.dictionaries(st.sampled_from(["version", "inference_count", "execution_count", "inference_stats"]), junk),
)
def test_arbitrary_answers_give_a_reason_or_a_figure_and_never_an_exception(
    first: dict[str, Any], last: dict[str, Any]
) -> None:
    side, reason = statistics_between([{"m": [first]}, {"m": [last]}], "m")

    assert side is not None or reason


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=6))
def test_consecutive_windows_add_up_to_the_whole(growth: list[int]) -> None:
    totals = [sum(growth[: end + 1]) + 1 for end in range(len(growth))]
    answers = [{"m": [served(total)]} for total in totals]

    whole_statistics, _ = statistics_between(answers, "m")
    parts = [statistics_between([before, after], "m")[0] for before, after in pairwise(answers)]

    assert (whole_statistics.requests if whole_statistics else 0) == sum(part.requests for part in parts if part)
