"""SavedModels served to tritonclient over HTTP and gRPC, from separate processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from penstock.backends.datatypes import DATATYPES
from penstock.server.cli import main
from tests.clients.tensorflow_models import BROKEN, has_tensorflow, workers, write
from tests.live import Live, live_server
from tests.savedmodels import install
from tests.server.python_models.repositories import left_behind

pytestmark = pytest.mark.slow

Ask = Callable[..., Any]
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, savedmodels: Path) -> Path:
    return write(tmp_path_factory.mktemp("models"), savedmodels)


@pytest.fixture(scope="module")
def live(root: Path) -> Iterator[Live]:
    before = left_behind()
    with live_server(root, model_control_mode="explicit", load_model=("*",)) as server:
        yield server
    assert left_behind() == before


@pytest.fixture(params=[triton_http, triton_grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def client(live: Live, triton: Any) -> Iterator[Any]:
    with triton.InferenceServerClient(address(live, triton)) as new_client:
        yield new_client


@pytest.fixture
def ask(client: Any, triton: Any) -> Ask:
    """Infer once: `ask(model, x=array, **terms)`."""
    return lambda model, version="", **tensors: client.infer(model, inputs_of(triton, tensors), version)


def address(live: Live, triton: Any) -> str:
    return live.address if triton is triton_http else live.grpc_address


def inputs_of(triton: Any, tensors: dict[str, Any], **types: str) -> list[Any]:
    inputs = []
    for name, array in tensors.items():
        kind = types.get(name) or next(each.name for each in DATATYPES.values() if each.dtype == array.dtype)
        tensor = triton.InferInput(name, array.shape, kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def floats(*rows: Any) -> Any:
    return np.array(rows, np.float32)


def index(client: Any) -> dict[tuple[str, str], tuple[str, str]]:
    models = client.get_model_repository_index()
    if not isinstance(models, list):
        models = [
            {"name": each.name, "version": each.version, "state": each.state, "reason": each.reason}
            for each in models.models
        ]
    return {(each["name"], each.get("version", "")): (each["state"], each.get("reason", "")) for each in models}


def until(condition: Callable[[], Any]) -> None:
    """Poll until a condition holds; the server sends no notification."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError("the condition never held")
        time.sleep(0.02)  # leave the processor to a starting process


class TestTensors:
    def test_tensors_of_every_datatype_are_returned_unchanged(self, client: Any, triton: Any) -> None:
        random = np.random.default_rng(5)
        tensors: dict[str, Any] = {}
        for name, row in DATATYPES.items():
            if name == "BYTES":
                tensors[name] = np.array([[b"", "zwölf".encode(), b"\xff\x00"], [b"x" * 9000, b"a", b"b"]], np.object_)
            elif name == "BF16":
                tensors[name] = np.array([[1, -2, 0.5], [3, 4, 96]], ml_dtypes.bfloat16)
            elif name == "BOOL":
                tensors[name] = np.array([[True, False, True], [False, False, True]])
            elif row.dtype.kind in "iu":
                ends = np.iinfo(row.dtype)  # type: ignore[type-var]
                tensors[name] = np.array([[ends.min, 0, ends.max], [1, 2, 3]], row.dtype)
            else:
                tensors[name] = random.standard_normal((2, 3)).astype(row.dtype)
        result = client.infer("types", inputs_of(triton, tensors, **{name: name for name in tensors}))

        for name, array in tensors.items():
            assert np.array_equal(result.as_numpy(f"{name}_out"), array), name

    @pytest.mark.parametrize("rows", [0, 1, 3, 64])
    def test_any_number_of_rows_is_answered(self, ask: Ask, rows: int) -> None:
        x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)

        assert np.array_equal(ask("right", x=x).as_numpy("y"), x + 2)

    def test_strings_are_processed_by_a_string_operation(self, ask: Ask) -> None:
        result = ask("upper", text=np.array([b"iris", b"", "größe".encode()], np.object_))

        assert result.as_numpy("upper").ravel().tolist() == [b"IRIS", b"", "GRößE".encode()]
        assert result.as_numpy("length") is None  # not declared, so not served

    def test_an_unranked_input_has_the_configured_shape(self, ask: Ask) -> None:
        assert ask("unranked", x=floats([1, 2], [3, 4])).as_numpy("y").tolist() == [[2, 4], [6, 8]]

    def test_a_partial_configuration_is_completed_from_the_model(self, live: Live, ask: Ask) -> None:
        row = np.arange(64, dtype=np.float32)[np.newaxis]
        config = httpx.get(f"{live.url}/v2/models/in_part/config").json()
        tensors = [(each["name"], each["data_type"], each["dims"]) for each in (*config["input"], *config["output"])]

        assert tensors == [("x", "TYPE_FP32", [64]), ("y", "TYPE_FP32", [10])]
        assert np.array_equal(ask("in_part", x=row).as_numpy("y"), ask("mlp", x=row).as_numpy("y"))

    def test_a_wrong_shape_or_datatype_is_rejected(self, ask: Ask) -> None:
        with pytest.raises(InferenceServerException, match=r"\[-1,2\].*\[1,3\]|\[1,3\].*\[-1,2\]"):
            ask("right", x=floats([1, 2, 3]))
        with pytest.raises(InferenceServerException, match="FP64"):
            ask("right", x=np.zeros((1, 2)))


