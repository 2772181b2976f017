"""Model control on a live server: loading and unloading under load, and the requests of clients."""

from __future__ import annotations

import asyncio
import gc
import gzip
import http.client
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaioclient
import tritonclient.http as httpclient
import tritonclient.http.aio as aioclient
from tritonclient.utils import InferenceServerException

from penstock.server.repository.control import ModelControl
from penstock.server.repository.repository import Repository
from tests.backends.onnx_models import FLOAT, floats, node, save, value
from tests.live import Live, live_server
from tests.server.repository.folders import look_twice

SWAPS = int(os.environ.get("PENSTOCK_SWAPS", "12"))
"""How often a model is swapped, and another loaded and unloaded, under load."""
NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"


def write(folder: Path, version: int, offset: float | None = None) -> Path:
    """Write a version whose `y` is `x` plus its own number, or `offset`. It appears at once and whole.

    Even versions have one more output, before `y`.
    """
    making = folder.parent / f".{folder.name}-{version}"
    making.mkdir(parents=True)
    outputs = ["z", "y"] if version % 2 == 0 else ["y"]
    save(
        making / "model.onnx",
        [node("Add", ["x", "n"], ["y"]), node("Mul", ["x", "n"], ["z"])],
        [value("x", FLOAT, ["N", 4])],
        [value(name, FLOAT, ["N", 4]) for name in outputs],
        {"n": floats([version if offset is None else offset])},
    )
    folder.mkdir(exist_ok=True)
    place = folder / str(version)
    shutil.rmtree(place, ignore_errors=True)
    making.rename(place)
    return place / "model.onnx"


def body_of(rows: int = 1) -> bytes:
    x = {"name": "x", "shape": [rows, 4], "datatype": "FP32", "data": [0.5] * (4 * rows)}
    return json.dumps({"inputs": [x]}).encode()


class Caller:
    """One connection, kept alive."""

    def __init__(self, live: Live) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=30)

    def post(self, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        self._connection.request("POST", path, body, named)
        answer = self._connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None

    def get(self, path: str) -> tuple[int, Any]:
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None

    def control(self, name: str, action: str, **parameters: Any) -> tuple[int, Any]:
        body = json.dumps({"parameters": parameters}).encode() if parameters else b""
        return self.post(f"/v2/repository/models/{name}/{action}", body)

    def index(self) -> dict[str, list[tuple[str, str]]]:
        rows: dict[str, list[tuple[str, str]]] = {}
        for row in self.post("/v2/repository/index")[1]:
            rows.setdefault(row["name"], []).append((row.get("version", ""), row.get("state", "")))
        return rows

    def answer_of(self, name: str) -> tuple[str, float]:
        """The version that answered, and its offset."""
        status, document = self.post(f"/v2/models/{name}/infer", body_of())
        assert status == 200, document
        outputs = {output["name"]: output["data"] for output in document["outputs"]}
        return document["model_version"], outputs["y"][0] - 0.5

    def close(self) -> None:
        self._connection.close()


@contextmanager
def calling(live: Live) -> Iterator[Caller]:
    caller = Caller(live)
    try:
        yield caller
    finally:
        caller.close()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    for name in ("a", "b"):
        write(root / name, 1)
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "1" / "model.onnx").write_bytes(b"nonsense")
    (root / "wrong").mkdir()
    (root / "wrong" / "config.pbtxt").write_text("nonsense: 1\n")
    with live_server(root, model_control_mode="explicit", load_model=("a",)) as server:
        yield server


@pytest.fixture
def caller(live: Live) -> Iterator[Caller]:
    with calling(live) as new_caller:
        yield new_caller


# -- swapping under load ---------------------------------------------------------------------------------------


HOOKS = """
def pre_inference(sample, metadata):
    return sample

def post_inference(prediction, metadata):
    return {"y": prediction[-1]}
"""


def ask_http(caller: Caller, name: str, body: bytes, **headers: str) -> tuple[str, set[float]]:
    status, document = caller.post(f"/v2/models/{name}/infer", body, **headers)
    if status != 200:
        raise AssertionError((status, document))
    outputs = {output["name"]: output["data"] for output in document["outputs"]}
    return document["model_version"], {each - 0.5 for each in outputs["y"]}


def ask_grpc(client: Any, name: str) -> tuple[str, set[float]]:
    x = grpcclient.InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.full((1, 4), 0.5, np.float32))
    result = client.infer(name, [x])
    return result.get_response().model_version, {float(each) - 0.5 for each in result.as_numpy("y")[0]}


