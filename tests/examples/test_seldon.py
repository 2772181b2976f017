"""The component under examples/ is served as its README says, alone and in a graph."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from penstock.server.seldon.check import check_components
from penstock.server.settings import Settings
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples" / "seldon"
README = (EXAMPLES / "README.md").read_text("utf-8")
ANSWERS = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", README, re.DOTALL)]
BODIES = [json.loads(text) for text in re.findall(r"-d '(.*?)'", README)]


def post(live: Live, path: str, body: Any) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{live.url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_the_iris_component_answers_as_its_readme_states() -> None:
    with live_server(EXAMPLES / "iris", dialect="seldon") as live:
        answer = post(live, "/api/v1.0/predictions", BODIES[0])
        tensor = post(live, "/v2/models/Iris/infer", BODIES[1])["outputs"][0]

    assert answer["meta"] == ANSWERS[0]["meta"]
    assert [round(each, 6) for each in answer["data"]["ndarray"][0]] == [
        round(each, 6) for each in ANSWERS[0]["data"]["ndarray"][0]
    ]
    assert (tensor["name"], tensor["data"]) == ("shares", answer["data"]["ndarray"][0])


def test_the_iris_graph_answers_for_inches() -> None:
    with live_server(EXAMPLES / "iris.yaml", dialect="seldon") as live:
        answer = post(live, "/api/v1.0/predictions", BODIES[2])

    assert answer["data"]["names"] == ["setosa", "versicolor", "virginica"]
    assert answer["data"]["ndarray"][0][0] > 0.9
    assert list(answer["meta"]["requestPath"]) == ["centimetres", "iris"]


def test_check_reports_no_mistakes_in_the_component_or_graph() -> None:
    for path in (EXAMPLES / "iris", EXAMPLES / "iris.yaml"):
        assert check_components(Settings(dialect="seldon", model_repository=(str(path),))).findings == []
