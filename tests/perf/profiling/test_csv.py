from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.perf.profiling import csv
from penstock.perf.profiling.options import Options, Range, Rule
from tests.perf.profiling.scripted import document, level, served

_SERVER = "Network+Server Send/Recv,Server Queue,Server Compute Input,Server Compute Infer,Server Compute Output,"
_CACHE = "Server Cache Hit,Server Cache Miss,"
_USUAL = "p50 latency,p90 latency,p95 latency,p99 latency"
_WITH_P75 = "p50 latency,p75 latency,p90 latency,p95 latency,p99 latency"
_MORE = "Avg latency,request/response,response wait"
_GPUS = "Avg GPU Utilization,Avg GPU Power Usage,Max GPU Memory Usage,Total GPU Memory"
CLOSED = Options("iris")
RATES = Options("iris", concurrency=None, rate=Range(100, 200, 100))
P75 = Rule(percentile=75)

# First lines of files that perf_analyzer 2.47 wrote, of a server with and without a response cache.
RECORDED = [
    (CLOSED, False, f"Concurrency,Inferences/Second,Client Send,{_SERVER}Client Recv,{_USUAL}"),
    (
        replace(CLOSED, verbose_csv=True, collect_metrics=True),
        False,
        f"Concurrency,Inferences/Second,Client Send,{_SERVER}Client Recv,{_USUAL},{_MORE},{_GPUS}",
    ),
    (
        replace(CLOSED, verbose_csv=True, rule=P75),
        False,
        f"Concurrency,Inferences/Second,Client Send,{_SERVER}Client Recv,{_WITH_P75},request/response,response wait",
    ),
    (CLOSED, True, f"Concurrency,Inferences/Second,Client Send,{_SERVER}{_CACHE}Client Recv,{_USUAL}"),
    (RATES, False, f"Request Rate,Inferences/Second,Client Send,{_SERVER}Client Recv,{_USUAL}"),
    (
        replace(RATES, verbose_csv=True),
        False,
        f"Request Rate,Inferences/Second,Client Send,{_SERVER}Client Recv,{_USUAL},{_MORE}",
    ),
    (
        Options("iris", concurrency=None, intervals=Path("file")),
        False,
        f"Request Rate,Inferences/Second,Client Send,{_SERVER}Client Recv,{_USUAL}",
    ),
]


@pytest.mark.parametrize(("options", "cached", "recorded"), RECORDED)
def test_the_header_line_is_that_of_perf_analyzer(options: Options, cached: bool, recorded: str) -> None:
    run = document(level(1, 100), response_cache={"enable": cached})

    assert csv.text(run, options).splitlines()[0] == recorded


def test_a_server_without_statistics_has_no_columns() -> None:
    run = document(level(1, 100))
    run.server = {}

    assert csv.text(run, CLOSED).splitlines() == [
        f"Concurrency,Inferences/Second,Client Send,Client Recv,{_USUAL}",
        "1,100,0,0,100,100,100,100",
    ]


def test_a_cache_adds_columns_to_every_row_even_if_only_its_counts_show_it() -> None:
    hits = served(cache_hits=1, cache_hit_us=4.0)
    lines = csv.text(document(level(1, 100, server=hits), level(2, 200)), CLOSED).splitlines()

    assert f"{_SERVER}{_CACHE}" in lines[0]
    assert lines[1:] == [
        "1,100,0,57,10,5,20,3,4,0,0,100,100,100,100",
        "2,200,0,100,0,0,0,0,0,0,0,100,100,100,100",
    ]


def test_levels_are_ordered_by_throughput_and_times_are_truncated() -> None:
    run = document(level(8, 5321.987, server=served()), level(1, 1234567.8, server=served()), level(2, 99.5))

    assert csv.text(run, CLOSED).splitlines()[1:] == [
        "2,99.5,0,100,0,0,0,0,0,100,100,100,100",
        "8,5321.99,0,61,10,5,20,3,0,100,100,100,100",
        "1,1.23457e+06,0,61,10,5,20,3,0,100,100,100,100",
    ]


def test_levels_that_failed_or_were_unstable_are_omitted() -> None:
    run = document(level(1, 100), level(2, 200, stable=False, ended="unstable"), level(3, 300, ended="over"))

    assert [line.split(",")[0] for line in csv.text(run, CLOSED).splitlines()] == ["Concurrency", "1"]


def test_lateness_in_sending_is_not_part_of_the_request_time() -> None:
    late = level(100, 100)
    late.client.late_us = {"mean": 30.0, "p50": 0.0, "p99": 0.0, "max": 0.0}

    assert csv.text(document(late), replace(RATES, verbose_csv=True)).splitlines()[1].endswith(",100,0,70")


def test_gpus_are_named_by_their_uuid() -> None:
    figures = {"utilization": 0.5, "power_w": 71.25, "memory_bytes": 2e9, "memory_total_bytes": 8e10}
    run = document(level(1, 100, gpus={"GPU-b": figures, "GPU-a": {"utilization": 1.0}}))
    options = replace(CLOSED, verbose_csv=True, collect_metrics=True)

    assert (
        csv.text(run, options)
        .splitlines()[1]
        .endswith(",GPU-a:1;GPU-b:0.5;,GPU-b:71.25;,GPU-b:2000000000;,GPU-b:80000000000;")
    )


def test_each_composing_model_has_its_own_file(tmp_path: Path) -> None:
    part = served(requests=150, request_us=50.0, version="3")
    run = document(level(4, 1000, server=served(composing={"inner": part})))
    csv.write(run, CLOSED, tmp_path / "out.csv")

    assert (tmp_path / "inner_v3.out.csv").read_text("utf-8").splitlines() == [
        f"Concurrency,Inferences/Second,Client Send,{_SERVER}Client Recv",
        "4,500,0,10,10,5,20,3,0",
    ]
    assert (tmp_path / "out.csv").read_text("utf-8").startswith("Concurrency,")


def test_a_decoupled_model_has_a_column_for_responses() -> None:
    run = document(level(1, 100), model_transaction_policy={"decoupled": True})

    assert csv.text(run, CLOSED).startswith("Concurrency,Inferences/Second,Response Throughput,Client Send,")


@pytest.mark.parametrize(("per_s", "written"), [(400.0, "4,100,400,"), (None, "4,100,100,")], ids=["many", "one each"])
def test_responses_of_a_decoupled_model_are_counted(per_s: float | None, written: str) -> None:
    one = level(4, 100)
    one.client.responses_per_s = per_s

    text = csv.text(document(one, model_transaction_policy={"decoupled": True}), CLOSED)

    assert text.splitlines()[1].startswith(written)