class Load:
    """Clients that send requests to a model while the block lasts, and the wrong answers they got.

    An answer is right if it matches the version that it names.
    """

    def __init__(self, live: Live, name: str) -> None:
        self._callers = [Caller(live) for _ in range(4)]
        self._client = grpcclient.InferenceServerClient(live.grpc_address)
        one, two, three, four = self._callers
        plain, packed = body_of(), gzip.compress(body_of(3))
        self._asks: list[Callable[[], tuple[str, set[float]]]] = [
            lambda: ask_http(one, name, plain),
            lambda: ask_http(two, name, body_of(2)),
            # these two are not decoded in the turn of the loop in which they arrive
            lambda: ask_http(three, name, packed, content_encoding="gzip"),
            lambda: ask_http(four, name, plain.ljust(300_000)),
            lambda: ask_grpc(self._client, name),
        ]
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(len(self._asks))]
        self.failures: list[Any] = []
        self.counts = [0] * len(self._asks)
        self.versions: set[str] = set()

    def _run(self, number: int) -> None:
        while not self._ending.is_set():
            try:
                version, offsets = self._asks[number]()
            except Exception as error:  # noqa: BLE001 - told by the test's own thread
                self.failures.append(error)
                return
            if offsets == {float(version)}:
                self.versions.add(version)
            else:
                self.failures.append((version, offsets))
            self.counts[number] += 1

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        for caller in self._callers:
            caller.close()
        self._client.close()


def resources_of(process: psutil.Process) -> tuple[list[str], int, float]:
    """The models' threads, open files, and megabytes. Other threads belong to the event loop, which limits them."""
    gc.collect()
    named = [thread.name for thread in threading.enumerate() if "/" in thread.name]
    return named, process.num_fds(), process.memory_info().rss / 1e6


class TestSwapsUnderLoad:
    def test_swaps_loads_and_unloads_fail_no_request_and_leak_nothing(self, tmp_path: Path) -> None:
        stays, comes = tmp_path / "stays", tmp_path / "comes"
        write(stays, 1)
        write(comes, 1)
        process = psutil.Process()
        with (
            live_server(tmp_path, model_control_mode="explicit", load_model=("stays",)) as live,
            calling(live) as caller,
            Load(live, "stays") as load,
        ):
            before = None
            for version in range(2, SWAPS + 6):
                write(stays, version)
                assert caller.control("stays", "load") == (200, None)
                shutil.rmtree(stays / str(version - 1))
                assert caller.control("comes", "load") == (200, None)
                assert caller.answer_of("comes") == ("1", 1.0)
                assert caller.control("comes", "unload") == (200, None)
                assert caller.post("/v2/models/comes/infer", body_of()) == (
                    404, {"error": "Request for unknown model: 'comes' has no available versions"},
                )  # fmt: skip
                if version == 5:
                    before = resources_of(process)
            after = resources_of(process)
            index = caller.index()

        assert load.failures == []
        assert min(load.counts) > 0
        assert len(load.versions) > SWAPS / 2
        assert index["stays"][-1] == (str(SWAPS + 5), "READY")
        assert {state for _, state in index["stays"][:-1]} == {"UNAVAILABLE"}
        assert before is not None
        assert [name.partition("/")[0] for name in before[0]] == ["stays"]
        assert after[0] == [f"stays/{SWAPS + 5}#0"]
        assert after[1] == before[1]
        assert after[2] - before[2] < 16

    def test_swaps_of_a_model_with_hooks_fail_no_request_and_end_the_old_hook_threads(self, tmp_path: Path) -> None:
        write(tmp_path / "hooked", 1)
        (tmp_path / "hooked" / "hooks.py").write_text(HOOKS)
        (tmp_path / "hooked" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
        hooks: list[threading.Thread] = []
        with (
            live_server(tmp_path, model_control_mode="explicit", load_model=("*",)) as live,
            calling(live) as caller,
            Load(live, "hooked") as load,
        ):
            for version in range(2, 10):
                hooks += [thread for thread in threading.enumerate() if thread.name.startswith("hooks-hooked/")]
                write(tmp_path / "hooked", version)
                assert caller.control("hooked", "load") == (200, None)

        assert load.failures == []
        assert min(load.counts) > 0
        for thread in hooks:
            thread.join(10)
            assert not thread.is_alive()


# -- requests of clients ---------------------------------------------------------------------------------------


def refused(call: Any, *args: Any, **named: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **named)
    return caught.value.status(), caught.value.message()


def offset_of(client: Any, name: str) -> float:
    x = httpclient.InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.zeros((1, 4), np.float32))
    return float(client.infer(name, [x]).as_numpy("y")[0, 0])


