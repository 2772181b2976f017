"""What went wrong in Triton, each as a test: its published CVEs, and its present limits.

Source: NVIDIA's bulletins and the commits after them, as published up to 2026.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import logging
import os
import signal
import socket
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from penstock.server.restricted import GRPC_CATEGORIES
from penstock.server.settings import Settings
from penstock.server.telemetry.logs import Logs
from tests.clients import models
from tests.clients.tensors import document
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

MOST_BYTES = 1 << 20
ONE = np.ones((1, 1, 1), np.float32)
TRAVERSALS = (
    "..",
    "../escaped",
    "a/../../escaped",
    "/etc/passwd",
    "..\\escaped",
    "a\0b",
    "",
    ".",
    ".hidden",
    "a" * 256,
)
INTERNAL = ("Traceback", "/work", "/tmp", "/dev/shm", "site-packages", ".py", "penstock/", " at 0x")
"""What no answer may contain: paths on this machine and details of the implementation."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lessons") / "repository"
    models.write_shapes(root)
    models.write_identity(root, "words", "", "BYTES")
    return root


@pytest.fixture(scope="module")
def live(root: Path) -> Iterator[Live]:
    """A server that allows everything that can be allowed over the network."""
    with live_server(
        root, model_control_mode="explicit", load_model=("*",), allow_client_shm=True, http_max_input_size=MOST_BYTES,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(autouse=True)
def unharmed(live: Live) -> Iterator[None]:
    """After each case the server is live, serves, and has no request in progress."""
    yield
    assert httpx.get(f"{live.url}/v2/health/live", verify=False).status_code == 200
    assert infer(live, document(ONE)).status_code == 200
    assert live.server.engine.inflight == 0


def post(live: Live, path: str, body: Any = None, **headers: str) -> httpx.Response:
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return httpx.post(live.url + path, content=raw, headers=headers, timeout=10, verify=False)


def infer(live: Live, body: Any, model: str = "free", **headers: str) -> httpx.Response:
    return post(live, f"/v2/models/{model}/infer", body, **headers)


def entry(**changes: Any) -> Mapping[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1, 1], "data": [1.0], **changes}]}


def refused(answer: httpx.Response, *statuses: int) -> str:
    """Check that a request was rejected as a client error without internal details; return the text."""
    assert answer.status_code in (statuses or (400,)), answer.text
    text: str = answer.json()["error"]
    assert not [word for word in INTERNAL if word in text], text
    return text


