"""A supervisor that is stopped: nobody is started again meanwhile, and nothing else is missed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.server.supervisor.test_faults import PATIENCE_S, load_on, run, served

pytestmark = pytest.mark.slow


def test_a_supervisor_that_is_stopped_and_goes_on_harms_no_request_and_no_process() -> None:
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
            # it works: what dies is started again
            since = len(server.lines)
            os.kill(before[0], signal.SIGKILL)
            await server.says("every process is ready again", since)

    run(main)
