"""Faults under load, as clients see them: every request ends once in a ledger, with the right answer or none.

`FAULT_ROUNDS=20 pytest tests/server/supervisor/test_faults.py -s` is the long version, and prints the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

from penstock.batching.registry import STOPPING_MESSAGE
from penstock.server.grpc.request import SHUTTING_DOWN
from tests.clients import models
from tests.processes import children, lives

pytestmark = pytest.mark.slow
IRIS = Path(__file__).parents[3] / "examples" / "iris"
ROUNDS = range(int(os.environ.get("FAULT_ROUNDS", "1")))
CLIENTS = 24
PATIENCE_S = 180.0
"""Starting three processes takes a minute on a machine that runs two such servers and compiles at the same time."""
PAUSE_S = 0.05
"""The pause of a client after each answer, without which the clients take the cores from processes that start."""
AWAY = "turned away"
TENSOR = {"name": "input", "datatype": "FP32", "shape": [1, 4], "data": [5.1, 3.5, 1.4, 0.2]}
SAMPLE = {"sepal_length": 5.1, "sepal_width": 3.5, "petal_length": 1.4, "petal_width": 0.2}


@dataclass
class Ledger:
    """How each request ended. `late_s` is the longest time that a failed request took after the fault; it is
    printed, and no test fails because of it.
    """

    ends: Counter[str] = field(default_factory=Counter)
    fault_s: float = 0.0
    late_s: float = 0.0
    over: bool = False

    def write(self, end: str, begun_s: float) -> None:
        self.ends[end] += 1
        if end != "good" and self.fault_s:
            self.late_s = max(self.late_s, time.monotonic() - max(begun_s, self.fault_s))

    @property
    def all_good(self) -> bool:
        return set(self.ends) == {"good"}

    @property
    def all_that_was_accepted_is_good(self) -> bool:
        """Whether only requests on connections made after the drain had begun have failed."""
        return {"good"} <= set(self.ends) <= {"good", AWAY}


@dataclass
class Served:
    """A server of several processes, as its operator sees it."""

    process: asyncio.subprocess.Process
    lines: list[dict[str, str]] = field(default_factory=list)
    message_arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def listen(self) -> None:
        if self.process.stderr is None:
            raise AssertionError("no pipe")
        async for line in self.process.stderr:
            self.lines.append(json.loads(line))
            async with self.message_arrived:
                self.message_arrived.notify_all()

    async def says(self, text: str, since: int = 0) -> str:
        """Wait for a line of the log, and return it."""
        async with self.message_arrived:
            while not (found := [line["msg"] for line in self.lines[since:] if text in line["msg"]]):
                await self.message_arrived.wait()
        return found[0]

    def signalled(self, number: signal.Signals) -> None:
        """Send the supervisor a signal. Not with asyncio, which would take the exit status from the waiting code."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def port(self, protocol: str) -> int:
        places = next(line["msg"] for line in self.lines if line["msg"].startswith("penstock "))
        return int(places.partition(f"{protocol} on ")[2].partition(",")[0].rpartition(":")[2])

    def pids(self, *names: str) -> list[int]:
        """Return the processes whose names begin with one of these; by default, all that serve."""
        begin = names or ("front", "engine")
        return [pid for pid in sorted(children(self.process.pid)) if _name(pid).startswith(begin)]

    def everybody(self) -> list[int]:
        """Return every process that the supervisor has started."""
        return self.pids("")

    async def has_a_spare(self) -> None:
        while not self.pids("spare"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


@asynccontextmanager
async def served(*flags: str, ends: Collection[int] = (0, -signal.SIGKILL)) -> AsyncIterator[Served]:
    words = ("-m", "penstock.server.cli", "serve", str(IRIS), "--grpc-port=0", "--metrics-port=0", "--http-workers=2")
    flags = flags if any("http-port" in flag for flag in flags) else ("--http-port=0", *flags)
    process = await asyncio.create_subprocess_exec(sys.executable, *words, *flags, stderr=asyncio.subprocess.PIPE)
    server = Served(process)
    listening = asyncio.ensure_future(server.listen())
    pids: list[int] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            await server.says("ready, serving iris/1")
            pids = server.everybody()
            yield server
            pids += server.everybody() if process.returncode is None else []
    finally:
        server.signalled(signal.SIGTERM)
        status = await process.wait()
        async with asyncio.timeout(PATIENCE_S):
            while any(map(lives, pids)):  # noqa: ASYNC110 - they may have lost their parent
                await asyncio.sleep(0.01)
        await listening
    assert status in ends


async def http_client(port: int, number: int, ledger: Ledger) -> None:
    """Send one request after another, half of them through hooks, on a new connection when one ends."""
    hooked = number % 2
    path, body = "infer", json.dumps({"id": "{}", "inputs": [TENSOR], "parameters": {"hooks": False}})
    if hooked:
        path, body = "predict", json.dumps(SAMPLE)
    sent = 0
    while not ledger.over:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return
        closing = False
        while not closing and not ledger.over:
            sent += 1
            name = f"{number}-{sent}"
            text = body.replace("{}", name)
            begun = time.monotonic()
            try:
                head = f"POST /v2/models/iris/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n"
                writer.write((head + text).encode())
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                answer = await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
            except (OSError, asyncio.IncompleteReadError):
                ledger.write("lost", begun)
                break
            status = head.split()[1]
            if STOPPING_MESSAGE.encode() in answer:
                ledger.write(AWAY, begun)
                writer.close()
                return
            good = answer == b'"iris-setosa"' if hooked else f'"id":"{name}"'.encode() in answer
            ledger.write("good" if status == "200" and good else status if status == "503" else repr(answer), begun)
            closing = "connection: close" in head
            await asyncio.sleep(PAUSE_S)
        writer.close()


async def grpc_client(port: int, number: int, ledger: Ledger) -> None:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
    request = service_pb2.ModelInferRequest(model_name="iris")
    request.inputs.add(name="input", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(struct.pack("<4f", *TENSOR["data"]))
    request.parameters["hooks"].bool_param = False
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        sent = 0
        while not ledger.over:
            sent += 1
            request.id = f"{number}-{sent}"
            begun = time.monotonic()
            try:
                answer = await infer(request.SerializeToString(), timeout=PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                refused = "onnection refused" in (error.details() or "")
                if refused:
                    return
                if error.details() == SHUTTING_DOWN:
                    ledger.write(AWAY, begun)
                    return
                ledger.write("503" if error.code() is grpc.StatusCode.UNAVAILABLE else str(error.details()), begun)
                # the library fails calls immediately until it tries to connect again
                await asyncio.sleep(0.2)
            else:
                good = service_pb2.ModelInferResponse.FromString(answer).id == request.id
                ledger.write("good" if good else "wrong", begun)
                await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def load_on(server: Served) -> AsyncIterator[Ledger]:
    """Send requests while the block runs, and afterwards until as many again have been answered well."""
    ledger = Ledger()
    asking = [
        asyncio.ensure_future(
            grpc_client(server.port("gRPC"), number, ledger)
            if number % 4 == 3
            else http_client(server.port("HTTP"), number, ledger)
        )
        for number in range(CLIENTS)
    ]
    try:
        while ledger.ends["good"] < 4 * CLIENTS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield ledger
        before = ledger.ends["good"]
        while ledger.ends["good"] < before + 4 * CLIENTS and not all(each.done() for each in asking):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    finally:
        ledger.over = True
        await asyncio.gather(*asking)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def run_main() -> None:
        await main()

    asyncio.run(run_main())


def shown(title: str, ledger: Ledger, ready_line: str = "") -> None:
    print(  # noqa: T201 - the long version is run for this output
        f"{title}: {dict(ledger.ends)}, failed within {ledger.late_s * 1e3:.0f} ms, {ready_line}"
    )


@pytest.mark.parametrize("round_", ROUNDS)
@pytest.mark.parametrize("name", ["front", "engine"])
def test_a_process_that_dies_loses_only_its_own_requests_and_is_replaced(name: str, round_: int) -> None:
    async def main() -> None:
        async with served() as server:
            for fault in (signal.SIGKILL, signal.SIGSTOP):
                async with load_on(server) as ledger:
                    await server.has_a_spare()
                    since = len(server.lines)
                    await asyncio.sleep(0.01 * round_)
                    ledger.fault_s = time.monotonic()
                    os.kill(server.pids(name)[0], fault)
                    await server.says("has ended", since)
                    if fault == signal.SIGSTOP:
                        # clients see nothing until the supervisor detects the stop
                        ledger.late_s, ledger.fault_s = 0.0, time.monotonic()
                    ready_line = await server.says("every process is ready again", since)
                shown(f"{fault.name} of {name}", ledger, ready_line)

                # over gRPC the client library reports a front end's lost requests as UNAVAILABLE
                allowed = {"good", "lost", "503"} if name == "front" else {"good", "503"}
                assert set(+ledger.ends) <= allowed
                if name == "front":
                    assert ledger.ends["lost"] + ledger.ends["503"] <= 2 * CLIENTS

    run(main)


@pytest.mark.parametrize("round_", ROUNDS)
def test_processes_finish_accepted_requests_and_end_when_the_supervisor_dies(round_: int) -> None:
    async def main() -> None:
        async with served() as server, load_on(server) as ledger:
            ledger.fault_s = time.monotonic()
            pids = server.everybody()
            server.signalled(signal.SIGKILL)
            while any(map(lives, pids)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        shown("SIGKILL of the supervisor", ledger)

        assert ledger.all_that_was_accepted_is_good

    run(main)


@pytest.mark.parametrize("round_", ROUNDS)
def test_sighup_under_load_replaces_every_process_without_losing_a_request(round_: int) -> None:
    async def main() -> None:
        async with served() as server, load_on(server) as ledger:
            before = set(server.pids())
            since = len(server.lines)
            server.signalled(signal.SIGHUP)
            await server.says("every process has been replaced", since)
            while before & set(server.pids()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            shown("SIGHUP", ledger)

            assert len(server.pids()) == len(before) == 3
            assert ledger.all_good

    run(main)


@pytest.mark.parametrize("round_", ROUNDS)
def test_sigterm_under_load_loses_no_accepted_request(round_: int) -> None:
    async def main() -> None:
        async with served() as server, load_on(server) as ledger:
            server.signalled(signal.SIGTERM)
            assert await server.process.wait() == 0
        shown("SIGTERM", ledger)

        assert ledger.all_that_was_accepted_is_good

    run(main)


def test_the_server_keeps_serving_while_the_supervisor_is_stopped() -> None:
    async def main() -> None:
        async with served() as server, load_on(server) as ledger:
            await server.has_a_spare()
            before = set(server.everybody())
            server.signalled(signal.SIGSTOP)
            good = ledger.ends["good"]
            while ledger.ends["good"] < good + 4 * CLIENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            server.signalled(signal.SIGCONT)
            while ledger.ends["good"] < good + 8 * CLIENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

            assert set(server.everybody()) == before
            assert ledger.all_good

    run(main)


def test_a_port_is_reusable_after_all_processes_are_killed_but_not_before() -> None:
    def named() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir() if "penstock" in path.name}

    async def main() -> None:
        before = named()
        async with served() as server:
            port = server.port("HTTP")
            pids = server.everybody()
            # the supervisor first, because it would restart the others
            for pid in (server.process.pid, *pids):
                os.kill(pid, signal.SIGKILL)
        assert named() == before

        async with served(f"--http-port={port}") as again:
            assert again.port("HTTP") == port
            assert (await last_words_of_another(port)).endswith("already in use")

    run(main)


async def last_words_of_another(port: int) -> str:
    """Start a server on a port in use, which must end with status 1. Returns: its only log message."""
    words = ("-m", "penstock.server.cli", "serve", str(IRIS), f"--http-port={port}", "--http-workers=2")
    second = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=asyncio.subprocess.PIPE)
    _, log_line = await second.communicate()
    assert second.returncode == 1
    return str(json.loads(log_line)["msg"])


def test_a_second_signal_ends_every_process_at_once() -> None:
    async def main() -> None:
        async with served("--drain-delay-secs=60", ends={1}) as server:
            pids = server.everybody()
            server.signalled(signal.SIGTERM)
            await server.says("repeat the signal to force")
            while server.process.returncode is None:
                server.signalled(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(server.process.wait(), 0.1)
            assert server.process.returncode == 1
            while any(map(lives, pids)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(main)


def test_sighup_does_nothing_to_a_single_process_server() -> None:
    async def main() -> None:
        async with served("--http-workers=0") as server:
            server.signalled(signal.SIGHUP)
            await server.says("only a server with --http-workers replaces its processes")

            assert (await called(server.port("HTTP"), "/v2/health/ready"))[0] == 200

    run(main)


async def called(port: int, path: str, body: object = None) -> tuple[int, bytes]:
    """Send one request on its own connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    text = json.dumps(body) if body is not None else ""
    word = "POST" if body is not None else "GET"
    writer.write(f"{word} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    answer = await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
    writer.close()
    return int(head.split()[1]), answer


def test_a_new_engine_keeps_regions_settings_and_unloaded_models_of_the_old_engine() -> None:
    async def main() -> None:
        key = f"penstock-test-{os.getpid()}"
        file = Path("/dev/shm") / key
        file.write_bytes(bytes(64))
        async with served("--model-control-mode=explicit", "--load-model=iris", "--allow-client-shm") as server:
            port = server.port("HTTP")
            region = {"key": key, "offset": 0, "byte_size": 64}
            try:
                assert (await called(port, "/v2/systemsharedmemory/region/r/register", region))[0] == 200
            finally:
                file.unlink()  # removes the name, not the memory
            assert (await called(port, "/v2/logging", {"log_verbose_level": 1}))[0] == 200
            assert (await called(port, "/v2/trace/setting", {"trace_rate": "7"}))[0] == 200
            for how in ("crash", "SIGHUP"):
                assert (await called(port, "/v2/repository/models/iris/unload", {}))[0] == 200
                assert (await called(port, "/v2/health/ready"))[0] == 200
                since = len(server.lines)
                if how == "crash":
                    os.kill(server.pids("engine")[0], signal.SIGKILL)
                    await server.says("every process is ready again", since)
                else:
                    server.signalled(signal.SIGHUP)
                    await server.says("every process has been replaced", since)

                assert json.loads((await called(port, "/v2/systemsharedmemory/status"))[1]) == [{"name": "r"} | region]
                assert json.loads((await called(port, "/v2/logging"))[1])["log_verbose_level"] == 1
                assert json.loads((await called(port, "/v2/trace/setting"))[1])["trace_rate"] == "7"
                assert (await called(port, "/v2/models/iris/ready"))[0] != 200
                assert (await called(port, "/v2/repository/models/iris/load", {}))[0] == 200
                assert (await called(port, "/v2/models/iris/ready"))[0] == 200
            _, page = await called(server.port("metrics"), "/metrics")
            assert b'penstock_processes{role="front"} ' in page

    run(main)


def test_a_request_waiting_for_its_batch_to_fill_is_answered_on_sigterm(tmp_path: Path) -> None:
    batching = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 3600000000 }"
    models.write_identity(tmp_path, "open", batching)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [7]}

    async def main() -> None:
        async with served(str(tmp_path)) as server:
            coroutine = called(server.port("HTTP"), "/v2/models/open/infer", {"inputs": [tensor]})
            answer = asyncio.ensure_future(coroutine)
            pending = b'nv_inference_pending_request_count{model="open",version="1"} 1\n'
            while pending not in (await called(server.port("metrics"), "/metrics"))[1]:
                pass
            server.signalled(signal.SIGTERM)
            status, text = await answer

        assert (status, json.loads(text)["outputs"][0]["data"]) == (200, [7])

    run(main)