def states(index: Any, name: str) -> list[tuple[Any, Any, Any]]:
    return [(row.get("version"), row.get("state"), row.get("reason")) for row in index if row["name"] == name]


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    new_client = httpclient.InferenceServerClient(live.address)
    yield new_client
    new_client.close()


class TestTritonclient:
    def test_a_model_is_loaded_listed_served_and_unloaded(self, client: Any) -> None:
        assert states(client.get_model_repository_index(), "b") == [(None, None, None)]
        assert not client.is_model_ready("b")
        client.load_model("b")
        assert states(client.get_model_repository_index(), "b") == [("1", "READY", None)]
        assert client.is_model_ready("b")
        assert offset_of(client, "b") == 1
        client.unload_model("b", unload_dependents=True)
        assert states(client.get_model_repository_index(), "b") == [("1", "UNAVAILABLE", "unloaded")]
        assert not client.is_model_ready("b")
        assert client.is_server_ready()
        assert refused(offset_of, client, "b") == ("404", "Request for unknown model: 'b' has no available versions")

    def test_a_configuration_in_a_load_request_applies_only_to_that_load(self, client: Any) -> None:
        before = client.get_model_config("a")["max_batch_size"]
        client.load_model("a", config=json.dumps({"max_batch_size": 3, "parameters": {}}))
        during = client.get_model_config("a")["max_batch_size"]
        client.load_model("a")

        assert (before, during, client.get_model_config("a")["max_batch_size"]) == (64, 3, 64)

    def test_files_in_a_load_request_create_a_model(self, client: Any, tmp_path: Path) -> None:
        content = write(tmp_path / "made", 7).read_bytes()
        client.load_model("fresh", config=json.dumps({"max_batch_size": 2}), files={"file:7/model.onnx": content})

        assert offset_of(client, "fresh") == 7
        assert client.get_model_metadata("fresh")["versions"] == ["7"]
        assert client.get_model_config("fresh")["max_batch_size"] == 2
        client.unload_model("fresh")
        assert refused(client.load_model, "fresh") == (
            "500", "failed to load 'fresh', failed to poll from model repository",
        )  # fmt: skip

    def test_files_in_a_load_request_replace_a_model_on_disk_until_its_next_load(
        self, client: Any, tmp_path: Path
    ) -> None:
        content = write(tmp_path / "made", 9).read_bytes()
        client.load_model("a", config="{}", files={"file:1/model.onnx": content})
        brought = offset_of(client, "a")
        client.load_model("a")

        assert (brought, offset_of(client, "a")) == (9, 1)

    def test_the_asyncio_client_loads_lists_and_unloads_a_model(self, live: Live, tmp_path: Path) -> None:
        content = write(tmp_path / "made", 4).read_bytes()

        async def main() -> list[Any]:
            async with aioclient.InferenceServerClient(live.address) as client:
                await client.load_model("b", config="{}", files={"file:1/model.onnx": content})
                ready = await client.is_model_ready("b")
                index = await client.get_model_repository_index()
                await client.unload_model("b")
                return [ready, states(index, "b"), await client.is_model_ready("b")]

        assert asyncio.run(main()) == [True, [("1", "READY", None)], False]


class TestTritonclientGrpc:
    def test_a_model_is_loaded_listed_served_and_unloaded(self, live: Live, tmp_path: Path) -> None:
        content = write(tmp_path / "made", 6).read_bytes()
        client: Any = grpcclient.InferenceServerClient(live.grpc_address)
        try:
            client.load_model("g", config="{}", files={"file:6/model.onnx": content})
            assert client.is_model_ready("g")
            index = client.get_model_repository_index(as_json=True)["models"]
            assert states(index, "g") == [("6", "READY", None)]
            assert ask_grpc(client, "g") == ("6", {6.0})
            client.unload_model("g", unload_dependents=True)
            assert not client.is_model_ready("g")
            index = client.get_model_repository_index(as_json=True)["models"]
            assert states(index, "g") == [("6", "UNAVAILABLE", "unloaded")]
            text = "Request for unknown model: 'g' has no available versions"
            assert refused(ask_grpc, client, "g") == ("StatusCode.NOT_FOUND", text)
            text = "failed to load 'g', failed to poll from model repository"
            assert refused(client.load_model, "g") == ("StatusCode.INTERNAL", text)
            assert refused(client.load_model, "..")[0] == "StatusCode.INVALID_ARGUMENT"
        finally:
            client.close()

    def test_the_asyncio_client_loads_and_unloads_a_model(self, live: Live) -> None:
        async def main() -> list[Any]:
            async with grpcaioclient.InferenceServerClient(live.grpc_address) as client:
                await client.load_model("b", config=json.dumps({"max_batch_size": 2}))
                config = await client.get_model_config("b", as_json=True)
                await client.unload_model("b")
                return [config["config"]["max_batch_size"], await client.is_model_ready("b")]

        assert asyncio.run(main()) == [2, False]


