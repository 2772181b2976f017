"""How workers end: killed, crashed or past a limit, with their child processes. Nothing is left."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import Code
from penstock.server.workers import worker as worker_module
from penstock.server.workers.order import NotStartedError, WorkerLost
from penstock.server.workers.process import describe_end
from penstock.server.workers.worker import Worker
from tests.processes import lives
from tests.server.workers.orders import CALL, ended, ends_within, group_members, order, scene

pytestmark = pytest.mark.slow


async def ends(body: bytes, *, limit_s: float = 0.0, **members: Any) -> tuple[Worker, WorkerLost]:
    """End a worker by a call, with one call before it and one after it. Return the worker and the call's error."""
    lost: list[Worker] = []
    worker = Worker(order(**members), lost.append)
    before, fatal, after = (
        worker.call(CALL, b"echo"),
        worker.call(CALL, body, limit_s=limit_s),
        worker.call(CALL, b"echo"),
    )
    assert (await before)[0] == b"echo"
    with pytest.raises(WorkerLost) as caught:
        await fatal
    with pytest.raises(NotStartedError):
        await after
    await worker.ended
    assert lost == [worker]
    assert worker.exited
    assert not worker.serving
    with pytest.raises(NotStartedError):
        worker.call(CALL)
    return worker, caught.value


@pytest.mark.parametrize(
    ("body", "reason", "text"),
    [
        (b"exit 3", "exit", "exit status 3"),
        (b"abort", "signal", r"signal 6 \(SIGABRT\)"),
        (b"crash", "signal", r"signal 11 \(SIGSEGV\)"),
        (b"kill", "signal", r"signal 9 \(SIGKILL\)"),
    ],
)
def test_only_the_running_call_fails_with_an_ended_process(body: bytes, reason: str, text: str) -> None:
    async def work() -> None:
        worker, error = await ends(body)
        assert error.message == f"the test's worker ended: {text}".replace("\\", "")
        assert (error.code, worker.end_reason) == (Code.NOT_READY, reason)

    scene(work())


def test_waiting_calls_fail_immediately_when_the_worker_is_killed() -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.ready
        calls = [worker.call(CALL, b"sleep 60"), *[worker.call(CALL, b"echo") for _ in range(50)]]
        os.kill(worker.pid, signal.SIGKILL)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors[1:]] == [NotStartedError] * 50
        await worker.ended

    scene(work())  # it times out before the minute that the first call takes


@pytest.mark.parametrize("body", [b"spin", b"hold", b"sleep 60"])
def test_a_call_above_its_time_limit_kills_the_worker(body: bytes) -> None:
    async def work() -> None:
        worker, error = await ends(body, limit_s=0.1)
        assert error.message == "the test's worker: a call took longer than its limit of 0.1 s"
        assert (error.code, worker.end_reason) == (Code.EXPIRED, "time")

    scene(work())


def test_the_time_limit_of_a_call_starts_when_the_call_is_first_in_line() -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.ready
        calls = [worker.call(CALL, b"sleep 0.3", limit_s=1.0) for _ in range(4)]
        await asyncio.gather(*calls)
        await ended(worker)

    scene(work())


def test_a_canceled_call_above_its_time_limit_kills_the_worker() -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.ready
        call = worker.call(CALL, b"spin", limit_s=0.1)
        await asyncio.sleep(0)
        call.cancel()
        await worker.ended
        assert worker.end_reason == "time"

    scene(work())


def test_an_answer_that_waits_to_be_read_is_in_time() -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.ready
        call = worker.call(CALL, b"echo", limit_s=0.5)
        await asyncio.sleep(0)
        time.sleep(0.8)  # noqa: ASYNC251 - blocks the loop
        worker._check()  # the timer may fire before the socket is read
        assert (await call)[0] == b"echo"
        await ended(worker)

    scene(work())


def test_a_call_gets_extra_time_after_the_server_itself_stood_still() -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.ready
        call = worker.call(CALL, b"sleep 0.3", limit_s=30.0)
        await asyncio.sleep(0)
        worker._line_since_s -= 60.0
        worker._next_check_s -= 60.0
        worker._check()
        assert (await call)[0] == b"None"
        await ended(worker)

    scene(work())


def test_a_worker_above_its_memory_limit_is_killed() -> None:
    async def work() -> None:
        worker, error = await ends(b"grow 300", memory_bytes=200 << 20)
        assert "MiB of memory, more than its limit of 200 MiB" in error.message
        assert worker.end_reason == "memory"

    scene(work())


