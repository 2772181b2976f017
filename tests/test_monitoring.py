"""The dashboard and the alerts in deploy/ use only existing metrics, according to their types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SERIES = {
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("", "_sum", "_count"),
    "counter": ("",),
    "gauge": ("",),
}
_ROW = re.compile(r"^\| `(\w+)` \| (counter|gauge|histogram|summary) \|([^|]*)\|", re.MULTILINE)
_SERIES = re.compile(r"\b((?:nv|penstock|process)_\w+)\b(?:\{([^}]*)\})?")
_OF_ALL = {"instance", "job", "le", "model", "version"}


def documented() -> dict[str, tuple[str, set[str]]]:
    """Read the tables of docs/metrics.md. Returns: the type and labels of each series."""
    rows = _ROW.findall((ROOT / "docs" / "metrics.md").read_text("utf-8"))
    return {
        name + suffix: (kind, _OF_ALL | set(re.findall(r"\w+", labels)))
        for name, kind, labels in rows
        for suffix in SERIES[kind]
    }


def dashboard() -> Iterator[str]:
    for panel in json.loads((ROOT / "deploy" / "grafana.json").read_text("utf-8"))["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def alerts() -> Iterator[str]:
    for group in yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text("utf-8"))["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


QUERIES = [*dashboard(), *alerts()]


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_uses_only_existing_metrics_and_labels(query: str) -> None:
    known = documented()
    selectors = [(name, set(re.findall(r"(\w+)[=!]~?\"", labels))) for name, labels in _SERIES.findall(query)]
    grouped = {label for words in re.findall(r"\bby \(([^)]*)\)", query) for label in words.split(", ")}

    assert selectors or query.startswith("up{")
    assert [name for name, _ in selectors if name not in known] == []
    assert [(name, labels | grouped) for name, labels in selectors if not labels | grouped <= known[name][1]] == []


@pytest.mark.parametrize("query", QUERIES)
def test_queries_take_the_rate_of_counters_and_of_no_other_metrics(query: str) -> None:
    known = documented()
    rated = re.findall(r"\b(?:rate|increase)\((\w+)", query)

    assert {name for name, _ in _SERIES.findall(query) if known[name][0] in {"counter", "histogram"}} == set(rated)
