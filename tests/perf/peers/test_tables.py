"""The table says who wins what, and leaves nothing out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.peers import results, tables
from penstock.perf.peers.process_tree import Memory
from penstock.perf.peers.results import Cell, Results, Sample


def cell(peer: str, rate: float = 100.0, *, p99_ms: float = 2.0, pss: float = 50.0, others: float = 0.0) -> Cell:
    samples = [Sample(100, rate + step, 1.0, p99_ms, 10.0, 0.5, others) for step in (-1, 0, 7)]
    return Cell(peer, "iris", "json", "v2 JSON", 8, samples, Memory(2 * pss, pss))


def failed(peer: str, error: str) -> Cell:
    return Cell(peer, "iris", "json", "own JSON", 8, error=error)


def run(*cells: Cell, **more: object) -> Results:
    results = Results("2026-11-23 05:00 UTC", "penstock perf peers", 3, 1.5, cells=list(cells))
    for name, value in more.items():
        setattr(results, name, value)
    return results


def test_figures_are_medians_of_the_rounds() -> None:
    assert cell("penstock", 100).median("requests_per_s") == 100


def test_a_peer_with_a_higher_rate_is_marked_and_named() -> None:
    table_text = "\n".join(tables.terminal(run(cell("penstock", 100), cell("mosec", 150))))

    assert "150*" in table_text
    assert "mosec is better: iris, v2 JSON, 8 at once: requests/s 150 (1.50 times Penstock's)." in table_text
    assert "in 0 of 1 comparisons, a peer in 1" in table_text


def test_lower_is_better_for_times_and_memory() -> None:
    first, second = tables.verdicts(run(cell("penstock"), cell("mosec", 50, p99_ms=1.0, pss=40)))
    wins = "p99 ms 1.00 (0.50 times Penstock's), memory MiB 40 (0.80 times Penstock's)"

    assert first == "Penstock answers more requests/s than the peer in 1 of 1 comparisons, a peer in 0."
    assert second == f"mosec is better: iris, v2 JSON, 8 at once: {wins}."


def test_a_tie_is_not_a_win() -> None:
    assert list(tables.verdicts(run(cell("penstock"), cell("mosec")))) == [
        "Penstock answers more requests/s than the peer in 0 of 1 comparisons, a peer in 0, 1 even."
    ]


def test_a_cell_that_failed_in_a_later_round_has_no_figures() -> None:
    half = cell("mosec", 150)
    half.error = "it died"

    assert not half.measured
    assert run(cell("penstock"), half).ratio(half) is None


def test_an_error_is_shown_in_its_cell() -> None:
    table_text = "\n".join(tables.terminal(run(cell("penstock"), failed("mlserver", "500: no"))))

    assert "mlserver  own JSON  500: no" in table_text


def test_without_penstock_nothing_is_compared() -> None:
    results_found = run(failed("penstock", "it ended"), cell("mosec"))

    assert list(tables.verdicts(results_found)) == []
    ((_, rows),) = tables.sections(results_found)
    assert [row[-1] for row in rows] == ["it ended", ""]


def test_cells_are_ordered_by_model_wire_load_and_peer() -> None:
    cells = [
        Cell(peer, model, kind, kind, concurrency, error="-")
        for peer in ("penstock", "mosec")
        for model in ("mlp", "iris")
        for kind in ("json", "grpc")
        for concurrency in (32, 1)
    ]
    results_found = list(tables.sections(run(*cells)))

    assert [heading for heading, _ in results_found] == ["mlp, json", "mlp, grpc", "iris, json", "iris, grpc"]
    assert [row[:2] for row in results_found[0][1]] == [
        ["1", "penstock"],
        ["1", "mosec"],
        ["32", "penstock"],
        ["32", "mosec"],
    ]


def test_notes_list_failures_disturbances_and_missing_parts() -> None:
    results_found = run(cell("mosec", others=0.5), failed={"kserve": "no such version"}, interrupted=True)

    assert list(tables.notes(results_found)) == [
        "Not measured: kserve: no such version.",
        "Other processes used the machine in 1 cells, up to 0.50 cores: repeat these.",
        "Interrupted: not all rounds were run.",
    ]


def test_the_generated_part_of_a_page_is_replaced_and_the_rest_kept() -> None:
    page = f"# Title\n\nBefore.\n\n{tables.BEGIN}\nold\n{tables.END}\n\nAfter.\n"
    part = tables.markdown(run(cell("penstock")))
    placed = tables.place(page, part)

    assert placed.startswith("# Title\n\nBefore.\n\n")
    assert placed.endswith(f"{tables.END}\n\nAfter.\n")
    assert "\nold\n" not in placed
    assert tables.place(placed, part) == placed


@given(st.text("ab#\n", max_size=30))
def test_a_page_without_a_generated_part_gets_it_at_the_end(page: str) -> None:
    part = tables.markdown(run(cell("penstock")))
    once = tables.place(page, part)

    assert once.endswith(part)
    assert tables.place(once, part) == once


def test_markdown_shows_wins_in_bold_and_all_columns_in_every_row() -> None:
    text = tables.markdown(
        run(
            cell("penstock", 100), cell("mosec", 150), failed("mlserver", "500: <a|b>\nline"),
            configurations={"mosec": "1 worker"}, versions={"mosec": {"mosec": "0.9.8"}},
            machine={"cpu": "Xeon", "usable_cores": 2, "memory_bytes": 24 << 30},
        )
    )  # fmt: skip

    assert "**150** *" in text
    assert "500: &lt;a\\|b> line" in text
    assert "| mosec | mosec 0.9.8 | 1 worker |" in text
    assert "Machine: Xeon, 2 cores, 24 GiB." in text
    rows = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("| 8 |")]
    assert {line.count("|") for line in rows} == {10}


def test_results_are_written_as_json(tmp_path: Path) -> None:
    results.write(run(cell("penstock"), failed("mosec", "no")), tmp_path / "peers.json")
    results_found = json.loads((tmp_path / "peers.json").read_text())

    assert results_found["format"] == "penstock-peers/1"
    assert results_found["cells"][0]["samples"][0]["p99_ms"] == 2.0
    assert results_found["cells"][0]["memory"] == {"rss": 100.0, "pss": 50.0}
    assert results_found["cells"][1]["error"] == "no"


@pytest.mark.parametrize(("others", "count"), [(0.0, 0), (0.08, 0), (0.2, 1)])
def test_a_cell_without_background_load_is_not_disturbed(others: float, count: int) -> None:
    assert len(run(cell("penstock", others=others)).disturbed()) == count
