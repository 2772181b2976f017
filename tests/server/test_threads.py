"""A server when no more threads can be started: accepted work is done, and the server can end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from penstock.server.answering import LargeJsonReader
from penstock.server.listening.mapped_buffer import LargeAnswerEncoder
from penstock.server.process import run
from penstock.server.serve import Server
from penstock.server.settings import Settings
from penstock.server.threads import StripedLocks, ThreadPool, new_loop
from tests.fakes import PATIENCE_S, no_more_threads
from tests.live import settings_for


def test_work_waits_for_an_existing_thread_when_no_more_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, gate = ThreadPool(4), threading.Event()
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        with pytest.raises(RuntimeError):
            threads.submit(gate.set)
    first = threads.submit(gate.wait, PATIENCE_S)
    no_more_threads(monkeypatch)
    second = threads.submit(str, "done")
    assert not gate.is_set()
    gate.set()

    assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == (True, "done")


def test_large_texts_and_answers_are_processed_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[str]:
        texts, answers = LargeJsonReader(), LargeAnswerEncoder()
        no_more_threads(monkeypatch)
        return [await texts.read(None, str, 1), await answers.encode(0, str, 2), await answers.encode(9 << 20, str, 3)]

    loop = new_loop()
    assert loop.run_until_complete(main()) == ["1", "2", "3"]
    loop.close()


def test_a_server_closes_while_its_threads_are_busy_and_no_more_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(gate: threading.Event) -> int:
        server = Server(settings_for(tmp_path))
        await server.open()
        await server.load()
        no_more_threads(monkeypatch)
        busy = asyncio.ensure_future(asyncio.to_thread(gate.wait, PATIENCE_S))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(server.close())
        await asyncio.sleep(0)
        gate.set()
        await closing
        return int(await busy)

    loop = new_loop()
    assert loop.run_until_complete(main(threading.Event())) == 1
    loop.close()


def test_a_server_that_cannot_start_any_thread_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        assert run(Settings()) == 1

    assert "can't start new thread: the limit on processes and threads is too low" in capsys.readouterr().err


def test_striped_locks_have_a_fixed_number_of_locks_for_any_number_of_names() -> None:
    locks = StripedLocks()

    assert locks.lock_for("model") is locks.lock_for("model")
    assert len({id(locks.lock_for(f"made up {number}")) for number in range(10_000)}) == 64
