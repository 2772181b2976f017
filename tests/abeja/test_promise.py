"""Faults of the original that are corrected: each trap in its documentation that has a better answer."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.abeja.serving import Served, serving
from tests.originals import HOST, get

pytestmark = pytest.mark.slow


@contextmanager
def handled(name: str, *words: str) -> Iterator[Served]:
    """Serve a handler of mended.py."""
    with serving(f"--handler=mended:{name}", *words) as served:
        yield served


def ask(served: Served, query: str = "", path: str = "/", **options: Any) -> dict[str, Any]:
    """Send a request over its own connection."""
    return served.player.play(get("any", f"{path}?{query}", **options).written())


def test_a_connection_is_kept_alive(tmp_path: Path) -> None:
    with handled("serial") as served:
        connection = http.client.HTTPConnection(HOST, served.ports[""], timeout=30)
        connection.request("GET", "/")
        first = connection.getresponse()
        body, sock = first.read(), connection.sock
        connection.request("GET", "/")
        second = connection.getresponse().read()
        same = connection.sock is sock
        connection.close()

    assert (first.status, same) == (200, True)
    assert body == second


def test_a_connection_is_kept_alive_after_rejected_requests() -> None:
    refused = [("PATCH", "/", "text/plain"), ("POST", "/", "bad;;"), ("POST", "/", "multipart/form-data")]
    with handled("leaving") as served:
        connection = http.client.HTTPConnection(HOST, served.ports[""], timeout=30)
        found = []
        for method, path, kind in [*refused, ("GET", "/health_check", "text/plain"), ("POST", "/", "text/plain")]:
            connection.request(method, path, b"x", {"Content-Type": kind})
            with connection.getresponse() as answer:
                answer.read()
                found.append((answer.status, connection.sock))
        connection.close()

    assert [status for status, _ in found] == [501, 501, 503, 200, 200]
    assert [sock for _, sock in found] == [found[0][1]] * 5
    assert found[0][1] is not None


def test_calls_of_one_process_run_one_after_another() -> None:
    with handled("serial") as served, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(served), range(40)))

    assert {answer["status"] for answer in answers} == {200}
    assert len({answer["body"] for answer in answers}) == 1


def test_several_processes_run_calls_in_parallel(tmp_path: Path) -> None:
    with handled("meeting", "--abeja-workers=2") as served, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(served, f"2,{tmp_path}"), range(2)))

    assert [answer["body"] for answer in answers] == ["met", "met"]


def test_health_is_answered_while_a_call_runs(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with handled("waiting") as served, ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, served, str(go))
        begun = threading.Event()
        while not begun.is_set() and not running.done():
            if (tmp_path / "go.begun").exists():
                begun.set()
        healths = [ask(served, path="/health_check", port=port) for port in ("", "health")]
        still = not running.done()
        go.touch()
        answer = running.result(60)

    assert [(health["status"], health["body"]) for health in healths] == [(200, '{"status":"ok"}')] * 2
    assert (still, answer["body"]) == (True, "done")


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_handler_that_ends_its_process_does_not_end_the_service(how: str) -> None:
    with handled("leaving") as served:
        lost = ask(served, how)
        for _ in range(600):
            answer = ask(served)
            if answer["status"] == 200:
                break

    assert (lost["status"], lost["headers"]) == (500, {"content-type": "application/json"})
    assert answer["body"] == "here"


@pytest.mark.parametrize(("what", "status"), [("status", 200), ("metadata", 500)])
def test_a_value_that_cannot_be_sent_does_not_affect_later_calls(what: str, status: int) -> None:
    with handled("poison") as served:
        answers = [ask(served, what) for _ in range(3)]

    assert [answer["status"] for answer in answers] == [status] * 3
    assert "communication" not in answers[0].get("body", "")


def test_authorization_does_not_reach_the_handler() -> None:
    headers = {"Authorization": "Bearer t", "Proxy-Authorization": "Basic x", "X-Api-Key": "k"}
    with handled("seen") as served:
        answer = ask(served, headers=headers)

    assert answer["body"] == "connection proxy-authorization x-api-key"


def test_the_headers_hidden_from_the_handler_are_configurable() -> None:
    headers = {"Authorization": "Bearer t", "X-Api-Key": "k"}
    with handled("seen", "--abeja-strip-headers=x-api-key") as served:
        answer = ask(served, headers=headers)

    assert answer["body"] == "authorization connection"


def test_a_body_above_the_size_limit_is_rejected() -> None:
    with handled("seen", "--http-max-input-size=1000") as served:
        connection = http.client.HTTPConnection(HOST, served.ports[""], timeout=30)
        connection.putrequest("POST", "/")
        connection.putheader("Content-Type", "text/plain")
        connection.putheader("Content-Length", str(200 << 20))
        connection.endheaders()
        answer = connection.getresponse()
        connection.close()

    assert answer.status == 413
