"""Connections to a draining server, as clients and probes see them: HTTP and gRPC, with and without front ends."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from penstock.batching.registry import STOPPING_MESSAGE
from penstock.server.grpc.request import SHUTTING_DOWN
from penstock.server.health import EXITING
from tests.live import Live, live_server
from tests.server.fronts.live_fronts import LiveFronts, live_front
from tests.server.test_serve import BODY, Gate, wait_until_turned_away, write_models

pytestmark = pytest.mark.slow

INFER = "/v2/models/a/infer"
SERVED: dict[str, Callable[..., AbstractContextManager[Any]]] = {"one process": live_server, "front ends": live_front}


class Draining:
    """A server that drains, and waits for one request accepted earlier."""

    def __init__(self, live: Live, gate: Gate) -> None:
        self.live = live
        self.gate = gate
        gate.entered.clear()
        gate.open.clear()
        self.early = asyncio.run_coroutine_threadsafe(asyncio.to_thread(self.ask), live.loop)
        assert gate.entered.wait(10)
        part = live.fronts[0] if isinstance(live, LiveFronts) else live.server
        self.drained: Any = asyncio.run_coroutine_threadsafe(part.drain(), live.loop)
        wait_until_turned_away(live.http_port)

    def ask(self) -> httpx.Response:
        return httpx.post(self.live.url + INFER, content=BODY, timeout=30)

    def finish(self) -> None:
        """Let the accepted request finish, and with it the server."""
        self.gate.open.set()
        answer = self.early.result(30)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert self.drained.result(30) == 0


@pytest.fixture(params=SERVED)
def draining(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Draining]:
    gate = Gate()
    with SERVED[request.param](write_models(tmp_path, "a"), loaders=gate.loaders) as live:
        found = Draining(live, gate)
        yield found
        gate.open.set()


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    except ConnectionRefusedError:
        return True
    return False


def test_http_requests_while_draining_are_answered_503_with_reason_and_retry_after(draining: Draining) -> None:
    texts = {INFER: STOPPING_MESSAGE, "/v2/repository/models/a/load": EXITING, "/v2/models/a/generate": EXITING}
    for path, text in texts.items():
        answer = httpx.post(draining.live.url + path, content=BODY)

        assert (answer.status_code, answer.json()) == (503, {"error": text})
        assert (answer.headers["connection"], answer.headers["retry-after"]) == ("close", "1")
    assert not draining.drained.done()
    draining.finish()


def test_a_client_that_sends_a_large_body_while_draining_receives_the_503_answer(draining: Draining) -> None:
    answer = httpx.post(draining.live.url + INFER, content=b" " * (8 << 20))

    assert answer.status_code == 503
    draining.finish()


def test_probes_fail_while_draining_and_read_only_requests_are_answered(draining: Draining) -> None:
    paths = {"/v2/health/live": 503, "/v2/health/ready": 503, "/v2": 200, "/v2/models/a/stats": 200}

    assert {path: httpx.get(draining.live.url + path).status_code for path in paths} == paths
    with grpc.insecure_channel(draining.live.grpc_address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=10) == b"\x08\x02"  # NOT_SERVING
    with triton.InferenceServerClient(draining.live.grpc_address) as client:
        assert (client.is_server_live(), client.is_server_ready()) == (False, False)
        assert client.get_server_metadata().name == "triton"
    draining.finish()


def test_grpc_calls_while_draining_are_unavailable_with_the_reason(draining: Draining) -> None:
    tensor = triton.InferInput("x", [1, 2], "FP32")
    tensor._raw_content = bytes(8)
    for _ in range(3):
        with triton.InferenceServerClient(draining.live.grpc_address) as client:
            for ask in (partial(client.infer, "a", [tensor]), partial(client.load_model, "a")):
                with pytest.raises(InferenceServerException) as caught:
                    ask()
                assert (caught.value.status(), caught.value.message()) == ("StatusCode.UNAVAILABLE", SHUTTING_DOWN)
    assert not draining.drained.done()
    draining.finish()


def test_the_ports_close_after_the_last_request_even_if_idle_clients_stay_connected(draining: Draining) -> None:
    live = draining.live
    idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for port in (live.http_port, live.grpc_port)]
    draining.finish()

    assert refused(live.http_port)
    assert refused(live.grpc_port)
    for each in idle:
        each.close()


@pytest.mark.parametrize("served", SERVED)
def test_a_drain_without_requests_in_progress_ends_at_once(served: str, tmp_path: Path) -> None:
    with SERVED[served](write_models(tmp_path, "a"), loaders=Gate().loaders) as live:
        part = live.fronts[0] if isinstance(live, LiveFronts) else live.server
        start_s = time.monotonic()
        assert live.call(part.drain()) == 0
        took_s = time.monotonic() - start_s

    assert took_s < 0.4