def test_a_worker_stopped_while_idle_is_detected_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "IDLE_S", 3600.0)  # no checks while idle

    async def work() -> None:
        worker = Worker(order())
        await worker.call(CALL, b"echo")
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(NotStartedError):
            await worker.call(CALL, b"echo")
        await worker.ended
        assert worker.end_reason == "stopped"

    scene(work())


def test_a_worker_that_is_stopped_is_killed() -> None:
    async def work() -> None:
        worker, error = await ends(b"freeze")
        assert error.message == "the test's worker was stopped for more than 1 s"
        assert worker.end_reason == "stopped"

    scene(work())


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_an_idle_worker_that_answers_pings_is_kept(monkeypatch: pytest.MonkeyPatch, memory_bytes: int) -> None:
    async def work() -> None:
        worker = Worker(order(memory_bytes=memory_bytes))
        await worker.ready
        monkeypatch.setattr(worker_module, "IDLE_S", 0.01)
        await worker.call(CALL, b"echo")
        before = worker._last_number
        pinged = asyncio.Event()

        def answered(_: asyncio.Future[Any]) -> None:
            if worker._last_number > before + 2:
                pinged.set()

        monkeypatch.setattr(worker_module, "_ignore_result", lambda ping: ping.add_done_callback(answered))
        await pinged.wait()
        await ended(worker)

    scene(work())


def test_an_idle_worker_that_does_not_answer_pings_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "IDLE_S", 0.01)
    monkeypatch.setattr("penstock.server.workers.watch.SILENT_S", 0.3)

    async def work() -> None:
        worker = Worker(order())
        await worker.ready
        await worker.call(CALL, b"hold_later")
        await worker.ended
        assert worker.end_reason == "silent"

    scene(work())


def test_a_worker_that_closes_its_output_continues_to_serve() -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.call(CALL, b"mute")
        assert (await worker.call(CALL, b"echo"))[0] == b"echo"
        await ended(worker)

    scene(work())


def test_a_worker_that_closes_its_socket_is_killed() -> None:
    async def work() -> None:
        worker, error = await ends(b"cut")
        assert error.message.startswith("the test's worker cannot be reached")
        assert worker.end_reason == "silent"

    scene(work())


