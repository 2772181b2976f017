"""Budgets: the limit of each measure of the gate, and the verdict on it. Pure.

All are ratios of two things measured in turns in one run, so they also hold on a slower or busy machine.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import difflib
import statistics
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOWER, HIGHER = "lower", "higher"
_HEAD = """\
# What `make bench-gate` holds the tree against: ratios, each of two things measured in turns in the same run.
# `budget` is what was measured on the date and the machine named, `tolerance` the share by which it may be worse:
# both are checked in, and `python -m penstock.perf.gate --update` writes them anew after a change that is meant.
"""


class BudgetError(Exception):
    """The budgets file is invalid."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The limit of one measure. `better`: which direction is better; `tolerance`: a fraction of the budget."""

    what: str
    measure: str
    budget: float
    tolerance: float
    date: dt.date
    machine: str
    better: str = LOWER


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one measure. `worse_by`: a fraction of the budget, negative if it is better."""

    name: str
    budget: Budget
    values: tuple[float, ...]

    @property
    def measured(self) -> float:
        return statistics.median(self.values)

    @property
    def worse_by(self) -> float:
        change = self.measured / self.budget.budget - 1
        return change if self.budget.better == LOWER else -change

    @property
    def label(self) -> str:
        """`WORSE`, `within` or `better`."""
        if self.worse_by > self.budget.tolerance:
            return "WORSE"
        return "better" if self.worse_by < -self.budget.tolerance else "within"


def read(text: str, measures: Collection[str]) -> dict[str, Budget]:
    """Parse the file. `measures` are the known names. Raises: BudgetError with the table and the key."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BudgetError(str(error)) from error
    return {name: _budget(name, table, measures) for name, table in tables.items()}


def _budget(name: str, table: Any, measures: Collection[str]) -> Budget:
    if not isinstance(table, Mapping):
        raise BudgetError(f"{name}: this is to be a table, [{name}]")
    fields = {field.name: field for field in dataclasses.fields(Budget)}
    for key in table:
        _require_known(f"[{name}]: unknown key", key, fields)
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in table]
    if missing:
        raise BudgetError(f"[{name}]: {', '.join(missing)} missing")
    for key, value in table.items():
        kinds = {"budget": (int, float), "tolerance": (int, float), "date": (dt.date,)}.get(key, (str,))
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise BudgetError(f"[{name}]: {key} = {value!r} is no {' or '.join(kind.__name__ for kind in kinds)}")
    _require_known(f"[{name}]: unknown measure", table["measure"], measures)
    _require_known(f"[{name}]: better is", table.get("better", LOWER), (LOWER, HIGHER))
    if not table["budget"] > 0 or not 0 < table["tolerance"] < 1:
        raise BudgetError(f"[{name}]: budget is to be above 0, and tolerance a share between 0 and 1")
    return Budget(**table)


def _require_known(subject: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        close_matches = difflib.get_close_matches(name, known, 1, 0.5)
        suggestion = (
            f"; did you mean {close_matches[0]!r}?" if close_matches else f"; there are {', '.join(sorted(known))}"
        )
        raise BudgetError(f"{subject} {name!r}{suggestion}")


def report(verdicts: Sequence[Verdict], failed: Mapping[str, str]) -> Iterator[str]:
    """Format a table, followed by what got worse, what got better, and what could not be measured."""
    width = max((len(name) for name in [*failed, *(verdict.name for verdict in verdicts)]), default=0) + 2
    yield f"{'':<{width}}{'measured':>10}{'rounds':>18}{'budget':>10}{'change':>9}  verdict"
    for verdict in verdicts:
        spread = f"{min(verdict.values):.3g} to {max(verdict.values):.3g}"
        change = verdict.measured / verdict.budget.budget - 1
        yield (
            f"{verdict.name:<{width}}{verdict.measured:>10.3g}{spread:>18}{verdict.budget.budget:>10.3g}"
            f"{change:>+9.0%}  {verdict.label}"
        )
    for name in failed:
        yield f"{name:<{width}}{'-':>10}{'':>18}{'':>10}{'':>9}  FAILED"
    for verdict in verdicts:
        yield from _sentence(verdict)
    for name, reason in failed.items():
        yield f"FAILED {name}: {reason}"


def _sentence(verdict: Verdict) -> Iterator[str]:
    budget, change = verdict.budget, abs(verdict.measured / verdict.budget.budget - 1)
    direction = "more" if verdict.measured > budget.budget else "less"
    figures = (
        f"{verdict.measured:.3g}, {change:.0%} {direction} than {budget.budget:.3g} ({budget.date}, {budget.machine})"
    )
    if verdict.label == "WORSE":
        yield f"WORSE {verdict.name}: {budget.what}: {figures}; {budget.tolerance:.0%} are allowed"
    elif verdict.label == "better":
        yield f"better {verdict.name}: {budget.what}: {figures}; `--update --only {verdict.name}` tightens it"


def updated(
    verdicts: Sequence[Verdict], before: Mapping[str, Budget], today: dt.date, machine: str
) -> dict[str, Budget]:
    """Return the budgets with the new measurements; the others are unchanged."""
    budgets = dict(before)
    for verdict in verdicts:
        budget = float(f"{verdict.measured:.3g}")
        budgets[verdict.name] = dataclasses.replace(before[verdict.name], budget=budget, date=today, machine=machine)
    return budgets


def written(budgets: Mapping[str, Budget]) -> str:
    """Format the file."""
    tables = []
    for name, budget in budgets.items():
        lines = [f"{field.name} = {_toml(getattr(budget, field.name))}" for field in dataclasses.fields(budget)]
        tables.append("\n".join([f"[{name}]", *lines]))
    return "\n".join([_HEAD, "\n\n".join(tables), ""])


def _toml(value: str | float | dt.date) -> str:
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(float(value))
