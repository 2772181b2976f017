"""Remote repositories, served by a live server and queried with tritonclient."""

from __future__ import annotations

import functools
import http.server
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from penstock.server import cli
from penstock.server.listening.sockets import StartError
from tests.backends.onnx_models import FLOAT, floats, node, save, value
from tests.forking import Forker
from tests.live import Live, live_server
from tests.server.repository.folders import look_twice


def model(folder: Path, offset: float) -> bytes:
    """A model whose `y` is `x` plus `offset`."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y = (value(name, FLOAT, ["N", 4]) for name in ("x", "y"))
    return save(folder / "made.onnx", [node("Add", ["x", "n"], ["y"])], [x], [y], {"n": floats([offset])}).read_bytes()


class Bucket:
    """A store in memory, whose models a server in this process serves."""

    def __init__(self, folder: Path) -> None:
        self.url = f"memory://{uuid.uuid4().hex}/models"
        self._store = fsspec.filesystem("memory")
        self._folder = folder

    def put(self, name: str, version: int, offset: float | None = None) -> None:
        content = model(self._folder, version if offset is None else offset)
        self._store.pipe_file(f"{self.url}/{name}/{version}/model.onnx", content)

    def say(self, name: str, config: str) -> None:
        self._store.pipe_file(f"{self.url}/{name}/config.pbtxt", config.encode())

    def remove(self, place: str = "") -> None:
        self._store.rm(f"{self.url}/{place}".rstrip("/"), recursive=True)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    new_bucket = Bucket(tmp_path / "made")
    new_bucket.put("a", 1)
    yield new_bucket
    new_bucket.remove()


@contextmanager
def serving(*repositories: str, **settings: Any) -> Iterator[tuple[Live, Any]]:
    with live_server(model_repository=repositories, **settings) as live:
        client = httpclient.InferenceServerClient(live.address)
        try:
            yield live, client
        finally:
            client.close()


def answer(client: Any, name: str) -> tuple[str, float]:
    """The version that answers, and what it adds."""
    x = httpclient.InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.zeros((1, 4), np.float32))
    result = client.infer(name, [x])
    return result.get_response()["model_version"], float(result.as_numpy("y")[0, 0])


def states(client: Any) -> list[tuple[str, str, str]]:
    rows = client.get_model_repository_index()
    return [(row["name"], row.get("version", ""), row.get("state", "")) for row in rows]


def test_a_remote_and_a_local_repository_are_served_together(bucket: Bucket, tmp_path: Path) -> None:
    local = tmp_path / "local" / "b" / "1"
    (local / "x").mkdir(parents=True)
    (local / "model.onnx").write_bytes(model(tmp_path, 7))
    with serving(str(tmp_path / "local"), bucket.url) as (_, client):
        assert client.is_server_ready()
        assert answer(client, "a") == ("1", 1)
        assert answer(client, "b") == ("1", 7)


def test_polling_follows_the_changes_in_the_store(bucket: Bucket) -> None:
    with serving(bucket.url, model_control_mode="poll", repository_poll_secs=3600) as (live, client):
        assert answer(client, "a") == ("1", 1)

        bucket.put("a", 2)
        bucket.put("b", 1)
        live.call(look_twice(live.server.control))
        assert (answer(client, "a"), answer(client, "b")) == (("2", 2), ("1", 1))

        bucket.put("b", 1, 5)
        live.call(look_twice(live.server.control))
        assert answer(client, "b") == ("1", 5)

        bucket.remove("a")
        live.call(look_twice(live.server.control))
        assert states(client) == [("b", "1", "READY")]
        with pytest.raises(InferenceServerException, match="has no available versions"):
            answer(client, "a")


def test_a_load_serves_the_current_versions_in_the_store(bucket: Bucket) -> None:
    bucket.put("b", 1)
    with serving(bucket.url, model_control_mode="explicit", load_model=("a",)) as (_, client):
        assert states(client) == [("a", "1", "READY"), ("b", "", "")]

        bucket.say("a", "version_policy { all {} }")
        bucket.put("a", 2)
        assert answer(client, "a") == ("1", 1)
        client.load_model("a")
        client.load_model("b")
        assert states(client) == [("a", "1", "READY"), ("a", "2", "READY"), ("b", "1", "READY")]

        bucket.remove("a/1")
        client.load_model("a")
        assert ("a", "1", "UNAVAILABLE") in states(client)
        assert answer(client, "a") == ("2", 2)

        bucket.remove("b")
        with pytest.raises(InferenceServerException, match="failed to load 'b', failed to poll from model repository"):
            client.load_model("b")
        client.unload_model("b")
        assert [row for row in states(client) if row[2] == "READY"] == [("a", "2", "READY")]


def test_the_local_copy_is_deleted_when_the_server_ends(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with serving(bucket.url):
        (home,) = (tmp_path / "temporary").iterdir()
        assert home.stat().st_mode & 0o777 == 0o700
        assert (home / "models" / "a" / "1" / "model.onnx").is_file()
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nowhere/at/all", "memory://nowhere/at/all: no such file or folder"),
        ("nope://bob:hunter2@host/x", "nope://host/x: ValueError: Protocol not known: nope"),
    ],
)
def test_an_unreachable_store_is_a_start_error_without_the_password(url: str, message: str) -> None:
    with pytest.raises(StartError) as caught, serving(url):
        pass
    assert str(caught.value) == message


@pytest.mark.slow
def test_serve_reports_an_unreachable_store_without_the_password(forker: Forker) -> None:
    words = ["serve", "https://bob:hunter2@127.0.0.1:9/models", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    ended = forker.run([sys.executable, "-m", "penstock.server.cli", *words], text=True)

    assert ended.returncode == 1
    assert "https://127.0.0.1:9/models: " in ended.stdout + ended.stderr
    assert "hunter2" not in ended.stdout + ended.stderr


def test_check_reads_remote_repositories(bucket: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", bucket.url]) == 0
    text = capsys.readouterr().out
    assert f"a version 1, onnxruntime, {bucket.url}/a/1/model.onnx" in text

    bucket.say("a", "nonsense: 1")
    assert cli.main(["check", bucket.url]) == 1
    assert f"{bucket.url}/a/config.pbtxt:1: " in capsys.readouterr().out


def test_check_of_an_unreachable_store_exits_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "memory://nowhere/at/all"]) == 1
    assert capsys.readouterr().err == "penstock: memory://nowhere/at/all: no such file or folder\n"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.mark.slow
def test_a_folder_listed_by_a_web_server_is_served_as_a_repository(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    root = tmp_path / "www" / "models"
    file = root / "a" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(model(tmp_path, 1))
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=tmp_path / "www"))
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{web.server_port}/models"
        with serving(url, model_control_mode="poll", repository_poll_secs=3600) as (live, client):
            assert answer(client, "a") == ("1", 1)
            file.write_bytes(model(tmp_path, 3))
            os.utime(file, (1e9, 1e9))  # a web server reports modification times in seconds
            live.call(look_twice(live.server.control))
            assert answer(client, "a") == ("1", 3)
    finally:
        web.shutdown()
        thread.join(10)
        web.server_close()
