"""Lead: when the next Batch is taken, given the time that the device needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.running.lead import MAX_RUNS, WAKE_LATENCY_NS, Lead, estimate_end_ns

NS = st.integers(0, 1 << 50)
MS = 1_000_000
KEY = ((4,),)


class TestTakeTime:
    @given(st.lists(NS, max_size=5), NS, NS)
    def test_the_next_batch_is_taken_between_the_runs_start_and_the_devices_release(
        self, gathers: list[int], start_ns: int, cost_ns: int
    ) -> None:
        lead = Lead()
        for gather_ns in gathers:
            lead.learn_gather(gather_ns)

        assert start_ns - 1 <= lead.take_ns(start_ns + cost_ns, cost_ns) <= start_ns + cost_ns

    @given(st.integers(0, 10 * MS), st.integers(1, 20), st.integers(100 * MS, 500 * MS))
    def test_the_next_batch_is_taken_just_in_time_to_be_gathered_when_the_device_is_free(
        self, gather_ns: int, times: int, cost_ns: int
    ) -> None:
        lead = Lead()
        for _ in range(times):
            lead.learn_gather(gather_ns)

        assert lead.take_ns(1000 * MS, cost_ns) == 1000 * MS - WAKE_LATENCY_NS - 2 * gather_ns

    @given(st.lists(st.integers(0, 10 * MS), min_size=1, max_size=5))
    def test_the_learned_gather_time_lies_between_observed_gather_times(self, gathers: list[int]) -> None:
        lead = Lead()
        for gather_ns in gathers:
            lead.learn_gather(gather_ns)
        learned_ns = (1000 * MS - WAKE_LATENCY_NS - lead.take_ns(1000 * MS, 500 * MS)) / 2

        assert min(gathers) - 1 <= learned_ns <= max(gathers) + 1

    def test_a_long_gather_is_forgotten_after_many_short_ones(self) -> None:
        lead = Lead()
        lead.learn_gather(100 * MS)
        before = lead.take_ns(1000 * MS, 400 * MS)
        for _ in range(200):
            lead.learn_gather(MS)

        assert before < lead.take_ns(1000 * MS, 400 * MS) <= 1000 * MS - WAKE_LATENCY_NS - 2 * MS
        assert lead.take_ns(1000 * MS, 400 * MS) > 1000 * MS - WAKE_LATENCY_NS - 2.1 * MS


class TestDeviceRunTime:
    def test_the_batchs_predicted_cost_is_used_until_the_device_has_reported_a_run_time(self) -> None:
        lead = Lead()
        lead.learn_run(KEY, 8, 0)

        assert lead.run_ns(KEY, 8, 5 * MS) == 5 * MS

    def test_device_time_is_learned_by_key_and_by_rows(self) -> None:
        lead = Lead()
        lead.learn_run(KEY, 8, 3 * MS)

        assert lead.run_ns(KEY, 8, 5 * MS) == 3 * MS
        assert lead.run_ns(KEY, 4, 5 * MS) == 5 * MS
        assert lead.run_ns(((5,),), 8, 5 * MS) == 5 * MS

    @given(st.lists(st.integers(1, 10 * MS), min_size=1, max_size=30))
    def test_the_learned_device_time_lies_between_observed_runs(self, runs: list[int]) -> None:
        lead = Lead()
        for run_ns in runs:
            lead.learn_run(KEY, 8, run_ns)

        assert min(runs) - 1 <= lead.run_ns(KEY, 8, 0) <= max(runs) + 1

    def test_a_slower_device_is_learned_after_some_runs(self) -> None:
        lead = Lead()
        for run_ns in [MS] * 5 + [2 * MS] * 40:
            lead.learn_run(KEY, 8, run_ns)

        assert 1.95 * MS <= lead.run_ns(KEY, 8, 0) <= 2 * MS

    def test_the_number_of_remembered_shapes_is_bounded(self) -> None:
        lead = Lead()
        for length in range(3 * MAX_RUNS):
            lead.learn_run(((length,),), 8, MS)

        assert len(lead._runs) <= MAX_RUNS


class TestEstimatedEnd:
    @given(NS, NS, NS, st.booleans())
    def test_the_estimated_end_of_a_run_lies_within_known_bounds(
        self, predicted_ns: int, requested_ns: int, waited_ns: int, over: bool
    ) -> None:
        reported_ns = requested_ns + waited_ns
        ended = estimate_end_ns(predicted_ns, requested_ns, reported_ns, ended=over)

        if over:
            assert ended <= requested_ns
        else:
            assert requested_ns <= ended <= reported_ns

    def test_the_predicted_end_is_used_within_known_bounds(self) -> None:
        assert estimate_end_ns(7, 5, 9, ended=False) == 7
        assert estimate_end_ns(3, 5, 9, ended=True) == 3
