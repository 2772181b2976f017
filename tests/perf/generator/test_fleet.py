"""The fleet: a few processes, started once for all tests here, against a server in a thread of this one."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from penstock.perf.generator import fleet as fleets
from penstock.perf.generator import process
from penstock.perf.generator.fleet import Fleet, FleetError, _Child, fleet
from penstock.perf.generator.orders import ARRAYS, Load, Part, Target, Window
from penstock.perf.payloads.repeated import Repeated

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
COUNT = 60


class Answering(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while self.request.recv(1 << 16):
            self.request.sendall(ANSWER)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may leave as it likes."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with Server(("127.0.0.1", 0), Answering) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield server.server_address[1]
        server.shutdown()
        serving.join()


@pytest.fixture(scope="module")
def running(port: int) -> Iterator[Fleet]:
    with fleet(Target("127.0.0.1", port), Repeated((REQUEST,)), 2) as started:
        yield started


def counted(running: Fleet, load: Load) -> Window:
    """Send a load of COUNT requests and give them all."""
    running.start_load(load)
    while not running.wait(10, COUNT):
        pass
    running.halt()
    return running.take()


@pytest.mark.parametrize(
    "load",
    [
        Load(concurrency=3, requests=COUNT),
        Load(rate_per_s=1e5, requests=COUNT),
        Load(rate_per_s=1e5, requests=COUNT, sequences=3),
        Load(concurrency=1, requests=COUNT),
    ],
)
def test_processes_share_loads_of_any_kind_one_after_another(running: Fleet, load: Load) -> None:
    window = counted(running, load)

    assert (len(window.ends_ns), window.errors, window.failure, window.in_flight) == (COUNT, {}, "", 0)
    assert len(window.late_ns) == (COUNT if load.open else 0)
    assert (window.latencies_ns > 0).all()
    assert window.cpu_s > 0


def test_processes_start_a_schedule_at_the_same_moment(running: Fleet) -> None:
    window = counted(running, Load(rate_per_s=2e4, requests=COUNT))

    gaps = np.diff(np.sort(window.starts_ns))

    assert gaps.tolist() == [50_000] * (COUNT - 1)


def test_results_are_returned_only_once(running: Fleet) -> None:
    counted(running, Load(concurrency=1, requests=COUNT))

    assert (running.count(), len(running.take().ends_ns)) == (0, 0)


def test_an_invalid_load_is_an_error_and_the_next_load_runs(running: Fleet) -> None:
    with pytest.raises(ConnectionError, match="rate above 0"):
        running.start_load(Load(rate_per_s=-1))

    assert len(counted(running, Load(concurrency=1, requests=COUNT)).ends_ns) == COUNT


def test_a_ctrl_c_during_an_order_does_not_affect_the_next_order(
    running: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(running, "_answer", pressed)
        with pytest.raises(KeyboardInterrupt):
            running.count()

    assert len(counted(running, Load(concurrency=1, requests=COUNT)).ends_ns) == COUNT


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have SIGINT interrupt: what a shell starts in the background begins by ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_ctrl_c_during_a_message_is_deferred_until_it_is_sent() -> None:
    through = []

    def message() -> None:
        with fleets._deferring_interrupts():
            signal.raise_signal(signal.SIGINT)
            through.append("whole")

    with pytest.raises(KeyboardInterrupt):
        message()

    assert through == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_ctrl_c_at_the_terminal_does_not_reach_the_processes(running: Fleet) -> None:
    for child in running._children:
        assert os.getpgid(child.process.pid) != os.getpgid(0)
        child.process.send_signal(signal.SIGINT)

    assert len(counted(running, Load(concurrency=1, requests=COUNT)).ends_ns) == COUNT


def quiet() -> tuple[Fleet, list[Any]]:
    """Give a fleet of one process that is not there, and the ends it would have."""
    orders, child_orders = multiprocessing.Pipe()
    failures, child_failures = multiprocessing.Pipe(duplex=False)
    return Fleet([_Child(orders, failures, None)]), [orders, child_orders, failures, child_failures]  # type: ignore[arg-type]


def test_waiting_ends_as_soon_as_a_process_reports_a_dead_server() -> None:
    watching, pipes = quiet()
    pipes[3].send("the server is gone")

    assert watching.wait(3600)
    assert watching.wait(3600)
    for pipe in pipes:
        pipe.close()


def test_waiting_ends_on_time_if_nothing_happens() -> None:
    watching, pipes = quiet()

    assert not watching.wait(0)
    for pipe in pipes:
        pipe.close()


def test_the_death_of_a_process_is_an_error_and_does_not_block() -> None:
    watching, pipes = quiet()
    pipes[1].close()
    pipes[3].close()

    assert watching.wait(3600)
    with pytest.raises(FleetError, match="has died"):
        watching.take()
    pipes[0].close()
    pipes[2].close()


def test_an_order_that_fails_raises_the_text_of_its_error() -> None:
    watching, pipes = quiet()
    pipes[1].send((1, False, (False, "out of luck")))

    with pytest.raises(FleetError, match="out of luck"):
        watching.halt()
    for pipe in pipes:
        pipe.close()


def test_every_array_of_a_window_is_sent_as_raw_memory() -> None:
    window = Window(0, 1)

    assert set(ARRAYS) == {each.name for each in fields(window) if isinstance(getattr(window, each.name), np.ndarray)}


def test_an_answer_that_cannot_be_sent_is_an_error_and_does_not_block() -> None:
    window = Window(0, 1)
    window.late_ns = None  # type: ignore[assignment]
    watching, pipes = quiet()
    replier = threading.Thread(target=_replies, args=(pipes[1], pipes[3], window))
    replier.start()

    with pytest.raises(FleetError, match="TypeError: object of type"):
        watching.take()
    replier.join()
    for pipe in pipes:
        pipe.close()


def _replies(orders: Any, failures: Any, answer: Any) -> None:
    child = process._Process.__new__(process._Process)
    child._orders, child._failures = orders, failures
    serial, *_ = orders.recv()
    child._reply(serial, True, answer)


class Unreadable:
    """An argument that fails where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_an_order_that_cannot_be_read_ends_the_fleet_with_the_reason(port: int) -> None:
    with (
        fleet(Target("127.0.0.1", port), Repeated((REQUEST,))) as started,
        pytest.raises(FleetError, match="has died: ValueError: invalid literal"),
    ):
        started._send_order(process.READY, Unreadable())


