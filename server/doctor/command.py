"""`penstock doctor`: reads Facts, judges them and returns the Report. Called by the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .facts import Facts
from .gpu_rules import judge_gpus
from .machine_rules import judge_machine, judge_models
from .reading import read_facts
from .report import Report

if TYPE_CHECKING:
    from penstock.server.settings import Settings


def examine(settings: Settings) -> Report:
    """Examine this machine for a server with these settings; blocks, for minutes if there are models to load."""
    return judge(read_facts(settings))


def judge(facts: Facts) -> Report:
    """Make a Report from Facts. Pure."""
    return Report([*judge_machine(facts), *judge_gpus(facts), *judge_models(facts)])
