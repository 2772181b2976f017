"""Custom metrics: the values of several workers on one page, by kind."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.server.python_models.metrics import MAX_METRICS, CustomMetrics


def change(do: str, value: float | str = 0.0, **more: Any) -> dict[str, Any]:
    defaults = {"family": "seen", "kind": "counter", "help": "What was seen", "labels": {"m": "a"}, "buckets": []}
    return defaults | {"do": do, "value": value} | more


def page(metrics: CustomMetrics) -> list[str]:
    return list(metrics.render())


def test_values_of_several_workers_are_added() -> None:
    metrics = CustomMetrics()
    for worker in ("one", "two"):
        metrics.apply(worker, change("make"))
        metrics.apply(worker, change("increment", 2))

    assert page(metrics) == ["# HELP seen What was seen", "# TYPE seen counter", 'seen{m="a"} 4']


def test_a_gauge_has_the_value_last_set() -> None:
    metrics = CustomMetrics()
    metrics.apply(0, change("set", 1.5, kind="gauge", labels={}))
    metrics.apply(0, change("increment", -1, kind="gauge", labels={}))

    assert page(metrics)[-1] == "seen 0.5"


def test_histogram_buckets_are_cumulative() -> None:
    metrics = CustomMetrics()
    for value in (0.5, 1.0, 5, 100):
        metrics.apply(0, change("observe", value, kind="histogram", buckets=[1.0, 10.0]))

    assert page(metrics)[2:] == [
        'seen_bucket{m="a",le="1"} 2',
        'seen_bucket{m="a",le="10"} 3',
        'seen_bucket{m="a",le="+Inf"} 4',
        'seen_sum{m="a"} 106.5',
        'seen_count{m="a"} 4',
    ]


@pytest.mark.parametrize(("value", "shown"), [("nan", "NaN"), ("inf", "+Inf"), ("-inf", "-Inf")])
def test_nan_and_infinity_are_rendered_for_prometheus(value: Any, shown: str) -> None:
    metrics = CustomMetrics()
    metrics.apply(0, change("set", value, kind="gauge", labels={}))
    metrics.apply(0, change("observe", "nan", kind="histogram", family="times", labels={}, buckets=[1.0]))

    assert page(metrics)[2] == f"seen {shown}"
    assert page(metrics)[5:] == [
        'times_bucket{le="1"} 0', 'times_bucket{le="+Inf"} 1', "times_sum NaN", "times_count 1",
    ]  # fmt: skip


def test_a_family_is_removed_with_its_last_owner() -> None:
    metrics = CustomMetrics()
    for worker in ("one", "two"):
        metrics.apply(worker, change("increment", 1))

    metrics.remove_owner("one")
    assert page(metrics)[-1] == 'seen{m="a"} 2'
    metrics.apply("two", change("drop family"))
    assert page(metrics) == []


def test_a_built_in_name_or_a_conflicting_kind_is_ignored() -> None:
    metrics = CustomMetrics()
    metrics.apply(0, change("increment", 1, family="nv_inference_count"))
    metrics.apply(0, change("increment", 1))
    metrics.apply(0, change("set", 9, kind="gauge"))

    assert page(metrics)[2:] == ['seen{m="a"} 1']


def test_labels_and_help_are_escaped() -> None:
    metrics = CustomMetrics()
    metrics.apply(0, change("increment", 1, labels={"m": 'a"b\\c\nd'}, help="two\nlines"))

    assert page(metrics)[0] == "# HELP seen two\\nlines"
    assert page(metrics)[2] == 'seen{m="a\\"b\\\\c\\nd"} 1'


def test_the_number_of_metrics_per_family_is_limited() -> None:
    metrics = CustomMetrics()
    for number in range(MAX_METRICS + 10):
        metrics.apply(0, change("increment", 1, labels={"m": str(number)}))

    assert len(page(metrics)) == MAX_METRICS + 2


@pytest.mark.parametrize(
    "lie",
    [
        {"family": "x\ny 1"}, {"family": 5}, {"kind": "nice"}, {"help": None}, {"labels": {"a b": "c"}},
        {"labels": {"a": 1}}, {"buckets": ["1"]}, {"value": "1"}, {"value": None},
    ],
)  # fmt: skip
def test_a_message_that_would_break_the_page_is_rejected(lie: dict[str, Any]) -> None:
    metrics = CustomMetrics()
    with pytest.raises((ValueError, TypeError)):
        metrics.apply(0, change("increment", 1) | lie)
    assert page(metrics) == []