def talk(live: Live, *pieces: bytes) -> bytes:
    """Send raw bytes, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", live.http_port), 30) as sock:
        found = b""
        try:
            for piece in pieces:
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has closed already, and its answer can be read
        try:
            while part := sock.recv(1 << 16):
                found += part
        except ConnectionResetError:
            pass
    return found


@pytest.fixture
def shared() -> Iterator[Path]:
    """A shared memory object of 64 bytes; its name is its key."""
    path = Path("/dev/shm") / f"lessons_{uuid.uuid4().hex}"
    path.write_bytes(bytes(64))
    yield path
    path.unlink(missing_ok=True)


def register(live: Live, name: str, key: str, offset: int = 0, byte_size: int = 64) -> httpx.Response:
    body = {"key": key, "offset": offset, "byte_size": byte_size}
    return post(live, f"/v2/systemsharedmemory/region/{quote(name, safe='')}/register", body)


# -- CVE-2023-31036, 2026-24208, 2026-24209: path traversal ----------------------------------------------------


@pytest.mark.parametrize("name", TRAVERSALS)
def test_a_model_name_cannot_lead_out_of_the_repository(live: Live, name: str) -> None:
    for verb in ("load", "unload"):
        answer = post(live, f"/v2/repository/models/{quote(name, safe='')}/{verb}")
        refused(answer, 400, 404)
    with grpc_client.InferenceServerClient(live.grpc_address) as client:
        with pytest.raises(InferenceServerException) as raised:
            client.load_model(name)
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "name", [*TRAVERSALS[:8], "1/../../../escaped", "1/" + "b" * 256, "config.pbtxt", "1", "penstock.toml"]
)
def test_an_uploaded_file_cannot_lead_out_of_the_model_folder(live: Live, root: Path, name: str) -> None:
    before = sorted(path for path in root.parent.rglob("*"))
    files = {"config": "{}", f"file:{name}": base64.b64encode(b"x").decode(), "file:1/model.onnx": "eA=="}
    refused(post(live, "/v2/repository/models/uploaded/load", {"parameters": files}))

    assert sorted(path for path in root.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "key", ["/../etc/passwd", "../../etc/passwd", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "/" * 9]
)
def test_a_shared_memory_key_cannot_name_another_file(live: Live, key: str) -> None:
    refused(register(live, "region", key))


@pytest.mark.parametrize(
    "path", ["/v2/models/..%2f..%2fetc%2fpasswd", "/v2/models/%2e%2e/config", "/v2/../../etc/passwd"]
)
def test_a_path_on_the_control_plane_cannot_reach_a_file(live: Live, path: str) -> None:
    answer = talk(live, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())

    assert answer.split(b" ", 2)[1] == b"404"
    assert b"root:" not in answer


# -- CVE-2024-0087, 2024-0100: the network chose where logs and traces were written ----------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v2/logging", "log_file"), ("/v2/trace/setting", "trace_file"), ("/v2/models/free/trace/setting", "trace_file")],
)
def test_a_client_cannot_change_the_log_file_or_the_trace_file(
    live: Live, tmp_path: Path, path: str, name: str
) -> None:
    answer = post(live, path, {name: str(tmp_path / "written")})

    assert answer.status_code == 501
    assert answer.json()["error"].endswith("file location can not be updated through network protocol")
    with grpc_client.InferenceServerClient(live.grpc_address) as client:
        change = client.update_log_settings if name == "log_file" else client.update_trace_settings
        with pytest.raises(InferenceServerException) as raised:
            change(settings={name: str(tmp_path / "written")})
        assert raised.value.status() == "StatusCode.UNIMPLEMENTED"
    assert list(tmp_path.iterdir()) == []


# -- CVE-2024-0088, 2024-0116, 2026-24173: shared memory and integers that overflow ----------------------------


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [
        (0, 65),
        (64, 1),
        (1, 64),
        (-1, 8),
        (0, -8),
        (0, 0),
        (2**63, 8),
        (2**64 - 8, 16),
        (8, 2**64 - 8),
        (2**64, 1),
        (0, 2**70),
    ],
)
def test_a_region_outside_its_shared_memory_file_is_rejected(
    live: Live, shared: Path, offset: int, byte_size: int
) -> None:
    refused(register(live, "region", shared.name, offset, byte_size))


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [(64, 4), (61, 4), (0, 65), (-4, 4), (2**63 - 1, 4), (2**64 - 4, 8), (4, 2**64 - 4), (0, 2**63)],
)
def test_a_tensor_outside_its_shared_memory_region_is_rejected(
    live: Live, shared: Path, offset: int, byte_size: int
) -> None:
    assert register(live, "region", shared.name).status_code == 200
    try:
        where = {"shared_memory_region": "region", "shared_memory_offset": offset, "shared_memory_byte_size": byte_size}
        tensor = entry()
        refused(infer(live, {"inputs": [{**entry(parameters=where)["inputs"][0], "data": None}]}))
        refused(infer(live, {**tensor, "outputs": [{"name": "y", "parameters": where}]}))
    finally:
        post(live, "/v2/systemsharedmemory/unregister")


def test_a_region_may_be_unregistered_while_requests_use_it(live: Live, shared: Path) -> None:
    where = {"shared_memory_region": "region", "shared_memory_byte_size": 4}
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1, 1], "parameters": where}]}

    def ask(_: int) -> int:
        return infer(live, body).status_code

    with ThreadPoolExecutor(4) as pool:
        results = pool.map(ask, range(40))
        for _ in range(20):
            register(live, "region", shared.name)
            post(live, "/v2/systemsharedmemory/region/region/unregister")
        statuses = set(results)
    post(live, "/v2/systemsharedmemory/unregister")

    assert statuses <= {200, 400, 404}


def test_a_shared_memory_file_that_shrinks_fails_only_the_request(live: Live, shared: Path) -> None:
    assert register(live, "region", shared.name).status_code == 200
    os.truncate(shared, 2)
    where = {"shared_memory_region": "region", "shared_memory_byte_size": 4}
    try:
        text = refused(
            infer(live, {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1, 1], "parameters": where}]})
        )
        refused(infer(live, {**entry(), "outputs": [{"name": "y", "parameters": where}]}))
    finally:
        post(live, "/v2/systemsharedmemory/unregister")

    assert "region" in text
    assert shared.stat().st_size == 2


# -- CVE-2024-0095: log injection ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["x\n2026-01-01T00:00:00.000Z ERROR serve: forged", "x\x1b[2J", "x\u2028y", "x\u202ey", "x\r\nforged"]
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_name_sent_by_a_client_cannot_forge_a_log_line(live: Live, name: str, form: str) -> None:
    stream = io.StringIO()
    logs = Logs(Settings(log_format=form, log_verbose=9), stream)
    logs.start()
    try:
        post(live, f"/v2/repository/models/{quote(name, safe='')}/load")
        infer(live, document(ONE), quote(name, safe=""))
        logging.getLogger("penstock.test").error("model '%s' failed", name, extra={"request_id": name})
    finally:
        logs.stop()
    lines = stream.getvalue().split("\n")[:-1]

    assert lines
    for line in lines:
        assert line.startswith("{" if form == "json" else "20"), line
        assert line.isprintable()
    assert not [line for line in lines if line.startswith("2026-01-01")]


def test_a_name_sent_by_a_client_cannot_forge_a_response_header(live: Live) -> None:
    answer = talk(live, b"GET /v2/models/x%0d%0aset-cookie:%20a=b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")

    assert b"set-cookie" not in answer.split(b"\r\n\r\n")[0].lower()


# -- CVE-2024-53880: the size of a file to be loaded overflowed ------------------------------------------------


def test_the_size_of_a_load_request_is_limited_before_its_base64_is_decoded(live: Live) -> None:
    body = {"parameters": {"config": "{}", "file:1/model.onnx": "A" * (2 * MOST_BYTES)}}

    assert "exceeds the maximum" in refused(post(live, "/v2/repository/models/uploaded/load", body))


@pytest.mark.parametrize("text", ["A", "A===", "????", "QUJD\n", "é", "QQ=" * 9])
def test_an_uploaded_file_with_invalid_base64_is_rejected(live: Live, text: str) -> None:
    body = {"parameters": {"config": "{}", "file:1/model.onnx": text}}

    refused(post(live, "/v2/repository/models/uploaded/load", body))


# -- CVE-2025-23310, 2025-23311: a stack array as long as the number of chunks ---------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/models/free/infer",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/repository/models/free/load",
    ],
)
def test_the_number_of_chunks_is_limited_at_every_endpoint(live: Live, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    answer = talk(live, head, b"1\r\n \r\n" * 70_000, b"0\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 400 ")


# -- CVE-2025-23319, 23320, 23334: an error named an internal region, which could then be registered ------------


def test_error_messages_contain_no_internal_details(live: Live) -> None:
    big = json.dumps(entry(data=[1.0] * (MOST_BYTES // 4))).encode()
    refused(infer(live, big))
    refused(infer(live, entry(), "quotient"))
    refused(register(live, "region", "no_such_object"), 400, 404)
    refused(
        infer(live, {**entry(), "outputs": [{"name": "y", "parameters": {"shared_memory_region": "none"}}]}), 400, 404
    )


@pytest.mark.parametrize("name", ["triton_python_backend_shm_region_1", "penstock_x", "sem.x"])
def test_reserved_region_names_and_keys_are_rejected(live: Live, shared: Path, name: str) -> None:
    refused(register(live, name, shared.name))
    refused(register(live, "region", "/" + name))


def test_shared_memory_is_off_by_default(root: Path, shared: Path) -> None:
    with live_server(root, model_control_mode="explicit") as without_regions:
        assert register(without_regions, "region", shared.name).status_code == 501
        answer = post(without_regions, "/v2/systemsharedmemory/region/region/unregister")
        assert answer.status_code in {200, 501}
        with grpc_client.InferenceServerClient(without_regions.grpc_address) as client:
            with pytest.raises(InferenceServerException) as raised:
                client.register_system_shared_memory("region", "/" + shared.name, 64)
            assert raised.value.status() == "StatusCode.UNIMPLEMENTED"


# -- CVE-2025-23316 to 23336: recursion, allocation, division, cancelling, misconfigured loads ------------------


@pytest.mark.parametrize("depth", [101, 5_000, 100_000])
@pytest.mark.parametrize(
    "path", ["/v2/models/free/infer", "/v2/repository/index", "/v2/logging", "/v2/repository/models/free/load"]
)
def test_json_nested_too_deeply_is_rejected_at_every_endpoint(live: Live, depth: int, path: str) -> None:
    refused(post(live, path, b'{"inputs":' + b"[" * depth + b"]" * depth + b"}"))


@pytest.mark.parametrize(
    "shape",
    [[2**31, 2**31, 4], [2**62, 2, 2], [2**32, 2**32, 0], [2**63, 1, 1], [10**30, 1, 1], [-1, 1, 1],
     [1, -1, -1], [1e9, 1, 1], [True, 1, 1], [1] * 100_000, [2**40, 1, 1]],
)  # fmt: skip
def test_an_overflowing_or_invalid_shape_is_rejected(live: Live, shape: list[Any]) -> None:
    refused(infer(live, entry(shape=shape)))
    assert infer(live, {"inputs": [{**entry(shape=shape)["inputs"][0], "data": []}]}).status_code == 400


@pytest.mark.parametrize("shape", [[0, 1, 1], [1, 0, 1], [0, 0, 0]])
def test_tensors_without_elements_cause_no_division_by_zero(live: Live, shape: list[int]) -> None:
    answer = infer(live, entry(shape=shape, data=[]))

    assert answer.status_code == 200
    assert answer.json()["outputs"][0]["shape"] == shape


def test_cancelled_requests_are_released_exactly_once(live: Live) -> None:
    with grpc.insecure_channel(live.grpc_address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        tensor = grpc_client.InferInput("x", [1, 1, 1], "FP32")
        tensor.set_data_from_numpy(ONE)
        message = grpc_client.service_pb2.ModelInferRequest(
            model_name="free", inputs=[tensor._get_tensor()], raw_input_contents=[ONE.tobytes()]
        ).SerializeToString()
        for _ in range(300):
            call.future(message).cancel()
        assert call(message, timeout=30)
    body = json.dumps(document(ONE)).encode()
    head = b"POST /v2/models/free/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", live.http_port), 30) as sock:
            sock.sendall(head + body)


@pytest.mark.parametrize(
    "config",
    ["null", "[]", "{", "[" * 5_000, '{"a":' * 5_000, '{"max_batch_size": 1e99}', '{"max_batch_size": -1}',
     '{"input": [{"name": "x", "dims": [0]}]}', '{"no_such_field": 1}',
     '{"instance_group": [{"count": 2147483647}]}', '{"instance_group": [{"count": 1025}]}', '{"name": "other"}',
     '{"default_model_filename": "../../x"}', '{"backend": "python"}', '{"parameters": {"a": 1}}',
     '{"cc_model_filenames": {"a": "/etc/passwd"}}',
     '{"output": [{"name": "y", "label_filename": "../../../etc/passwd"}]}'],
)  # fmt: skip
def test_an_invalid_configuration_in_a_load_request_is_rejected(live: Live, config: str) -> None:
    answer = post(live, "/v2/repository/models/free/load", {"parameters": {"config": config}})

    assert answer.status_code in {400, 500}
    assert not [word for word in ("Traceback", "site-packages", "lessons") if word in answer.text]


# -- CVE-2025-33201, 33211: large payloads and bad quantities ---------------------------------------------------


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("path", ["/v2/models/free/infer", "/v2/models/free/predict"])
def test_the_size_limit_applies_to_the_decompressed_body(live: Live, coding: str, path: str) -> None:
    import zlib

    plain = b" " * (64 << 20)
    packed = gzip.compress(plain, 9) if coding == "gzip" else zlib.compress(plain, 9)
    assert len(packed) < MOST_BYTES
    refused(post(live, path, packed, **{"content-encoding": coding}))


@pytest.mark.parametrize("size", [-1, -(2**63), 3, 5, 2**31, 2**63, 2**64, 2**64 + 4, 1.5, "4", True, None])
def test_an_invalid_binary_data_size_is_rejected(live: Live, size: Any) -> None:
    text = json.dumps({"inputs": [{**entry()["inputs"][0], "data": None, "parameters": {"binary_data_size": size}}]})
    body = text.replace('"data": null, ', "").encode()
    refused(infer(live, body + bytes(4), **{"inference-header-content-length": str(len(body))}))


@pytest.mark.parametrize("length", ["-1", "18446744073709551615", "99999999999999999999", "1e3", "0x10", "+5"])
def test_an_invalid_inference_header_content_length_is_rejected(live: Live, length: str) -> None:
    refused(infer(live, document(ONE), **{"inference-header-content-length": length}))


@pytest.mark.parametrize("words", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x80abcd", b"\x05\x00\x00\x00abc", b"\x01", b""])
def test_a_binary_string_of_another_length_than_its_prefix_is_rejected(live: Live, words: bytes) -> None:
    body = {
        "inputs": [{"name": "x", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(words)}}]
    }
    text = json.dumps(body).encode()
    refused(infer(live, text + words, "words", **{"inference-header-content-length": str(len(text))}))


# -- CVE-2026-24173: integers of a malformed request -----------------------------------------------------------


@pytest.mark.parametrize("value", [2**64, 2**200, -(2**63) - 1, 10**300])
@pytest.mark.parametrize("name", ["timeout", "priority", "sequence_id"])
def test_integer_parameters_beyond_64_bits_are_rejected(live: Live, name: str, value: int) -> None:
    refused(infer(live, {**document(ONE), "parameters": {name: value}}), 400, 501)


@pytest.mark.parametrize("value", [2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)])
@pytest.mark.parametrize("name", ["timeout", "priority", "sequence_id"])
def test_integer_parameters_are_accepted_up_to_64_bits_and_rejected_below_zero(
    live: Live, name: str, value: int
) -> None:
    assert infer(live, {**document(ONE), "parameters": {name: value}}).status_code == (200 if value > 0 else 400)


@pytest.mark.parametrize("version", ["9223372036854775808", "99999999999999999999999", "0" * 5000 + "9"])
def test_a_version_number_that_is_too_large_is_rejected(live: Live, version: str) -> None:
    refused(httpx.get(f"{live.url}/v2/models/free/versions/{version}"), 400, 404)


@pytest.mark.parametrize(
    ("changes", "raw"),
    [
        ({"shape": [2**62, 2, 2]}, [bytes(4)]), ({"shape": [-1, 1, 1]}, [bytes(4)]),
        ({"shape": [2**31, 2**31, 4]}, [b""]),
        ({"shape": [1] * 10_000}, [bytes(4)]), ({}, [bytes(3)]), ({}, [bytes(2**16)]), ({}, [bytes(4)] * 1000),
        ({}, []), ({"datatype": "BYTES"}, [b"\xff\xff\xff\xff"]), ({"name": "\0"}, [bytes(4)]),
        ({"name": "x" * 10**5}, [bytes(4)]),
    ],
)  # fmt: skip
def test_a_malformed_grpc_request_is_an_invalid_argument_with_a_short_message(
    live: Live, changes: dict[str, Any], raw: list[bytes]
) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1, 1], **changes}
    message = grpc_client.service_pb2.ModelInferRequest(model_name="free", inputs=[tensor], raw_input_contents=raw)
    with grpc.insecure_channel(live.grpc_address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as raised:
            call(message.SerializeToString(), timeout=30)

    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(raised.value.details()) < 10_000
    assert not [word for word in INTERNAL if word in raised.value.details()]


def test_bytes_that_are_not_a_protobuf_message_are_rejected_at_every_rpc(live: Live) -> None:
    with grpc.insecure_channel(live.grpc_address) as channel:
        for path in GRPC_CATEGORIES:
            if path.endswith(("ModelStreamInfer", "Watch")):
                continue
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(path)(b"\xff\xff\xff garbage", timeout=30)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT, path
            assert not [word for word in INTERNAL if word in raised.value.details()]


# -- CVE-2026-24207: authentication bypass ---------------------------------------------------------------------


def test_a_restricted_rpc_requires_the_exact_header_and_value(root: Path) -> None:
    with (
        live_server(root, grpc_restricted_protocol=("inference,health,model-repository:key=secret",)) as guarded,
        grpc_client.InferenceServerClient(guarded.grpc_address) as client,
    ):
        for headers in (
            None,
            {"key": "secret"},
            {"triton-grpc-protocol-key": "Secret"},
            {"triton-grpc-protocol-key": ""},
        ):
            with pytest.raises(InferenceServerException) as raised:
                client.is_server_live(headers=headers)
            assert raised.value.status() == "StatusCode.UNAVAILABLE"
            assert raised.value.message() == "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
        assert client.is_server_live(headers={"triton-grpc-protocol-key": "secret"})
        assert client.get_server_metadata().name


# -- later commits in Triton -----------------------------------------------------------------------------------


def test_classification_rejects_invalid_class_counts_and_string_outputs(live: Live) -> None:
    for classes in (10**6 + 1, 2**63, -1, "3"):
        parameters = {"classification": classes}
        answer = infer(live, {**entry(), "outputs": [{"name": "y", "parameters": parameters}]})
        assert answer.status_code == 400, (classes, answer.text)
    words = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}]}
    refused(infer(live, {**words, "outputs": [{"name": "y", "parameters": {"classification": 1}}]}, "words"))


def test_a_request_that_names_an_output_twice_is_rejected(live: Live) -> None:
    answer = infer(live, {**entry(), "outputs": [{"name": "y"}, {"name": "y"}]})

    assert refused(answer).endswith("Duplicate output name 'y' is not allowed in a request")


@pytest.mark.parametrize("name", ["triton_anything", "triton_final_response"])
def test_reserved_request_parameters_are_rejected(live: Live, name: str) -> None:
    refused(infer(live, {**document(ONE), "parameters": {name: True}}))


def test_sigpipe_is_ignored_when_a_client_disconnects(live: Live) -> None:
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", live.http_port), 30) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 20)


def test_truncated_json_is_rejected(live: Live) -> None:
    body = json.dumps(document(ONE)).encode()
    for end in range(0, len(body), 3):
        refused(infer(live, body[:end]))


def test_a_batch_larger_than_the_maximum_of_the_model_is_rejected(live: Live) -> None:
    refused(infer(live, entry(shape=[5000, 1, 1], data=[0.0] * 5000)))


# -- limits (6b) -----------------------------------------------------------------------------------------------


def test_default_settings_are_safer_than_the_defaults_of_triton() -> None:
    settings = Settings()

    assert (settings.http_address, settings.grpc_address) == ("127.0.0.1", "127.0.0.1")
    assert settings.http_max_input_size == 64 << 20
    assert (settings.http_max_json_depth, settings.http_max_chunks) == (100, 65536)
    assert settings.allow_client_shm is False
    assert settings.model_control_mode == "none"


def test_every_queue_has_a_limit_by_default(live: Live) -> None:
    rooms = [model.scheduler.limits for model in live.server.engine.models()]

    assert rooms
    assert all(room.max_rows > 0 and room.nbytes_ceiling >= room.max_nbytes > 0 for room in rooms)


def test_an_internal_error_is_answered_with_an_id_and_no_details(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("/secret/place of the inside")

    monkeypatch.setattr(live.server.engine, "submit", broken)
    answer = infer(live, document(ONE))
    monkeypatch.undo()

    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert " id " in answer.json()["error"]