def test_a_process_that_cannot_start_ends_the_fleet_with_the_reason(port: int) -> None:
    with (
        fleet(Target("127.0.0.1", port), Unreadable()) as started,  # type: ignore[arg-type]
        pytest.raises(FleetError, match="has died: ValueError: invalid literal"),
    ):
        started.count()


def test_a_process_reports_a_dead_server_to_the_fleet() -> None:
    watching, pipes = quiet()
    reporter = threading.Thread(target=_gives_up, args=(pipes[1], pipes[3]))
    reporter.start()

    assert watching.wait(3600)
    reporter.join()
    for pipe in pipes:
        pipe.close()


def _gives_up(orders: Any, failures: Any) -> None:
    import uvloop

    async def one() -> None:
        child = process._Process(orders, failures, (Target("127.0.0.1", 1), Repeated((REQUEST,)), Part()))
        child._recorder.abort("gone")
        child._writer.shutdown()

    uvloop.run(one())


PARENT = """
import sys
from penstock.perf.generator.fleet import fleet
from penstock.perf.generator.orders import ARRAYS, Load, Target
from penstock.perf.payloads.repeated import Repeated

with fleet(Target("127.0.0.1", int(sys.argv[1])), Repeated((sys.argv[2].encode(),))) as running:
    running.start_load(Load(concurrency=1))
    print(running._children[0].process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_processes_end_with_their_parent_however_it_ends(port: int) -> None:
    words = [sys.executable, "-c", PARENT, str(port), REQUEST.decode()]
    parent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        child = os.pidfd_open(int(parent.stdout.readline()))  # type: ignore[union-attr]
        parent.kill()

    assert select.select([child], [], [], 60)[0]
    os.close(child)
