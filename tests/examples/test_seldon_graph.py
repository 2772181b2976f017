"""The graph under examples/ answers as its README says, and learns."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.live import Live, live_server

pytestmark = pytest.mark.slow

MANIFEST = Path(__file__).parents[2] / "examples" / "seldon-graph" / "deployment.yaml"
FLOWER = {"data": {"ndarray": [[5.1, 3.5, 1.4, 0.2]]}}


def post(live: Live, path: str, message: Any) -> Any:
    url = f"{live.url}/seldon/seldon/flowers/api/v1.0/{path}"
    request = urllib.request.Request(url, json.dumps(message).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_example_graphs_router_abandons_a_branch_with_bad_rewards(tmp_path: Path) -> None:
    shutil.copytree(MANIFEST.parent, tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / MANIFEST.name
    never_at_random = manifest.read_text().replace('{name: epsilon, value: "0.1"', '{name: epsilon, value: "0.0"')
    manifest.write_text(never_at_random)
    with live_server(manifest, dialect="seldon") as live:
        answer = post(live, "predictions", FLOWER)
        assert answer["data"]["names"] == ["setosa", "versicolor", "virginica"]
        assert answer["data"]["ndarray"][0][0] > 0.5
        assert answer["meta"]["requestPath"] == {"by-sepals": "example.org/flowers:1.0"}
        assert answer["meta"]["routing"] == {"bandit": 0, "by-sepals": -1}
        post(live, "feedback", {"reward": 0.0, "response": answer})
        answer = post(live, "predictions", FLOWER)
        assert answer["meta"]["routing"] == {"average": -1, "bandit": 1, "by-all": -1, "by-petals": -1}
