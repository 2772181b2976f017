"""Workers end with their server, whatever they are doing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import lives
from tests.server.workers.orders import ends_within

ROOT = Path(__file__).parents[3]

# As in tests/live.py, the loop is not on the main thread.
PROGRAM = """
import asyncio, os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from penstock.server.workers.worker import Worker
from tests.server.workers.orders import CALL, order

async def main():
    workers = [Worker(order(settings=settings)) for settings in ({}, {"listens": True}, {"loop": True}) for _ in "1234"]
    await asyncio.gather(*[worker.ready for worker in workers])
    calls = [worker.call(CALL, word) for worker, word in zip(workers, (b"spin", b"hold", b"sleep 60", b"echo") * 3)]
    await asyncio.gather(*calls[3::4])
    loading = Worker(order(settings={"hangs": True}))
    while not loading._process.pid:
        await asyncio.sleep(0.001)
    print(*[worker.pid for worker in [*workers, loading]], flush=True)
    await asyncio.sleep(0 if sys.argv[2] == "leave" else 60)

thread = threading.Thread(target=asyncio.run, args=(main(),))
thread.start()
thread.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "leave"])
def test_no_worker_outlives_its_server(how: str) -> None:
    words = [sys.executable, "-c", PROGRAM, str(ROOT), how]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pids = [int(word) for word in server.stdout.readline().split()]
        assert len(pids) == 13
        if how == "killed":
            assert all(map(lives, pids))
            server.send_signal(signal.SIGKILL)
        server.wait(10)

    assert [pid for pid in pids if not ends_within(pid, 1.0)] == []


def test_a_worker_whose_server_ended_before_it_started_exits(tmp_path: Path) -> None:
    child = ROOT / "server" / "workers" / "child.py"

    ended = subprocess.run([sys.executable, str(child), "0", "0", "1", "{}"], check=False, timeout=10)

    assert ended.returncode == 1