class TestReporting:
    def test_metadata_and_configuration_match_tritons(self, live: Live) -> None:
        metadata = httpx.get(f"{live.url}/v2/models/mlp").json()
        config = httpx.get(f"{live.url}/v2/models/mlp/config").json()

        assert metadata["platform"] == "tensorflow_savedmodel"
        assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}]
        assert (config["platform"], config["backend"]) == ("tensorflow_savedmodel", "tensorflow")
        assert config["default_model_filename"] == "model.savedmodel"
        assert config["dynamic_batching"]["preferred_batch_size"] == [4, 8]
        assert config["instance_group"][0]["count"] == 2

    def test_a_repository_in_the_layout_of_tensorflow_serving_is_served(self, client: Any, triton: Any) -> None:
        lengths = {"sepal_length": 5.1, "sepal_width": 3.5, "petal_length": 1.4, "petal_width": 0.2}
        tensors = inputs_of(triton, {name: np.array([length]) for name, length in lengths.items()})
        shares = client.infer("flowers", tensors, "1700000000", parameters={"hooks": False}).as_numpy("probabilities")

        assert shares.shape == (1, 3)
        assert abs(float(shares.sum()) - 1) < 1e-5

    def test_a_configured_signature_is_served_and_otherwise_the_default_signature(self, ask: Ask) -> None:
        x = floats([1, 2])

        assert ask("right", x=x).as_numpy("y").tolist() == [[3, 4]]
        assert ask("versions", "1", x=x).as_numpy("y").tolist() == [[2, 3]]
        assert ask("versions", "2", x=x).as_numpy("y").tolist() == [[4, 5]]
        assert ask("versions", x=x).as_numpy("y").tolist() == [[4, 5]]

    def test_a_broken_model_is_unavailable_with_its_reason_and_the_others_are_served(self, client: Any) -> None:
        states = index(client)

        assert {name for (name, _), (state, _) in states.items() if state == "UNAVAILABLE"} == set(BROKEN)
        assert states["wrong_key", "1"][1] == "the model has no signature 'nope': it has 'predict'"
        assert "variables" in states["no_variables", "1"][1]
        assert "saved_model.pb" in states["corrupt", "1"][1]
        assert "model.savedmodel is not a SavedModel: there is no saved_model.pb in it" in str(
            [reason for (name, _), (_, reason) in states.items() if name == "empty"]
        )
        assert states["plus", "1"][0] == states["types", "1"][0] == "READY"
        assert not client.is_model_ready("wrong_key")


class TestInference:
    def test_parallel_requests_share_batches(self, live: Live, triton: Any) -> None:
        before = counts(live)

        def many(number: int) -> None:
            with triton.InferenceServerClient(address(live, triton)) as client:
                for turn in range(25):
                    x = np.full((1, 64), number + turn, np.float32)
                    assert client.infer("mlp", inputs_of(triton, {"x": x})).as_numpy("y").shape == (1, 10)

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(many, range(12)))
        inferences, executions = (after - then for after, then in zip(counts(live), before, strict=True))

        assert inferences == 300
        assert executions < 200

    def test_the_server_process_does_not_import_tensorflow(self, live: Live) -> None:
        assert "tensorflow" not in sys.modules
        assert not has_tensorflow()
        assert len(workers()) >= 8

    def test_an_ensemble_can_combine_onnx_and_tensorflow_models(self, ask: Ask) -> None:
        # right adds 2, plus 10, and the first version 1
        assert ask("chain", **{"in": floats([1, 2], [3, 4])}).as_numpy("out").tolist() == [[14, 15], [16, 17]]

    def test_a_sequence_keeps_its_state(self, client: Any, triton: Any) -> None:
        sums = []
        for number in (1, 2, 3):
            ends = {"sequence_start": number == 1, "sequence_end": number == 3}
            tensors = inputs_of(triton, {"x": floats([number])})
            sums.append(client.infer("accumulator", tensors, sequence_id=7, **ends).as_numpy("y").item())

        assert sums == [1, 3, 6]

    def test_requests_of_different_lengths_share_a_ragged_batch(self, live: Live, triton: Any) -> None:
        def total(length: int) -> float:
            with triton.InferenceServerClient(address(live, triton)) as client:
                x = np.ones((1, length), np.float32)
                return float(client.infer("ragged", inputs_of(triton, {"x": x})).as_numpy("y").item())

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(total, range(1, 25))) == list(range(1, 25))

    def test_hooks_run_before_and_after_a_savedmodel(self, live: Live) -> None:
        flower = {"sepal_length": 5.2, "sepal_width": 3.6, "petal_length": 1.4, "petal_width": 0.3}
        answer = httpx.post(f"{live.url}/v2/models/flowers/predict", content=json.dumps(flower)).json()

        assert answer["label"] == "setosa"
        assert answer["inputs"][0] == ["sepal_length", "DT_DOUBLE", [None]]
        assert "probabilities" in answer["outputs"]


