from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.perf import plan
from penstock.perf.plan import Load, Plan, PlanError, load_of
from penstock.perf.simulator.arrivals import SHAPELESS
from penstock.perf.simulator.measured_run_times import read_costs
from penstock.server import cli
from tests.live import live_server

COSTS = [
    {"rows": rows, "mean_ns": 1_000_000 + 50_000 * rows, "p95_ns": 1_200_000 + 60_000 * rows} for rows in (1, 8, 64)
]


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS), "utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "REQUESTS", 2000)
    monkeypatch.setattr(plan, "MIN_SECONDS", 0.0)


def plan_for(
    rate: float, target_ms: float = 0.0, rows: int = 1, arrivals: str = "poisson", front_us: float = 0.0
) -> Plan:
    return Plan(read_costs(json.dumps(COSTS)), load_of(arrivals, rate, rows), target_ms, front_us)


class TestCosts:
    def test_a_table_gives_means_and_tails(self) -> None:
        measured = read_costs(json.dumps(COSTS))
        values = measured.run_times.values_ns(SHAPELESS, 8)

        assert measured.max_rows == 64
        assert sum(values) / len(values) == pytest.approx(1_400_000, rel=0.01)
        assert values[int(0.95 * len(values))] == pytest.approx(1_680_000, rel=0.02)

    def test_statistics_give_the_shape_that_ran_most(self) -> None:
        run_times = [
            {"shapes": [[4]], "rows": 1, "runs": 10, "mean_ns": 100, "p95_ns": 100},
            {"shapes": [[8]], "rows": 1, "runs": 70, "mean_ns": 300, "p95_ns": 300},
            {"shapes": [[8]], "rows": 2, "runs": 20, "mean_ns": 500, "p95_ns": 500},
        ]
        measured = read_costs(json.dumps({"model_stats": [{"name": "m", "run_times": run_times}]}))

        assert [measured.run_times.mean_ns(SHAPELESS, rows) for rows in (1, 2)] == [300, 500]

    def test_statistics_of_triton_give_means(self) -> None:
        entry = {"batch_size": 4, "compute_input": {"count": 2, "ns": 20}, "compute_output": {"count": 2, "ns": 40}}
        stats = [entry | {"compute_infer": {"count": 2, "ns": 200}}]
        measured = read_costs(json.dumps({"model_stats": [{"name": "m", "batch_stats": stats}]}))

        assert (measured.max_rows, measured.run_times.mean_ns(SHAPELESS, 4)) == (4, 130)

    @pytest.mark.parametrize(
        "text", ["", "3", "[]", "{}", '{"model_stats": []}', '[{"rows": 1, "mean_ns": 0}]', '{"batch_stats": []}']
    )
    def test_input_without_run_times_is_rejected(self, text: str) -> None:
        with pytest.raises(ValueError, match="no run times in the costs"):
            read_costs(text)


class TestThePlan:
    def test_the_knee_is_the_highest_throughput_of_the_device(self) -> None:
        assert plan_for(1000).knee_rows == 64
        assert plan_for(1000).knee_rows_per_s == pytest.approx(64 / 4.2e-3, rel=0.01)

    def test_the_curve_rises_with_load(self) -> None:
        curve = plan_for(1000).curve()

        assert [each.p50_ms for each in curve] == sorted(each.p50_ms for each in curve)
        assert curve[-1].p99_ms > 2 * curve[0].p99_ms
        assert curve[-1].requests_per_s == pytest.approx(0.95 * plan_for(1000).knee_rows_per_s, rel=0.1)

    def test_more_load_never_needs_fewer_devices(self) -> None:
        needed = [plan_for(rate, 10).devices(0.99) for rate in (1_000, 10_000, 30_000, 100_000, 300_000)]

        assert needed == sorted(needed)
        assert needed[0] == 1
        assert needed[-1] >= plan_for(300_000).min_devices

    def test_a_tighter_target_never_needs_fewer_devices(self) -> None:
        needed = [plan_for(100_000, target_ms).devices(0.99) for target_ms in (40, 20, 10, 5, 3)]

        assert needed == sorted(needed)
        assert needed[0] < needed[-1]

    def test_a_higher_attainment_never_needs_fewer_devices(self) -> None:
        needed = [plan_for(100_000, 8).devices(attain) for attain in (0.5, 0.9, 0.99, 0.999)]

        assert needed == sorted(needed)

    def test_the_answer_meets_the_target_and_one_device_less_does_not(self) -> None:
        planned = plan_for(100_000, 6)
        devices = planned.devices(0.99)

        assert planned.on_devices(devices).in_time >= 0.99
        assert planned.on_devices(devices - 1).in_time < 0.99

    def test_a_target_below_the_shortest_run_is_unattainable(self) -> None:
        assert plan_for(100_000, 0.5).devices(0.99) == 0

    @pytest.mark.parametrize("devices", [1, 64, 4096])
    def test_any_number_of_devices_takes_one_simulation(self, devices: int) -> None:
        planned = plan_for(7_000.0 * devices, 10)

        assert planned.on_devices(devices).requests_per_s == pytest.approx(7000, rel=0.1)
        assert 0.9 * planned.min_devices < planned.devices(0.99) <= devices

    def test_rows_count_and_not_requests(self) -> None:
        assert plan_for(1000, rows=8).min_devices == pytest.approx(8 * plan_for(1000).min_devices)

    def test_a_front_end_slower_than_the_device_is_the_limit(self) -> None:
        bound = plan_for(1000, front_us=200)

        assert bound.knee_rows_per_s == 5000
        assert [each.requests_per_s for each in bound.curve()][-1] == pytest.approx(0.95 * 5000, rel=0.05)
        assert plan_for(1000, rows=4, front_us=500).min_devices == pytest.approx(1000 * 500e-6)
        assert plan_for(1000, front_us=20).knee_rows_per_s == plan_for(1000).knee_rows_per_s

    def test_time_in_the_front_end_is_part_of_the_latency(self) -> None:
        without, slow = plan_for(500).on_devices(1), plan_for(500, front_us=1000).on_devices(1)

        assert slow.p50_ms >= without.p50_ms + 1
        assert plan_for(50_000, 10, front_us=200).devices(0.99) > plan_for(50_000, 10).devices(0.99)

    @pytest.mark.slow
    def test_bursts_need_more_devices_than_poisson_arrivals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan, "MIN_SECONDS", 8.0)

        assert plan_for(50_000, 10, arrivals="bursty").devices(0.99) > plan_for(50_000, 10).devices(0.99)


