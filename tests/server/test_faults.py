"""Faults that a live server injects on purpose (`--chaos`)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

import penstock.server.workers
from penstock.backends.errors import InferError
from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec
from penstock.server.chaos import Chaos, parse
from penstock.server.faults import ChaoticEngine, make_faults, own_workers
from tests.clients import models
from tests.clients.tensors import document
from tests.fakes import PATIENCE_S, FakeBackend, fake_loader, fake_model
from tests.live import live_server

ONE = np.ones((1, 4), np.float32)
GUARD_S = 60.0
CHILD = Path(penstock.server.workers.__file__).parent / "child.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    models.write_identity(folder, "same", "")
    return folder


@pytest.mark.slow
def test_chaos_fails_requests_at_its_rate_and_counts_the_faults_in_the_metrics(root: Path) -> None:
    with live_server(root, chaos=("fail=1",), allow_chaos=True) as live:
        answer = httpx.post(f"{live.url}/v2/models/same/infer", json=document(ONE))
        page = httpx.get(f"{live.url}/metrics").text

    assert (answer.status_code, answer.json()) == (503, {"error": "this request fails because of --chaos"})
    assert "\npenstock_chaos_faults_total 1\n" in page


@pytest.mark.slow
def test_requests_delayed_by_chaos_are_answered(root: Path) -> None:
    with live_server(root, chaos=("slow=1:30",), allow_chaos=True) as live:
        begin = time.monotonic()
        answer = httpx.post(f"{live.url}/v2/models/same/infer", json=document(ONE))
        took_s = time.monotonic() - begin

    assert answer.status_code == 200
    assert answer.json()["outputs"][0]["data"] == [1.0] * 4
    assert took_s > 0.03


@pytest.mark.slow
def test_the_server_stays_live_while_chaos_kills_its_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models.write_identity(tmp_path, "hooked", "")
    (tmp_path / "hooked" / "hooks.py").write_text("def pre_inference(sample, metadata):\n    return sample\n")
    (tmp_path / "hooked" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\nworkers = 1\n')
    with (
        live_server(tmp_path, chaos=("kill-worker=50",), allow_chaos=True) as live,
        httpx.Client(base_url=live.url, timeout=GUARD_S) as client,  # one client: each new one reads certificates
    ):
        end_s = time.monotonic() + GUARD_S
        while "\npenstock_chaos_faults_total 0\n" in client.get("/metrics").text:
            assert time.monotonic() < end_s
            time.sleep(0.02)  # a starting worker needs the processor
        assert client.get("/v2/health/live").status_code == 200

    assert own_workers() == []
    assert "--chaos is on, faults are injected: kill-worker=50 a second, seed=0" in caplog.messages
    assert any(message.startswith("chaos: kill-worker: process ") for message in caplog.messages)


@pytest.mark.slow
def test_a_server_without_chaos_has_a_plain_engine_and_no_chaos_metrics(root: Path) -> None:
    with live_server(root) as live:
        assert type(live.server.engine).__name__ == "Engine"
        assert "chaos" not in httpx.get(f"{live.url}/metrics").text


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(("fault", "number"), [("kill-worker", signal.SIGKILL), ("stop-worker", signal.SIGSTOP)])
def test_a_process_is_killed_or_stopped_when_its_fault_is_due(fault: str, number: signal.Signals) -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as victim:
        try:

            async def main() -> int:
                chaos = Chaos(parse((f"{fault}=1000",)), ("worker",), time.monotonic_ns())
                making = asyncio.ensure_future(make_faults(chaos, {"worker": lambda: [victim.pid]}))
                how = os.WSTOPPED | os.WEXITED | os.WNOWAIT
                await asyncio.to_thread(os.waitid, os.P_PID, victim.pid, how)
                making.cancel()
                return chaos.counts[fault]

            assert asyncio.run(main()) >= 1
            assert stopped(victim.pid) if number == signal.SIGSTOP else victim.wait(10) == -signal.SIGKILL
        finally:
            victim.kill()


def test_a_fault_without_a_process_or_with_an_ended_process_is_skipped() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait(10)
    calls: list[int] = []

    async def main() -> None:
        chaos = Chaos(parse(("kill-worker=1000",)), ("worker",), time.monotonic_ns())
        enough = asyncio.Event()

        def victims() -> list[int]:
            calls.append(1)
            if len(calls) > 3:
                enough.set()
            return [ended.pid] if len(calls) % 2 else []

        making = asyncio.ensure_future(make_faults(chaos, {"worker": victims}))
        await enough.wait()
        assert not making.done()
        making.cancel()
        assert chaos.counts == {}

    asyncio.run(main())


def test_own_workers_finds_the_workers_of_this_process_and_no_other_child() -> None:
    program = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
        subprocess.Popen([*command, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker,
    ):
        for child in (other, worker):
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"  # it is running its program
        found = own_workers()
        assert (other.poll(), worker.poll()) == (None, None)
        for child in (other, worker):
            child.communicate()

    assert worker.pid in found
    assert other.pid not in found


@asynccontextmanager
async def late_engine() -> AsyncIterator[tuple[ChaoticEngine, Model]]:
    """An Engine that delays every request by an hour."""
    backend = FakeBackend(fake_model().signature, list)
    chaos = Chaos(parse(("slow=1:3600000",)), (), 0)
    engine = ChaoticEngine(asyncio.get_running_loop(), {"fake": fake_loader(backend)}, chaos)
    yield engine, await engine.load(ModelSpec("m", 1, Path("model"), backend="fake"))
    await engine.stop(0)


def test_a_delayed_request_that_is_cancelled_is_never_submitted() -> None:
    async def main() -> None:
        async with late_engine() as (engine, model):
            asking = asyncio.ensure_future(engine.infer(model, [ONE]))
            await asyncio.sleep(0)
            assert model.hold_count == 1

            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

            assert model.hold_count == 0

    asyncio.run(main())


def test_a_stopping_engine_submits_delayed_requests_at_once() -> None:
    async def main() -> None:
        async with late_engine() as (engine, model):
            asking = asyncio.ensure_future(engine.infer(model, [ONE]))
            await asyncio.sleep(0)

            await engine.stop(PATIENCE_S)

            assert (await asking)[0].tolist() == ONE.tolist()

    asyncio.run(main())


def test_a_delayed_request_rejected_by_its_queue_fails_with_the_error() -> None:
    async def main() -> None:
        async with late_engine() as (engine, model):
            asking = asyncio.ensure_future(engine.infer(model, [ONE]))
            await asyncio.sleep(0)
            model.closing = True

            await engine.stop(PATIENCE_S)

            with pytest.raises(InferError, match="stop"):
                await asking

    asyncio.run(main())
