"""The metrics page: its text, its labels, and the page that documents it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import re
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.caching.cache import Cache
from penstock.batching.model import Model
from penstock.batching.request import InferRequest, Key
from penstock.batching.running.batch import Batch
from penstock.batching.spec import HookSpec
from penstock.batching.statistics import REJECTED
from penstock.server.options.metrics_config import DEFAULT_QUANTILES, parse
from penstock.server.settings import SettingError, Settings
from penstock.server.telemetry import page
from penstock.server.telemetry.exposition import decimal, label_value
from penstock.server.telemetry.families import FAMILIES
from penstock.server.telemetry.hardware import Hardware
from penstock.server.telemetry.metrics import MAX_SHOWN_KEYS, Metrics
from penstock.server.telemetry.page import make_metrics_app
from tests.fakes import fake_model
from tests.live import live_server
from tests.server.fronts.live_fronts import live_front

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
SAMPLE = re.compile(r'([a-z_]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*\})? (-?\d+(?:\.\d+)?)')
US = 1_000


class FakeEngine:
    def __init__(self, *models: Model) -> None:
        self._models = list(models)

    def models(self) -> list[Model]:
        return self._models


def _no_gpu() -> Any:
    raise ImportError("no pynvml here")


def _metrics(*models: Model, connections: int | None = None) -> Metrics:
    hardware = Hardware(nvml=_no_gpu)
    counted = None if connections is None else {"penstock_connections": lambda: connections}
    return Metrics(FakeEngine(*models), hardware, connections=counted)


def _page(*models: Model, connections: int | None = None) -> str:
    return asyncio.run(_metrics(*models, connections=connections).render()).decode()


def _values(page: str, name: str) -> dict[str, str]:
    lines = [line.removeprefix(name) for line in page.splitlines() if re.match(name + r"[ {]", line)]
    return {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in lines}


def _serve(model: Model, *rows: int, end_ns: int = 1_500 * US) -> None:
    requests = []
    start_ns = end_ns - 500 * US
    for count in rows:
        request = InferRequest(model, [], count, (), (0,), None)  # type: ignore[arg-type]
        request.start_ns = request.enqueued_ns = start_ns
        requests.append(request)
    batch = Batch(requests, sum(rows), (), start_ns + 40 * US)
    batch.compute_start_ns = start_ns + 50 * US
    batch.compute_end_ns = start_ns + 350 * US
    batch.exec_end_ns = start_ns + 400 * US
    model.statistics.record_batch(batch, end_ns)


def test_counters_have_the_names_labels_and_meanings_of_triton() -> None:
    model = fake_model("iris", 3)
    _serve(model, 1, 4)

    page = _page(model)

    expected = {
        "request_success": 2,
        "count": 5,
        "exec_count": 1,
        "request_duration_us": 1000,
        "queue_duration_us": 80,
        "compute_input_duration_us": 20,
        "compute_infer_duration_us": 600,
        "compute_output_duration_us": 100,
        "pending_request_count": 0,
    }
    for name, value in expected.items():
        assert f'\nnv_inference_{name}{{model="iris",version="3"}} {value}\n' in page


def test_failure_counters_have_a_line_for_each_reason_from_the_start() -> None:
    model = fake_model("iris")
    model.statistics.record_failure(REJECTED, 0, 1)

    labels = '{{model="iris",reason="{}",version="1"}}'

    assert _values(_page(model), "nv_inference_request_failure") == {
        labels.format("REJECTED"): "1",
        labels.format("CANCELED"): "0",
        labels.format("BACKEND"): "0",
        labels.format("OTHER"): "0",
    }


def test_histograms_are_cumulative_and_end_with_the_total() -> None:
    model = fake_model("iris")
    _serve(model, 1, 4)

    page = _page(model)

    labels = 'model="iris",version="1"'
    queue = _values(page, "penstock_queue_seconds_bucket")
    assert (queue[f'{{{labels},le="0.00005"}}'], queue[f'{{{labels},le="+Inf"}}']) == ("2", "2")
    rows = _values(page, "penstock_batch_rows_bucket")
    assert (rows[f'{{{labels},le="4"}}'], rows[f'{{{labels},le="8"}}']) == ("0", "1")
    assert f"\npenstock_total_seconds_sum{{{labels}}} 0.001\n" in page
    assert f"\npenstock_total_seconds_count{{{labels}}} 2\n" in page
    assert f"\npenstock_compute_seconds_sum{{{labels}}} 0.00036\n" in page


def test_only_models_with_hooks_have_hook_lines() -> None:
    hooked = fake_model("hooked", hooks=HookSpec(Path("hooks.py")))
    hooked.statistics.record_hook("post", 30 * US)

    page = _page(fake_model("plain"), hooked)

    assert _values(page, "penstock_hook_seconds_count") == {
        '{model="hooked",version="1",hook="pre"}': "0",
        '{model="hooked",version="1",hook="post"}': "1",
    }


EVENTS = {
    "batch_retries": "penstock_batch_retries_total",
    "quarantined": "penstock_quarantined_requests_total",
    "runs_stopped": "penstock_runs_stopped_total",
    "out_of_memory": "penstock_out_of_memory_total",
    "instances_replaced": "penstock_instances_replaced_total",
    "late_refusals": "penstock_late_refusals_total",
    "rows_padded": "penstock_padded_rows_total",
}


@pytest.mark.parametrize(("event", "name"), EVENTS.items())
def test_unusual_events_are_counted_from_zero(event: str, name: str) -> None:
    model = fake_model("iris")
    before = _page(model)
    model.count_event(event)
    model.count_event(event, 4)
    labels = '{model="iris",version="1"}'

    assert _values(before, name) == {labels: "0"}
    assert {other: _values(_page(model), other)[labels] for other in EVENTS.values()} == {
        **dict.fromkeys(EVENTS.values(), "0"), name: "5",
    }  # fmt: skip


def test_elements_of_padded_inputs_are_counted_as_real_or_padding() -> None:
    model = fake_model("iris")
    model.count_event("elements_real", 30)
    model.count_event("elements_padded", 10)

    assert _values(_page(model), "penstock_padding_elements_total") == {
        '{model="iris",version="1",kind="real"}': "30",
        '{model="iris",version="1",kind="padding"}': "10",
    }


def test_device_seconds_are_shown_for_models_that_have_run_on_a_device() -> None:
    model = fake_model("iris")
    before = _page(model)
    model.device_ns.update({"cuda:0": 1_500_000_000, "cuda:1": 7})
    labels = 'model="iris",version="1",device="cuda:{}"'

    assert "penstock_device_seconds_total" not in before
    assert _values(_page(model), "penstock_device_seconds_total") == {
        f"{{{labels.format(0)}}}": "1.5",
        f"{{{labels.format(1)}}}": "0.000000007",
    }


def test_a_model_that_fell_back_from_gpu_to_cpu_is_shown() -> None:
    model = fake_model("iris")
    model.spec = replace(model.spec, fallback_reason="no NVIDIA driver was found")

    assert _values(_page(model, fake_model("other")), "penstock_model_cpu_fallback") == {
        '{model="iris",version="1"}': "1"
    }


def test_every_event_that_is_counted_has_its_metric() -> None:
    sources = (path.read_text("utf-8") for path in (DOCS.parents[1] / "batching").rglob("*.py"))
    counted = {event for source in sources for event in re.findall(r'\bmodel\.count_event\(\s*"(\w+)"', source)}

    assert counted
    assert counted <= {*EVENTS, "elements_real", "elements_padded"}


def _learn(model: Model, key: Key, rows: int, ns: int, runs: int = 1) -> None:
    with model.lock:
        for _ in range(runs):
            model.scheduler.learn(key, rows, ns, 1)


def test_run_seconds_are_shown_by_shapes_and_rows() -> None:
    model = fake_model("iris")
    _learn(model, ((512,), None), 1, 50 * US)
    _learn(model, ((512,), None), 16, 200 * US)
    labels = 'model="iris",version="1",shapes="[[512],null]"'

    assert _values(_page(model), "penstock_run_seconds") == {
        f'{{{labels},rows="1",quantile="0.5"}}': "0.00005",
        f'{{{labels},rows="1",quantile="0.95"}}': "0.00005",
        f'{{{labels},rows="16",quantile="0.5"}}': "0.0002",
        f'{{{labels},rows="16",quantile="0.95"}}': "0.0002",
    }
    assert "penstock_run_seconds" not in _page(fake_model("iris"))


def test_run_seconds_are_shown_for_the_shapes_that_ran_most() -> None:
    model = fake_model("iris")
    for width in range(1, 40):
        _learn(model, ((width,),), 1, US, runs=width)

    shown = re.findall(r'shapes="\[\[(\d+)\]\]",rows="1",quantile="0.5"', _page(model))
    assert shown == [str(width) for width in range(39, 39 - MAX_SHOWN_KEYS, -1)]


def test_shapes_and_sizes_chosen_by_clients_do_not_add_series_without_limit() -> None:
    model = fake_model("iris")
    for width in range(1, MAX_SHOWN_KEYS):
        _learn(model, ((width,),), 9, US)
    first = _values(_page(model), "penstock_run_seconds").keys()
    for width in range(100, 150):
        _learn(model, ((width,),), 1, US, runs=9)
        _learn(model, ((1,),), 10, US)
    later = _values(_page(model), "penstock_run_seconds").keys()

    assert first <= {line for line in later if 'rows="10"' in line}
    assert len({re.sub(",rows.*", "", line) for line in later}) == MAX_SHOWN_KEYS
    _learn(model, ((999,),), 1, US, runs=999)
    assert _values(_page(model), "penstock_run_seconds").keys() == later


def test_the_number_of_connections_is_shown_if_known() -> None:
    assert "\npenstock_connections 7\n" in _page(connections=7)
    assert "penstock_connections" not in _page()


def test_a_version_that_could_not_be_loaded_is_shown_as_not_ready() -> None:
    metrics = _metrics()
    metrics.readiness = lambda: [("iris", "1", True), ("iris", "2", False), ('"broken"', "", False)]

    assert _values(asyncio.run(metrics.render()).decode(), "penstock_model_ready") == {
        '{model="iris",version="1"}': "1",
        '{model="iris",version="2"}': "0",
        '{model="\\"broken\\"",version=""}': "0",
    }


def test_a_live_server_shows_a_model_that_failed_to_load_as_not_ready(tmp_path: Path) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    with live_server(tmp_path) as live:
        page = httpx.get(f"{live.url}/metrics").text

    assert _values(page, "penstock_model_ready") == {'{model="broken",version="1"}': "0"}


def test_build_info_has_the_installed_versions_as_labels() -> None:
    [(labels, value)] = _values(_page(), "penstock_build_info").items()

    python, own = platform.python_version(), importlib.metadata.version("penstock")
    assert labels.startswith(f'{{version="{own}",python="{python}",onnxruntime="1.')
    assert value == "1"


def test_the_page_has_one_group_per_metric_with_help_and_type() -> None:
    models = [fake_model("a", hooks=HookSpec(Path("h.py"))), fake_model("b"), fake_model('odd "name"\\\n')]
    for model in models:
        _serve(model, 1)

    kinds = {family.name: family.kind for family in FAMILIES}
    families: list[str] = []
    for line in _page(*models, connections=1).splitlines():
        if line.startswith("# HELP "):
            families.append(line.split(" ", 3)[2])
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {families[-1]} {kinds[families[-1]]}"
        else:
            matched = SAMPLE.fullmatch(line)
            assert matched is not None, line
            assert (
                re.sub(r"_(bucket|sum|count)$" if kinds[families[-1]] == "histogram" else "$^", "", matched[1])
                == families[-1]
            )
    assert len(families) == len(set(families))


def test_rendering_yields_to_the_event_loop_after_each_model() -> None:
    async def main() -> int:
        turns = 0
        metrics = _metrics(*(fake_model(f"m{number}") for number in range(50)))
        rendering = asyncio.ensure_future(metrics.render())
        while not rendering.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(main()) >= 50


@pytest.mark.parametrize(
    ("text", "escaped"), [("plain", "plain"), ('a"b', 'a\\"b'), ("a\\b", "a\\\\b"), ("a\nb", "a\\nb"), ("é", "é")]
)
def test_label_values_are_escaped(text: str, escaped: str) -> None:
    assert label_value(text) == escaped


@given(st.integers(0, 10**24), st.integers(1, 9))
def test_decimal_numbers_are_exact_and_have_no_exponent(value: int, digits: int) -> None:
    text = decimal(value, digits)

    assert re.fullmatch(r"\d+(\.\d*[1-9])?", text)
    integer, _, part = text.partition(".")
    assert int(integer) * 10**digits + int(part.ljust(digits, "0")) == value


# -- optional metrics ------------------------------------------------------------------------------------------


def _page_with(model: Model, *entries: str) -> str:
    metrics = Metrics(FakeEngine(model), Hardware(nvml=_no_gpu), parse(entries))
    asyncio.run(metrics.render())
    now_ns = time.monotonic_ns()
    _serve(model, 1, 4, end_ns=now_ns)
    return asyncio.run(metrics.render()).decode()


def test_summaries_are_shown_if_enabled() -> None:
    page = _page_with(fake_model("iris"), "summary_latencies=true", "summary_quantiles=0.5:0.05,0.99:0.001")
    labels = 'model="iris",version="1"'

    assert _values(page, "nv_inference_queue_summary_us") == {
        f'{{{labels},quantile="0.5"}}': "40",
        f'{{{labels},quantile="0.99"}}': "40",
    }
    for name, summed in (("request", 1000), ("queue", 80), ("compute_input", 20), ("compute_output", 100)):
        assert f"\nnv_inference_{name}_summary_us_sum{{{labels}}} {summed}\n" in page
        assert f"\nnv_inference_{name}_summary_us_count{{{labels}}} 2\n" in page


def test_the_quantiles_of_a_summary_without_requests_are_nan() -> None:
    metrics = Metrics(FakeEngine(fake_model("iris")), Hardware(nvml=_no_gpu), parse(["summary_latencies=true"]))
    page = asyncio.run(metrics.render()).decode()

    assert set(_values(page, "nv_inference_request_summary_us").values()) == {"NaN"}
    assert len(_values(page, "nv_inference_request_summary_us")) == len(DEFAULT_QUANTILES)


def _decoupled(**fields: Any) -> Model:
    return Model(replace(fake_model("iris").spec, decoupled=True, **fields), (), lambda *_: None)


def test_the_first_response_histogram_is_shown_if_enabled() -> None:
    page = _page_with(_decoupled(), "histogram_latencies=true")
    buckets = _values(page, "nv_inference_first_response_histogram_ms_bucket")

    assert list(buckets.values()) == ["2"] * 5
    assert [re.findall('le="(.*)"', labels)[0] for labels in buckets] == ["100", "500", "2000", "5000", "+Inf"]
    assert '\nnv_inference_first_response_histogram_ms_sum{model="iris",version="1"} 1\n' in page


def test_a_model_may_set_the_bounds_of_its_first_response_histogram() -> None:
    page = _page_with(_decoupled(first_response_ms=(-1.5, 0.0, 0.5, 2500.25)), "histogram_latencies=true")
    buckets = _values(page, "nv_inference_first_response_histogram_ms_bucket")

    assert list(buckets.values()) == ["0", "0", "2", "2", "2"]
    assert [re.findall('le="(.*)"', labels)[0] for labels in buckets] == ["-1.5", "0", "0.5", "2500.25", "+Inf"]


def test_summaries_and_histograms_are_off_by_default_and_counters_can_be_turned_off() -> None:
    page = _page(fake_model("iris"))
    assert "summary_us" not in page
    assert "first_response" not in page
    assert "first_response" not in _page_with(fake_model("iris"), "histogram_latencies=true")

    remembering = fake_model("iris")
    cache: Any = Cache(1 << 20)
    remembering.cache = cache
    assert "nv_cache_num_hits_per_model" in _page(remembering)
    assert "nv_cache_hit_duration_per_model" in _page(remembering)

    without = _page_with(remembering, "counter_latencies=false")
    assert "duration_us" not in without
    assert "nv_cache" not in without
    assert "nv_inference_request_success" in without


@pytest.mark.parametrize(
    "entry",
    ["summary", "summary_latencies=maybe", "summaries=true", "summary_quantiles=", "summary_quantiles=0.5",
     "summary_quantiles=1.5:0.1", "summary_quantiles=0.5:x", "summary_quantiles=0.5:0.1,0.5:0.1", "=true"],
)  # fmt: skip
def test_an_invalid_metrics_config_is_a_setting_error(entry: str) -> None:
    with pytest.raises(SettingError, match="--metrics-config: "):
        Settings(metrics_config=(entry,))


def test_a_quantile_error_is_parsed_up_to_its_first_invalid_character_with_a_minimum() -> None:
    config = parse(["summary_quantiles=0.1:0.0.1,0.7:0.01,0.75:0,0.9:1e-2"])

    assert config.quantiles == (("0.1", 0.0001), ("0.7", 0.01), ("0.75", 0.0001), ("0.9", 0.01))


def test_metric_tags_of_a_model_are_labels_sorted_by_name() -> None:
    model = fake_model("iris")
    model.spec = replace(model.spec, metric_tags=(("team", 'a"b'), ("tier", "1")))
    page = _page(model)
    before, after = '_team="a\\"b",_tier="1",model="iris"', 'version="1"'

    assert f"\nnv_inference_count{{{before},{after}}} 0\n" in page
    assert f'\nnv_inference_request_failure{{{before},reason="OTHER",{after}}} 0\n' in page


def test_the_load_duration_of_a_model_is_shown() -> None:
    model = fake_model("iris")
    model.load_s = 1.5

    assert '\nnv_model_load_duration_secs{model="iris",version="1"} 1.500000\n' in _page(model)


def test_the_absent_pinned_memory_pool_is_shown_as_empty() -> None:
    page = _page()

    assert "\nnv_pinned_memory_pool_total_bytes 0\n" in page
    assert "\nnv_pinned_memory_pool_used_bytes 0\n" in page


# -- the metrics port ------------------------------------------------------------------------------------------


def _call(method: str, path: str, served: str = "/metrics", accept: str = "identity") -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(make_metrics_app(_metrics(fake_model("iris")), served))
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
            return await client.request(method, path, headers={"accept-encoding": accept})

    return asyncio.run(main())


def test_the_metrics_port_serves_the_metrics_page() -> None:
    response = _call("GET", "/metrics?name=x")

    assert (response.status_code, response.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert int(response.headers["content-length"]) == len(response.content)
    assert response.text.startswith("# HELP nv_inference_request_success ")


@pytest.mark.parametrize(("accept", "coding"), [("gzip", "gzip"), ("deflate, gzip;q=0.5", "deflate"), ("br", None)])
def test_the_page_is_compressed_as_its_client_requests(accept: str, coding: str | None) -> None:
    response = _call("GET", "/metrics", accept=accept)

    assert (response.headers.get("content-encoding"), response.headers["vary"]) == (coding, "accept-encoding")
    assert (int(response.headers["content-length"]) < len(response.content) / 5) == (coding is not None)
    assert response.text.startswith("# HELP nv_inference_request_success ")


def test_a_large_page_is_compressed_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def compressed(body: bytes, coding: bytes) -> bytes:
        threads.append(threading.get_ident())
        return body

    monkeypatch.setattr(page, "compress", compressed)
    asyncio.run(page.encode_page(b"x" * 1000, b"gzip"))
    asyncio.run(page.encode_page(b"x" * 100_000, b"gzip"))

    assert [thread == threading.get_ident() for thread in threads] == [True, False]


@pytest.mark.parametrize("serving", [live_server, partial(live_front, count=1)], ids=["server", "front end"])
def test_the_metrics_page_on_the_http_port_is_compressed(serving: Any, tmp_path: Path) -> None:
    with serving(tmp_path) as live:
        response = httpx.get(f"{live.url}/metrics", headers={"accept-encoding": "gzip"})
        uncompressed = httpx.get(f"{live.url}/metrics", headers={"accept-encoding": "identity"})

    assert (response.headers["content-encoding"], uncompressed.headers.get("content-encoding")) == ("gzip", None)
    assert response.text.startswith("# HELP ")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("GET", "/v2", 404), ("POST", "/metrics", 405)]
)
def test_the_metrics_port_rejects_all_other_requests(method: str, path: str, status: int) -> None:
    response = _call(method, path)

    assert (response.status_code, list(response.json())) == (status, ["error"])


def test_the_metrics_page_may_have_another_path() -> None:
    assert _call("GET", "/prometheus", "/prometheus").status_code == 200
    assert _call("GET", "/metrics", "/prometheus").status_code == 404


def test_the_metrics_port_starts_and_stops_with_its_server() -> None:
    sent: list[str] = []

    async def main() -> None:
        messages = iter(({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}))

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await make_metrics_app(_metrics())({"type": "lifespan"}, receive, send)

    asyncio.run(main())

    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


# -- the documentation -----------------------------------------------------------------------------------------


def test_the_docs_list_exactly_the_metrics_that_exist() -> None:
    documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", DOCS.read_text("utf-8"), flags=re.MULTILINE))

    assert documented == {family.name: family.kind for family in FAMILIES}


def test_the_docs_name_the_labels_that_the_page_has() -> None:
    model = fake_model("iris", hooks=HookSpec(Path("h.py")))
    _learn(model, ((4,),), 1, US)
    page, docs = _page(model), DOCS.read_text("utf-8")

    for name, cell in re.findall(r"^\| `(\w+)` \| \w+ \| ([^|]*) \|", docs, flags=re.MULTILINE):
        labels = {
            label
            for line in page.splitlines()
            if re.match(name + r"(_bucket|_sum|_count)?\{", line)
            for label in re.findall(r'(\w+)="', line)
        }
        if labels:
            assert labels - {"model", "version", "le"} == set(re.findall(r"`(\w+)`", cell)), name
