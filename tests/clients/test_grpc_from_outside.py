"""gRPC over clients that are not Python: curl, nghttp and h2load, from Debian's curl and nghttp2-client."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from penstock.perf import models
from penstock.perf.generator.orders import INFER
from penstock.perf.grpc import MANY, message
from tests.live import Live, live_server

SERVICE = INFER.rpartition("/")[0]
FIELDS = ("content-type: application/grpc", "te: trailers")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    models.make(root, {"iris": models.iris})
    with live_server(root) as server:
        yield server


@pytest.fixture
def body(tmp_path: Path) -> Path:
    return framed(tmp_path, b"")


def framed(folder: Path, content: bytes) -> Path:
    path = folder / "body"
    path.write_bytes(b"\0" + len(content).to_bytes(4, "big") + content)
    return path


def run(*words: str) -> bytes:
    if not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not installed")
    headers = [word for field in FIELDS for word in ("-H", field)]
    ended = subprocess.run([words[0], *headers, *words[1:]], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0, ended
    return ended.stdout


def test_curl_receives_a_message_and_its_trailers(live: Live, body: Path) -> None:
    url = f"http://{live.grpc_address}{SERVICE}/ServerLive"
    answer = run("curl", "-si", "--http2-prior-knowledge", "--data-binary", f"@{body}", url)

    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/2 200")
    assert b"content-type: application/grpc" in head
    assert service_pb2.ServerLiveResponse.FromString(rest[5 : 5 + rest[4]]).live
    assert b"grpc-status: 0" in rest


def test_curl_receives_an_error_in_a_trailers_only_response(live: Live) -> None:
    url = f"http://{live.grpc_address}{SERVICE}/Nothing"
    # without a body: the answer does not wait for it, and curl reports an error if it is answered before it was sent,
    # though the end of the stream says NO_ERROR, as RFC 9113 has it in 8.1
    answer = run("curl", "-si", "--http2-prior-knowledge", "--request", "POST", url)

    assert answer.startswith(b"HTTP/2 200")
    assert b"grpc-status: 12" in answer


def test_nghttp_ends_its_stream_and_its_connection_cleanly(live: Live, body: Path) -> None:
    output = run("nghttp", "-nv", f"--data={body}", f"http://{live.grpc_address}{SERVICE}/ServerReady")

    assert b"grpc-status: 0" in output
    assert b"GOAWAY" in output
    assert b"RST_STREAM" not in output


@pytest.mark.parametrize(("connections", "streams"), [(1, 1), (1, 100), (8, 8)])
def test_every_request_of_h2load_is_answered(live: Live, tmp_path: Path, connections: int, streams: int) -> None:
    path = framed(tmp_path, message(MANY))
    before = _served(live)
    words = ("-n2000", f"-c{connections}", f"-m{streams}", f"-d{path}", f"http://{live.grpc_address}{INFER}")
    output = run("h2load", *words)

    assert re.search(rb"2000 total, 2000 started, 2000 done, 2000 succeeded, 0 failed, 0 errored", output), output
    assert _served(live) - before == 2000


def _served(live: Live) -> int:
    return sum(model.statistics.snapshot().success.count for model in live.server.engine.models())