class TestRejections:
    def test_an_unknown_model_cannot_be_loaded_but_may_be_unloaded(self, client: Any) -> None:
        text = "failed to load 'unknown_model', failed to poll from model repository"

        assert refused(client.load_model, "unknown_model") == ("500", text)
        client.unload_model("unknown_model")

    def test_loading_a_model_with_an_invalid_configuration_reports_file_and_line(self, caller: Caller) -> None:
        status, answer = caller.control("wrong", "load")

        assert status == 500
        assert answer["error"].startswith(
            "failed to load 'wrong', failed to poll from model repository: config.pbtxt:1: "
        )
        assert caller.control("wrong", "unload") == (200, None)

    def test_a_model_that_does_not_load_is_unavailable_and_makes_the_server_not_ready(self, caller: Caller) -> None:
        status, answer = caller.control("broken", "load")

        assert status == 400
        assert answer["error"].startswith("load failed for model 'broken': version 1 is at UNAVAILABLE state: onnx")
        assert caller.index()["broken"] == [("1", "UNAVAILABLE")]
        assert caller.get("/v2/health/ready") == (400, None)
        assert caller.control("broken", "unload") == (200, None)
        assert caller.get("/v2/health/ready") == (200, None)

    @pytest.mark.parametrize(
        ("parameters", "refused"),
        [
            ({"config": "nonsense"}, 400),
            ({"config": '{"max_batch_size": "x"}'}, 400),
            ({"config": '{"nonsense": 1}'}, 400),
            ({"config": "{}", "file:1/model.onnx": ""}, 400),
            ({"config": "{}", "file:1/model.onnx": "bm9uc2Vuc2U="}, 400),
            ({"config": '{"name": "b"}'}, 500),
            ({"config": '{"backend": "caffe"}'}, 500),
        ],
    )
    def test_a_failed_load_leaves_the_loaded_version_serving(
        self, caller: Caller, parameters: dict[str, str], refused: int
    ) -> None:
        status, answer = caller.control("a", "load", **parameters)

        assert status == refused
        assert "/penstock-" not in answer["error"]
        assert caller.answer_of("a") == ("1", 1.0)
        assert caller.index()["a"] == [("1", "READY")]
        assert caller.get("/v2/health/ready") == (200, None)

    @pytest.mark.parametrize("name", ["..", ".", "%20%20", "%0A%09", ".hidden", "a%5Cb", "x" * 256, "%00"])
    @pytest.mark.parametrize("action", ["load", "unload"])
    def test_a_model_name_that_is_no_valid_folder_name_is_a_bad_request(
        self, caller: Caller, name: str, action: str
    ) -> None:
        status, answer = caller.control(name, action)

        assert status == 400
        assert answer["error"].startswith("invalid model name")

    @pytest.mark.parametrize("name", ["a%2F..", "..%2F..%2Fetc", "", "a/b"])
    def test_a_model_name_of_several_path_segments_is_not_found(self, caller: Caller, name: str) -> None:
        assert caller.control(name, "load")[0] == 404

    def test_a_load_request_over_the_input_size_limit_is_rejected(self, tmp_path: Path) -> None:
        write(tmp_path / "a", 1)
        with live_server(tmp_path, model_control_mode="explicit", http_max_input_size=4096) as live:
            with calling(live) as caller:
                status, _ = caller.control("a", "load", **{"config": "{}", "file:1/model.onnx": "A" * 8192})

            assert status == 400


