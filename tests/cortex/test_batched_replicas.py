"""A replica handles one request at a time while requests share batches; predictions are counted."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.cortex.projects import SAMPLE, Project, ask, post, write_iris
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

SMUGGLES = """
import time

inside = most = 0
held = None


def pre_inference(sample, signature, metadata):
    global inside, most, held
    inside += 1
    most = max(most, inside)
    held = sample["number"]
    metadata["held"] = held
    time.sleep(sample["pause_s"])
    inside -= 1
    return {signature[0].name: [sample["number"], 0, 0, 0]}


def post_inference(prediction, signature, metadata):
    global inside, most
    inside += 1
    most = max(most, inside)
    time.sleep(0.0002)
    seen = {"held": held, "metadata": metadata["held"], "most": most, "label": int(prediction[0][0])}
    inside -= 1
    return seen
"""
KEYED = """
asked = None


def pre_inference(sample, signature, metadata):
    global asked
    asked = sample
    return [5.2, 3.6, 1.4, 0.3]


def post_inference(prediction, signature, metadata):
    return asked
"""


async def flood(live: Live, path: str, count: int, pause_s: float = 0) -> list[Any]:
    """Send `count` numbered requests over 64 connections. Returns: the answers, by number."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:

        async def one(number: int) -> Any:
            async with session.post(live.url + path, json={"number": number, "pause_s": pause_s}) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        return await asyncio.gather(*map(one, range(count)))


def metrics(live: Live) -> dict[str, float]:
    """Read the metrics page: values by name and labels."""
    page = httpx.get(f"{live.url}/metrics").text
    pairs = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(number) for name, _, number in pairs}


def model(live: Live, name: str, metric: str) -> float:
    """Read one metric of a model."""
    return next(value for line, value in metrics(live).items() if line.startswith(f'{metric}{{model="{name}"'))


class TestOneRequestPerReplica:
    @pytest.mark.parametrize("rows", [None, "N", 1])
    def test_c32_globals_belong_to_one_request_at_64_connections_while_requests_share_batches(
        self, tmp_path: Path, rows: int | str | None
    ) -> None:
        project = Project(tmp_path)
        project.api("numbers", write_iris(project.model("m.onnx"), rows), SMUGGLES)
        with live_server(project.folder, dialect="cortex") as live:
            for floods in range(1, 6):  # on a busy machine requests may come too slowly to share batches
                answers = asyncio.run(flood(live, "/iris/numbers", 1000, 0.0002))
                assert [answer["held"] for answer in answers] == list(range(1000))
                assert [answer["metadata"] for answer in answers] == list(range(1000))
                assert {answer["most"] for answer in answers} == {1}
                requests = model(live, "numbers", "nv_inference_request_success")
                batches = model(live, "numbers", "nv_inference_exec_count")
                assert requests == 1000 * floods
                if batches < requests:
                    break

        assert batches < requests

    def test_each_request_in_a_shared_batch_gets_its_own_prediction(self, tmp_path: Path) -> None:
        project = Project(tmp_path)
        project.api("numbers", write_iris(project.model("m.onnx"), "N"), SMUGGLES)
        with live_server(project.folder, dialect="cortex") as live:
            alone = [post(live.http_port, "/iris/numbers", {"number": number, "pause_s": 0}).json["label"]
                     for number in range(40)]  # fmt: skip
            together = asyncio.run(flood(live, "/iris/numbers", 40))

        assert [answer["label"] for answer in together] == alone
        assert len(set(alone)) > 1


class TestTracker:
    def test_c31_the_class_status_and_latency_of_a_prediction_are_counted(self, tmp_path: Path) -> None:
        project = Project(tmp_path)
        handler = (Path(__file__).parents[2] / "examples" / "cortex" / "onnx-0.10" / "handler.py").read_text()
        path = write_iris(project.model("m.onnx"))
        project.api("classifier", path, handler, tracker={"model_type": "classification"})
        with live_server(project.folder, dialect="cortex") as live:
            answer = post(live.http_port, "/iris/classifier", SAMPLE)
            first = _cortex(metrics(live))
            assert post(live.http_port, "/iris/classifier", {}).status == 406
            ask(live.http_port, "GET", "/iris/classifier/signature")
            second = _cortex(metrics(live))
            from_v2 = httpx.post(f"{live.url}/v2/models/classifier/predict", json=SAMPLE)

        assert answer.body == b'"iris-setosa"\n'
        assert first["cortex_prediction_total"] == {"iris-setosa": 1}
        assert first["cortex_status_code_total"] == {"2XX": 1}
        assert first["cortex_latency_ms_count"] == {"": 1}
        assert second["cortex_prediction_total"] == {"iris-setosa": 1}
        assert second["cortex_status_code_total"] == {"2XX": 1, "4XX": 1}
        assert second["cortex_latency_ms_count"] == {"": 2}
        assert from_v2.json() == "iris-setosa", "v2 clients get no tracker line"

    def test_a_key_of_the_answer_is_counted_and_answers_that_cannot_be_counted_are_sent(self, tmp_path: Path) -> None:
        project = Project(tmp_path)
        path = write_iris(project.model("m.onnx"))
        project.api("classes", path, KEYED, tracker={"model_type": "classification", "key": "class"})
        project.api("values", path, KEYED, tracker={"model_type": "regression", "key": "value"})
        with live_server(project.folder, dialect="cortex") as live:
            for sample in ({"class": "a"}, {"class": 7}, {"class": 1.5}, {}, "text", None):
                assert post(live.http_port, "/iris/classes", sample).json == sample
            for value in (1.5, -2, "x", True):
                assert post(live.http_port, "/iris/values", {"value": value}).json == {"value": value}
            page = metrics(live)

        assert _cortex(page, "classes")["cortex_prediction_total"] == {"a": 1, "7": 1}
        values = _cortex(page, "values")
        assert values["cortex_prediction_value_sum"] == {"": -0.5}
        assert values["cortex_prediction_value_count"] == {"": 2}
        assert values["cortex_prediction_value_min"] == {"": -2}
        assert values["cortex_prediction_value_max"] == {"": 1.5}
        assert values["cortex_status_code_total"] == {"2XX": 4}


def _cortex(page: dict[str, float], api: str = "classifier") -> dict[str, dict[str, float]]:
    """Give the numbers of one API, by metric and by its class or status code."""
    found: dict[str, dict[str, float]] = {}
    for line, number in page.items():
        name, _, labels = line.partition("{")
        if name.startswith("cortex_") and f'AppName="iris",APIName="{api}"' in labels and "le=" not in labels:
            own = re.search(r'(?:Class|Code)="([^"]*)"', labels)
            found.setdefault(name, {})[own[1] if own else ""] = number
    return found
