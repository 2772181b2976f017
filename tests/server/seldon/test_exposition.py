"""Prometheus series as in seldon-core, and a page that is valid whatever components report."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.server.seldon.exposition import EDGES, MAX_SERIES, Exposition
from penstock.server.seldon.messages import Endpoint

NONE = "NOT_IMPLEMENTED"
# Recorded from the metrics port of seldon-core 1.17.1, except for the worker's id.
RECORDED = (
    f'{{deployment_name="{NONE}",image_name="{NONE}",image_version="{NONE}",method="predict",model_image="{NONE}",'
    f'model_name="{NONE}",model_version="{NONE}",predictor_name="{NONE}",predictor_version="{NONE}",'
    f'seldon_deployment_name="{NONE}",worker_id="0"}}'
)


def metrics_json(*metrics: Any) -> bytes:
    return json.dumps(list(metrics)).encode()


def page_of(exposition: Exposition) -> str:
    return "".join(f"{line}\n" for line in exposition.render())


def samples_of(page: str) -> dict[str, float]:
    """Return the samples of a page where each name has one set of labels, without buckets."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_a_counter_is_written_as_seldon_core_writes_a_counter() -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, metrics_json(["mycounter", "COUNTER", 1, None]))
    exposition.add(Endpoint.PREDICT, metrics_json(["mycounter", "COUNTER", 1, None]))

    recorded = f"# HELP mycounter_total \n# TYPE mycounter_total counter\nmycounter_total{RECORDED} 2.0\n"
    assert page_of(exposition) == recorded


def test_a_gauge_has_the_last_reported_value() -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, metrics_json(["mygauge", "GAUGE", 1, None]))
    exposition.add(Endpoint.PREDICT, metrics_json(["mygauge", "GAUGE", 100, None]))

    assert page_of(exposition) == f"# HELP mygauge \n# TYPE mygauge gauge\nmygauge{RECORDED} 100.0\n"


def test_a_timer_is_written_as_a_histogram_in_seconds() -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, metrics_json(["mytimer", "TIMER", 20.2, None]))

    lines = page_of(exposition).splitlines()
    assert lines[:2] == ["# HELP mytimer ", "# TYPE mytimer histogram"]
    assert lines[-2:] == [f"mytimer_count{RECORDED} 1.0", f"mytimer_sum{RECORDED} 0.0202"]
    assert lines[2] == f"mytimer_bucket{RECORDED}".replace(",method", ',le="0.001",method') + " 0.0"
    edges = {line.partition('le="')[2].partition('"')[0]: line.rpartition(" ")[2] for line in lines[2:-2]}
    assert len(edges) == 51
    # recorded from seldon-core
    assert (edges["0.019018554321561593"], edges["0.02347185009632733"], edges["+Inf"]) == ("0.0", "1.0", "1.0")


def test_a_time_equal_to_a_bucket_edge_counts_in_the_next_bucket() -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, metrics_json(["t", "TIMER", EDGES[0] * 1000, None]))

    buckets = [line.rpartition(" ")[2] for line in page_of(exposition).splitlines() if "_bucket" in line]
    assert buckets[:2] == ["0.0", "1.0"]


def test_a_negative_time_is_added_to_the_sum_but_not_the_count() -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, metrics_json(["t", "TIMER", -1000, None]))

    assert samples_of(page_of(exposition)) == {"t_count": 0.0, "t_sum": -1.0}


def test_labels_come_from_the_environment_variables() -> None:
    exposition = Exposition(
        {
            "PREDICTIVE_UNIT_ID": "classifier",
            "PREDICTIVE_UNIT_IMAGE": "reg.io:5000/org/img:0.3",
            "SELDON_DEPLOYMENT_ID": "dep",
            "PREDICTOR_ID": "main",
            "PREDICTOR_LABELS": '{"version": "v7"}',
        }
    )

    exposition.add(Endpoint.ROUTE, metrics_json(["k", "COUNTER", 1, None]))

    (family,) = text_string_to_metric_families(page_of(exposition))
    assert family.samples[0].labels == {
        "deployment_name": "dep",
        "seldon_deployment_name": "dep",
        "model_name": "classifier",
        "model_image": "reg.io:5000/org/img",
        "image_name": "reg.io:5000/org/img",
        "model_version": "0.3",
        "image_version": "0.3",
        "predictor_name": "main",
        "predictor_version": "v7",
        "method": "router",
        "worker_id": "0",
    }


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"v"'])
def test_the_predictor_version_is_not_implemented_when_predictor_labels_are_invalid(text: str) -> None:
    exposition = Exposition({"PREDICTOR_LABELS": text})

    exposition.add(Endpoint.PREDICT, metrics_json(["k", "COUNTER", 1, None]))

    assert f'predictor_version="{NONE}"' in page_of(exposition)