def test_a_worker_that_has_exited_is_reported_with_its_status_however_late(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_exited, reaped = os.waitid, threading.Event()

    def wait_late(*args: int) -> object:
        reaped.wait(30)
        return wait_exited(*args)

    async def work() -> None:
        disconnected: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(Worker, "_on_disconnect", lambda _, reason: disconnected.set_result(reason))
        monkeypatch.setattr(os, "waitid", wait_late)
        worker = Worker(order())
        call = worker.call(CALL, b"exit 3")
        reason = await disconnected
        await asyncio.to_thread(wait_exited, os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        worker._kill_unreachable(reason)
        reaped.set()
        with pytest.raises(WorkerLost, match=r"ended: exit status 3$"):
            await call
        assert worker.end_reason == "exit"

    scene(work())


def test_a_stopped_worker_that_is_slow_to_exit_logs_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "EXIT_GRACE_S", 0.0)
    os.mkfifo(pipe := tmp_path / "pipe")
    end = os.open(pipe, os.O_RDWR)

    async def work() -> None:
        unlinked, noticed = asyncio.Event(), Worker._on_disconnect

        def notice(worker: Worker, why: str) -> None:
            noticed(worker, why)
            unlinked.set()

        monkeypatch.setattr(Worker, "_on_disconnect", notice)
        worker = Worker(order())
        await worker.call(CALL, f"linger {pipe}".encode())
        worker.stop()
        await unlinked.wait()
        await asyncio.sleep(0)
        os.write(end, b"!")
        await worker.ended

    scene(work())
    os.close(end)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_exit_handlers_of_user_code_run_when_the_worker_stops(tmp_path: Path) -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.call(CALL, f"promise {tmp_path / 'file'}".encode())
        await ended(worker)

    scene(work())
    assert (tmp_path / "file").exists()


def test_a_process_pool_is_shut_down_before_the_worker_exits(tmp_path: Path) -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.call(CALL, f"promise_pool {tmp_path / 'file'}".encode())
        await ended(worker)

    scene(work())
    assert (tmp_path / "file").exists()


def test_a_process_pool_is_shut_down_when_an_exit_handler_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.call(CALL, f"promise_pool {tmp_path / 'file'}".encode())
        await worker.call(CALL, b"end_badly")
        await ended(worker)

    caplog.set_level(logging.INFO, "penstock.workers")
    scene(work())
    assert (tmp_path / "file").exists()
    assert "OSError: [Errno 9] Bad file descriptor" in caplog.text


def test_an_exit_handler_that_blocks_does_not_keep_the_worker_alive(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.call(CALL, b"stay")
        await ended(worker)

    scene(work())
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_child_processes_end_with_their_worker() -> None:
    async def work() -> int:
        worker = Worker(order())
        pid = int((await worker.call(CALL, b"start"))[0])
        assert lives(pid)
        with pytest.raises(WorkerLost):
            await worker.call(CALL, b"exit 0")
        await worker.ended
        return pid

    assert ends_within(scene(work()), 1.0)


def test_a_fork_bomb_ends_with_its_worker() -> None:
    async def work() -> int:
        worker, _ = await ends(b"bomb 5", limit_s=0.2)
        return worker.pid

    group = scene(work())

    # they are killed while they start others: none may be missed
    assert all(ends_within(pid, 5.0) for pid in group_members(group))
    assert not group_members(group)


@pytest.mark.parametrize("by", [b"python", b"c"])
def test_a_forked_child_that_returns_from_a_call_ends_without_an_answer(by: bytes) -> None:
    async def work() -> None:
        worker = Worker(order())
        child = (await worker.call(CALL, b"come_back_twice " + by))[0]
        assert int(child) > 0
        assert (await worker.call(CALL, b"status_of " + child))[0] == b"0"
        assert (await worker.call(CALL, b"still there"))[0] == b"still there"
        await ended(worker)

    scene(work())


def test_callers_do_not_wait_for_a_forked_child_that_holds_the_socket() -> None:
    async def work() -> None:
        worker = Worker(order())
        child = int((await worker.call(CALL, b"fork"))[0])
        with pytest.raises(WorkerLost):
            await worker.call(CALL, b"exit 0")
        await worker.ended
        os.kill(child, signal.SIGKILL)

    scene(work())


def test_a_service_that_does_not_close_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "CLOSE_LIMIT_S", 0.1)

    async def work() -> None:
        worker = Worker(order())
        await worker.call(CALL, b"close_slowly")
        await ended(worker)
        assert worker.end_reason == "time"

    scene(work())


@pytest.mark.parametrize("settings", [{"listens": True}, {"loop": True}, {}])
def test_a_worker_ends_when_its_server_is_gone(settings: dict[str, Any]) -> None:
    async def work() -> None:
        worker = Worker(order(settings=settings))
        await worker.call(CALL, b"echo")
        worker.call(CALL, b"sleep 60" if settings.get("listens") else b"echo")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        worker._link.close()
        await worker.ended
        assert worker.end_reason == "exit"

    scene(work())


def test_the_lost_callback_is_not_called_for_a_stopped_worker() -> None:
    async def work() -> None:
        lost: list[Worker] = []
        worker = Worker(order(), lost.append)
        await worker.ready
        worker.kill("nobody wants it")
        worker.stop()
        await worker.ended
        assert not lost
        worker.send_message(64, 0, b"nobody")

    scene(work())


def test_a_failed_opening_ends_the_worker_when_its_ready_future_is_canceled() -> None:
    async def work() -> None:
        worker = Worker(order(settings={"breaks": "x"}))
        worker.ready.cancel()
        await worker.ended
        assert worker.end_reason == "open"

    scene(work())


def test_settings_that_cannot_be_serialized_leave_nothing_behind() -> None:
    async def work() -> None:
        with pytest.raises(TypeError):
            Worker(order(settings={"x": object()}))

    scene(work())


def test_a_crash_during_the_opening_is_reported_with_its_signal() -> None:
    description = describe_end(order(), -signal.SIGSEGV, "Extension modules: numpy.linalg._umath_linalg (total: 1)")

    assert description[1] == "the test's worker ended while it was starting: signal 11 (SIGSEGV)"


def test_killing_a_worker_before_it_has_started_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        worker = Worker(order())
        worker.kill("nobody wants it")
        await worker.ended

    scene(work())
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_the_process_name_of_a_worker_is_worker() -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.ready
        assert Path(f"/proc/{worker.pid}/comm").read_text() == "worker\n"
        await ended(worker)

    scene(work())


def test_a_worker_can_be_killed_before_it_has_started() -> None:
    async def work() -> None:
        worker = Worker(order())
        worker.kill("nobody wants it")
        with pytest.raises(WorkerLost, match="nobody wants it"):
            await worker.ready
        await worker.ended
        assert worker.end_reason == "killed"

    scene(work())


def test_the_end_of_a_worker_is_noticed_when_sigchld_is_ignored() -> None:
    async def work() -> None:
        worker = Worker(order())
        await worker.ready
        os.kill(worker.pid, signal.SIGKILL)
        await worker.ended

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        scene(work())
    finally:
        signal.signal(signal.SIGCHLD, before)
