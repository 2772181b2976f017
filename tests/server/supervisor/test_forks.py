"""A front end whose hooks have forked: the child and its inherited listening sockets end with the front end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.processes import children
from tests.server.supervisor.test_faults import IRIS, SAMPLE, served

pytestmark = pytest.mark.slow
FORKING = """
import os, time

def pre_inference(sample, signature, metadata):
    if not os.fork():
        time.sleep(60)
        os._exit(0)
    return [[5.1, 3.5, 1.4, 0.2]]
"""


def forking(root: Path) -> Path:
    """Write a model whose hook leaves a child behind."""
    folder = root / "zfork"
    (folder / "1").mkdir(parents=True)
    shutil.copy(IRIS / "iris" / "1" / "model.onnx", folder / "1")
    (folder / "hooks.py").write_text(FORKING)
    (folder / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\nworkers = 0\n')
    return root


async def ask(port: int, model: str) -> int:
    """Send one request on its own connection. Returns: the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(SAMPLE).encode()
    head = b"POST /v2/models/%b/predict HTTP/1.1\r\nhost: x\r\n" % model.encode()
    writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    status = int(
        (await reader.readuntil(b"\r\n\r\n")).split()[1]
    )  # the connection does not end, because the child holds it open
    writer.close()
    await writer.wait_closed()
    return status


def test_a_killed_front_end_leaves_no_forked_child_accepting_its_connections(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(str(forking(tmp_path))) as server:
            port = server.port("HTTP")
            fronts = server.pids("front")
            while not all(children(pid) for pid in fronts):
                assert await ask(port, "zfork") == 200
            for pid in fronts:
                os.kill(pid, signal.SIGKILL)
            await server.says("every process is ready again")
            async with asyncio.timeout(20):
                assert await asyncio.gather(*(ask(port, "iris") for _ in range(64))) == [200] * 64

    asyncio.run(main())
