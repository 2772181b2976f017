"""Python models that are killed, hang, crash or use too much memory: which requests fail, and what is left behind."""

from __future__ import annotations

import functools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import httpx
import pytest
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from penstock.server.workers import restarting
from penstock.server.workers.backoff import Backoff
from tests.live import Live, live_server
from tests.processes import descriptors
from tests.server.python_models.repositories import ONE, infer_value, left_behind, wait_until, write_model

pytestmark = pytest.mark.slow
GUARD_S = 60.0
TRIPLE = """
import ctypes, os, sys, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if x.flat[0] == -1:
                while True:
                    pass
            if x.flat[0] == -2:
                ctypes.string_at(0)
            if x.flat[0] == -3:
                sys.exit(4)
            if x.flat[0] == -4:
                self.hoard = bytearray(os.urandom(1 << 20) * 600)
                time.sleep(60)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 3)]))
        time.sleep(0.005)  # work, or a fault would find nothing that runs
        return answers

    def finalize(self):
        with open(os.path.join(os.path.dirname(__file__), "finalized"), "a") as file:
            file.write("x")
"""
LEAVING = """
import gc, os
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        open(requests[0].request_id()).read()
        channel = next(each for each in gc.get_objects() if type(each).__name__ == "Channel")
        channel.send(19, 2, b'{"answers": [null]}')  # "the answer comes later", as if execute had returned
        os._exit(3)
"""
TICKS = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request, request.get_response_sender()), daemon=True).start()

    def send(self, request, sender):
        for number in range(2000):
            if request.is_cancelled():
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number], np.float32))]))
            time.sleep(0.005)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TICKS_CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
BATCHED = ONE + "dynamic_batching {}\ninstance_group [ { count: 2 kind: KIND_CPU } ]"


class Clients:
    """Clients that send requests continuously, and a ledger of how each request ended."""

    def __init__(self, live: Live, count: int = 8) -> None:
        self.ledger: dict[int, list[str]] = {}
        self._live = live
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number << 32,)) for number in range(1, count + 1)]
        for thread in self._threads:
            thread.start()

    def _run(self, first: int) -> None:
        with triton_http.InferenceServerClient(self._live.address) as client:
            number = 0
            while not self._stop.is_set():
                number += 1
                try:
                    end = "right" if infer_value(client, "triple", number) == number * 3 else "wrong"
                except InferenceServerException as error:
                    end = str(error.status())
                self.ledger.setdefault(first + number, []).append(end)

    @property
    def ended(self) -> int:
        return len(self.ledger)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_a_killed_worker_fails_only_the_requests_that_it_ran(tmp_path: Path) -> None:
    write_model(tmp_path, "triple", TRIPLE, BATCHED)
    before = left_behind()
    with live_server(tmp_path) as live:
        clients = Clients(live)
        try:
            for kills in range(20):  # a worker may be killed between two requests
                if kills >= 3 and ["503"] in clients.ledger.values():
                    break
                ended = clients.ended
                wait_until(lambda ended=ended: clients.ended > ended + 200)  # type: ignore[misc]
                victim = min(left_behind() - before)
                os.kill(victim, signal.SIGKILL)
                wait_until(lambda victim=victim: victim not in left_behind())  # type: ignore[misc]
                wait_until(lambda: len(left_behind() - before) == 2)
            ended = clients.ended
            wait_until(lambda: clients.ended > ended + 200)
        finally:
            clients.stop()
        assert httpx.get(f"{live.url}/v2/health/ready").status_code == 200

    ends = list(clients.ledger.values())
    assert all(len(end) == 1 for end in ends)
    assert {end[0] for end in ends} <= {"right", "503"}
    assert 0 < sum(end == ["503"] for end in ends) <= (kills + 1) * 8
    assert left_behind() == before


