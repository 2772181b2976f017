"""Results: the figures of all peers, as JSON, and which are better."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.perf.background_load import MAX_BACKGROUND_CORES

from .process_tree import Memory

FORMAT = "penstock-peers/1"
OURS = "penstock"


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn: the generator's measurements and the cost. `others`: the cores that others used."""

    requests: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    generator_cores: float
    others: float


@dataclass(slots=True)
class Cell:
    """One peer under one load, in all rounds. `error`: its text if it failed; then the figures do not count."""

    peer: str
    model: str
    kind: str
    says: str
    concurrency: int
    samples: list[Sample] = field(default_factory=list)
    memory: Memory | None = None
    error: str = ""

    @property
    def case(self) -> tuple[str, str, int]:
        """Return the key for comparisons: the model, the wire's kind, the concurrent requests."""
        return self.model, self.kind, self.concurrency

    @property
    def measured(self) -> bool:
        """Whether there are figures."""
        return bool(self.samples) and not self.error

    def median(self, name: str) -> float:
        """Return the median of one figure of Sample; `pss_mib`: of its memory."""
        if name == "pss_mib":
            return self.memory.pss if self.memory else 0.0
        return float(statistics.median(getattr(sample, name) for sample in self.samples))


@dataclass(frozen=True, slots=True)
class Figure:
    """A column. `more`: whether higher is better."""

    name: str
    title: str
    form: str
    more: bool = False


FIGURES = (
    Figure("requests_per_s", "requests/s", ",.0f", more=True),
    Figure("p50_ms", "p50 ms", ",.2f"),
    Figure("p99_ms", "p99 ms", ",.2f"),
    Figure("cpu_us", "CPU us/request", ",.0f"),
    Figure("pss_mib", "memory MiB", ",.0f"),
)
RATE = FIGURES[0]


@dataclass(slots=True)
class Results:
    """A run. `versions`: of each peer's packages; `failed`: peers that were not measured, and why."""

    made_at: str
    command: str
    rounds: int
    seconds: float
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    configurations: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    interrupted: bool = False
    took_s: float = 0.0
    format: str = FORMAT

    def ours(self, case: tuple[str, str, int]) -> Cell | None:
        """Return Penstock's cell of a case, if it was measured."""
        own_cells = (cell for cell in self.cells if cell.peer == OURS and cell.case == case and cell.measured)
        return next(own_cells, None)

    def ratio(self, cell: Cell) -> float | None:
        """Return a cell's requests/s relative to Penstock's, if both were measured."""
        our_cell = self.ours(cell.case)
        return cell.median(RATE.name) / our_cell.median(RATE.name) if our_cell and cell.measured else None

    def wins(self, cell: Cell) -> Iterator[tuple[Figure, float]]:
        """Yield the figures in which a peer is better than Penstock in the same case, with the ratios."""
        our_cell = self.ours(cell.case)
        if our_cell is None or cell is our_cell or not cell.measured:
            return
        for figure in FIGURES:
            our_value, their_value = our_cell.median(figure.name), cell.median(figure.name)
            if their_value > our_value if figure.more else their_value < our_value:
                yield figure, their_value / our_value if our_value else float("inf")

    def disturbed(self) -> list[Cell]:
        """Return the cells during which others used the machine."""
        return [cell for cell in self.cells if cell.measured and cell.median("others") > MAX_BACKGROUND_CORES]


def write(results: Results, path: Path) -> None:
    """Write it as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(results), indent=1) + "\n", "utf-8")
