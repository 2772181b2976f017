"""A component that sleeps, loops, exits or raises affects only its own request; pings are answered meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import json_format

from penstock.server.seldon import protos
from tests.live import Live, live_server
from tests.seldon.scenarios.definitions import giving

pytestmark = pytest.mark.slow

COMPONENTS = Path(__file__).with_name("components")
ANSWER = {"names": ["t:0", "t:1"], "ndarray": [[1, 2]]}


def serving(component: str, **settings: Any) -> Any:
    """Serve a component of misbehaving.py."""
    return live_server(COMPONENTS, dialect="seldon", seldon_component=f"misbehaving.{component}", **settings)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving("Misbehaving", seldon_timeout_secs=0.5) as live:
        yield live


@pytest.fixture(scope="module")
def modern() -> Iterator[Live]:
    with serving("Modern", seldon_strict=False) as live:
        yield live


def predict(live: Live, give: str) -> tuple[int, Any]:
    answer = httpx.post(f"{live.url}/predict", json=giving(give), timeout=30)
    return answer.status_code, answer.json()


def called(live: Live, give: str) -> Any:
    """Predict over gRPC. Returns: the message as a dict, or the code and details of the error."""
    message = json_format.ParseDict(giving(give), protos.message_class("SeldonMessage")())
    with grpc.insecure_channel(live.grpc_address) as channel:
        try:
            found = channel.unary_unary("/seldon.protos.Model/Predict")(message.SerializeToString(), timeout=30)
        except grpc.RpcError as error:
            return error.code(), error.details()
    return json_format.MessageToDict(protos.message_class("SeldonMessage").FromString(found))


@contextmanager
def asleep(live: Live, folder: Path) -> Iterator[Callable[[], int]]:
    """Have a prediction sleep until the block ends. Yields a function that then waits for its status."""
    wakes = folder / "wake"
    os.mkfifo(wakes)
    os.mkfifo(f"{wakes}.begun")
    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(predict, live, f"sleep {wakes}")
        Path(f"{wakes}.begun").read_bytes()
        try:
            yield lambda: sleeping.result(30)[0]
        finally:
            wakes.write_bytes(b"")


@pytest.mark.parametrize(
    ("give", "status", "message"),
    [
        ("raise", 500, "on purpose"),
        ("sys-exit", 500, "SystemExit: 3"),
        ("interrupt", 500, "KeyboardInterrupt"),
        ("exit", 503, "component 'misbehaving.Misbehaving' ended: exit status 3"),
        ("abort", 503, "component 'misbehaving.Misbehaving' ended: signal 6 (SIGABRT)"),
        ("loop", 503, "component 'misbehaving.Misbehaving': a call took longer than its limit of 0.5 s"),
    ],
)
def test_a_misbehaving_request_fails_and_the_next_request_succeeds(
    live: Live, give: str, status: int, message: str
) -> None:
    failed = predict(live, give)
    then_over_grpc = called(live, "nothing")
    then = predict(live, "nothing")

    assert failed == (
        status, {"status": {"code": -1, "info": message, "reason": "MICROSERVICE_INTERNAL_ERROR", "status": 1}},
    )  # fmt: skip
    assert then_over_grpc["data"]["ndarray"] == [[1, 2]]
    assert then == (200, {"data": ANSWER, "meta": {"tags": {"give": "nothing"}}})


def test_health_and_metadata_are_answered_while_a_prediction_sleeps(tmp_path: Path) -> None:
    paths = ["/health/ping", "/health/status", "/metadata", "/v2/health/live", "/v2/health/ready"]

    with serving("Misbehaving") as live:
        with asleep(live, tmp_path) as slept:
            answers = [httpx.get(live.url + path, timeout=30).status_code for path in paths]
        status = slept()

    assert answers == [200] * len(paths)
    assert status == 200


def test_a_second_worker_answers_while_the_first_sleeps(tmp_path: Path) -> None:
    with serving("Misbehaving", seldon_workers=2) as live:
        with asleep(live, tmp_path) as slept:
            others = [predict(live, "nothing")[0] for _ in range(8)]
        status = slept()

    assert others == [200] * 8
    assert status == 200


class TestStrictOff:
    """`--seldon-strict=false`."""

    @pytest.mark.parametrize(
        ("method", "path", "status", "message"),
        [
            ("GET", "/nope", 404, "404 Not Found: "),
            ("POST", "/nope", 404, "404 Not Found: "),
            ("POST", "/predict/", 404, "404 Not Found: "),
            ("DELETE", "/predict", 405, "405 Method Not Allowed: "),
            ("GET", "/api/v1.0/predictions", 405, "405 Method Not Allowed: "),
        ],
    )
    def test_unknown_paths_and_methods_are_answered_with_404_and_405(
        self, modern: Live, method: str, path: str, status: int, message: str
    ) -> None:
        answer = httpx.request(method, modern.url + path)

        assert answer.status_code == status
        assert answer.json()["status"]["info"].startswith(message)

    def test_predict_may_be_a_coroutine(self, modern: Live) -> None:
        assert predict(modern, "nothing")[1]["data"] == ANSWER
        assert called(modern, "nothing")["data"] == ANSWER

    def test_a_dict_with_numpy_values_is_answered(self, modern: Live) -> None:
        expected = {"a": 0.5, "b": 3, "c": [1, 2], "d": True}

        assert predict(modern, "scalars")[1]["jsonData"] == expected
        assert called(modern, "scalars")["jsonData"] == expected

    @pytest.mark.parametrize(
        ("give", "code", "details"),
        [
            ("value", grpc.StatusCode.UNKNOWN, "a value"),
            ("key", grpc.StatusCode.UNKNOWN, "'k'"),
            ("not-implemented", grpc.StatusCode.UNIMPLEMENTED, "later"),
            ("seldon-403", grpc.StatusCode.PERMISSION_DENIED, "forbidden"),
        ],
    )
    def test_an_exception_is_answered_with_a_status_code_and_its_text(
        self, modern: Live, give: str, code: grpc.StatusCode, details: str
    ) -> None:
        assert called(modern, give) == (code, details)