def test_an_image_without_a_tag_becomes_the_version_with_an_empty_image() -> None:
    exposition = Exposition({"PREDICTIVE_UNIT_IMAGE": "img"})

    exposition.add(Endpoint.PREDICT, metrics_json(["k", "COUNTER", 1, None]))

    assert 'model_image=""' in page_of(exposition)
    assert 'model_version="img"' in page_of(exposition)


@pytest.mark.parametrize(("endpoint", "method"), [(endpoint, endpoint.label) for endpoint in Endpoint])
def test_each_method_has_its_own_series(endpoint: Endpoint, method: str) -> None:
    exposition = Exposition({})

    for each in Endpoint:
        exposition.add(each, metrics_json(["k", "COUNTER", 1, {"method": "whatever"}]))
    exposition.add(endpoint, metrics_json(["k", "COUNTER", 1, None]))

    (family,) = text_string_to_metric_families(page_of(exposition))
    assert {sample.labels["method"]: sample.value for sample in family.samples}[method] == 2.0


def test_tags_become_escaped_labels() -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, metrics_json(["k", "GAUGE", 1, {"my": 'v"\\\nq', "worker_id": "mine"}]))

    assert ',my="v\\"\\\\\\nq",' in page_of(exposition)
    (family,) = text_string_to_metric_families(page_of(exposition))
    assert (family.samples[0].labels["my"], family.samples[0].labels["worker_id"]) == ('v"\\\nq', "0")


def test_all_series_of_a_metric_have_one_header() -> None:
    exposition = Exposition({})

    for value in ("a", "b"):
        exposition.add(Endpoint.PREDICT, metrics_json(["k", "COUNTER", 1, {"t": value}], ["other", "COUNTER", 1, None]))

    assert page_of(exposition).count("# TYPE k_total counter") == 1


def test_metrics_whose_tags_differ_only_in_order_share_a_series() -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, metrics_json(["k", "COUNTER", 1, {"a": "1", "b": "2"}]))
    exposition.add(Endpoint.PREDICT, metrics_json(["k", "COUNTER", 1, {"b": "2", "a": "1"}]))

    assert samples_of(page_of(exposition)) == {"k_total": 2.0}


def test_a_counter_whose_name_ends_in_total_gets_no_second_suffix() -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, metrics_json(["x_total", "COUNTER", 2, None]))

    assert samples_of(page_of(exposition)) == {"x_total": 2.0}


BAD = {
    "a name with a space": ["bad key-1", "COUNTER", 1, None],
    "no name": ["", "COUNTER", 1, None],
    "a name that is no text": [1, "COUNTER", 1, None],
    "an unknown type": ["k", "SUMMARY", 1, None],
    "a type that is a list": ["k", ["COUNTER"], 1, None],
    "a value that is a text": ["k", "COUNTER", "1", None],
    "a value without an end": ["k", "COUNTER", 10**400, None],
    "a tag with a dash": ["k", "COUNTER", 1, {"my-tag": "v"}],
    "a tag that is Prometheus' own": ["k", "COUNTER", 1, {"__name__": "v"}],
    "a tag that buckets have": ["k", "TIMER", 1, {"le": "1"}],
    "a tag that is a number": ["k", "COUNTER", 1, {"t": 1}],
    "a tag of half a character": ["k", "COUNTER", 1, {"t": "\ud800"}],
    "tags that are a list": ["k", "COUNTER", 1, ["t"]],
    "a name of the server's own": ["nv_inference_count", "GAUGE", 1, None],
}


@pytest.mark.parametrize("metric", BAD.values(), ids=BAD.keys())
def test_an_invalid_metric_is_omitted_and_logged_once(metric: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    exposition = Exposition({})

    with caplog.at_level(logging.WARNING):
        for number in range(3):
            exposition.add(
                Endpoint.PREDICT, metrics_json(metric, ["good", "COUNTER", 1, None], ["n", "GAUGE", number, None])
            )

    assert samples_of(page_of(exposition)) == {"good_total": 3.0, "n": 2.0}
    assert [record.message.startswith("metric '") for record in caplog.records] == [True]


def test_a_metric_with_the_name_of_an_existing_metric_is_omitted() -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, metrics_json(["x", "TIMER", 1000, None]))
    exposition.add(Endpoint.PREDICT, metrics_json(["x", "GAUGE", 7, None], ["x_sum", "GAUGE", 7, None]))

    assert samples_of(page_of(exposition)) == {"x_count": 1.0, "x_sum": 1.0}


