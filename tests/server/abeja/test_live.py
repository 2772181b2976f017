"""A handler behind a live server: calls that end its process, restarts, health, and the two ports."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Self

import pytest

from tests.forking import the_forker
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

MAIN = """
import os
import pathlib


def handler(request, context):
    said = request.read().decode()
    if said == "exit":
        os._exit(3)
    if said == "leave":
        raise SystemExit(3)
    if said.startswith("/"):
        pathlib.Path(said, "begun").write_bytes(b"")  # pipes: each end waits for the other
        pathlib.Path(said, "enough").read_bytes()
    return {"content": str(os.getpid())}
"""
WORKER_DIED = 500, b'{"status":"Internal Server Error: unexpected error of communication with runtime"}'
OK = 200, b'{"status":"ok"}'
UNAVAILABLE = 503, b'{"status":"service unavailable"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handler")
    (folder / "main.py").write_text(MAIN, "utf-8")
    return folder


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder, dialect="abeja", abeja_health_port=0) as live:
        yield live


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    """A folder with two pipes: a call that gets its path reports that it has begun, and waits until it may end."""
    for name in ("begun", "enough"):
        os.mkfifo(tmp_path / name)
    return tmp_path


def ask(port: int, query: str = "", path: str = "/", method: str = "GET") -> tuple[int, bytes]:
    """Send a request over its own connection."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, f"{path}?{query}")
        with connection.getresponse() as answer:
            return answer.status, answer.read()


def health_port(live: Live) -> int:
    (port,) = live.server._extra_ports
    return port.port


def health(live: Live) -> list[tuple[int, bytes]]:
    """Ask both ports."""
    return [ask(port, path="/health_check") for port in (live.http_port, health_port(live))]


def await_health(live: Live) -> None:
    for _ in range(100_000):
        if health(live) == [OK, OK]:
            return
    raise AssertionError("it does not come back")


@pytest.mark.parametrize("how", ["exit", "leave"])
def test_a_call_that_ends_its_process_fails_without_affecting_other_calls(live: Live, how: str) -> None:
    words = ["a", how, "b", how, "c"]
    with ThreadPoolExecutor(len(words)) as threads:
        found = list(threads.map(lambda word: ask(live.http_port, word), words))

    assert [answer[0] for answer in found] == [200, 500, 200, 500, 200]
    assert found[1] == found[3] == WORKER_DIED
    await_health(live)


