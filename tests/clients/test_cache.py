"""The response cache of a live server, through tritonclient: hits, misses, and how they are counted."""

from __future__ import annotations

import json
import queue
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm

from penstock.server.settings import SettingError, Settings
from tests.backends.onnx_models import FLOAT, floats, node
from tests.clients import models
from tests.clients.tensors import VALUES, input_of, pair, same
from tests.clients.test_perf_analyzer import PROGRAM, analyze
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

CACHED = "response_cache { enable: true }"
SIZE = 1 << 20
A = np.arange(16, dtype=np.int32).reshape(1, 16)
RAN = {"success": 1, "queue": 1, "compute_input": 1, "compute_infer": 1, "compute_output": 1, "cache_miss": 1}
FOUND = {"success": 1, "queue": 1, "cache_hit": 1}
PATIENCE_S = 10


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root: Path = tmp_path_factory.mktemp("repository")
    sides: list[models.Tensors] = [
        {f"{side}{i}": (models.INT32, ["N", 16]) for i in (0, 1)} for side in ("INPUT", "OUTPUT")
    ]
    for name, config in (("simple", CACHED), ("plain", "")):
        models.write(root, name, models.SUM_AND_DIFFERENCE, (sides[0], sides[1]), config=config)
    for datatype in VALUES:
        models.write_identity(root, f"identity_{datatype}", CACHED, datatype)
    write_versions(root, "versions", 1, 2)
    models.write_identity(root, "split", f"max_batch_size: 2 {CACHED}")
    (root / "split" / "penstock.toml").write_text("[batching]\nsplit = true\n")
    with live_server(
        root, cache_config=(f"local,size={SIZE}",), allow_client_shm=True, metrics_config=("summary_latencies=true",)
    ) as server:
        yield server


def write_versions(root: Path, name: str, *versions: int, more: int = 0) -> None:
    """Write a model whose versions add their number, plus `more`."""
    config = f"version_policy: {{ all {{}} }} {CACHED}"
    for version in versions:
        tensors: tuple[models.Tensors, models.Tensors] = {"x": (FLOAT, ["N", 1])}, {"y": (FLOAT, ["N", 1])}
        nodes, added = [node("Add", ["x", "more"], ["y"])], {"more": floats([version + more])}
        models.write(root, name, nodes, tensors, added, version=version, config=config)


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, live: Live) -> Iterator[Any]:
    new_client: Any
    if request.param == "http":
        new_client = triton.InferenceServerClient(live.address)
    else:
        new_client = triton_grpc.InferenceServerClient(live.grpc_address)
    with new_client:
        new_client.of = triton if request.param == "http" else triton_grpc
        yield new_client


