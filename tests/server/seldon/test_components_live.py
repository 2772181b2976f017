"""A component's folder on a live server: changes, loading, unloading, and components that fail to load."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.server.listening.sockets import StartError
from penstock.server.serve import Server
from tests.live import Live, live_server, settings_for
from tests.server.repository.folders import look_twice

pytestmark = pytest.mark.slow

PROCESS = "import os\nclass Adds:\n    def predict(self, X, names):\n        return X * 0 + os.getpid()\n"
CLASS = "class Adds:\n    def predict(self, X, names):\n        return X + {0}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one component."""
    (tmp_path / "Adds.py").write_text(CLASS.format(1))
    return tmp_path


def post(live: Live, path: str, body: Any) -> tuple[int, Any]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{live.url}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text, status = answer.read(), answer.status
    except urllib.error.HTTPError as error:
        text, status = error.read(), error.code
    return status, json.loads(text) if text else None


def sums(live: Live) -> Any:
    status, answer = post(live, "/predict", {"data": {"ndarray": [[1, 2]]}})
    return answer["data"]["ndarray"] if status == 200 else status


def metrics_of(live: Live, path: str = "/metrics") -> tuple[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{live.metrics_port}{path}", timeout=30) as answer:
        return answer.headers["content-type"], answer.read().decode()


def test_a_component_is_served_by_its_folder_or_its_file(folder: Path) -> None:
    for path in (folder, folder / "Adds.py"):
        with live_server(path, dialect="seldon") as live:
            assert sums(live) == [[2, 3]]


def test_a_changed_file_is_reloaded_in_poll_mode(folder: Path) -> None:
    with live_server(folder, dialect="seldon", model_control_mode="poll", repository_poll_secs=86400.0) as live:
        assert sums(live) == [[2, 3]]

        (folder / "Adds.py").write_text(CLASS.format(10))
        live.call(look_twice(live.server.control))

        assert sums(live) == [[11, 12]]


def test_a_file_that_no_longer_loads_leaves_the_old_component_serving(folder: Path) -> None:
    with live_server(folder, dialect="seldon", model_control_mode="poll", repository_poll_secs=86400.0) as live:
        (folder / "Adds.py").write_text("class Adds:\n    def __init__(self):\n        raise ValueError\n")
        live.call(look_twice(live.server.control))

        assert sums(live) == [[2, 3]]


def test_a_component_is_loaded_and_unloaded_by_the_name_of_its_class(folder: Path) -> None:
    with live_server(folder, dialect="seldon", model_control_mode="explicit") as live:
        assert sums(live) != [[2, 3]]
        assert post(live, "/v2/repository/models/Adds/load", {})[0] == 200
        assert sums(live) == [[2, 3]]
        assert post(live, "/v2/repository/models/Adds/unload", {})[0] == 200
        assert sums(live) != [[2, 3]]
        assert "'Other'" in post(live, "/v2/repository/models/Other/load", {})[1]["error"]


def test_the_metrics_page_has_the_content_type_and_path_of_the_original(folder: Path) -> None:
    with live_server(folder, dialect="seldon", metrics_path="/prometheus") as live:
        content_type, page = metrics_of(live, "/prometheus")

    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert 'nv_inference_count{model="Adds",version="1"} 0' in page


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nowhere_to_be_found\n", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("class Subtracts: ...\n", "AttributeError: module 'Adds' has no attribute 'Adds'"),
        ("class Adds:\n    def __init__(self):\n        raise ValueError('no model')\n", "ValueError: no model"),
        ("raise SystemExit(3)\n", ""),
    ],
    ids=["missing module", "missing class", "failing constructor", "exit"],
)
def test_a_component_that_fails_to_load_stops_the_server_from_starting(folder: Path, source: str, message: str) -> None:
    (folder / "Adds.py").write_text(source)

    with pytest.raises(StartError) as ended, live_server(folder, dialect="seldon", seldon_component="Adds"):
        pass

    assert str(ended.value).startswith("no component can be served:\nmodel 'Adds' version 1: component 'Adds' ")
    assert message in str(ended.value)