def test_a_killed_process_fails_its_running_call_and_is_replaced(live: Live, pipes: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        pid = int(ask(live.http_port)[1])
        busy = threads.submit(ask, live.http_port, str(pipes))
        (pipes / "begun").read_bytes()
        waiting = threads.submit(ask, live.http_port)
        os.kill(pid, signal.SIGKILL)

        assert busy.result(30) == WORKER_DIED
        status, body = waiting.result(60)
    assert status == 200
    assert int(body) != pid
    await_health(live)


def test_health_is_503_while_no_process_serves(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    again = "import pathlib\nif pathlib.Path('again').exists(): open('go').read()\npathlib.Path('again').touch()\n"
    (tmp_path / "main.py").write_text(again + MAIN)
    with live_server(tmp_path, dialect="abeja", abeja_health_port=0) as live, ThreadPoolExecutor(1) as thread:
        before = health(live)
        lost = ask(live.http_port, "exit")
        during = health(live)
        waiting = thread.submit(ask, live.http_port)
        (tmp_path / "go").write_bytes(b"")

        assert [before, lost, during] == [[OK, OK], WORKER_DIED, [UNAVAILABLE, UNAVAILABLE]]
        assert waiting.result(30)[0] == 200
        assert health(live) == [OK, OK]


def test_the_other_processes_serve_while_one_is_restarting(tmp_path: Path) -> None:
    gated = "import pathlib\nif pathlib.Path('gate').exists(): open('gate').read()\n"
    (tmp_path / "main.py").write_text(gated + MAIN)
    with live_server(tmp_path, dialect="abeja", abeja_health_port=0, abeja_workers=2) as live:
        os.mkfifo(tmp_path / "gate")
        lost = ask(live.http_port, "exit")
        during = health(live)
        answers = {ask(live.http_port) for _ in range(5)}
        (tmp_path / "gate").write_bytes(b"")

    assert (lost, during) == (WORKER_DIED, [OK, OK])
    assert [status for status, _ in answers] == [200]


def test_health_is_answered_while_a_call_runs(live: Live, pipes: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        busy = thread.submit(ask, live.http_port, str(pipes))
        (pipes / "begun").read_bytes()
        assert health(live) == [OK, OK]
        assert not busy.done()
        (pipes / "enough").write_bytes(b"")
        assert busy.result(30)[0] == 200


def test_paths_of_penstock_are_served_only_on_the_health_port(live: Live) -> None:
    port = health_port(live)

    assert [ask(port, path=path)[0] for path in ("/v2", "/v2/models/handler/ready", "/metrics", "/docs")] == [200] * 4
    assert b'nv_inference_count{model="handler"' in ask(port, path="/metrics")[1]
    assert ask(port, path="/v2", method="DELETE")[0] == 405
    for path in ("/", "/v3", "/health_check/"):
        assert ask(port, path=path) == (404, b"404 page not found\n")
    for path in ("/v2", "/metrics", "/docs", "/v2/models/handler/infer"):
        assert ask(live.http_port, path=path)[1].isdigit()


def test_a_connection_serves_many_calls(live: Live) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=30)) as connection:
        sockets = []
        for _ in range(3):
            connection.request("GET", "/")
            assert connection.getresponse().read().isdigit()
            sockets.append(connection.sock)
    assert sockets[0] is not None
    assert sockets[0] is sockets[1] is sockets[2]


def test_several_processes_serve_in_parallel(folder: Path, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
        for name in ("begun", "enough"):
            os.mkfifo(place / name)
    with (
        live_server(folder, dialect="abeja", abeja_health_port=0, abeja_workers=2) as live,
        ThreadPoolExecutor(2) as both,
    ):
        busy = []
        for place in places:
            busy.append(both.submit(ask, live.http_port, str(place)))
            (place / "begun").read_bytes()  # it has begun, and none has ended
        for place in places:
            (place / "enough").write_bytes(b"")
        pids = {call.result(30)[1] for call in busy}
    assert len(pids) == 2


class Started:
    """`penstock serve` as a separate process in a folder."""

    def __init__(self, folder: Path, *words: str, **environ: str) -> None:
        command = [sys.executable, "-m", "penstock.server.cli", "serve", "--dialect=abeja", "--http-port=0"]
        ports = ["--abeja-health-port=0", "--allow-grpc=false", "--allow-metrics=false"]
        self.child = the_forker().start(
            [*command, *ports, *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environ},
        )  # fmt: skip
        self.lines: list[str] = []

    def line(self, word: str) -> str:
        """Wait for a line of its log that contains `word`."""
        line: str
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(line)
            if word in line:
                return line
        raise AssertionError("".join(self.lines))

    def status(self) -> int:
        """Wait for its end, and give its exit status."""
        assert self.child.stderr is not None
        self.lines += self.child.stderr
        return self.child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.status()
        assert self.child.stderr is not None
        self.child.stderr.close()


def test_sigterm_lets_accepted_calls_finish(folder: Path, pipes: Path) -> None:
    with Started(folder) as server, ThreadPoolExecutor(1) as thread:
        port = int(server.line("HTTP on").partition("HTTP on http://127.0.0.1:")[2].partition(",")[0])
        server.line("serving handler")
        busy = thread.submit(ask, port, str(pipes))
        (pipes / "begun").read_bytes()
        server.child.send_signal(signal.SIGTERM)
        server.line("SIGTERM")
        (pipes / "enough").write_bytes(b"")

        assert busy.result(30)[0] == 200
        assert server.status() == 0


def test_requests_are_answered_503_until_the_handler_is_loaded(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    (tmp_path / "main.py").write_text("open('go').read()\ndef handler(r, c): return {'content': 'at last'}")
    with Started(tmp_path) as server:
        log_line = server.line("HTTP on")
        port, other = (
            int(part.partition(",")[0].partition('"')[0]) for part in log_line.split("http://127.0.0.1:")[1:3]
        )
        before = [ask(port), ask(port, path="/health_check"), ask(other, path="/health_check")]
        (tmp_path / "go").write_bytes(b"")
        server.line("serving handler")

        assert before == [UNAVAILABLE] * 3
        assert [ask(port), ask(other, path="/health_check")] == [(200, b"at last"), OK]


@pytest.mark.parametrize(
    ("words", "more", "why"),
    [
        (["--abeja-handler=main:none"], {}, "has no attribute 'none'"),
        ([], {"HANDLER": "main"}, "it must be module:name"),
        ([], {"CONTEXT": "{"}, "CONTEXT in the environment is not JSON"),
    ],
)
def test_the_server_exits_with_status_1_if_the_handler_cannot_be_loaded(
    folder: Path, words: list[str], more: dict[str, str], why: str
) -> None:
    with Started(folder, *words, **more) as server:
        server.line("no handler can be served:")
        server.line(why)

        assert server.status() == 1


def test_the_server_exits_with_status_1_if_requirements_cannot_be_installed(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("def handler(r, c): return {}")
    (tmp_path / "requirements.txt").write_text("--no-index\nno-such-package-as-this\n")
    with Started(tmp_path, f"--environments={tmp_path / 'kept'}", "--offline") as server:
        server.line("--offline forbids downloads")

        assert server.status() == 1
    with Started(tmp_path, "--abeja-install=false") as server:
        server.line("serving handler")
