"""Static settings become models of a server, and the default is held against the best of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.perf import batching, model_variants
from penstock.perf.batching import FIRST_GUESS, TWIN, CellRounds, Trial, cost_lines, promising_settings, verdicts
from penstock.perf.model_variants import Run, Variant, knee_per_s, median, toml
from penstock.perf.open_loop import OpenLoopResult
from penstock.perf.open_loop_sender import RECORD, SKIPPED
from penstock.perf.simulator.arrivals import Arrivals, Kind
from penstock.perf.static_policies import (
    DEFAULT_POLICY,
    FOUR_SIZES,
    TWO_SHAPES,
    Comparison,
    Figures,
    cells,
    static_grid,
)
from penstock.server.repository.penstock_toml import read_toml

CELL = cells()[0]


def run_with(p99_ms: float, goodput_per_s: float = 1000, cpu_us: float = 200, others: float = 0.1) -> Run:
    """A run with these figures, of three requests, one of which could not be sent."""
    records = np.zeros(3, RECORD)
    records["status"] = 200, 200, SKIPPED
    result = OpenLoopResult(records, connections=32, cpu_us=cpu_us, load_cpu_us=40)
    return Run(Figures(goodput_per_s, 1, p99_ms, 8), result, others)


def compared(**static: tuple[float, float]) -> Comparison:
    """A default of 1000 rows/s and 10 ms beside static settings of so many rows/s and ms."""
    return Comparison(
        CELL, Figures(1000, 5, 10, 8), {name: Figures(rate, 5, ms, 8) for name, (rate, ms) in static.items()}
    )


class TestVariants:
    @pytest.mark.parametrize("policy", [DEFAULT_POLICY, *static_grid().values()], ids=["the default", *static_grid()])
    def test_the_server_accepts_every_setting(self, policy: Any, tmp_path: Path) -> None:
        path = tmp_path / "penstock.toml"
        path.write_text(toml(policy), "utf-8")

        _, findings = read_toml(path)

        assert findings == []

    def test_a_setting_is_written_without_what_is_left_to_be_learned(self) -> None:
        stated = toml(static_grid()["cap 16, 1 ms, prefers half"])

        assert stated.splitlines() == [
            "[batching]", "max_batch_size = 16", "cap = 16", "max_queue_delay_us = 1000", "preferred = [8, 16]",
            "", "[runtime]", "intra_op_threads = 1",
        ]  # fmt: skip
        assert toml(DEFAULT_POLICY).splitlines()[1:3] == ["max_batch_size = 64", ""]

    def test_a_request_goes_to_the_variant_with_the_rows_and_shape_of_its_kind(self) -> None:
        (short, long), (one, *_, eight) = (
            Variant("ragged", "ragged_cap_8").calls(TWO_SHAPES),
            Variant("mlp", "mlp_cap_8").calls(FOUR_SIZES),
        )

        assert (short.path, one.path) == ("/v2/models/ragged_cap_8/infer", "/v2/models/mlp_cap_8/infer")
        assert b'"shape": [1, 256]' in short.bodies[0]
        assert b'"shape": [1, 384]' in long.bodies[0]
        assert b'"shape": [1, 512]' in one.bodies[0]
        assert b'"shape": [8, 512]' in eight.bodies[0]

    def test_rounds_are_summarized_by_their_medians(self) -> None:
        assert median([run_with(9), run_with(2, 500), run_with(3, 800)]) == Figures(800, 1, 3, 8)


class TestKnee:
    @pytest.mark.parametrize("guess_per_s", [100, 1000, 5000])
    @pytest.mark.parametrize("kinds", [(Kind(),), FOUR_SIZES], ids=["one row", "four sizes"])
    def test_the_knee_is_what_is_answered_under_overload_whatever_the_guess(
        self, guess_per_s: float, kinds: tuple[Kind, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def answer_1000_rows_per_s(_server: object, _variant: object, arrivals: Arrivals, *_rest: object) -> Run:
            records = np.zeros(len(arrivals), RECORD)
            records["due_ns"], records["which"] = arrivals.at_ns, arrivals.kind_indexes
            done_ns = np.maximum(np.cumsum(arrivals.rows) * 1_000_000, arrivals.at_ns)
            records["took_ns"] = done_ns - arrivals.at_ns
            records["status"] = 200
            return Run(Figures(0, 0, 0, 0), OpenLoopResult(records, 1, 0, 0), 0.0)

        monkeypatch.setattr(model_variants, "run", answer_1000_rows_per_s)

        assert knee_per_s(None, Variant("mlp", "mlp"), kinds, guess_per_s) == pytest.approx(1000, rel=0.02)  # type: ignore[arg-type]


class TestPromising:
    def test_the_best_setting_of_each_cap_is_a_candidate_and_the_best_few_are_tried(self) -> None:
        ranked = compared(
            **{
                "cap 16, 0 ms": (1000, 5), "cap 16, 1 ms": (1000, 4), "cap 8, 0 ms": (1000, 6),
                "cap 32, 0 ms": (1000, 7), "cap 64, 0 ms": (1000, 8),
            }
        )  # fmt: skip

        assert promising_settings(ranked, 2) == ["cap 16, 1 ms", "cap 8, 0 ms", FIRST_GUESS]

    def test_settings_that_serve_too_little_come_last_however_low_their_latency(self) -> None:
        ranked = compared(**{"cap 1, 0 ms": (900, 1), "cap 8, 0 ms": (1000, 6), "cap 64, 0 ms": (1000, 8)})

        assert promising_settings(ranked, 2) == ["cap 8, 0 ms", FIRST_GUESS]

    def test_without_a_ranking_a_default_selection_is_tried(self) -> None:
        assert set(promising_settings(None)) <= set(static_grid(8))


class TestFields:
    def test_every_setting_of_a_cell_is_a_model_shared_by_cells(self) -> None:
        fields = Trial({cell: [FIRST_GUESS] for cell in cells()}).cells

        assert {variant.name for each in fields for variant in each.variants.values()} == {
            "mlp", "mlp_the_default_again", "mlp_cap_64_0_ms",
            "ragged", "ragged_the_default_again", "ragged_cap_64_0_ms",
        }  # fmt: skip
        assert [each.variants[""].model for each in fields if each.cell.kinds is TWO_SHAPES] == ["ragged"]

    def test_a_comparison_excludes_the_twin_which_measures_the_noise(self) -> None:
        variant = Variant("mlp", "mlp")
        tried = CellRounds(CELL, {"": variant, TWIN: variant, FIRST_GUESS: variant}, ["", FIRST_GUESS])
        tried.runs = {"": [run_with(10)], TWIN: [run_with(12)], FIRST_GUESS: [run_with(8, cpu_us=150)]}

        assert list(tried.comparison().static) == [FIRST_GUESS]
        assert tried.noise() == 1.2
        assert "".join(cost_lines([tried])) == (
            "Poisson 30%: server CPU 200 us a request, 150 with cap 64, 0 ms; the load 40, late by 0.00 ms (p99); "
            "others had 0.10 cores at most; p99 of the default again 1.20 times; 3 not served"
        )

    def test_the_rounds_that_compare_are_not_those_that_selected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[tuple[str, Arrivals]] = []

        def note(_server: object, variant: Variant, arrivals: Arrivals, **_rest: object) -> Run:
            sent.append((variant.name, arrivals))
            return run_with(5 if variant.name == "mlp_cap_8_0_ms" and len(sent) <= 3 else 10)

        monkeypatch.setattr(batching, "run", note)
        tried = Trial({CELL: ["cap 8, 0 ms", FIRST_GUESS]})
        tried.cells[0].knee_per_s = 1000

        tried.round(None, 0, 1.0, 0.0)  # type: ignore[arg-type]
        tried.cells[0].keep_best()
        tried.round(None, 1, 1.0, 0.0)  # type: ignore[arg-type]

        assert [name for name, _ in sent[:3]] == ["mlp", "mlp_cap_8_0_ms", "mlp_cap_64_0_ms"]
        assert {name for name, _ in sent[3:]} == {"mlp", "mlp_the_default_again", "mlp_cap_8_0_ms"}
        assert sent[0][1].at_ns[0] != sent[3][1].at_ns[0]
        assert tried.cells[0].comparison().p99_ratio == 1.0


@pytest.mark.parametrize(
    ("rate", "ms", "holds"), [(1000, 10, True), (1060, 10, False), (1050, 9.2, True), (1000, 9, False)]
)
def test_a_cell_passes_near_the_best_goodput_and_the_best_p99(rate: float, ms: float, holds: bool) -> None:
    (line,) = verdicts([compared(best=(rate, ms), slow=(500, 1))])

    assert line.startswith("Poisson 30%: goodput ")
    assert line.endswith(": holds" if holds else ": DOES NOT HOLD")