# -- changed instance groups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["auto", "thread"])
def test_changing_instance_groups_keeps_the_model_loaded_and_loses_no_request(tmp_path: Path, executor: str) -> None:
    write(tmp_path / "a", 1)
    (tmp_path / "a" / "penstock.toml").write_text(f'[batching]\nexecutor = "{executor}"\n')

    def configure(count: int) -> None:
        (tmp_path / "a" / "config.pbtxt").write_text(f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]")

    configure(1)
    with live_server(tmp_path, model_control_mode="explicit", load_model=("a",)) as live, calling(live) as caller:
        model = live.server.engine.model("a")
        stop, wrong = threading.Event(), []

        def ask_repeatedly() -> None:
            with calling(live) as other:
                while not stop.is_set():
                    if other.answer_of("a") != ("1", 1.0):
                        wrong.append("wrong")

        asking = [threading.Thread(target=ask_repeatedly) for _ in range(4)]
        for thread in asking:
            thread.start()
        for count in (3, 2, 5, 1, 4):
            configure(count)
            assert caller.control("a", "load")[0] == 200
            assert caller.get("/v2/models/a/config")[1]["instance_group"][0]["count"] == count
        stop.set()
        for thread in asking:
            thread.join()

        assert wrong == []
        assert live.server.engine.model("a") is model
        assert caller.get("/v2/models/a/stats")[1]["model_stats"][0]["inference_stats"]["success"]["count"] > 0


# -- the modes -------------------------------------------------------------------------------------------------


class TestModes:
    @pytest.mark.parametrize("mode", ["none", "poll"])
    def test_models_can_be_loaded_by_name_only_in_explicit_mode(self, tmp_path: Path, mode: str) -> None:
        write(tmp_path / "a", 1)
        with live_server(tmp_path, model_control_mode=mode) as live, calling(live) as caller:
            assert caller.answer_of("a") == ("1", 1.0)
            for action in ("load", "unload"):
                assert caller.control("a", action) == (503, {"error": NOT_ALLOWED})

    def test_polling_detects_added_changed_and_removed_models(self, tmp_path: Path) -> None:
        write(tmp_path / "a", 1)
        write(tmp_path / "b", 1)
        with (
            live_server(tmp_path, model_control_mode="poll", repository_poll_secs=3600) as live,
            calling(live) as caller,
        ):
            write(tmp_path / "a", 2)
            write(tmp_path / "c", 1)
            shutil.rmtree(tmp_path / "b")
            live.call(look_twice(live.server.control))

            assert caller.answer_of("a") == ("2", 2.0)
            assert caller.answer_of("c") == ("1", 1.0)
            assert caller.index() == {"a": [("1", "UNAVAILABLE"), ("2", "READY")], "c": [("1", "READY")]}

    def test_the_repository_is_polled_periodically_in_poll_mode(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked = threading.Semaphore(0)
        look = Repository.fingerprints

        def counted(repository: Repository) -> dict[str, bytes]:
            looked.release()
            return look(repository)

        monkeypatch.setattr(Repository, "fingerprints", counted)
        write(tmp_path / "a", 1)
        with live_server(tmp_path, model_control_mode="poll", repository_poll_secs=0.05) as live:
            write(tmp_path / "b", 1)
            while looked.acquire(blocking=False):
                pass
            # at the third poll, what the first two have seen has been loaded
            for _ in range(3):
                assert looked.acquire(timeout=10)
            with calling(live) as caller:
                assert caller.answer_of("b") == ("1", 1.0)

    def test_a_polling_interval_of_zero_disables_polling(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        polls: list[object] = []
        monkeypatch.setattr(ModelControl, "_poll_forever", polls.append)
        write(tmp_path / "a", 1)
        with (
            live_server(tmp_path, model_control_mode="poll", repository_poll_secs=0.0) as live,
            calling(live) as caller,
        ):
            assert caller.answer_of("a") == ("1", 1.0)
            assert polls == []

    def test_load_model_with_an_asterisk_loads_all_models_at_start(self, tmp_path: Path) -> None:
        write(tmp_path / "a", 1)
        write(tmp_path / "b", 1)
        with live_server(tmp_path, model_control_mode="explicit", load_model=("*",)) as live, calling(live) as caller:
            assert caller.index() == {"a": [("1", "READY")], "b": [("1", "READY")]}

    def test_the_named_configuration_replaces_the_default_where_it_exists(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            write(tmp_path / name, 1)
            (tmp_path / name / "config.pbtxt").write_text("max_batch_size: 5\n")
        (tmp_path / "a" / "configs").mkdir()
        (tmp_path / "a" / "configs" / "large.pbtxt").write_text("max_batch_size: 50\n")
        with live_server(tmp_path, model_config_name="large") as live, calling(live) as caller:
            sizes = [caller.get(f"/v2/models/{name}/config")[1]["max_batch_size"] for name in ("a", "b")]

        assert sizes == [50, 5]
