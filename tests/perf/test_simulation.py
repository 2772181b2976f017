from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.spec import BatchPolicy
from penstock.perf.simulator.arrivals import (
    ONE_ROW,
    SHAPELESS,
    Arrivals,
    Kind,
    constant,
    poisson,
    recorded,
)
from penstock.perf.simulator.front_end import FrontCosts, simulate_server
from penstock.perf.simulator.run_times import RunTimes, from_table, linear
from penstock.perf.simulator.simulation import EXPIRED, REFUSED, SERVED, Result, simulate
from penstock.perf.static_policies import Comparison, Figures, cells, compare_simulated, static_grid

MS = 1_000_000
POLICY = BatchPolicy(max_batch_rows=16)
ALONE = BatchPolicy(max_batch_rows=0, max_queue_rows=1_000_000)
JUST_MISSED = [0, *[1000] * 15]
"""One request, and more just after it: they wait for all of a run that carries one."""
TRUTH = linear(MS, 50_000, noise=0.1)
FREE = FrontCosts(0, 0, 0, 0, 0, 0)
COSTS = FrontCosts(20_000, 5_000, 10_000, 50_000, 15_000, 30_000)


def volleys(after_ns: list[int], every_s: float, seconds: float) -> Arrivals:
    """Requests at these times, again and again."""
    at_ns = (np.arange(0, seconds, every_s)[:, None] * 1e9 + after_ns).astype(np.int64).ravel()
    return Arrivals(at_ns, np.zeros_like(at_ns), ONE_ROW, seconds)


def giants(every: int) -> Arrivals:
    """Small requests, and a giant every so often."""
    small = poisson(5000, 0.5)
    which = (np.arange(len(small)) % every == every - 1).astype(np.int64)
    return Arrivals(small.at_ns, which, (Kind(), Kind(64)), small.seconds)


def checked(result: Result) -> Result:
    """A result in which every request has one end, and was batched if it was served."""
    ends = [result.count(ending) for ending in (SERVED, REFUSED, EXPIRED)]
    assert sum(ends) == len(result.arrivals)
    served = result.outcomes == SERVED
    assert result.batch_rows.sum() == result.arrivals.rows[served].sum()
    assert (result.start_ns[served] >= result.arrivals.at_ns[served]).all()
    assert (result.end_ns[served] > result.start_ns[served]).all()
    assert (result.start_ns[~served] == -1).all()
    return result


loads = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=120
)  # fmt: skip
policies = st.builds(
    BatchPolicy,
    max_batch_rows=st.sampled_from([0, 1, 4, 16]),
    cap_rows=st.sampled_from([None, 2, 8]),
    max_queue_delay_us=st.sampled_from([0, 700, 5000]),
    preferred_rows=st.sampled_from([(), (4,), (2, 8)]),
    max_queue_rows=st.sampled_from([8, 1024]),
    latency_target_us=st.sampled_from([0, 0, 6000]),
)
KINDS = (Kind(), Kind(3), Kind(1, ((9,),)), Kind(1, deadline_ns=3 * MS))


