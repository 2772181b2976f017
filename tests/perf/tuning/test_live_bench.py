from __future__ import annotations

import math
import time
from typing import Any, cast

import pytest

from penstock.perf.generator.orders import Load, Window
from penstock.perf.profiling.control import Control
from penstock.perf.profiling.model import ModelDescription
from penstock.perf.profiling.sampling import Watch
from penstock.perf.reports.document import Level
from penstock.perf.tuning.arguments import parse_arguments
from penstock.perf.tuning.duels import Measurement
from penstock.perf.tuning.knobs import ORIGINAL, Setting
from penstock.perf.tuning.live_bench import BenchContext, LiveBench
from penstock.perf.tuning.search import SearchEndedError
from penstock.perf.tuning.served_model import RejectedSettingError, ServedModel, ServingError
from tests.perf.profiling.scripted import window

TWO: Setting = (("instance_count", 2),)
SLOW: Setting = (("max_queue_delay", 9),)
MIB = 2**20


class Machine:
    """Server, generator and watch in one: it serves 1000 requests a second, with two instances 1500, each in 10 ms.

    As a queue it answers the later the nearer a rate comes to that. `refuses`: what it does not load.
    """

    def __init__(self) -> None:
        self.setting: Setting | None = ORIGINAL
        self.loaded: list[Setting] = []
        self.refuses: Setting = SLOW
        self.failing = 0
        self.lives = True
        self.memory_bytes: float | None = 100 * MIB
        self._load = Load()
        self._seconds = 0

    # what is asked of ServedModel
    def load(self, setting: Setting) -> None:
        if setting == self.refuses:
            raise RejectedSettingError("400 no")
        self.setting = setting
        self.loaded.append(setting)

    # what is asked of a fleet
    def start_load(self, load: Load) -> None:
        self._load = load

    def take(self) -> Window:
        most = 1500.0 if self.setting == TWO else 1000.0
        if self._load.open:
            per_s = min(self._load.rate_per_s, most)
            latency_us = 1e4 / (1 - per_s / most) if per_s < most else 1e9
        else:
            per_s = min(self._load.concurrency * 100.0, most)
            latency_us = self._load.concurrency / per_s * 1e6
        self._seconds += 1
        new_window = window([latency_us] * int(per_s) if self.lives else [], self._seconds)
        if self.failing:
            new_window.errors["503: busy"] = self.failing
        if not self.lives:
            new_window.failure = "connection refused"
        return new_window

    def count(self) -> int:
        return 0

    def wait(self, seconds: float, requests: int = 0) -> bool:
        return True

    def halt(self) -> None:
        pass

    # what is asked of a Watch and of a Control
    def begin(self) -> None:
        pass

    def mark(self) -> None:
        pass

    def set_figure(self, name: str, value: float) -> None:
        pass

    def record_in(self, level: Level, first: Any, last: Any) -> None:
        level.server_rss_bytes = self.memory_bytes

    def ready(self, model: str = "", version: str = "") -> bool:
        return self.lives

    def statistics(self, model: str, version: str = "") -> list[dict[str, Any]]:
        return []


def bench_of(machine: Machine, words: str = "", *, stopped: bool = False, left_s: float = 1e6) -> LiveBench:
    options = parse_arguments(f"-m m --out found {words}".split())
    model = ModelDescription("m", "", "", (), ())
    served, control, watch = cast("ServedModel", machine), cast("Control", machine), cast("Watch", machine)
    ends = time.monotonic() + left_s
    return LiveBench(BenchContext(options, served, control, model, machine, watch, lambda: stopped, ends))


def test_the_concurrency_is_twice_what_suffices() -> None:
    bench = bench_of(Machine())

    assert bench.find_concurrency() == "1,000 requests/s with 16 under way"
    assert bench.concurrency == 32


def test_a_specified_concurrency_is_used() -> None:
    bench = bench_of(Machine(), "--concurrency-range 5")

    assert (bench.find_concurrency(), bench.concurrency) == ("", 5)