@pytest.mark.parametrize(("value", "status"), [(-2, "503"), (-3, "500")])
def test_a_crash_fails_only_the_request_that_caused_it(tmp_path: Path, value: float, status: str) -> None:
    write_model(tmp_path, "triple", TRIPLE, ONE)
    with live_server(tmp_path) as live, triton_http.InferenceServerClient(live.address) as client:
        with pytest.raises(InferenceServerException) as caught:
            infer_value(client, "triple", value)
        assert caught.value.status() == status
        assert infer_value(client, "triple", 2) == 6


def test_a_hung_call_is_terminated_at_its_time_limit(tmp_path: Path) -> None:
    write_model(tmp_path, "triple", TRIPLE, ONE, "[worker]\ntimeout_s = 0.5\n")
    with live_server(tmp_path) as live, triton_http.InferenceServerClient(live.address) as client:
        with pytest.raises(InferenceServerException, match=r"limit of 0\.5 s"):
            infer_value(client, "triple", -1)
        assert infer_value(client, "triple", 2) == 6


def test_a_worker_above_its_memory_limit_is_killed(tmp_path: Path) -> None:
    write_model(tmp_path, "triple", TRIPLE, ONE, "[worker]\nmemory_mb = 300\n")
    with live_server(tmp_path) as live, triton_http.InferenceServerClient(live.address) as client:
        with pytest.raises(InferenceServerException) as caught:
            infer_value(client, "triple", -4)
        assert caught.value.status() == "503"
        assert infer_value(client, "triple", 2) == 6


def test_the_model_is_not_ready_while_it_has_no_worker(tmp_path: Path) -> None:
    gate = tmp_path / "gate"  # opening a FIFO to read waits for the test to open it
    wait = f"if os.path.exists({str(gate)!r}): open({str(gate)!r}).read()"
    initialize = f"    def initialize(self, args):\n        {wait}\n\n"
    gated = "import os\n" + TRIPLE.replace("    def execute", f"{initialize}    def execute")
    write_model(tmp_path, "triple", gated, ONE)
    before = left_behind()
    with live_server(tmp_path) as live, triton_http.InferenceServerClient(live.address) as client:
        (victim,) = left_behind() - before
        os.mkfifo(gate)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not client.is_model_ready("triple"))
        assert httpx.get(f"{live.url}/v2/health/ready").status_code == 400
        gate.write_text("")
        gate.unlink()
        assert infer_value(client, "triple", 2) == 6
        assert client.is_model_ready("triple")


def test_waiting_requests_fail_with_the_reason_when_a_worker_cannot_restart(tmp_path: Path) -> None:
    once = TRIPLE.replace(
        "    def execute",
        """    def initialize(self, args):
        place = os.path.join(os.path.dirname(__file__), "started")
        if os.path.exists(place):
            raise ValueError("only once")
        open(place, "w").close()

    def execute""",
        1,
    )
    write_model(tmp_path, "triple", once, ONE)
    with live_server(tmp_path) as live, triton_http.InferenceServerClient(live.address) as client:
        with pytest.raises(InferenceServerException):
            infer_value(client, "triple", -2)
        with pytest.raises(InferenceServerException, match="only once") as caught:
            infer_value(client, "triple", 2)
        assert caught.value.status() == "503"
        assert not client.is_model_ready("triple")


def test_the_server_exits_while_a_model_hangs(tmp_path: Path) -> None:
    write_model(tmp_path, "triple", TRIPLE, ONE)
    before = left_behind()
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [-1]}]}
    with ThreadPoolExecutor(1) as pool:
        with live_server(tmp_path, exit_timeout_secs=1) as live:
            hangs = pool.submit(httpx.post, f"{live.url}/v2/models/triple/infer", json=body, timeout=GUARD_S)
            wait_until(lambda: live.server.engine.inflight == 1)
        assert hangs.result().status_code == 503

    assert left_behind() == before


def test_repeated_worker_crashes_do_not_delay_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = functools.partial(Backoff, first_s=10 * GUARD_S, max_s=10 * GUARD_S)
    monkeypatch.setattr(restarting, "Backoff", never)  # once it does not start again at once
    write_model(tmp_path, "triple", TRIPLE, ONE)
    with live_server(tmp_path) as live, triton_http.InferenceServerClient(live.address) as client:
        for _ in range(4):
            assert infer_value(client, "triple", 2) == 6
            with pytest.raises(InferenceServerException, match="ended: signal 11"):
                infer_value(client, "triple", -2)


