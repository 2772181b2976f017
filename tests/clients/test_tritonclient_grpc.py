"""NVIDIA's gRPC client, sync, on grpcio's C core, against a live server: every public method of it."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from penstock.backends.backend import Array
from tests.clients import models
from tests.clients.client_errors import refused
from tests.clients.gated_onnxruntime import at_a_gate, cancelled, waiting
from tests.clients.tensors import VALUES, same, texts
from tests.fakes import Gate
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

ASCENDING = np.arange(16, dtype=np.int32).reshape(1, 16)
ONES = np.ones((1, 16), np.int32)
WAYS = [None, "gzip", "deflate"]
PATIENCE_S = 20.0
HOOKS = "def post_inference(prediction, signature, metadata):\n    return {'total': float(prediction[0].sum())}\n"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root: Path = tmp_path_factory.mktemp("repository")
    for write in (models.write_examples, models.write_identities, models.write_shapes):
        write(root)
    models.write_identity(root, "hooked", "")
    (root / "hooked" / "handler.py").write_text(HOOKS)
    (root / "hooked" / "penstock.toml").write_text('[hooks]\nfile = "handler.py"\n')
    with live_server(root, allow_client_shm=True, grpc_header_forward_pattern="my-.*") as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with triton.InferenceServerClient(live.grpc_address) as new_client:
        yield new_client


def input_of(name: str, array: Array, datatype: str = "") -> Any:
    kind = datatype or next(each for each, values in VALUES.items() if values.dtype == array.dtype)
    tensor = triton.InferInput(name, list(array.shape), kind)
    return tensor.set_data_from_numpy(array)


def pair(first: Array = ASCENDING, second: Array = ONES) -> list[Any]:
    return [input_of("INPUT0", first), input_of("INPUT1", second)]


def output_of(name: str, classes: int = 0) -> Any:
    return triton.InferRequestedOutput(name, class_count=classes)


class TestControlCalls:
    def test_health_calls_report_liveness_and_readiness(self, client: Any) -> None:
        assert client.is_server_live()
        assert client.is_server_ready(headers={"a": "b"}, client_timeout=PATIENCE_S)
        assert client.is_model_ready("simple")
        assert client.is_model_ready("versions", "2")
        assert not client.is_model_ready("wrong_model_name")
        assert not client.is_model_ready("simple", "7")

    def test_metadata_of_the_server_and_of_a_model_is_returned(self, client: Any) -> None:
        assert client.get_server_metadata().name == "triton"
        assert "statistics" in client.get_server_metadata(as_json=True)["extensions"]
        metadata = client.get_model_metadata("simple", as_json=True)
        assert metadata["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": ["-1", "16"]}
        assert list(client.get_model_metadata("versions").versions) == ["1", "2", "10"]

    def test_the_model_configuration_is_returned(self, client: Any) -> None:
        config = client.get_model_config("simple").config
        assert (config.max_batch_size, config.input[0].name, list(config.input[0].dims)) == (8, "INPUT0", [16])

    def test_statistics_and_repository_index_are_returned(self, client: Any) -> None:
        client.infer("simple_auto", pair())
        (one,) = client.get_inference_statistics("simple_auto").model_stats
        assert one.inference_count == one.inference_stats.success.count == one.inference_stats.queue.count > 0
        assert len(client.get_inference_statistics().model_stats) > 1
        index = client.get_model_repository_index(as_json=True)["models"]
        assert {"name": "simple", "version": "1", "state": "READY"} in index

    def test_errors_have_a_status_and_a_message(self, client: Any) -> None:
        unknown = ("StatusCode.NOT_FOUND", "Request for unknown model: 'nope' is not found")
        assert refused(client.get_model_metadata, "nope") == unknown
        assert refused(client.get_model_config, "nope") == unknown
        assert refused(client.infer, "nope", pair()) == unknown
        text = "requested model 'nope' is not available"
        assert refused(client.get_inference_statistics, "nope") == ("StatusCode.INVALID_ARGUMENT", text)
        refusal = refused(client.infer, "simple", [input_of("INPUT0", ASCENDING)], request_id="é")
        assert refusal[0] == "StatusCode.INVALID_ARGUMENT"
        assert refusal[1].startswith("[request id: é] expected 2 inputs but got 1 inputs for model 'simple'.")

    def test_load_and_unload_are_rejected_unless_model_control_is_explicit(self, client: Any) -> None:
        text = "explicit model load / unload is not allowed if polling is enabled"
        assert refused(client.load_model, "simple") == ("StatusCode.UNAVAILABLE", text)
        assert refused(client.unload_model, "simple", unload_dependents=True) == ("StatusCode.UNAVAILABLE", text)

    def test_trace_and_log_settings_are_read_and_changed(self, client: Any) -> None:
        assert list(client.get_trace_settings().settings["trace_rate"].value) == ["1000"]
        changed = client.update_trace_settings("simple", {"trace_rate": "7"}).settings
        assert list(changed["trace_rate"].value) == ["7"]
        assert list(client.get_trace_settings("simple").settings["trace_rate"].value) == ["7"]
        client.update_trace_settings("simple", {"trace_rate": None})
        assert list(client.get_trace_settings("simple").settings["trace_rate"].value) == ["1000"]
        assert client.update_log_settings({"log_verbose_level": 1}).settings["log_verbose_level"].uint32_param == 1
        assert client.update_log_settings({"log_verbose_level": 0}, as_json=True)
        assert client.get_log_settings().settings["log_info"].bool_param
        assert refused(client.update_log_settings, {"log_file": "x"})[0] == "StatusCode.UNIMPLEMENTED"

    def test_a_plugins_authorization_header_is_accepted(self, client: Any) -> None:
        client.register_plugin(BasicAuth("user", "secret"))
        try:
            assert client.plugin() is not None
            assert client.is_server_live()
        finally:
            client.unregister_plugin()


class TestInfer:
    @pytest.mark.parametrize("way", WAYS)
    def test_simple_adds_and_subtracts(self, client: Any, way: str | None) -> None:
        outputs = [output_of("OUTPUT1"), output_of("OUTPUT0")]
        for _ in range(2):
            result = client.infer(
                "simple", pair(), outputs=outputs, request_id="7", headers={"test": "1"}, compression_algorithm=way,
                client_timeout=PATIENCE_S, priority=1, timeout=10_000_000, parameters={"mine": "x", "more": 2},
            )  # fmt: skip
            assert (result.as_numpy("OUTPUT0") == ASCENDING + ONES).all()
            assert (result.as_numpy("OUTPUT1") == ASCENDING - ONES).all()
            assert result.get_response().id == "7"
            assert [output.name for output in result.get_response().outputs] == ["OUTPUT1", "OUTPUT0"]
            assert result.get_output("OUTPUT0").datatype == "INT32"

    @pytest.mark.parametrize("datatype", VALUES)
    def test_every_datatype_is_returned_unchanged(self, client: Any, datatype: str) -> None:
        array = VALUES[datatype]
        for values in (array, array[::-1].copy(), array[:1], array[:, :0].copy()):
            result = client.infer(f"identity_{datatype}", [input_of("x", values, datatype)])
            assert same(datatype, result.as_numpy("y"), values)

    def test_simple_string_adds_and_subtracts_numbers_in_strings(self, client: Any) -> None:
        words = np.array([[str(each).encode() for each in range(16)]], np.object_)
        result = client.infer("simple_string", [input_of("INPUT0", words, "BYTES"), input_of("INPUT1", words, "BYTES")])
        assert texts(result.as_numpy("OUTPUT0")) == [str(2 * each) for each in range(16)]

    def test_malformed_strings_are_rejected_repeatedly(self, client: Any) -> None:
        words = np.array([[b"a", b"b"]], np.object_)
        right = input_of("x", words, "BYTES")
        for count in range(3):
            assert texts(client.infer("identity_BYTES", [right]).as_numpy("y")) == ["a", "b"]
            wrong = input_of("x", words, "BYTES")
            wrong._raw_content = b"\1\0\0\0a" + b"\x99\0\0\0b"
            status, text = refused(client.infer, "identity_BYTES", [wrong], request_id=str(count))
            assert status == "StatusCode.INVALID_ARGUMENT"
            assert text.startswith(f"[request id: {count}] incomplete string data for inference input 'x'")

    def test_large_tensors_are_returned_unchanged(self, client: Any) -> None:
        large = np.arange(4 << 20, dtype=np.float32).reshape(1, -1)
        for _ in range(2):
            assert (client.infer("identity_FP32", [input_of("x", large)]).as_numpy("y") == large).all()

    def test_classification_returns_the_top_classes(self, client: Any) -> None:
        result = client.infer("simple", pair(), outputs=[output_of("OUTPUT0", classes=2), output_of("OUTPUT1")])
        assert texts(result.as_numpy("OUTPUT0")) == ["16:15", "15:14"]
        assert (result.as_numpy("OUTPUT1") == ASCENDING - ONES).all()

    def test_hooks_run_unless_bypassed(self, client: Any) -> None:
        row = np.array([[1, 2, 3]], np.float32)
        result = client.infer("hooked", [input_of("x", row)], request_id="h")
        assert (result.as_numpy("total").tolist(), result.get_response().id) == ([6.0], "h")
        bypassed = client.infer("hooked", [input_of("x", row)], parameters={"hooks": False})
        assert bypassed.as_numpy("y").tolist() == row.tolist()

    def test_a_forwarded_header_that_is_not_reserved_is_accepted(self, client: Any) -> None:
        result = client.infer("simple", pair(), headers={"my-name": "x"})

        assert np.array_equal(result.as_numpy("OUTPUT0"), client.infer("simple", pair()).as_numpy("OUTPUT0"))

    def test_a_model_without_sequences_ignores_sequence_parameters(self, client: Any) -> None:
        for sequence in (5, "five"):
            result = client.infer("simple", pair(), sequence_id=sequence, sequence_start=True, sequence_end=True)
            assert result.as_numpy("OUTPUT0") is not None

    def test_async_infer_calls_its_callback_with_each_result(self, client: Any) -> None:
        done: queue.Queue[Any] = queue.Queue()
        for number in range(20):
            client.async_infer(
                "simple", pair(second=ONES * number), lambda result, error: done.put((result, error)),
                request_id=str(number),
            )  # fmt: skip
        for _ in range(20):
            result, error = done.get(timeout=PATIENCE_S)
            assert error is None
            number = int(result.get_response().id)
            assert (result.as_numpy("OUTPUT0") == ASCENDING + number).all()


class TestStreams:
    @pytest.mark.parametrize("way", WAYS)
    def test_answers_arrive_in_order_and_errors_leave_the_stream_open(self, client: Any, way: str | None) -> None:
        done: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: done.put((result, error)), compression_algorithm=way)
        for number in range(30):
            name = "nope" if number % 10 == 3 else "hooked" if number % 10 == 5 else "simple"
            inputs = [input_of("x", np.ones((1, 3), np.float32))] if name == "hooked" else pair()
            client.async_stream_infer(name, inputs, request_id=str(number), enable_empty_final_response=True)
        client.stop_stream()
        for number in range(30):
            result, error = done.get(timeout=PATIENCE_S)
            if number % 10 == 3:
                assert "Request for unknown model: 'nope' is not found" in str(error)
                continue
            assert error is None
            response = result.get_response()
            assert response.id == str(number)
            assert response.parameters["triton_final_response"].bool_param

    def test_an_error_ends_the_stream_with_its_status_if_the_client_requests_grpc_errors(self, client: Any) -> None:
        done: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: done.put(error), headers={"triton_grpc_error": "true"})
        client.async_stream_infer("nope", pair())
        error = done.get(timeout=PATIENCE_S)
        assert error.status() == "StatusCode.NOT_FOUND"
        client.stop_stream()

    def test_a_stream_timeout_ends_the_stream_with_deadline_exceeded(self, live: Live) -> None:
        with triton.InferenceServerClient(live.grpc_address) as client:
            done: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error: done.put(error), stream_timeout=0.2)
            assert done.get(timeout=PATIENCE_S).status() == "StatusCode.DEADLINE_EXCEEDED"


class TestSharedMemory:
    @pytest.fixture
    def region(self) -> Iterator[Path]:
        path = Path("/dev/shm", f"grpc_test_{os.getpid()}")
        path.write_bytes(bytes(256))
        yield path
        path.unlink()

    def test_tensors_are_read_from_and_written_into_a_region(self, client: Any, region: Path) -> None:
        region.write_bytes(ASCENDING.tobytes() + ONES.tobytes() + bytes(128))
        client.register_system_shared_memory("r", "/" + region.name, 256)
        try:
            assert client.get_system_shared_memory_status("r").regions["r"].byte_size == 256
            inputs = [triton.InferInput(f"INPUT{at}", [1, 16], "INT32") for at in (0, 1)]
            outputs = [output_of("OUTPUT0"), output_of("OUTPUT1")]
            for at in (0, 1):
                inputs[at].set_shared_memory("r", 64, 64 * at)
            outputs[1].set_shared_memory("r", 64, 128)
            for _ in range(2):
                result = client.infer("simple", inputs, outputs=outputs)
                assert (result.as_numpy("OUTPUT0") == ASCENDING + ONES).all()
                assert [len(raw) for raw in result.get_response().raw_output_contents] == [64, 0]
            assert region.read_bytes()[128:192] == (ASCENDING - ONES).tobytes()
            mixed = [inputs[0], input_of("INPUT1", ONES)]
            assert (client.infer("simple", mixed).as_numpy("OUTPUT0") == ASCENDING + ONES).all()
            text = "shared memory region 'r' already in manager"
            again = refused(client.register_system_shared_memory, "r", "/" + region.name, 256)
            assert again == ("StatusCode.ALREADY_EXISTS", text)
        finally:
            client.unregister_system_shared_memory()
        assert not client.get_system_shared_memory_status(as_json=True).get("regions")
        assert refused(client.infer, "simple", inputs)[0] in {"StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT"}

    def test_cuda_regions_are_listed_and_unregistered(self, client: Any) -> None:
        assert not client.get_cuda_shared_memory_status().regions
        client.unregister_cuda_shared_memory()
        assert refused(client.register_cuda_shared_memory, "g", b"x" * 64, 0, 64)[0] != "StatusCode.INTERNAL"


def test_models_are_loaded_and_unloaded_in_explicit_mode(tmp_path: Path) -> None:
    models.write_identity(tmp_path, "one", "")
    with (
        live_server(tmp_path, model_control_mode="explicit") as live,
        triton.InferenceServerClient(live.grpc_address) as client,
    ):
        row = [input_of("x", np.ones((1, 2), np.float32))]
        assert not client.is_model_ready("one")
        client.load_model("one", config='{"max_batch_size": 3}')
        assert client.get_model_config("one").config.max_batch_size == 3
        assert client.infer("one", row).as_numpy("y") is not None
        content = (tmp_path / "one" / "1" / "model.onnx").read_bytes()
        client.load_model("one", config='{"backend": "onnxruntime"}', files={"file:5/model.onnx": content})
        assert client.infer("one", row).get_response().model_version == "5"
        client.unload_model("one")
        assert not client.is_model_ready("one")
        assert refused(client.infer, "one", row)[0] == "StatusCode.NOT_FOUND"
        assert refused(client.load_model, "no") == (
            "StatusCode.INTERNAL", "failed to load 'no', failed to poll from model repository",
        )  # fmt: skip


def test_no_request_fails_while_versions_are_replaced(tmp_path: Path) -> None:
    models.write_identity(tmp_path, "one", "")
    over, failed, counts = threading.Event(), [], {"unary": 0, "stream": 0}
    row = np.ones((1, 3), np.float32)

    def ask(address: str) -> None:
        with triton.InferenceServerClient(address) as client:
            while not over.is_set():
                for array in (row, np.ones((1, 100_000 + counts["unary"]), np.float32)):
                    try:
                        client.infer("one", [input_of("x", array)])
                        counts["unary"] += 1
                    except InferenceServerException as error:
                        failed.append(error)

    def stream(address: str) -> None:
        done: queue.Queue[Any] = queue.Queue()
        with triton.InferenceServerClient(address) as client:
            client.start_stream(lambda result, error: done.put(error))
            while not over.is_set():
                client.async_stream_infer("one", [input_of("x", row)])
                failed.extend(error for error in [done.get(timeout=PATIENCE_S)] if error)
                counts["stream"] += 1

    with live_server(tmp_path, model_control_mode="explicit", load_model=("one",)) as live:
        threads = [threading.Thread(target=each, args=(live.grpc_address,)) for each in (ask, stream)]
        for thread in threads:
            thread.start()
        with triton.InferenceServerClient(live.grpc_address) as client:
            for swap in range(10):
                client.load_model("one", config=f'{{"max_batch_size": {swap + 2}}}')
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)

    assert failed == []
    assert min(counts.values()) > 0


class TestDeadlinesAndCancellation:
    """Deadlines and cancellation, on a model that never finishes."""

    @pytest.fixture
    def gate(self) -> Gate:
        return Gate(list)

    @pytest.fixture
    def live(self, tmp_path: Path, gate: Gate) -> Iterator[Live]:
        yield from at_a_gate(tmp_path, gate)

    @pytest.fixture
    def row(self) -> list[Any]:
        return [input_of("x", np.ones((1, 2), np.float32))]

    def test_a_call_past_its_deadline_fails_with_deadline_exceeded(self, live: Live, row: list[Any]) -> None:
        with triton.InferenceServerClient(live.grpc_address) as client:
            status, text = refused(client.infer, "m", row, client_timeout=0.2)
            assert (status, text) == ("StatusCode.DEADLINE_EXCEEDED", "Deadline Exceeded")

    def test_a_canceled_request_leaves_the_queue(self, live: Live, gate: Gate, row: list[Any]) -> None:
        with triton.InferenceServerClient(live.grpc_address) as client:
            errors: queue.Queue[Any] = queue.Queue()
            first = client.async_infer("m", row, lambda result, error: errors.put(error))
            live.call(gate.entered())
            second = client.async_infer("m", row, lambda result, error: errors.put(error))
            live.call(waiting(live, 1))
            second.cancel()
            assert errors.get(timeout=PATIENCE_S).status() == "StatusCode.CANCELLED"
            live.call(waiting(live, 0))
            assert live.call(cancelled(live)) == 1
            gate.open()
            assert errors.get(timeout=PATIENCE_S) is None
            assert first is not None

    def test_a_canceled_stream_cancels_its_queued_requests(self, live: Live, gate: Gate, row: list[Any]) -> None:
        with triton.InferenceServerClient(live.grpc_address) as client:
            ended = threading.Event()
            client.start_stream(lambda result, error: ended.set())
            client.async_stream_infer("m", row)
            live.call(gate.entered())
            for _ in range(3):
                client.async_stream_infer("m", row)
            live.call(waiting(live, 3))
            client.stop_stream(cancel_requests=True)
            live.call(waiting(live, 0))
            assert live.call(cancelled(live)) == 3


def test_strings_serialized_by_the_client_library_are_decoded(client: Any) -> None:
    words = np.array([["a", "", "ü"]], np.object_)
    raw = triton.InferInput("x", [1, 3], "BYTES")
    raw._raw_content = serialize_byte_tensor(words).item()
    assert texts(client.infer("identity_BYTES", [raw]).as_numpy("y")) == ["a", "", "ü"]