def test_without_a_target_the_score_is_throughput() -> None:
    bench = bench_of(Machine(), "--concurrency-range 20")
    bench.find_concurrency()

    assert bench.measure(ORIGINAL, None).score == pytest.approx(1000)
    assert bench.measure(TWO, None).score == pytest.approx(1500)
    assert bench.levels.keys() == {ORIGINAL, TWO}


def test_with_a_target_the_score_is_the_highest_rate() -> None:
    bench = bench_of(Machine(), "--latency-target 20")
    bench.find_concurrency()

    first = bench.measure(ORIGINAL, None)
    two = bench.measure(TWO, first)

    assert first.score == pytest.approx(500, rel=0.06)  # of a queue that takes twice as long at half of what it can
    assert two.score == pytest.approx(750, rel=0.06)
    assert two.p99_us <= 20_000


def test_with_a_target_and_a_closed_loop_the_score_is_the_highest_concurrency() -> None:
    bench = bench_of(Machine(), "--latency-target 20 --concurrency-range 1:64")
    bench.find_concurrency()

    assert bench.measure(ORIGINAL, None) == Measurement(1000, 20, 1000, 20_000, 20_000, 100 * MIB)


def test_a_target_that_is_never_met_scores_zero() -> None:
    measured = bench_of(Machine(), "--latency-target 5 --concurrency-range 1:64").measure(ORIGINAL, None)

    assert (measured.score, measured.why) == (0, "p99 is over the target at 1 already")


def test_at_a_fixed_rate_without_a_target_the_score_is_latency() -> None:
    bench = bench_of(Machine(), "--request-rate-range 500")

    assert bench.measure(TWO, None).score > bench.measure(ORIGINAL, None).score


def test_screening_reloads_only_a_changed_setting_and_measuring_always_reloads() -> None:
    machine = Machine()
    bench = bench_of(machine, "--concurrency-range 8")
    for setting in (ORIGINAL, TWO, TWO):
        bench.screen(setting, Measurement(1.0, 8))
    bench.measure(TWO, None)

    assert machine.loaded == [TWO, TWO]


def test_a_rejected_setting_does_not_end_the_search() -> None:
    assert bench_of(Machine()).measure(SLOW, None).why == "400 no"


def test_rejection_of_a_setting_served_before_ends_the_search() -> None:
    machine = Machine()
    machine.refuses = ORIGINAL

    with pytest.raises(ServingError, match="no longer taken: 400 no"):
        bench_of(machine).measure(ORIGINAL, None)


def test_a_setting_that_exceeds_the_memory_budget_scores_zero() -> None:
    measured = bench_of(Machine(), "--memory-budget 99").measure(TWO, None)

    assert (measured.score, measured.why) == (0, "over the memory budget: 100 MiB")


def test_a_memory_budget_without_a_memory_figure_is_an_error() -> None:
    machine = Machine()
    machine.memory_bytes = None

    with pytest.raises(ServingError, match="memory is not known"):
        bench_of(machine, "--memory-budget 99").measure(TWO, None)


def test_failed_requests_are_reported() -> None:
    machine = Machine()
    machine.failing = 50

    assert bench_of(machine, "--concurrency-range 20").measure(TWO, None).why.endswith("requests failed: 503: busy")


def test_losing_the_server_ends_the_search() -> None:
    machine = Machine()
    machine.lives = False

    with pytest.raises(ServingError, match="connection refused"):
        bench_of(machine).measure(ORIGINAL, None)


@pytest.mark.parametrize(("how", "why"), [({"stopped": True}, "interrupted"), ({"left_s": -1}, "the time is up")])
def test_the_search_ends_on_an_interrupt_and_when_time_is_up(how: dict[str, Any], why: str) -> None:
    with pytest.raises(SearchEndedError, match=why):
        bench_of(Machine(), **how).screen(TWO, Measurement(1.0, 8, math.nan))