def counts(live: Live) -> tuple[int, int]:
    (statistics,) = httpx.get(f"{live.url}/v2/models/mlp/stats").json()["model_stats"]
    return statistics["inference_count"], statistics["execution_count"]


class TestLoading:
    @pytest.mark.parametrize("triton", [triton_grpc])
    def test_a_model_is_reloaded_and_unloaded(
        self, root: Path, savedmodels: Path, client: Any, ask: Ask, triton: Any
    ) -> None:
        install(savedmodels / "left_right", root / "changing" / "1")
        client.load_model("changing")
        assert ask("changing", x=floats([1, 2])).as_numpy("y").tolist() == [[2, 3]]

        install(savedmodels / "special_keys", root / "changing" / "2")
        client.load_model("changing")
        assert ask("changing", x=floats([1, 2])).as_numpy("y").tolist() == [[4, 5]]

        before = set(workers())
        client.unload_model("changing")
        until(lambda: not client.is_model_ready("changing") and len(workers()) == len(before) - 1)
        shutil.rmtree(root / "changing")

    @pytest.mark.parametrize("triton", [triton_http])
    def test_a_failed_load_leaves_the_loaded_model_in_service(self, client: Any, ask: Ask) -> None:
        text = {"platform": "tensorflow_savedmodel", "parameters": {"TF_SIGNATURE_DEF": {"string_value": "gone"}}}
        with pytest.raises(InferenceServerException, match="has no signature 'gone': it has 'left', 'right'"):
            client.load_model("right", config=json.dumps(text))

        assert ask("right", x=floats([1, 2])).as_numpy("y").tolist() == [[3, 4]]

    @pytest.mark.parametrize("triton", [triton_http])
    def test_a_model_can_be_sent_as_files_in_the_load_request(
        self, savedmodels: Path, client: Any, ask: Ask, triton: Any
    ) -> None:
        place = savedmodels / "left_right"
        files = {
            f"file:1/model.savedmodel/{path.relative_to(place)}": path.read_bytes()
            for path in place.rglob("*")
            if path.is_file()
        }
        client.load_model("sent", config='{"platform": "tensorflow_savedmodel"}', files=files)

        assert ask("sent", x=floats([1, 2])).as_numpy("y").tolist() == [[2, 3]]
        client.unload_model("sent")


class Clients:
    """Clients of `mlp` that send requests until stopped. `ledger`: how the requests of each ended."""

    def __init__(self, live: Live, triton: Any, count: int = 6) -> None:
        self.ledger: Counter[str] = Counter()
        self._live, self._triton = live, triton
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        x = np.full((1, 64), number + 1, np.float32)
        with self._triton.InferenceServerClient(address(self._live, self._triton)) as client:
            expected: Any = None
            while not self._over.is_set():
                self.ledger["sent"] += 1
                try:
                    found = client.infer("mlp", inputs_of(self._triton, {"x": x})).as_numpy("y")
                except InferenceServerException as error:
                    self.ledger[str(error.status())] += 1
                    continue
                expected = found if expected is None else expected
                self.ledger["right" if np.allclose(found, expected, rtol=1e-4) else "wrong"] += 1

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def test_a_killed_worker_fails_only_the_requests_it_was_running(live: Live, triton: Any) -> None:
    async def pid() -> int:
        return int(live.server.engine.model("mlp").placements[0].backend.pid)  # type: ignore[attr-defined]

    clients = Clients(live, triton)
    try:
        until(lambda: clients.ledger["right"] > 50)
        victim = live.call(pid())
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in workers())
        # other models are served meanwhile
        with triton.InferenceServerClient(address(live, triton)) as client:
            assert client.infer("right", inputs_of(triton, {"x": floats([1, 2])})).as_numpy("y").tolist() == [[3, 4]]
            assert client.is_server_live()
            assert client.is_model_ready("right")
            until(lambda: client.is_model_ready("mlp"))
        so_far = clients.ledger["right"]
        until(lambda: clients.ledger["right"] > so_far + 50)
    finally:
        clients.stop()
    ledger = clients.ledger

    assert live.call(pid()) != victim
    failed = ledger["503"] + ledger["StatusCode.UNAVAILABLE"]
    assert failed <= 16, ledger  # the batches that two instances ran
    assert ledger["wrong"] == 0
    assert ledger["sent"] == ledger["right"] + failed


