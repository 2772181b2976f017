"""What is counted of predictions, and how it is shown on the metrics page."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.cortex.api import Api, Tracker
from penstock.server.cortex.prediction_metrics import (
    LATENCY_BOUNDS_NS,
    MAX_CLASSES,
    OTHERS,
    ApiMetrics,
    PredictionMetrics,
    api_id,
)

API = Api(
    Path("/a/project"), 'ir"is', "classifier", "/iris/classifier", "onnx", "m.onnx", tracker=Tracker("classification")
)
LABELS = f'AppName="ir\\"is",APIName="classifier",APIID="{api_id(API)}"'


def lines(counted: ApiMetrics) -> list[str]:
    return [line for _, line in counted.lines()]


def test_answers_are_counted_by_status_series_and_latency() -> None:
    counted = ApiMetrics(API)
    counted.record(200, 1_000_000)
    counted.record(200, 1_000_001)
    counted.record(406, 60_000_000_000)
    counted.record(503, 0)
    metrics = lines(counted)

    for series, count in (("2XX", 2), ("4XX", 1), ("5XX", 1)):
        assert f'cortex_status_code_total{{{LABELS},Code="{series}"}} {count}' in metrics
    assert f'cortex_latency_ms_bucket{{{LABELS},le="1"}} 2' in metrics
    assert f'cortex_latency_ms_bucket{{{LABELS},le="2"}} 3' in metrics
    assert f'cortex_latency_ms_bucket{{{LABELS},le="30000"}} 3' in metrics
    assert f'cortex_latency_ms_bucket{{{LABELS},le="+Inf"}} 4' in metrics
    assert f"cortex_latency_ms_sum{{{LABELS}}} 60002.000001" in metrics
    assert f"cortex_latency_ms_count{{{LABELS}}} 4" in metrics


@given(st.lists(st.integers(0, 10**11)))
def test_latency_buckets_are_cumulative(latencies: list[int]) -> None:
    counted = ApiMetrics(API)
    for latency_ns in latencies:
        counted.record(200, latency_ns)
    buckets = [int(line.rpartition(" ")[2]) for line in lines(counted) if "_bucket" in line]

    assert buckets == [*(sum(each <= bound for each in latencies) for bound in LATENCY_BOUNDS_NS), len(latencies)]


def test_predicted_classes_are_counted_by_name() -> None:
    counted = ApiMetrics(API)
    for prediction in ("iris-setosa", "iris-setosa", 'a"b\n', 7):
        counted.record_prediction(json.dumps({"class": prediction}).encode())

    assert f'cortex_prediction_total{{{LABELS},Class="iris-setosa"}} 2' in lines(counted)
    assert f'cortex_prediction_total{{{LABELS},Class="a\\"b\\n"}} 1' in lines(counted)
    assert f'cortex_prediction_total{{{LABELS},Class="7"}} 1' in lines(counted)


def test_classes_beyond_the_maximum_are_counted_together() -> None:
    counted = ApiMetrics(API)
    for number in range(MAX_CLASSES + 5):
        counted.record_prediction(b'{"class":"%d"}' % number)
    counted.record_prediction(b'{"class":"0"}')

    assert len(counted.class_counts) == MAX_CLASSES + 1
    assert (counted.class_counts[OTHERS], counted.class_counts["0"]) == (5, 2)


def test_predicted_values_have_a_sum_a_count_a_minimum_and_a_maximum() -> None:
    api = replace(API, tracker=Tracker("regression"))
    counted = ApiMetrics(api)
    labels = counted.labels
    assert not any("min" in line for line in lines(counted))
    for value in (1.5, -2, 7):
        counted.record_prediction(json.dumps({"value": value}).encode())

    assert lines(counted)[-4:] == [
        f"cortex_prediction_value_sum{{{labels}}} 6.5", f"cortex_prediction_value_count{{{labels}}} 3",
        f"cortex_prediction_value_min{{{labels}}} -2", f"cortex_prediction_value_max{{{labels}}} 7",
    ]  # fmt: skip


def test_a_nan_value_is_neither_the_minimum_nor_the_maximum() -> None:
    counted = ApiMetrics(replace(API, tracker=Tracker("regression")))
    for text in (b"NaN", b"1", b"Infinity"):
        counted.record_prediction(b'{"value":%b}' % text)

    assert (counted.min_value, counted.max_value, counted.values) == (1, float("inf"), 3)
    assert all(line.rpartition(" ")[2] for line in lines(counted))


def test_predictions_that_cannot_be_counted_are_logged_at_a_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    counted = ApiMetrics(API)
    with caplog.at_level(logging.WARNING, "penstock.cortex"):
        for _ in range(50):
            counted.record_prediction(b'{"warning": "unable to find key"}')

    assert [record.getMessage() for record in caplog.records] == [
        "unable to record prediction metric: unable to find key"
    ]
    assert not counted.class_counts


def test_each_metric_family_is_declared_once_for_all_apis() -> None:
    tracked = PredictionMetrics()
    tracked.for_api(API).record(200, 5)
    tracked.for_api(replace(API, name="other")).record(200, 5)
    page = list(tracked.render())

    assert tracked.for_api(API) is tracked.for_api(replace(API, line=9))
    assert sum("# TYPE cortex_latency_ms histogram" in line for line in page) == 1
    assert sum(line.startswith("cortex_latency_ms_count") for line in page) == 2


def test_the_api_id_changes_with_the_configuration_of_the_api() -> None:
    assert api_id(API) == api_id(replace(API, line=3))
    assert api_id(API) != api_id(replace(API, model="other.onnx"))
    assert api_id(API) != api_id(replace(API, metadata={"a": 1}))
