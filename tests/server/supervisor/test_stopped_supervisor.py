"""A stopped supervisor: requests and processes are unaffected, and it restarts processes when continued."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.server.supervisor.test_faults import PATIENCE_S, load_on, run, served

pytestmark = pytest.mark.slow


def test_a_supervisor_that_is_stopped_and_continued_loses_no_request_or_process() -> None:
    async def main() -> None:
        async with served() as server, asyncio.timeout(PATIENCE_S):
            before = server.pids()
            async with load_on(server) as ledger:
                server.process.send_signal(signal.SIGSTOP)
                good = ledger.ends["good"]
                while ledger.ends["good"] < good + 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGCONT)

            assert ledger.all_good
            assert server.pids() == before
            # the supervisor works again: a process that dies is restarted
            since = len(server.lines)
            os.kill(before[0], signal.SIGKILL)
            await server.says("every process is ready again", since)

    run(main)
