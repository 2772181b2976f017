"""`make bench-gate`: has the tree become slower? Ratios, measured in turns, against budgets.toml.

It takes a few minutes and needs only this package and what its tests need. Others may use the machine meanwhile: each
ratio is of two things measured within a second of each other, and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.perf.profiling import environment

from .budgets import Budget, BudgetError, Verdict, read, report, updated, written
from .measures import MEASURES
from .testbed import testbed

BUDGETS = Path(__file__).with_name("budgets.toml")
ROUNDS = 5
_FAILED, _USAGE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and compare. Returns: the exit status: 0 all within, 1 something is worse or failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="make bench-gate", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="measure this budget; repeatable")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--update", action="store_true", help="write the measurements as the new budgets")
    parser.add_argument("--budgets", type=Path, default=BUDGETS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        budgets = read(args.budgets.read_text("utf-8"), MEASURES)
        selected = chosen(budgets, args.only)
    except (OSError, BudgetError) as error:
        print(f"{args.budgets.name}: {error}")
        return _USAGE
    with testbed() as servers:
        values, failed = measured(selected, lambda budget: MEASURES[budget.measure](servers), max(args.rounds, 1), _say)
    verdicts = [Verdict(name, selected[name], tuple(each)) for name, each in values.items()]
    print(*report(verdicts, failed), sep="\n")
    if args.update:
        args.budgets.write_text(written(updated(verdicts, budgets, dt.datetime.now(dt.UTC).date(), here())), "utf-8")
        print(f"{args.budgets.name} was written")
        return _FAILED if failed else 0
    return _FAILED if failed or any(verdict.label == "WORSE" for verdict in verdicts) else 0


def chosen(budgets: Mapping[str, Budget], only: Sequence[str] | None) -> dict[str, Budget]:
    """Return the requested budgets, or all. Raises: BudgetError for an unknown one."""
    unknown = sorted(set(only or ()) - set(budgets))
    if unknown:
        raise BudgetError(f"no budget {unknown[0]!r}; there are {', '.join(budgets)}")
    return {name: budget for name, budget in budgets.items() if not only or name in only}


def measured(
    budgets: Mapping[str, Budget], measure: Callable[[Budget], float], rounds: int, print_cost: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measure all in turns, round after round. Returns: the values, and why some could not be measured.

    A measure that failed is not tried again, and has no value.
    """
    values: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name, budget in budgets.items():
            if name in failed:
                continue
            try:
                values.setdefault(name, []).append(measure(budget))
            except Exception as error:  # noqa: BLE001 - one measure that fails does not hide the others
                failed[name] = f"{type(error).__name__}: {error}"
                values.pop(name, None)
        print_cost(f"round {number + 1} of {rounds} done")
    return values, failed


def here() -> str:
    """Name this machine."""
    machine = environment.machine(gpus=lambda: ([], ""))
    return f"{machine['cpu']}, {os.cpu_count()} cores"


def _say(arguments: str) -> None:
    print(arguments, flush=True)
