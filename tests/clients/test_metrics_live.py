"""The metrics page of a live server: scraped on both ports, parsed as Prometheus does, and compared with the load."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from tests.backends.onnx_models import node
from tests.clients import models
from tests.clients.tensors import document
from tests.fakes import PATIENCE_S
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z_]+=\"(?:[^\"\\]|\\.)*\",?)*)\})? (\S+)\Z")
TYPES = {"counter", "gauge", "histogram", "summary"}
BOUNDS = """
model_transaction_policy { decoupled: true }
model_metrics { metric_control [ {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ -1, 0.0, 1, 60000.5 ] }
} ] }
"""
Page = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    models.write_shapes(root)
    models.write_identity(root, 'odd "name"\\', "")
    same: tuple[models.Tensors, models.Tensors] = {"x": (models.INT32, [2])}, {"y": (models.INT32, [2])}
    models.write(root, "bounded", [node("Identity", ["x"], ["y"])], same, config=BOUNDS)
    shown = ("summary_latencies=true", "histogram_latencies=true", "summary_quantiles=0.5:0.05,0.99:0.001")
    with live_server(root, metrics_config=shown) as server:
        yield server


def scrape(live: Live, port: int = 0) -> str:
    response = httpx.get(f"http://127.0.0.1:{port or live.metrics_port}/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    return response.text


def parsed(text: str) -> Page:
    """Parse a page strictly: every sample once, after its HELP and TYPE, families in one piece."""
    page: Page = {}
    family = ""
    families: set[str] = set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
            assert family not in families
            families.add(family)
        elif line.startswith("# TYPE "):
            assert line.split()[2] == family
            assert line.split()[3] in TYPES
        else:
            match = SAMPLE.match(line)
            assert match, line
            assert match[1].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") == family or (
                match[1] == family
            )
            key = (match[1], match[2] or "")
            assert key not in page
            page[key] = float(match[3])
    return page


def infer(live: Live, model: str, array: Any, status: int = 200) -> None:
    assert httpx.post(f"{live.url}/v2/models/{model}/infer", json=document(array)).status_code == status


def test_the_page_is_well_formed_and_has_the_same_metrics_on_both_ports(live: Live) -> None:
    one, other = parsed(scrape(live)), parsed(scrape(live, live.http_port))

    assert one.keys() == other.keys()


def test_every_nv_metric_of_a_model_is_present_with_tritons_labels(live: Live) -> None:
    page = parsed(scrape(live))
    labels = 'model="free",version="1"'

    for name in (
        "nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count",
        "nv_inference_request_duration_us", "nv_inference_queue_duration_us",
        "nv_inference_compute_input_duration_us", "nv_inference_compute_infer_duration_us",
        "nv_inference_compute_output_duration_us", "nv_inference_pending_request_count",
    ):  # fmt: skip
        assert (name, labels) in page
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert ("nv_inference_request_failure", f'model="free",reason="{reason}",version="1"') in page


def test_requests_and_rows_are_counted(live: Live) -> None:
    before = parsed(scrape(live))
    for rows in (1, 3):
        infer(live, "versions", np.ones((rows, 1), np.float32))
    after = parsed(scrape(live))
    labels = 'model="versions",version="10"'
    moved = {
        name: after[name, labels] - before[name, labels]
        for name in ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count")
    }

    assert moved == {"nv_inference_request_success": 2, "nv_inference_count": 4, "nv_inference_exec_count": 2}
    assert after["penstock_batch_rows_count", labels] - before["penstock_batch_rows_count", labels] == 2
    assert after["penstock_batch_rows_sum", labels] - before["penstock_batch_rows_sum", labels] == 4


def test_histograms_are_cumulative_and_agree_with_their_counts(live: Live) -> None:
    infer(live, "versions", np.ones((1, 1), np.float32))
    page = parsed(scrape(live))
    labels = 'model="versions",version="10"'
    for name in ("penstock_queue_seconds", "penstock_compute_seconds", "penstock_total_seconds", "penstock_batch_rows"):
        buckets = [value for (each, pairs), value in page.items() if each == f"{name}_bucket" and labels in pairs]

        assert buckets == sorted(buckets)
        assert buckets[-1] == page[f"{name}_count", labels] > 0


def test_summaries_count_the_successful_requests(live: Live) -> None:
    scrape(live)
    infer(live, "versions", np.ones((1, 1), np.float32))
    page = parsed(scrape(live))
    labels = 'model="versions",version="10"'

    for phase in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        name = f"nv_inference_{phase}_summary_us"
        assert 0 <= page[name, f'{labels},quantile="0.5"'] <= page[name, f'{labels},quantile="0.99"']
        assert page[f"{name}_count", labels] == page["nv_inference_request_success", labels]


def test_a_decoupled_model_has_a_first_response_histogram_with_its_configured_bounds(live: Live) -> None:
    assert httpx.post(f"{live.url}/v2/models/bounded/generate", json={"x": [1, 2]}).status_code == 200
    text = scrape(live)
    page = parsed(text)
    name, labels = "nv_inference_first_response_histogram_ms_bucket", 'model="bounded",version="1"'
    found = {key.removeprefix(f"{labels},"): value for (family, key), value in page.items() if family == name}
    own = {edge: value for edge, value in found.items() if edge.startswith("le=")}

    assert list(own) == [f'le="{edge}"' for edge in ("-1", "0", "1", "60000.5", "+Inf")]
    assert (own['le="0"'], own['le="60000.5"']) == (0, 1)
    shown = [line for line in text.splitlines() if line.startswith("nv_inference_first_response")]
    assert all('model="bounded"' in line and line.rpartition(" ")[2].isdigit() for line in shown)


def test_connections_of_both_protocols_are_counted(live: Live) -> None:
    with grpc_client.InferenceServerClient(live.grpc_address) as client:
        assert client.is_server_live()
        until = time.monotonic() + PATIENCE_S
        page = parsed(scrape(live))
        while not page["penstock_grpc_connections", ""] and time.monotonic() < until:
            page = parsed(scrape(live))  # a front end reports to its engine once a second

    assert page["penstock_grpc_connections", ""] == 1
    assert page["penstock_connections", ""] >= 0


def test_the_load_duration_of_each_model_is_present(live: Live) -> None:
    assert parsed(scrape(live))["nv_model_load_duration_secs", 'model="free",version="1"'] > 0


def test_quotes_in_a_model_name_are_escaped(live: Live) -> None:
    assert ("nv_inference_count", 'model="odd \\"name\\"\\\\",version="1"') in parsed(scrape(live))


def test_the_metrics_port_serves_nothing_else(live: Live) -> None:
    url = f"http://127.0.0.1:{live.metrics_port}"

    assert httpx.get(f"{url}/v2").status_code == 404
    assert httpx.post(f"{url}/metrics").status_code == 405
    assert httpx.post(f"{url}/v2/models/free/infer", json=document(np.ones((1, 1, 1), np.float32))).status_code == 404
