from __future__ import annotations

import math

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.chaos import PROCESS_FAULTS, Chaos, Rates, parse
from penstock.server.settings import SettingError, Settings

S = 1_000_000_000
ALL = ("worker", "front", "engine")
RATES = st.dictionaries(st.sampled_from(PROCESS_FAULTS), st.floats(0.01, 50.0), min_size=1)


def test_chaos_rules_are_parsed() -> None:
    rates = parse(("kill-worker=0.5", " stop-front = 2 ", "fail=0.1", "slow=0.2:30", "seed=7", "kill-engine=0"))

    assert rates == Rates({"kill-worker": 0.5, "stop-front": 2.0}, 0.1, 0.2, 30.0, 7)
    assert not parse(()) and not parse(("fail=0", "seed=3"))  # noqa: PT018


@pytest.mark.parametrize("rule", [
    "fail", "fail=", "fail=2", "fail=-1", "fail=nan", "slow=0.1:", "slow=0.1:-1", "kill-worker=x", "kill-worker=1e9",
    "kill-workers=1", "seed=x", "=1", "fail:1", "kill-front=0.1:5",
])  # fmt: skip
def test_an_invalid_chaos_rule_is_an_error_that_lists_the_valid_rules(rule: str) -> None:
    with pytest.raises(ValueError, match=r"must be one of kill-worker, .*seed=NUMBER, not '.*'"):
        parse((rule,))


def test_chaos_requires_allow_chaos() -> None:
    with pytest.raises(SettingError, match="it requires --allow-chaos"):
        Settings(chaos=("fail=0.1",))
    with pytest.raises(SettingError, match=r"--chaos: must be .*, not 'fail=3'"):
        Settings(chaos=("fail=3",), allow_chaos=True)

    assert Settings(chaos=("fail=0.1",), allow_chaos=True).chaos == ("fail=0.1",)


@pytest.mark.parametrize("rule", ["kill-front=1", "stop-engine=1"])
def test_faults_in_fronts_or_the_engine_require_http_workers(rule: str) -> None:
    with pytest.raises(SettingError, match=f"'{rule}' requires --http-workers"):
        Settings(chaos=(rule,), allow_chaos=True)

    assert Settings(chaos=(rule,), allow_chaos=True, http_workers=1).chaos == (rule,)


def test_no_fault_is_ever_due_without_rates() -> None:
    chaos = Chaos(Rates(), ALL, 5)

    assert chaos.next_ns == math.inf
    assert chaos.pop_due(10**18) == []
    assert {chaos.draw_request_fault() for _ in range(100)} == {(False, 0.0)}


def test_only_faults_in_reachable_processes_are_due() -> None:
    chaos = Chaos(parse([f"{fault}=10" for fault in PROCESS_FAULTS]), ("worker",), 0)

    assert set(chaos.pop_due(10 * S)) == {"kill-worker", "stop-worker"}


@hypothesis.settings(max_examples=30)
@given(rates=RATES, seed=st.integers(), cuts=st.lists(st.integers(0, 20 * S), max_size=20))
def test_the_faults_due_do_not_depend_on_how_often_due_is_called(
    rates: dict[str, float], seed: int, cuts: list[int]
) -> None:
    often, once = (Chaos(Rates(rates, seed=seed), ALL, 0) for _ in range(2))

    faults = [fault for now_ns in (*sorted(cuts), 20 * S) for fault in often.pop_due(now_ns)]

    assert faults == once.pop_due(20 * S)
    assert often.next_ns == once.next_ns > 20 * S


@given(rates=RATES, seed=st.integers(), start=st.integers(0, 10**15))
def test_no_fault_is_due_before_its_time(rates: dict[str, float], seed: int, start: int) -> None:
    chaos = Chaos(Rates(rates, seed=seed), ALL, 0)
    chaos.restart(start)

    next_ns = chaos.next_ns

    assert next_ns > start
    assert chaos.pop_due(math.ceil(next_ns) - 1) == []
    assert len(chaos.pop_due(math.ceil(next_ns))) >= 1


@hypothesis.settings(max_examples=20)
@given(rate=st.floats(1.0, 20.0), seed=st.integers(0, 1000))
def test_faults_are_due_at_their_rate(rate: float, seed: int) -> None:
    seconds = 200
    count = len(Chaos(Rates({"kill-worker": rate}, seed=seed), ALL, 0).pop_due(seconds * S))

    assert abs(count - rate * seconds) < 7 * math.sqrt(rate * seconds)


def test_faults_are_reproducible_for_one_seed_and_process_and_differ_for_others() -> None:
    def run(seed: int, salt: str = "") -> list[object]:
        chaos = Chaos(
            parse(("kill-worker=3", "stop-worker=3", "fail=0.3", "slow=0.3:10", f"seed={seed}")), ALL, 0, salt
        )
        return [
            *chaos.pop_due(10 * S),
            *(chaos.draw_request_fault() for _ in range(50)),
            chaos.choose_victim(range(1000)),
        ]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(1, "front-0") != run(1, "front-1")


def test_requests_fail_and_are_delayed_in_the_configured_proportions() -> None:
    chaos = Chaos(parse(("fail=0.25", "slow=0.5:20")), (), 0)

    found = [chaos.draw_request_fault() for _ in range(4000)]

    failed, late = sum(fails for fails, _ in found), sum(late_s > 0 for _, late_s in found)
    assert abs(failed - 1000) < 200
    assert abs(late - 1500) < 200
    assert {late_s for _, late_s in found} == {0.0, 0.02}
