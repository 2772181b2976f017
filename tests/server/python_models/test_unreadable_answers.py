"""Python models whose worker sends unreadable answers: the requests of that Batch fail, and others continue."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.live import live_server
from tests.server.python_models.repositories import ONE, write_model

pytestmark = pytest.mark.slow
FORGING = """
import gc, json, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if request.request_id():
                channel = next(each for each in gc.get_objects() if type(each).__name__ == "Channel")
                kind, number, body = json.loads(request.request_id())
                channel.send(kind, number, body.encode())
                time.sleep(60)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 3)]))
        return answers
"""


def ask(url: str, name: str = "") -> int:
    body = {"id": name, "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [2.0]}]}
    answer = httpx.post(f"{url}/v2/models/m/infer", json=body, timeout=10)
    return answer.status_code


@pytest.mark.parametrize(
    ("forged", "status"),
    [
        ('[19, 2, ""]', 500),
        ('[19, 2, "{}"]', 500),
        ('[19, 2, "{\\"answers\\": [5]}"]', 500),
        ('[20, 2, "[]"]', 503),
        ('[64, 1, "[]"]', 503),
    ],
)
def test_an_unreadable_answer_fails_only_its_batch(tmp_path: Path, forged: str, status: int) -> None:
    write_model(tmp_path, "m", FORGING, ONE)
    with live_server(tmp_path) as live:
        assert ask(live.url, forged) == status
        assert ask(live.url) == 200