class TestEveryArrivalHasOneEnd:
    @pytest.mark.slow
    @settings(deadline=None, max_examples=60)
    @given(loads, policies, st.integers(1, 3))
    def test_for_any_arrivals_and_any_policy(
        self, load: list[tuple[int, int]], policy: BatchPolicy, instances: int
    ) -> None:
        arrivals = recorded([at / 1000 for at, _ in load], KINDS, [which for _, which in load])

        checked(simulate(arrivals, policy, TRUTH, instances=instances))
        checked(simulate_server(arrivals, policy, TRUTH, COSTS, instances=instances))

    @pytest.mark.parametrize(
        "arrivals",
        [
            volleys([0] * 40, 0.01, 0.5),
            volleys(JUST_MISSED, 0.01, 0.5),
            giants(20),
            poisson(40_000, 0.5, seed=1),
            poisson(3000, 0.5, (Kind(target_ns=4 * MS),), seed=1),
        ],
        ids=["volleys", "just missed", "giants", "overload", "targets"],
    )
    def test_in_the_worst_cases(self, arrivals: Arrivals) -> None:
        checked(simulate(arrivals, POLICY, TRUTH))

    def test_a_request_beyond_the_queue_limit_is_rejected_on_arrival(self) -> None:
        result = checked(simulate(volleys([0] * 20, 1, 1), BatchPolicy(max_batch_rows=4, max_queue_rows=8), TRUTH))

        assert result.count(REFUSED) == 12
        assert result.end_ns[result.outcomes == REFUSED].tolist() == [0] * 12

    def test_a_request_expires_at_its_deadline(self) -> None:
        # nothing is known of two shapes: a wait that nobody can predict is no reason to refuse at the door
        kinds = (Kind(), Kind(1, ((9,),), deadline_ns=MS // 2))
        result = checked(simulate(recorded([0.0, 0.001], kinds, [0, 1]), POLICY, from_table({1: 4 * MS})))

        assert result.outcomes.tolist() == [SERVED, EXPIRED]
        assert result.end_ns.tolist() == [4 * MS, MS + MS // 2]

    def test_a_scheduler_that_forgets_a_request_is_detected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Scheduler, "take", lambda self, now_ns, most_ns=0: None)

        with pytest.raises(RuntimeError, match="3 requests never end"):
            simulate(constant(1000, 0.003), POLICY, TRUTH)


@pytest.mark.slow
class TestQueueingTheory:
    @pytest.mark.parametrize("busy", [0.3, 0.5, 0.7])
    def test_batches_of_one_with_equal_run_times_wait_as_in_m_d_1(self, busy: float) -> None:
        result = simulate(poisson(busy * 1000, 60, seed=2), ALONE, from_table({1: MS}))
        waited_ns = (result.start_ns - result.arrivals.at_ns).mean()

        assert waited_ns == pytest.approx(busy * MS / (2 * (1 - busy)), rel=0.05)
        assert result.utilization == pytest.approx(busy, rel=0.02)

    def test_two_instances_wait_as_in_m_d_2(self) -> None:
        one = simulate(poisson(700, 60, seed=2), ALONE, from_table({1: MS}))
        two = simulate(poisson(1400, 60, seed=2), ALONE, from_table({1: MS}), instances=2)
        waits = [(result.start_ns - result.arrivals.at_ns).mean() for result in (one, two)]

        # Source: Cosmetatos' approximation of M/D/2, from M/M/2 at 0.7, which waits 0.9608 runs
        assert waits[1] / MS == pytest.approx(0.4916, rel=0.06)
        assert waits[1] < waits[0]

    @pytest.mark.parametrize("per_s", [500, 3000, 8000])
    def test_the_mean_queue_length_is_rate_times_wait(self, per_s: int) -> None:
        result = simulate(poisson(per_s, 3, seed=4), POLICY, TRUTH)
        wait_s = (result.start_ns - result.arrivals.at_ns).mean() / 1e9

        assert result.mean_queue_length == pytest.approx(len(result.arrivals) / result.span_s * wait_s, rel=0.01)


class TestTheSimulation:
    def test_a_seed_determines_the_result(self) -> None:
        def run(seed: int) -> list[int]:
            ends: list[int] = simulate(poisson(5000, 1, seed=1), POLICY, TRUTH, seed=seed).end_ns.tolist()
            return ends

        assert run(1) == run(1)
        assert run(1) != run(2)

    def test_recorded_arrivals_are_replayed_to_the_nanosecond(self) -> None:
        result = simulate(recorded([0.0, 0.0105, 0.02]), POLICY, from_table({1: 2 * MS}))

        assert result.start_ns.tolist() == [0, 10_500_000, 20_000_000]
        assert result.latency_ns.tolist() == [2 * MS] * 3

    def test_requests_that_wait_while_the_device_runs_share_a_batch(self) -> None:
        result = simulate(volleys(JUST_MISSED[:6], 1, 1), POLICY, from_table({1: MS, 16: MS}))

        assert result.batch_rows.tolist() == [1, 5]
        assert result.latency_ns.tolist() == [MS, *[2 * MS - 1000] * 5]

    def test_a_delay_holds_a_batch_open_and_no_longer(self) -> None:
        policy = BatchPolicy(max_batch_rows=4, cap_rows=4, max_queue_delay_us=1000)
        result = simulate(recorded([0.0, 0.0004, 0.01, 0.01, 0.01, 0.01]), policy, from_table({1: MS, 4: MS}))

        assert result.start_ns.tolist() == [MS, MS, *[10 * MS] * 4]

    def test_the_cost_model_learns_the_run_times_of_the_device(self) -> None:
        result = simulate(poisson(5000, 2, seed=1), POLICY, TRUTH)

        predicted = result.cost_model.predict_ns(SHAPELESS, 8)
        assert predicted == pytest.approx(TRUTH.mean_ns(SHAPELESS, 8), rel=0.1)

    def test_a_slowdown_of_the_device_takes_effect(self) -> None:
        run_times = from_table({1: MS}, slowdowns=[(2_000_000_000, 3.0)])
        result = simulate(constant(100, 2, (Kind(),)), POLICY, run_times)

        assert sorted(set(result.batch_ns.tolist())) == [MS, 3 * MS]

    def test_padded_batches_take_as_long_as_their_padded_size(self) -> None:
        run_times = from_table({1: MS, 4: 4 * MS, 8: 8 * MS})
        result = simulate(volleys([0] * 3, 1, 1), BatchPolicy(max_batch_rows=8, allowed_rows=(8,)), run_times)

        assert result.batch_ns.tolist() == [8 * MS]


class TestTheFrontEnd:
    def test_a_front_end_without_costs_changes_nothing(self) -> None:
        load = poisson(1000, 2, seed=3)
        without, free = simulate(load, ALONE, TRUTH), simulate_server(load, ALONE, TRUTH, FREE)

        assert free.latency_ns.tolist() == without.latency_ns.tolist()

    def test_a_single_request_takes_its_run_and_all_other_costs(self) -> None:
        result = simulate_server(constant(10, 1), POLICY, from_table({1: MS}), COSTS)

        beside_ns = COSTS.wire_ns + 3 * COSTS.wake_ns + COSTS.batch_ns
        beside_ns += COSTS.read_ns + COSTS.encode_ns + COSTS.write_ns
        assert set(result.latency_ns.tolist()) == {MS + beside_ns}

    @pytest.mark.slow
    def test_throughput_is_limited_by_the_event_loop(self) -> None:
        result = checked(simulate_server(poisson(40_000, 1, seed=1), POLICY, from_table({1: 100, 16: 100}), COSTS))

        assert 20_000 < result.goodput_per_s() < 1e9 / (COSTS.read_ns + COSTS.encode_ns + COSTS.write_ns)

    @pytest.mark.slow
    def test_several_instances_share_the_event_loop(self) -> None:
        load = poisson(1800, 2, seed=1)
        one, two = (simulate_server(load, ALONE, from_table({1: MS}), COSTS, instances=count) for count in (1, 2))

        assert one.goodput_per_s() == pytest.approx(1000, rel=0.1)
        assert checked(two).goodput_per_s() == pytest.approx(1800, rel=0.05)


class TestRunTimes:
    def test_run_times_are_drawn_from_a_sample(self) -> None:
        run_times = from_table({1: [MS, MS, MS, 5 * MS], 2: 2 * MS})
        draw = run_times.sampler(1)
        drawn = [draw(SHAPELESS, 1, 0) for _ in range(4000)]

        assert np.mean(drawn) == pytest.approx(run_times.mean_ns(SHAPELESS, 1), rel=0.05)
        assert draw(SHAPELESS, 2, 0) == 2 * MS

    def test_run_times_are_interpolated_between_sizes_and_extrapolated_beyond(self) -> None:
        run_times = linear(1000, 10)

        assert [run_times.mean_ns(SHAPELESS, rows) for rows in (1, 7, 1024, 2048)] == [1010, 1070, 11_240, 21_480]

    def test_noise_preserves_the_mean(self) -> None:
        assert linear(1000, 10, noise=0.3).mean_ns(SHAPELESS, 10) == pytest.approx(1100, rel=0.02)

    def test_keys_have_their_own_run_times_and_an_unknown_key_those_of_the_first(self) -> None:
        run_times = RunTimes({((4,),): {1: 100}, ((8,),): {1: 200}})

        assert [run_times.mean_ns(key, 1) for key in (((4,),), ((8,),), ((9,),))] == [100, 200, 100]

    def test_the_knee_is_the_smallest_size_with_the_most_rows_per_second(self) -> None:
        assert from_table({1: 100, 8: 200, 16: 400, 64: 2000}).knee(SHAPELESS, 64) == (8, 8 / 200 * 1e9)


class TestTheGrid:
    def test_static_policies_state_everything_that_could_be_learned(self) -> None:
        grid = static_grid()

        assert len(set(grid.values())) == len(grid) == 67
        assert all(policy.cap_rows == policy.max_batch_rows for policy in grid.values())
        assert {policy.cap_rows for policy in static_grid(8).values()} == {8, 16, 32, 64}

    def test_every_cell_offers_its_share_of_the_knee(self) -> None:
        for cell in cells():
            assert cell.arrivals(10_000, 20, 1).rows_per_s == pytest.approx(cell.share * 10_000, rel=0.1)

    def test_the_best_policy_is_the_fastest_that_serves_enough(self) -> None:
        static = {"quick": Figures(900, 1, 2, 1), "good": Figures(980, 1, 4, 1), "most": Figures(1000, 1, 9, 1)}
        compared = Comparison(cells()[0], Figures(960, 1, 4.2, 1), static)

        assert (compared.best_goodput, compared.best_p99) == ("most", "good")
        assert compared.p99_ratio == pytest.approx(1.05)
        assert compared.passes
        assert not Comparison(cells()[0], Figures(960, 1, 4.5, 1), static).passes

    @pytest.mark.slow
    def test_all_cells_are_simulated_with_the_whole_grid(self) -> None:
        compared = compare_simulated(TRUTH, requests=100)

        assert [each.cell for each in compared] == list(cells())
        assert [len(each.static) for each in compared[:2]] == [67, 67]
        assert all(each.default.goodput_per_s > 0 for each in compared)