def sums(live: Live, triton: Any, number: int, steps: int) -> list[float]:
    """Send a sequence whose values increase by one, starting with its number; return the answers."""
    found = []
    with triton.InferenceServerClient(address(live, triton)) as client:
        for step in range(steps):
            options = {"sequence_id": number, "sequence_start": step == 0, "sequence_end": step == steps - 1}
            answer = client.infer("remembers", inputs_of(triton, {"x": floats([number + step])}), **options)
            assert answer.as_numpy("id").tolist() == [[number]]
            found.append(float(answer.as_numpy("y")[0][0]))
    return found


def test_each_instance_keeps_the_state_of_its_own_sequences_in_its_variables(live: Live, triton: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: sums(live, triton, number, 20), range(1, 17)))

    for number, answers in enumerate(found, 1):
        assert answers == [sum(range(number, number + step + 1)) for step in range(20)]


def test_a_sequence_whose_worker_has_ended_must_be_restarted(live: Live, triton: Any) -> None:
    async def pids() -> list[int]:
        return [int(each.backend.pid) for each in live.server.engine.model("remembers").placements]  # type: ignore[attr-defined]

    before = live.call(pids())
    assert len(set(before)) == 2
    with triton.InferenceServerClient(address(live, triton)) as client:

        def ask(number: int, **options: Any) -> Any:
            tensors = inputs_of(triton, {"x": floats([1])})
            return float(client.infer("remembers", tensors, sequence_id=number, **options).as_numpy("y")[0][0])

        assert [ask(number, sequence_start=True) for number in (101, 102)] == [1, 1]
        for pid in before:
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: pid not in workers())  # type: ignore[misc]
        for number in (101, 102):
            with pytest.raises(InferenceServerException, match="the instance that ran it was lost"):
                ask(number)
        assert [ask(number, sequence_start=True) for number in (101, 102)] == [1, 1]
        assert [ask(number, sequence_end=True) for number in (101, 102)] == [2, 2]


def test_a_front_end_serves_savedmodels_from_a_store(
    savedmodels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(savedmodels / "left_right", tmp_path / "m" / "1")
    monkeypatch.setenv("PENSTOCK_TEST_FRONTS", "1")
    with live_server(model_repository=(f"file://{tmp_path}",)) as live:
        for triton in (triton_http, triton_grpc):
            with triton.InferenceServerClient(address(live, triton)) as client:
                assert client.infer("m", inputs_of(triton, {"x": floats([1, 2])})).as_numpy("y").tolist() == [[2, 3]]


def test_polling_detects_changed_variables(savedmodels: Path, tmp_path: Path) -> None:
    place = install(savedmodels / "left_right", tmp_path / "m" / "1")
    others = set(workers())
    with (
        live_server(tmp_path, model_control_mode="poll", repository_poll_secs=0.05) as live,
        triton_http.InferenceServerClient(live.address) as client,
    ):
        before = set(workers()) - others
        shutil.copytree(savedmodels / "special_keys", place, dirs_exist_ok=True)

        def added() -> float:
            return float(client.infer("m", inputs_of(triton_http, {"x": floats([1, 2])})).as_numpy("y")[0][0])

        until(lambda: added() == 4)
        until(lambda: not before & set(workers()))


def test_penstock_check_reports_what_is_wrong_and_where(
    savedmodels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("PENSTOCK_TEST_SAVEDMODELS", "PENSTOCK_TEST_FRONTS"):
        monkeypatch.delenv(word, raising=False)  # no settings
    for name, savedmodel in (("keyed", "left_right"), ("cut", "corrupt"), ("good", "mlp")):
        install(savedmodels / savedmodel, tmp_path / name / "1")
    text = 'platform: "tensorflow_savedmodel"\n\nparameters { key: "TF_SIGNATURE_DEF" value { string_value: "nope" } }'
    (tmp_path / "keyed" / "config.pbtxt").write_text(text)

    assert main(["check", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert f"{tmp_path}/keyed/config.pbtxt:3: the model has no signature 'nope': it has 'left', 'right'" in output
    assert re.search(rf"{tmp_path}/cut/1/model.savedmodel: .*saved_model.pb", output)
    assert "1 version would be served, 2 mistakes" in output