def test_a_worker_that_dies_before_a_deferred_answer_fails_the_request(tmp_path: Path) -> None:
    write_model(tmp_path, "leaving", LEAVING, ONE)
    fifo = tmp_path / "go"
    os.mkfifo(fifo)

    async def let_it_end_while_the_loop_is_held(begun: TextIO) -> None:
        begun.close()
        for thread in threading.enumerate():
            if thread.name == "worker":  # which waits for the process
                thread.join(GUARD_S)

    with live_server(tmp_path) as live, ThreadPoolExecutor(1) as pool:
        body = {"id": str(fifo), "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [2.0]}]}
        future = pool.submit(httpx.post, f"{live.url}/v2/models/leaving/infer", json=body, timeout=10)
        with fifo.open("w") as begun:  # opens once the model has the request
            live.call(let_it_end_while_the_loop_is_held(begun))
        assert future.result().status_code == 503


def test_a_killed_worker_ends_its_streams_with_an_error(tmp_path: Path) -> None:
    write_model(tmp_path, "ticks", TICKS, TICKS_CONFIG)
    before = left_behind()
    with live_server(tmp_path) as live:
        url = f"{live.url}/v2/models/ticks/generate_stream"
        with httpx.stream("POST", url, json={"x": 1}, timeout=GUARD_S) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            os.kill(min(left_behind() - before), signal.SIGKILL)
            *_, last = lines
        assert "ended and is being restarted" in last
        with httpx.stream("POST", url, json={"x": 1}, timeout=GUARD_S) as answer:
            assert '"y":0' in next(line for line in answer.iter_lines() if line)


def test_repeated_loading_and_unloading_leaks_no_descriptors_or_threads(tmp_path: Path) -> None:
    write_model(tmp_path, "triple", TRIPLE, ONE)
    explicit = live_server(tmp_path, model_control_mode="explicit")
    with explicit as live, triton_http.InferenceServerClient(live.address) as client:

        def threads() -> int:  # without those of the loop's pool, which starts them as calls coincide
            return sum(not thread.name.startswith(("uvloop_", "asyncio_")) for thread in threading.enumerate())

        def come_and_go(times: int) -> None:
            for _ in range(times):
                client.load_model("triple")
                assert infer_value(client, "triple", 2) == 6
                client.unload_model("triple")

        come_and_go(2)
        files_before, threads_before = descriptors(), threads()
        come_and_go(3)
        wait_until(lambda: descriptors() <= files_before and threads() <= threads_before)  # one may be just ending


def test_unloading_finalizes_the_model_and_ends_its_workers(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "triple", TRIPLE, BATCHED)
    before = left_behind()
    with live_server(tmp_path, model_control_mode="explicit") as live:
        with triton_http.InferenceServerClient(live.address) as client:
            client.load_model("triple")
            assert infer_value(client, "triple", 2) == 6
            assert len(left_behind() - before) == 2
            client.unload_model("triple")
        assert left_behind() == before
    assert (folder / "1" / "finalized").read_text() == "xx"


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ('pb_utils.Logger.log_warn("the last word")', "the last word"),
        ("undefined_variable", "name 'undefined_variable' is not defined"),
    ],
)
def test_log_lines_and_errors_of_finalize_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last: str, text: str
) -> None:
    caplog.set_level("INFO")
    write_model(tmp_path, "triple", TRIPLE.replace('file.write("x")', last), BATCHED)
    with (
        live_server(tmp_path, model_control_mode="explicit") as live,
        triton_http.InferenceServerClient(live.address) as client,
    ):
        client.load_model("triple")
        client.unload_model("triple")

    assert sum(text in record.getMessage() for record in caplog.records) == 2, "one of each instance"
