"""`penstock check --dialect seldon` for a graph: its nodes, how they are connected, and all mistakes.

Called by seldon/check.py. No code of a component is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penstock.server.repository.check import CheckReport
from penstock.server.repository.mirrors import make_defaults
from penstock.server.seldon.check import describe, mistakes_of
from penstock.server.settings import Settings

from .graph_file import read
from .nodes import Deployment, GraphNode
from .repository import GraphRepository


def check_graph(settings: Settings) -> CheckReport:
    """Check the file."""
    file = Path(settings.model_repository[0])
    deployment = read(file)
    if deployment.mistakes:
        return CheckReport(findings=[*deployment.findings])
    entries, findings, _ = GraphRepository(settings, file, make_defaults(settings)).scan()
    report = CheckReport(findings=findings)
    for entry in entries:
        for spec in entry.specs:
            report.specs.append(replace(spec, options={}))  # the notes below describe them
            report.findings += mistakes_of(spec)
            report.extra_lines[spec.name] = describe(spec)
    if report.specs:
        report.extra_lines[report.specs[-1].name] += ["", *_draw(deployment)]
    return report


def _draw(deployment: Deployment) -> Iterator[str]:
    """Draw the graphs, one line for each node."""
    is_only = sum(not predictor.shadow for predictor in deployment.predictors) == 1
    for predictor in deployment.predictors:
        share = "a shadow" if predictor.shadow else f"{100 if is_only else predictor.weight} % of the requests"
        yield f"{deployment.name}, predictor {predictor.name}: {share}"
        yield from _draw_node(predictor.graph, 1)


def _draw_node(node: GraphNode, depth: int) -> Iterator[str]:
    methods = ", ".join(sorted(node.methods))
    yield f"{'  ' * depth}{node.name}: {node.implementation or node.type}{f' ({methods})' if methods else ''}"
    for child in node.children:
        yield from _draw_node(child, depth + 1)