@pytest.mark.parametrize("batching", [False, True], ids=["alone", "batching"])
def test_a_worker_is_replaced_after_max_requests_without_losing_a_call(folder: Path, batching: bool) -> None:
    (folder / "Adds.py").write_text(PROCESS)

    with (
        live_server(folder, dialect="seldon", seldon_max_requests=20, seldon_batching=batching) as live,
        ThreadPoolExecutor(8) as pool,
    ):
        pids = [answer[0][0] for answer in pool.map(lambda _: sums(live), range(60))]

    assert len(set(pids)) > 1
    if not batching:  # calls in flight count towards the limit, and a batch is not split
        assert max(pids.count(pid) for pid in pids) <= 20 + 2 * 8


def test_ports_open_only_after_the_component_has_loaded(folder: Path) -> None:
    pipe, begun = folder / "pipe", folder / "begun"
    os.mkfifo(pipe)
    # the constructor waits until the other end of the pipe is opened
    waits = "open('begun', 'w').close(); open('pipe').close()"
    (folder / "Adds.py").write_text(f"class Adds:\n    def __init__(self):\n        {waits}\n")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        place = held.getsockname()

    async def main() -> None:
        settings = settings_for(folder, dialect="seldon", http_port=place[1])
        server = Server(settings)
        await server.open()
        loading = asyncio.ensure_future(server.load())
        try:
            while not begun.exists():
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection(*place)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*place)
            assert (server.urls, server.status_line) == (None, "not ready, serving nothing; unavailable: Adds/1")
            opened = await asyncio.get_running_loop().run_in_executor(None, pipe.open, "w")
            opened.close()
            await loading
            _, writer = await asyncio.open_connection(*place)
            writer.close()
            assert server.urls is not None
            assert server.urls["HTTP"] == f"http://127.0.0.1:{place[1]}"
        finally:
            await server.close()

    asyncio.run(main())


def test_a_port_in_use_stops_the_server_from_starting(folder: Path) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        with (
            pytest.raises(StartError, match=f"failed to start HTTP service: .*:{port}' already in use"),
            live_server(folder, dialect="seldon", http_port=port),
        ):
            pass


def test_invalid_parameters_stop_the_server_from_starting(folder: Path) -> None:
    parameters = '[{"name":"n","value":"3","type":"LIST"}]'

    with (
        pytest.raises(StartError, match="Bad model parameter type: LIST valid are INT, FLOAT, DOUBLE, STRING, BOOL"),
        live_server(folder, dialect="seldon", seldon_parameters=parameters),
    ):
        pass


def test_the_command_exits_when_its_component_fails_to_load(folder: Path) -> None:
    (folder / "Adds.py").write_text("raise ValueError('no model')\n")
    words = ["seldon-core-microservice", "Adds", "--service-type", "MODEL"]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--http-address", "127.0.0.1"]
    command = [sys.executable, "-m", "penstock.server.cli", *words, *ports, "--grpc-address", "127.0.0.1"]

    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 1
    assert "component 'Adds' cannot be opened: ValueError: no model" in ended.stderr


@pytest.mark.usefixtures("started_workers")
def test_processes_started_by_user_code_end_when_the_server_is_forced_to_stop(tmp_path: Path) -> None:
    (tmp_path / "Forks.py").write_text(
        "import os, signal\nclass Forks:\n    def __init__(self):\n        if os.path.exists('held'):\n"
        "            held = open('held', 'w')\n            if os.fork() == 0:\n                signal.pause()\n"
    )
    held = tmp_path / "held"
    os.mkfifo(held)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(held.read_bytes)  # returns once no process has the pipe open
        with live_server(tmp_path, dialect="seldon") as live:
            held.unlink()  # the next worker starts nothing

            async def force() -> None:
                live.server.force()

            live.call(force())
            assert ended.result(30) == b""