def inputs(client: Any, *arrays: np.ndarray[Any, Any], names: tuple[str, ...] = ("INPUT0", "INPUT1")) -> list[Any]:
    tensors = []
    for name, array in zip(names, arrays, strict=False):
        datatype = "BYTES" if array.dtype.hasobject else f"{array.dtype.name}".upper().replace("FLOAT", "FP")
        tensors.append(client.of.InferInput(name, list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def counts(live: Live, model: str) -> dict[str, int]:
    """The counts of a model's statistics, the same over HTTP and gRPC."""
    with triton.InferenceServerClient(live.address) as client:
        (entry,) = client.get_inference_statistics(model)["model_stats"]
    with triton_grpc.InferenceServerClient(live.grpc_address) as other:
        (found,) = other.get_inference_statistics(model).model_stats
    counted = {name: each["count"] for name, each in entry["inference_stats"].items()}
    assert counted == {name: getattr(found.inference_stats, name).count for name in counted}
    return {**counted, "inferences": entry["inference_count"], "executions": entry["execution_count"]}


@contextmanager
def moves(live: Live, model: str, **expected: int) -> Iterator[None]:
    """Check that exactly these counts of the statistics change within the block."""
    before = counts(live, model)
    yield
    after = counts(live, model)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == expected


def fresh(value: int) -> np.ndarray[Any, Any]:
    """Make a tensor that no other test has sent."""
    return np.full((1, 16), value, np.int32)


class TestHits:
    def test_a_repeated_request_is_answered_from_the_cache(self, live: Live, client: Any) -> None:
        sent = inputs(client, A, fresh(1 if client.of is triton else 2))
        with moves(live, "simple", **RAN, inferences=1, executions=1):
            first = client.infer("simple", sent)
        with moves(live, "simple", **FOUND):
            second = client.infer("simple", sent, request_id="7")

        for name in ("OUTPUT0", "OUTPUT1"):
            assert first.as_numpy(name).tobytes() == second.as_numpy(name).tobytes()
        response = second.get_response()
        assert (response["id"] if client.of is triton else response.id) == "7"

    def test_transports_and_tensor_encodings_share_cached_answers(self, live: Live) -> None:
        sent = [A, fresh(3)]
        with (
            triton.InferenceServerClient(live.address) as http,
            moves(live, "simple", **RAN, inferences=1, executions=1),
        ):
            http.infer("simple", pair(*sent))
        with moves(live, "simple", success=2, queue=2, cache_hit=2):
            with triton.InferenceServerClient(live.address) as http:
                http.infer("simple", pair(*sent, binary=(False, False)))
            with triton_grpc.InferenceServerClient(live.grpc_address) as grpc:
                grpc.of = triton_grpc
                grpc.infer("simple", inputs(grpc, *sent))

    def test_an_input_that_differs_in_one_element_is_a_miss(self, live: Live, client: Any) -> None:
        one, other = (fresh(value + (0 if client.of is triton else 10)) for value in (100, 101))
        with moves(live, "simple", **{name: 2 * each for name, each in RAN.items()}, inferences=2, executions=2):
            first, second = (client.infer("simple", inputs(client, A, array)) for array in (one, other))

        assert (first.as_numpy("OUTPUT0") + 1 == second.as_numpy("OUTPUT0")).all()

    @pytest.mark.parametrize("datatype", [name for name in VALUES if name != "BF16"])
    def test_every_datatype_is_returned_unchanged_from_the_cache(self, live: Live, client: Any, datatype: str) -> None:
        array = VALUES[datatype]
        if client.of is triton:
            array = array[::-1].copy()
        sent = [client.of.InferInput("x", list(array.shape), datatype)]
        sent[0].set_data_from_numpy(array)
        with moves(live, f"identity_{datatype}", **RAN, inferences=2, executions=1):
            client.infer(f"identity_{datatype}", sent)
        with moves(live, f"identity_{datatype}", **FOUND):
            found = client.infer(f"identity_{datatype}", sent)

        assert same(datatype, found.as_numpy("y"), array)

    def test_a_request_for_other_outputs_is_cached_separately(self, live: Live, client: Any) -> None:
        sent = inputs(client, A, fresh(20 if client.of is triton else 21))
        with moves(live, "simple", **RAN, inferences=1, executions=1):
            client.infer("simple", sent)
        requested = [client.of.InferRequestedOutput("OUTPUT1")]
        with moves(live, "simple", **RAN, inferences=1, executions=1):
            client.infer("simple", sent, outputs=requested)
        with moves(live, "simple", **FOUND):
            found = client.infer("simple", sent, outputs=requested)

        assert found.as_numpy("OUTPUT0") is None
        assert (found.as_numpy("OUTPUT1") == A - fresh(20 if client.of is triton else 21)).all()

    def test_classes_are_computed_from_a_cached_answer(self, live: Live, client: Any) -> None:
        sent = inputs(client, A, fresh(30))
        client.infer("simple", sent, outputs=[client.of.InferRequestedOutput("OUTPUT0")])
        requested = [client.of.InferRequestedOutput("OUTPUT0", class_count=2)]
        with moves(live, "simple", **FOUND):
            found = client.infer("simple", sent, outputs=requested)

        assert found.as_numpy("OUTPUT0").ravel().tolist() == [b"45:15", b"44:14"]

    def test_a_cached_answer_is_written_into_shared_memory(self, live: Live, client: Any) -> None:
        sent = inputs(client, A, fresh(40))
        client.infer("simple", sent, outputs=[client.of.InferRequestedOutput("OUTPUT0")])
        region = shm.create_shared_memory_region("out", f"/cache_{live.http_port}", 64)
        try:
            client.register_system_shared_memory("out", f"/cache_{live.http_port}", 64)
            requested = [client.of.InferRequestedOutput("OUTPUT0")]
            requested[0].set_shared_memory("out", 64)
            with moves(live, "simple", **FOUND):
                client.infer("simple", sent, outputs=requested)
            assert (shm.get_contents_as_numpy(region, np.int32, [1, 16]) == A + 40).all()
        finally:
            client.unregister_system_shared_memory("out")
            shm.destroy_shared_memory_region(region)

    def test_requests_on_a_stream_are_answered_from_the_cache(self, live: Live) -> None:
        answers: queue.Queue[Any] = queue.Queue()
        with triton_grpc.InferenceServerClient(live.grpc_address) as grpc:
            grpc.of = triton_grpc
            sent = inputs(grpc, A, fresh(50))
            with moves(live, "simple", **{**RAN, "success": 3, "queue": 3}, cache_hit=2, inferences=1, executions=1):
                grpc.infer("simple", sent)
                grpc.start_stream(lambda result, error: answers.put((result, error)))
                for number in "12":
                    grpc.async_stream_infer("simple", sent, request_id=number)
                found = [answers.get(timeout=PATIENCE_S) for _ in "12"]
                grpc.stop_stream()

        assert [error for _, error in found] == [None, None]
        assert [result.get_response().id for result, _ in found] == ["1", "2"]
        assert all((result.as_numpy("OUTPUT0") == A + 50).all() for result, _ in found)

    def test_generate_is_answered_from_the_cache(self, live: Live) -> None:
        body = {"INPUT0": A.ravel().tolist(), "INPUT1": fresh(60).ravel().tolist()}
        first = httpx.post(f"{live.url}/v2/models/simple/generate", json=body)
        with moves(live, "simple", **FOUND):
            second = httpx.post(f"{live.url}/v2/models/simple/generate", json=body)

        assert first.status_code == 200
        assert first.json() == second.json()

    def test_the_answer_to_a_split_request_is_cached_as_a_whole(self, live: Live, client: Any) -> None:
        array = np.arange(15, dtype=np.float32).reshape(5, 3) + (0 if client.of is triton else 1)
        sent = inputs(client, array, names=("x",))
        first = client.infer("split", sent)
        with moves(live, "split", **FOUND):
            second = client.infer("split", sent)

        assert (first.as_numpy("y") == array).all()
        assert (second.as_numpy("y") == array).all()

    def test_a_large_request_is_answered_from_the_cache(self, live: Live, client: Any) -> None:
        array = np.full((1, 90_000), 1 if client.of is triton else 2, np.float32)
        sent = inputs(client, array, names=("x",))
        with moves(live, "identity_FP32", **RAN, inferences=1, executions=1):
            client.infer("identity_FP32", sent)
        with moves(live, "identity_FP32", **FOUND):
            found = client.infer("identity_FP32", sent)

        assert found.as_numpy("y").tobytes() == array.tobytes()

    def test_an_answer_too_large_for_the_cache_is_never_cached(self, live: Live, client: Any) -> None:
        array = np.full((1, SIZE // 4), 3, np.float32)
        sent = inputs(client, array, names=("x",))
        with moves(live, "identity_FP32", **{name: 2 * each for name, each in RAN.items()}, inferences=2, executions=2):
            for _ in range(2):
                assert client.infer("identity_FP32", sent).as_numpy("y").tobytes() == array.tobytes()


class TestModels:
    def test_versions_of_a_model_are_cached_separately(self, live: Live, client: Any) -> None:
        sent = inputs(client, np.full((1, 1), 5 if client.of is triton else 6, np.float32), names=("x",))
        answers = [client.infer("versions", sent, version).as_numpy("y").item() for version in "1212"]

        assert answers[:2] == answers[2:]
        assert answers[0] + 1 == answers[1]

    def test_a_model_without_response_cache_is_not_cached(self, live: Live, client: Any) -> None:
        with moves(live, "plain", success=2, queue=2, compute_input=2, compute_infer=2, compute_output=2,
                   inferences=2, executions=2):  # fmt: skip
            for _ in range(2):
                client.infer("plain", inputs(client, A, A))

    def test_a_reloaded_model_does_not_use_the_answers_of_its_predecessor(self, tmp_path: Path) -> None:
        write_versions(tmp_path, "again", 1)
        sent = [input_of("x", np.zeros((1, 1), np.float32))]
        settings: dict[str, Any] = {
            "cache_config": ("local,size=10000",),
            "model_control_mode": "explicit",
            "load_model": ("again",),
        }
        with live_server(tmp_path, **settings) as live, triton.InferenceServerClient(live.address) as client:
            before = [client.infer("again", sent).as_numpy("y").item() for _ in range(2)]
            shutil.rmtree(tmp_path / "again")
            write_versions(tmp_path, "again", 1, more=70)
            client.load_model("again")
            after = [client.infer("again", sent).as_numpy("y").item() for _ in range(2)]

        assert (before, after) == ([1, 1], [71, 71])

    def test_response_cache_has_no_effect_without_a_server_cache(self, tmp_path: Path) -> None:
        write_versions(tmp_path, "m", 1)
        sent = [input_of("x", np.zeros((1, 1), np.float32))]
        with live_server(tmp_path) as live, triton.InferenceServerClient(live.address) as client:
            with moves(live, "m", success=2, queue=2, compute_input=2, compute_infer=2, compute_output=2,
                       inferences=2, executions=2):  # fmt: skip
                for _ in range(2):
                    client.infer("m", sent)
            assert client.get_model_config("m")["response_cache"] == {"enable": True}
            assert "nv_cache" not in httpx.get(f"{live.url}/metrics").text

    @pytest.mark.parametrize(
        ("config", "why"),
        [
            ("model_transaction_policy { decoupled: true }", "'Decoupled' transaction policy"),
            ("sequence_batching { }", "sequence batching scheduler"),
        ],
    )
    def test_a_model_that_cannot_be_cached_is_rejected_with_the_reason(
        self, tmp_path: Path, config: str, why: str
    ) -> None:
        models.write_identity(tmp_path, "m", f"{CACHED} {config}")
        with live_server(tmp_path, cache_config=("local,size=10000",)) as live:
            index = httpx.post(f"{live.url}/v2/repository/index").json()

        assert index[0]["state"] == "UNAVAILABLE"
        text = f"Response Cache does not currently support model m with {why}. Please disable the response cache."
        assert text in index[0]["reason"]


class TestEnsembles:
    """The cases of qa/L0_response_cache/ensemble_cache_test.py."""

    @pytest.mark.parametrize(
        ("outermost", "step", "moved", "step_moved"),
        [
            (CACHED, "", FOUND, {}),
            (CACHED, CACHED, FOUND, {}),
            ("", CACHED, None, FOUND),
        ],
        ids=["the whole", "both", "the step"],
    )
    def test_the_outermost_cached_model_answers(
        self, tmp_path: Path, outermost: str, step: str, moved: dict[str, int] | None, step_moved: dict[str, int]
    ) -> None:
        models.write_identity(tmp_path, "step", f"max_batch_size: 8 {step}")
        write_ensemble(tmp_path, outermost)
        sent = [input_of("IN", np.ones((1, 3), np.float32))]
        with (
            live_server(tmp_path, cache_config=("local,size=10840",)) as live,
            triton.InferenceServerClient(live.address) as client,
        ):
            first = client.infer("whole", sent).as_numpy("OUT")
            before, step_before = counts(live, "whole"), counts(live, "step")
            second = client.infer("whole", sent).as_numpy("OUT")
            after, step_after = counts(live, "whole"), counts(live, "step")

        assert first.tolist() == second.tolist() == [[1, 1, 1]]
        assert before["cache_miss"] == bool(outermost)
        assert step_before["cache_miss"] == bool(step)
        found = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        assert found == moved if moved is not None else found["success"] == 1
        assert after["cache_hit"] == bool(outermost)
        assert {
            name: step_after[name] - step_before[name] for name in after if step_after[name] != step_before[name]
        } == (step_moved)

    def test_a_reloaded_step_invalidates_the_answers_of_its_ensembles(self, tmp_path: Path) -> None:
        write_versions(tmp_path, "step", 1)
        write_ensemble(tmp_path, CACHED, "inner", "step")
        write_ensemble(tmp_path, CACHED, "whole", "inner", ("IN", "OUT"))
        sent = [input_of("IN", np.zeros((1, 1), np.float32))]
        settings: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("whole",)}
        with (
            live_server(tmp_path, cache_config=("local,size=10000",), **settings) as live,
            triton.InferenceServerClient(live.address) as client,
        ):
            before = [client.infer("whole", sent).as_numpy("OUT").item() for _ in range(2)]
            write_versions(tmp_path, "step", 2)
            client.load_model("step")
            after = [client.infer("whole", sent).as_numpy("OUT").item() for _ in range(2)]
            counted = counts(live, "whole")

        assert (before, after) == ([1, 1], [2, 2])
        assert (counted["cache_hit"], counted["cache_miss"]) == (2, 2)

    def test_an_answer_too_large_for_the_cache_is_a_miss_each_time(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        models.write_identity(tmp_path, "step", "max_batch_size: 8")
        write_ensemble(tmp_path, CACHED)
        sent = [input_of("IN", np.ones((1, 3), np.float32))]
        with (
            live_server(tmp_path, cache_config=("local,size=200",)) as live,
            triton.InferenceServerClient(live.address) as client,
        ):
            for _ in range(2):
                client.infer("whole", sent)
            counted = counts(live, "whole")

        assert (counted["cache_hit"], counted["cache_miss"], counted["success"]) == (0, 2, 2)
        assert "Failed to insert key" in caplog.text

    @pytest.mark.parametrize("decoupled", ["whole", "step"])
    def test_an_ensemble_that_is_decoupled_or_has_a_decoupled_step_cannot_be_cached(
        self, tmp_path: Path, decoupled: str
    ) -> None:
        policy = {decoupled: "model_transaction_policy { decoupled: true }"}
        models.write_identity(tmp_path, "step", f"max_batch_size: 8 {policy.get('step', '')}")
        write_ensemble(tmp_path, f"{CACHED} {policy.get('whole', '')}")
        with live_server(tmp_path, cache_config=("local,size=10480",)) as live:
            index = {entry["name"]: entry for entry in httpx.post(f"{live.url}/v2/repository/index").json()}

        assert index["whole"]["state"] == "UNAVAILABLE"
        assert "response cache does not currently support" in index["whole"]["reason"].lower()
        assert "decoupled" in index["whole"]["reason"].lower()

    def test_an_ensemble_with_a_sequence_step_cannot_be_cached(self, tmp_path: Path) -> None:
        models.write_identity(tmp_path, "step", "max_batch_size: 8 sequence_batching { }")
        write_ensemble(tmp_path, CACHED)
        with live_server(tmp_path, cache_config=("local,size=10480",)) as live:
            index = {entry["name"]: entry for entry in httpx.post(f"{live.url}/v2/repository/index").json()}

        text = "Response Cache does not currently support ensemble whole: step step has sequences"
        assert (index["step"]["state"], index["whole"]["state"]) == ("READY", "UNAVAILABLE")
        assert text in index["whole"]["reason"]


def write_ensemble(
    root: Path, more: str, name: str = "whole", step: str = "step", tensors: tuple[str, str] = ("x", "y")
) -> None:
    """Write an ensemble of one step whose tensors have these names."""
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(f"""
platform: "ensemble" max_batch_size: 8
input {{ name: "IN" data_type: TYPE_FP32 dims: -1 }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: -1 }}
ensemble_scheduling {{ step {{ model_name: "{step}" model_version: -1
  input_map {{ key: "{tensors[0]}" value: "IN" }} output_map {{ key: "{tensors[1]}" value: "OUT" }} }} }}
{more}
""")


class TestHooks:
    def test_a_hook_that_modifies_its_prediction_does_not_change_the_cached_answer(self, tmp_path: Path) -> None:
        models.write_identity(tmp_path, "m", CACHED)
        (tmp_path / "m" / "hooks.py").write_text(
            "def post_inference(prediction, metadata):\n    prediction[0] *= 2\n    return prediction\n"
        )
        (tmp_path / "m" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
        sent = [input_of("x", np.ones((1, 3), np.float32))]
        with (
            live_server(tmp_path, cache_config=("local,size=10000",)) as live,
            triton.InferenceServerClient(live.address) as client,
        ):
            answers = [client.infer("m", sent).as_numpy("y").tolist() for _ in range(3)]
            counted = counts(live, "m")

        assert answers == [[[2, 2, 2]]] * 3
        assert (counted["cache_hit"], counted["cache_miss"], counted["executions"]) == (2, 1, 1)


class TestMetrics:
    def test_the_metrics_page_counts_hits_and_misses_like_the_statistics(self, live: Live, client: Any) -> None:
        sent = inputs(client, A, fresh(70 if client.of is triton else 71))
        for _ in range(3):
            client.infer("simple", sent)
        page = httpx.get(f"{live.url}/metrics").text
        counted = counts(live, "simple")

        labels = '{model="simple",version="1"}'
        assert f"nv_cache_num_hits_per_model{labels} {counted['cache_hit']}\n" in page
        assert f"nv_cache_num_misses_per_model{labels} {counted['cache_miss']}\n" in page
        assert f"nv_inference_request_success{labels} {counted['success']}\n" in page
        assert f"nv_inference_count{labels} {counted['inferences']}\n" in page
        assert f"nv_cache_hit_summary_us_count{labels} {counted['cache_hit']}\n" in page
        for name in (
            "nv_cache_hit_duration_per_model",
            "nv_cache_miss_duration_per_model",
            "nv_cache_miss_summary_us_sum",
        ):
            assert f"{name}{labels}" in page
        assert f"nv_inference_request_summary_us_count{labels}" not in page
        assert f"nv_inference_queue_summary_us_count{labels} {counted['queue']}\n" in page
        assert 'nv_inference_request_summary_us_count{model="plain",version="1"}' in page
        assert 'nv_cache_num_hits_per_model{model="plain"' not in page


class TestCacheConfig:
    @pytest.mark.parametrize(
        ("rules", "why"),
        [
            (("redis,host=localhost",), "unknown cache 'redis', known: local"),
            (("local,size=1024", "redis,host=x"), "multiple cache configurations"),
            (("local,size=0",), "the size must be from 1"),
            (("local,size=-1",), "the size must be from 1"),
            (("local,size=1e6",), "the size must be from 1"),
            (("local,size",), "must have the form local,size=BYTES"),
            (("local",), "must have the form local,size=BYTES"),
            (("size=1024",), "must have the form local,size=BYTES"),
            (("local,bytes=1024",), "unknown setting 'bytes' of cache 'local', known: size"),
            (("local,size=1024", "local,size=2048"), "the size is set twice"),
        ],
    )
    def test_an_invalid_cache_config_is_rejected_at_startup(self, rules: tuple[str, ...], why: str) -> None:
        with pytest.raises(SettingError, match=f"--cache-config: .*{why}"):
            Settings(cache_config=rules)


@pytest.mark.skipif(not PROGRAM.exists(), reason="perf_analyzer is not here: .ci/peers fetches it")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer_reports_cache_hits(live: Live, protocol: str) -> None:
    report = analyze(live, f"-i {protocol} -m simple")

    hits = re.findall(r"Cache hit count: (\d+)", report)
    assert hits, report
    assert int(hits[-1]) > 0


def test_the_trace_of_a_cache_hit_has_no_compute_timestamps(tmp_path: Path) -> None:
    models.write_identity(tmp_path / "models", "m", CACHED)
    rules = f"triton,file={tmp_path}/trace.json", "level=TIMESTAMPS", "rate=1"
    sent = [input_of("x", np.ones((1, 3), np.float32))]
    with (
        live_server(tmp_path / "models", cache_config=("local,size=10000",), trace_config=rules) as live,
        triton.InferenceServerClient(live.address) as client,
    ):
        for _ in range(2):
            client.infer("m", sent)
    stamps: dict[int, list[str]] = {}
    for entry in json.loads((tmp_path / "trace.json").read_text()):
        stamps.setdefault(entry["id"], []).extend(each["name"] for each in entry.get("timestamps", ()))

    assert [len(names) for names in stamps.values()] == [7, 3]
    assert list(stamps.values())[1] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