class TestATrace:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> str:
        path = tmp_path / "trace"
        path.write_text("\n".join(str(100 + number / 1000) for number in range(4000)), "utf-8")
        return f"trace:{path}"

    def test_a_trace_is_replayed_unchanged(self, trace: str) -> None:
        load = load_of(trace, 0, 1)

        assert load.requests_per_s == pytest.approx(1000, rel=1e-3)
        assert load.draw(1)[0].at_ns[:3].tolist() == [0, 1_000_000, 2_000_000]

    def test_a_rate_scales_a_trace(self, trace: str) -> None:
        assert load_of(trace, 5000, 1).draw(1)[0].at_ns[:3].tolist() == [0, 200_000, 400_000]

    def test_each_of_many_devices_gets_a_random_part_of_a_trace(self, trace: str) -> None:
        parts = load_of(trace, 0, 1).draw(100)

        assert len(parts) == 50
        assert sum(map(len, parts)) == pytest.approx(2000, rel=0.1)

    @pytest.mark.parametrize("text", ["", "a\nb"])
    def test_an_invalid_trace_is_rejected(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "trace").write_text(text, "utf-8")

        with pytest.raises(PlanError, match="trace"):
            load_of(f"trace:{tmp_path / 'trace'}", 0, 1)


class TestTheCommand:
    def test_penstock_finds_the_command_by_its_entry_point(
        self, costs: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status = cli.main(["plan", "--costs", costs, "--rate", "50000", "--target-ms", "10"])

        assert status == 0
        printed = capsys.readouterr().out
        assert "one device: at most 15,2" in printed
        assert re.search(r"^99% within 10 ms: [45] devices$", printed, re.MULTILINE)

    def test_the_command_reports_if_the_front_end_is_the_bottleneck(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        known = [{"shapes": [[4]], "rows": rows, "runs": 9, "mean_ns": 5_000, "p95_ns": 6_000} for rows in (1, 64)]
        (tmp_path / "quick.json").write_text(json.dumps({"run_times": known}), "utf-8")
        plan.main(["--costs", str(tmp_path / "quick.json"), "--rate", "1000"])

        assert "one front end takes in some 80,000 small requests/s" in capsys.readouterr().out

        plan.main(["--costs", str(tmp_path / "quick.json"), "--rate", "1000", "--front-us", "100"])

        assert "one device: at most 10,000 rows/s, all that its front end takes in\n" in capsys.readouterr().out

    def test_json_contains_everything_that_is_printed(self, costs: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan.main(["--costs", costs, "--rate", "20000", "--target-ms", "10", "--json"]) == 0

        printed_json: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert printed_json["target"]["devices"] == 2
        assert printed_json["load"]["devices"] == 2
        assert {"p50_ms", "p99_ms", "in_time", "refused"} < printed_json["load"]["each"].keys()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--rate", "0"], "--rate says how many requests come per second"),
            (["--rate", "5", "--arrivals", "often"], "poisson, bursty or trace:FILE"),
            (["--rate", "5", "--costs", "/nowhere"], "--costs /nowhere"),
            (["--rate", "5", "--costs", "/dev/null"], "no run times in the costs"),
        ],
    )
    def test_an_error_is_named(
        self, costs: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert plan.main(["--costs", costs, *words]) == 2
        assert message in capsys.readouterr().err

    def test_a_server_without_costs_is_an_error_with_a_reason(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with live_server(tmp_path) as live:
            status = plan.main(["--costs", live.url + "/v2/models/gone/stats", "--rate", "5"])

        assert status == 2
        assert "requested model 'gone' is not available" in capsys.readouterr().err

    @pytest.mark.parametrize("words", [["--rows", "0"], ["--devices", "x"], ["--attain", "2"]])
    def test_a_number_out_of_range_is_wrong_usage(self, costs: str, words: list[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            plan.main(["--costs", costs, "--rate", "5", *words])


def test_a_load_states_its_request_rate() -> None:
    load = load_of("poisson", 500, 4)

    assert isinstance(load, Load)
    assert (load.requests_per_s, load.rows) == (500, 4)
