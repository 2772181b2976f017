"""Latency targets and overload over HTTP and gRPC: when clients may retry, and how they set a target."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.server.errors import pushback_ms, retry_after_s
from penstock.server.grpc.method import Status
from tests import live
from tests.fakes import FakeBackend, fake_loader, fake_model
from tests.server.grpc.echo_server import Live, served
from tests.server.http.lane import request, run
from tests.server.http2.wire import ECHO
from tests.server.repository.folders import make, native
from tests.server.v2.rpc.calls import Services
from tests.server.v2.rpc.calls import request as rpc_request
from tests.server.v2.test_inference import BODY, PATH, Served

PATIENCE_S = 20
TRIES = 50
MS = 1_000_000
LATE = "the answer would be late"


class TestRetryDelays:
    @pytest.mark.parametrize(
        ("code", "after_ns", "seconds"),
        [
            (Code.OVERLOADED, 0, 1),
            (Code.OVERLOADED, 1, 1),
            (Code.OVERLOADED, 1000 * MS, 1),
            (Code.OVERLOADED, 1001 * MS, 2),
            (Code.EXPIRED, 1, 1),
            (Code.EXPIRED, 0, 0),
            (Code.NOT_READY, 0, 1),
            (Code.NOT_READY, -1, 0),
            (Code.INVALID, 0, 0),
            (Code.INTERNAL, 0, 0),
        ],
    )
    def test_the_http_retry_after_is_in_whole_seconds_and_at_least_one(
        self, code: Code, after_ns: int, seconds: int
    ) -> None:
        assert retry_after_s(InferError(code, "", after_ns)) == seconds

    @pytest.mark.parametrize(
        ("code", "after_ns", "ms"),
        [
            (Code.OVERLOADED, 0, 0),
            (Code.OVERLOADED, 1, 1),
            (Code.EXPIRED, 20 * MS, 20),
            (Code.NOT_READY, -1, -1),
            (Code.EXPIRED, 0, 0),
        ],
    )
    def test_the_grpc_pushback_is_in_milliseconds_and_zero_if_unknown(self, code: Code, after_ns: int, ms: int) -> None:
        assert pushback_ms(InferError(code, "", after_ns)) == ms


class TestHttp:
    @pytest.mark.parametrize("code", [Code.OVERLOADED, Code.EXPIRED, Code.NOT_READY])
    def test_a_request_rejected_on_submission_has_a_retry_after_header(self, code: Code) -> None:
        async def main() -> None:
            http = Served()
            http.engine.failure = InferError(code, LATE, 2500 * MS)
            [answer] = await http.fed(request(PATH, BODY))

            assert (answer.status, json.loads(answer.body)) == (503, {"error": LATE})
            assert answer.headers["retry-after"] == "3"

        run(main)

    @pytest.mark.parametrize("size", [0, 100_000])
    def test_a_request_that_would_be_late_is_rejected_before_its_body_is_decoded(self, size: int) -> None:
        async def main() -> None:
            http = Served()
            http.engine.loaded = [targeted()]
            await http.fed(request(PATH, BODY))
            http.engine.let_go()
            http.transport.written.clear()
            http.engine.refusal = InferError(Code.OVERLOADED, LATE, 2500 * MS)
            [answer] = await http.fed(request(PATH, b"no JSON" + bytes(size)))

            assert (answer.status, json.loads(answer.body)) == (503, {"error": LATE})
            assert answer.headers["retry-after"] == "3"

        run(main)

    def test_an_invalid_request_has_no_retry_after_header(self) -> None:
        async def main() -> None:
            [answer] = await Served().fed(request(PATH, b"{}"))

            assert answer.status == 400
            assert "retry-after" not in answer.headers

        run(main)

    def test_the_latency_target_parameter_sets_the_target_of_a_request(self) -> None:
        async def main() -> None:
            http = Served()
            body = json.dumps({**json.loads(BODY), "parameters": {"latency_target_ms": 50}}).encode()
            before_ns = time.monotonic_ns()
            await http.fed(request(PATH, body))
            [held] = http.engine.held

            assert before_ns + 50 * MS <= held.target_ns <= time.monotonic_ns() + 50 * MS
            assert held.deadline_ns == 0

        run(main)

    def test_a_request_without_the_parameter_has_no_target_of_its_own(self) -> None:
        async def main() -> None:
            http = Served()
            await http.fed(request(PATH, BODY))

            assert http.engine.held[0].target_ns == 0

        run(main)


class TestGrpcRequests:
    def test_the_deadline_of_a_call_is_the_target_of_its_request(self) -> None:
        services = Services()
        for _ in range(2):
            services.call("ModelInfer", rpc_request(), deadline_ns=123)

        assert [held.target_ns for held in services.engine.held] == [123, 123]

    def test_the_earlier_of_deadline_and_parameter_is_the_target(self) -> None:
        services = Services()
        message = rpc_request()
        message.parameters["latency_target_ms"].double_param = 0.5
        for deadline_ns in (1, time.monotonic_ns() + 3600 * 1000 * MS, 0):
            services.call("ModelInfer", message, deadline_ns=deadline_ns)

        first, second, third = (held.target_ns for held in services.engine.held)
        assert first == 1
        assert 0 < second <= third <= time.monotonic_ns() + MS

    @pytest.mark.parametrize("known", [False, True])
    def test_a_request_that_would_be_late_is_rejected_before_its_tensors_are_decoded(self, known: bool) -> None:
        services = Services(targeted())
        if known:
            services.call("ModelInfer", rpc_request())
        services.engine.refusal = InferError(Code.OVERLOADED, LATE, 20 * MS)
        call = services.call("ModelInfer", rpc_request(np.zeros((1, 3), np.float32)))

        assert (call.status, call.text, call.pushback_ms) == (Status.UNAVAILABLE, LATE, 20)

    def test_a_request_rejected_on_submission_has_a_pushback(self) -> None:
        services = Services()
        services.engine.failure = InferError(Code.OVERLOADED, LATE, 20 * MS)
        call = services.call("ModelInfer", rpc_request())

        assert (call.text, call.pushback_ms) == (LATE, 20)


class TestGrpcClients:
    @pytest.fixture
    def live(self) -> Iterator[Live]:
        with served() as started:
            yield started

    def test_a_rejected_call_has_a_retry_pushback_trailer(self, live: Live) -> None:
        live.served.refusals.append(InferError(Code.OVERLOADED, LATE, 20 * MS))
        with grpc.insecure_channel(live.address) as channel, pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary(ECHO)(b"x", timeout=PATIENCE_S)

        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert raised.value.details() == LATE
        assert ("grpc-retry-pushback-ms", "20") in tuple(raised.value.trailing_metadata())

    def test_a_client_with_a_retry_policy_retries_after_the_pushback(self, live: Live) -> None:
        live.served.refusals += [InferError(Code.OVERLOADED, LATE, 1 * MS) for _ in range(2)]
        with grpc.insecure_channel(live.address, retrying()) as channel:
            answer = channel.unary_unary(ECHO)(b"x", timeout=PATIENCE_S)

        assert (answer, live.served.message_count) == (b"x", 3)

    def test_a_client_with_a_retry_policy_does_not_retry_after_a_negative_pushback(self, live: Live) -> None:
        live.served.refusals.append(InferError(Code.NOT_READY, "not here", -1))
        with grpc.insecure_channel(live.address, retrying()) as channel, pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary(ECHO)(b"x", timeout=PATIENCE_S)

        assert raised.value.details() == "not here"
        assert live.served.message_count == 1


@pytest.fixture(scope="module")
def served_late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    """A server whose model exceeds its target; now and then a request is admitted to check if it still does."""
    root = tmp_path_factory.mktemp("repository")
    make(root, "m/1/model.onnx")
    native(root, "m", "[batching]\nlatency_target_ms = 0.001\nmax_batch_size = 4\n")
    graph = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
    with live.live_server(root, loaders={"onnxruntime": fake_loader(FakeBackend(graph, list))}) as started:
        yield started


class TestLiveServer:
    """A live server whose model exceeds its target."""

    def test_an_http_request_that_would_be_late_is_answered_503_with_retry_after(self, served_late: live.Live) -> None:
        with httpx.Client() as client:
            refusals = (client.post(served_late.url + PATH, content=BODY) for _ in range(TRIES))
            answer = next(each for each in refusals if each.status_code != 200)

        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert re.fullmatch(r"Exceeds latency target: .* the target is 0.001 ms", answer.json()["error"])

    def test_a_generate_request_that_would_be_late_is_answered_503_with_retry_after(
        self, served_late: live.Live
    ) -> None:
        with httpx.Client() as client:
            url = served_late.url + "/v2/models/m/generate"
            refusals = (client.post(url, json={"x": [1, 2, 3, 4]}) for _ in range(TRIES))
            answer = next(each for each in refusals if each.status_code != 200)

        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    def test_a_model_control_request_that_is_not_allowed_has_no_retry_after_header(
        self, served_late: live.Live
    ) -> None:
        answer = httpx.post(served_late.url + "/v2/repository/models/m/load")

        assert answer.status_code == 503
        assert "retry-after" not in answer.headers

    def test_a_grpc_request_that_would_be_late_is_unavailable_with_a_pushback(self, served_late: live.Live) -> None:
        message = rpc_request().SerializeToString()
        with grpc.insecure_channel(served_late.grpc_address) as channel:
            ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            calls = (ask.with_call(message, timeout=PATIENCE_S) for _ in range(TRIES))
            with pytest.raises(grpc.RpcError) as raised:
                list(calls)

        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert raised.value.details().startswith("Exceeds latency target: ")
        [after] = [value for name, value in raised.value.trailing_metadata() if name == "grpc-retry-pushback-ms"]
        assert int(after) >= 1


def targeted() -> Model:
    """Return a model with a latency target."""
    untargeted = fake_model()
    spec = replace(untargeted.spec, policy=replace(untargeted.spec.policy, latency_target_us=50_000))
    return Model(spec, [FakeBackend(untargeted.signature, list)], lambda *_: None)


def retrying() -> list[tuple[str, Any]]:
    """Options of a channel that retries, but without a pushback only after longer than any test waits."""
    policy = {
        "maxAttempts": 5, "initialBackoff": "1000s", "maxBackoff": "1000s", "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }  # fmt: skip
    config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
    return [("grpc.service_config", json.dumps(config)), ("grpc.enable_retries", 1)]