@pytest.mark.parametrize("raw", [b"", b"{}", b"null", b"[1]", b"[[1]]", b"\xff"])
def test_metrics_that_cannot_be_parsed_are_ignored(raw: bytes) -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, raw)

    assert page_of(exposition) == ""


def test_nan_and_infinity_are_written_in_the_prometheus_format() -> None:
    exposition = Exposition({})

    exposition.add(Endpoint.PREDICT, b'[["a","GAUGE",NaN,null],["b","GAUGE",Infinity,null],["c","GAUGE",1e7,null]]')

    found = samples_of(page_of(exposition))
    assert math.isnan(found.pop("a"))
    assert found == {"b": math.inf, "c": 1e7}


def test_each_component_has_its_own_labels_on_the_shared_page() -> None:
    exposition = Exposition({})

    for name in ("first", "second"):
        exposition.label(name, {"PREDICTIVE_UNIT_ID": name})
    for name in ("first", "second", "other"):
        exposition.add(Endpoint.PREDICT, metrics_json(["k", "COUNTER", 1, None]), name)

    (family,) = text_string_to_metric_families(page_of(exposition))
    assert [sample.labels["model_name"] for sample in family.samples] == ["first", "second", NONE]


def test_new_series_beyond_the_limit_are_omitted_while_existing_series_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exposition = Exposition({})
    for user in range(MAX_SERIES + 2):
        exposition.add(Endpoint.PREDICT, metrics_json(["asked", "COUNTER", 1, {"user": str(user)}]))
    exposition.add(Endpoint.PREDICT, metrics_json(["asked", "COUNTER", 1, {"user": "0"}], ["more", "GAUGE", 1, None]))
    lines = page_of(exposition).splitlines()

    assert len(lines) == MAX_SERIES + 2
    assert [line.rpartition(" ")[2] for line in lines if 'user="0"' in line] == ["2.0"]
    assert [record.getMessage() for record in caplog.records] == [
        f"metric '{name}' is left out: there are {MAX_SERIES} series already" for name in ("asked", "more")
    ]


def test_counter_values_of_ten_thousand_calls_are_summed() -> None:
    exposition = Exposition({})

    for number in range(10_000):
        exposition.add(Endpoint.PREDICT, metrics_json(["k", "COUNTER", number, None]))

    assert samples_of(page_of(exposition)) == {"k_total": 49_995_000.0}


NAMES = st.text(max_size=4) | st.sampled_from(["a", "a_total", "a_count", "a_bucket", "b"])
METRICS = st.tuples(
    NAMES,
    st.sampled_from(["COUNTER", "GAUGE", "TIMER", "OTHER"]),
    st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.none() | st.dictionaries(st.text(max_size=3) | st.sampled_from(["a", "le", "method"]), st.text(max_size=4)),
)


@given(st.lists(st.lists(METRICS, max_size=3), max_size=8))
def test_the_page_is_valid_whatever_metrics_components_report(calls: list[list[tuple[Any, ...]]]) -> None:
    exposition = Exposition({})

    for call in calls:
        exposition.add(Endpoint.PREDICT, metrics_json(*call))

    page = page_of(exposition)
    read = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    assert len(read) == sum(not line.startswith("#") for line in page.split("\n") if line)
    places = Counter((sample.name, *sorted(sample.labels.items())) for sample in read)
    assert set(places.values()) <= {1}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(-1000, 1000)), max_size=40))
def test_counters_are_the_sums_over_all_calls(calls: list[tuple[str, str, int]]) -> None:
    exposition = Exposition({})
    counted: Counter[tuple[str, str]] = Counter()

    for key, tag, value in calls:
        exposition.add(Endpoint.PREDICT, metrics_json([key, "COUNTER", value, {"t": tag}]))
        counted[f"{key}_total", tag] += value

    read = {
        (sample.name, sample.labels["t"]): sample.value
        for family in text_string_to_metric_families(page_of(exposition))
        for sample in family.samples
    }
    assert read == counted
