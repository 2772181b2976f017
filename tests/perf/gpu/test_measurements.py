"""What the parts make of what they see, without a device: tolerances, batches, traces, slopes, pages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.gpu import copies, correct, faults, memory, offline, telemetry
from penstock.perf.gpu.copies import Span
from penstock.perf.gpu.telemetry import COMPARED_METRICS, ComparedMetric
from tests.backends.fake_cuda import FakeRuntime

_SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)).map(lambda each: (each[0], each[0] + each[1])))
_POWER = next(each for each in COMPARED_METRICS if each.metric == telemetry.POWER)


def test_the_error_of_an_answer_is_that_of_its_worst_row() -> None:
    expected = np.array([[3.0, 4.0], [0.0, 2.0]])

    assert correct.max_error(expected, expected) == 0
    assert correct.max_error(expected + np.array([[0, 0], [0, 1]]), expected) == 0.5
    assert correct.max_error(expected[::-1], expected) > 0.5
    assert correct.max_error(expected * math.nan, expected) == math.inf
    assert correct.max_error(expected[:1], expected) == math.inf


def test_requests_cover_all_rows_of_the_pool_in_odd_sizes() -> None:
    row_selections = correct.row_selections()

    assert [len(rows) for rows in row_selections[: len(correct.SIZES)]] == list(correct.SIZES)
    assert {row for rows in row_selections for row in rows} == set(range(correct.POOL))


@pytest.mark.parametrize(
    ("rates", "best"),
    [({1: 10, 8: 60, 16: 100, 32: 99}, 16), ({1: 10, 8: 99, 16: 100}, 8), ({1: 5}, 1)],
)
def test_the_best_batch_is_the_smallest_that_is_nearly_as_fast_as_the_fastest(
    rates: dict[int, float], best: int
) -> None:
    assert offline.best(rates) == (best, rates[best])


@given(_SPANS, _SPANS)
@settings(max_examples=60)
def test_overlap_is_computed_exactly(spans: list[Span], under: list[Span]) -> None:
    lit = np.zeros(70, bool)
    for begin, end in under:
        lit[int(begin) : int(end)] = True
    moments = [bool(lit[at]) for begin, end in spans for at in range(int(begin), int(end))]
    share = copies.overlap_share(spans, copies.merge_spans(under))

    assert share == pytest.approx(np.mean(moments) if moments else 0.0)


def test_a_trace_is_sorted_into_kernels_and_copies() -> None:
    def event(cat: str, name: str, ts: float) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 2.0}

    spans = copies.read({
        "traceEvents": [
            event("kernel", "gemm", 1.0), event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2.0),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 3.0), event("cpu_op", "HtoD", 4.0),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 5.0), {"ph": "M", "name": "process_name"},
        ]
    })  # fmt: skip

    assert spans == copies.DeviceSpans([(1.0, 3.0)], [(2.0, 4.0)], [(3.0, 5.0)])


def test_leaked_memory_shows_as_a_slope() -> None:
    assert memory.slope([5.0, 5.0, 5.0]) == pytest.approx(0)
    assert memory.slope([1.0, 3.0, 5.0]) == pytest.approx(2)
    assert memory.slope([1.0]) == 0


def test_the_device_is_filled_except_for_a_remainder_and_then_freed() -> None:
    runtime = FakeRuntime(devices=1, memory=40 << 20)

    with faults.filled_device(runtime, 10 << 20) as filled_bytes:
        free, _ = runtime.memory_info(0)
        assert filled_bytes == 16 << 20
        assert 10 << 20 <= free < (10 << 20) + faults._CHUNKS[-1]

    assert runtime.memory_info(0)[0] == 40 << 20


def test_nothing_is_filled_without_a_device() -> None:
    with faults.filled_device(None, 0) as filled_bytes:
        assert filled_bytes == 0


def test_a_metric_close_to_nvidia_smi_passes() -> None:
    page = {"nv_gpu_power_usage": 300.0}

    assert telemetry.compare_with_smi(_POWER, page, {"power.draw": 310.0}).held is True
    assert telemetry.compare_with_smi(_POWER, page, {"power.draw": 700.0}).held is False
    assert telemetry.compare_with_smi(_POWER, {}, {"power.draw": 310.0}).held is False
    assert telemetry.compare_with_smi(_POWER, page, {}).held is False


def test_units_are_converted_before_comparing() -> None:
    used = ComparedMetric("nv_gpu_memory_used_bytes", "memory.used", 1 << 20, 0.02, 0)

    assert used.is_close(1000 << 20, 1000.0)
    assert not used.is_close(1000 << 20, 900.0)


def test_a_page_sums_a_metric_over_all_its_labels() -> None:
    page = telemetry._parse_page(b'# HELP x\nx{model="a",device="cuda:0"} 1.5\nx{model="b"} 2\ny 3\nz NaNo\n')

    assert page == {"x": 3.5, "y": 3.0}


def test_energy_is_compared_with_power_over_the_same_time() -> None:
    first, second = {telemetry.ENERGY: 10.0, telemetry.POWER: 100.0}, {telemetry.ENERGY: 310.0, telemetry.POWER: 200.0}

    assert telemetry.energy(first, second, 2.0).held is True
    assert telemetry.energy(first, second, 5.0).held is False
    assert telemetry.energy({}, second, 2.0).held is False


def test_unknown_values_in_the_output_of_nvidia_smi_are_skipped() -> None:
    assert telemetry.parse_smi(["a", "b", "c"], "1, [N/A], 2.5\n") == {"a": 1.0, "c": 2.5}
    assert telemetry.parse_smi(["a"], "") == {}


def test_errors_in_the_doctors_report_are_found() -> None:
    findings = [{"level": "error", "part": "driver", "text": "too old"}, {"level": "ok", "part": "cpu", "text": "fine"}]

    assert telemetry.errors_of({"status": 1, "findings": findings}) == ["too old"]
