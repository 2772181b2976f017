"""A server with isolated models, under load over HTTP while their worker is killed."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.perf.soak.request_log import RIGHT, WRONG, RequestLog
from penstock.server.isolated.backend import IsolatedBackend
from tests.backends.onnx_models import contract_model
from tests.live import Live, live_server
from tests.processes import lives
from tests.server.isolated.stage import PATIENCE_S, nothing_left, onnx_loader, until
from tests.server.repository.folders import look_twice

pytestmark = pytest.mark.slow
CALLERS = 6


class Callers:
    """Threads that send requests continuously, and record how each request ends."""

    def __init__(self, port: int) -> None:
        self.request_log = RequestLog()
        self.done = threading.Event()
        self._port = port
        self._numbers = itertools.count(1)
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def _call(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        while not self.done.is_set():
            number = next(self._numbers)
            values = [float(number), 1.0, 2.0, 3.0]
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": values}
            self.request_log.begin(str(number), "rows", time.monotonic())
            connection.request("POST", "/v2/models/m/infer", json.dumps({"inputs": [tensor]}))
            answer = connection.getresponse()
            document: dict[str, Any] = json.loads(answer.read())
            right = answer.status == 200 and _data(document, "doubled") == [2 * value for value in values]
            self.request_log.end(
                str(number), RIGHT if right else WRONG, time.monotonic(), f"{answer.status} {document}"
            )
        connection.close()

    @property
    def right(self) -> int:
        return self.request_log.counts().get("rows", Counter())[RIGHT]

    def end(self) -> None:
        self.done.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


def _data(document: dict[str, Any], name: str) -> Any:
    return next((output["data"] for output in document.get("outputs", ()) if output["name"] == name), None)


def backend_of(live: Live) -> IsolatedBackend:
    instance: Any = live.server.engine.model("m").instances[0]
    backend = instance.placement.backend
    assert isinstance(backend, IsolatedBackend)
    return backend


def ready(live: Live) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=PATIENCE_S)
    connection.request("GET", "/v2/models/m/ready")
    status = connection.getresponse().status
    connection.close()
    return status == 200


@pytest.mark.skipif(bool(os.environ.get("PENSTOCK_TEST_FRONTS")), reason="reaches into the engine's process")
def test_every_request_gets_the_right_answer_while_the_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    contract_model("rows", tmp_path / "m" / "1" / "model.onnx")
    with nothing_left():
        with live_server(tmp_path, loaders={"onnxruntime": onnx_loader()}) as live:
            callers = Callers(live.http_port)
            pids = []
            for _ in range(3):
                backend, served = backend_of(live), callers.right
                pids.append(backend.pid)
                os.kill(backend.pid, signal.SIGKILL)
                until(lambda old=backend: backend_of(live) is not old)  # type: ignore[misc]
                until(lambda most=served + 100: callers.right > most)  # type: ignore[misc]
                assert ready(live)
            callers.end()

            assert callers.request_log.failures() == []
            assert callers.request_log.pending_count == callers.request_log.ended_twice == 0
            assert callers.right > 300
            pids.append(backend_of(live).pid)
        assert len(set(pids)) == 4
        assert not any(map(lives, pids))


@pytest.mark.skipif(bool(os.environ.get("PENSTOCK_TEST_FRONTS")), reason="reaches into the engine's process")
def test_instances_are_added_and_removed_in_one_worker(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    contract_model("rows", folder / "1" / "model.onnx")
    config = folder / "config.pbtxt"
    config.write_text("instance_group [ { count: 1 kind: KIND_CPU } ]")
    polled = live_server(tmp_path, loaders={"onnxruntime": onnx_loader()}, model_control_mode="poll")
    with nothing_left(), polled as live:
        callers, pid = Callers(live.http_port), backend_of(live).pid
        for count in (3, 1, 4, 2):
            config.write_text(f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]")
            live.call(look_twice(live.server.control))
            served = callers.right
            until(lambda most=served + 50: callers.right > most)  # type: ignore[misc]
            until(lambda expected=count: len(live.server.engine.model("m").instances) == expected)  # type: ignore[misc]
        callers.end()

        assert callers.request_log.failures() == []
        assert callers.request_log.pending_count == callers.request_log.ended_twice == 0
        assert backend_of(live).pid == pid
