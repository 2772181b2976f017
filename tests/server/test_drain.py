"""SIGTERM under load as clients see it: `DRAIN_ROUNDS=50 pytest tests/server/test_drain.py` is the long version."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

from penstock.batching.registry import STOPPING_MESSAGE
from penstock.server.grpc.request import SHUTTING_DOWN

IRIS = Path(__file__).parents[2] / "examples" / "iris"
ROUNDS = int(os.environ.get("DRAIN_ROUNDS", "2"))
CLIENTS = 48
TURNED_AWAY = {"HTTP": STOPPING_MESSAGE, "gRPC": SHUTTING_DOWN}
TENSOR = {"name": "input", "datatype": "FP32", "shape": [1, 4], "data": [5.1, 3.5, 1.4, 0.2]}
SAMPLE = {"sepal_length": 5.1, "sepal_width": 3.5, "petal_length": 1.4, "petal_width": 0.2}


def request(request_id: str, kind: str) -> bytes:
    """Return one request; the "hooked" kind goes through hooks, which run on threads."""
    path, sent = "infer", json.dumps({"id": request_id, "inputs": [TENSOR], "parameters": {"hooks": False}})
    if kind == "hooked":
        path, sent = "predict", json.dumps(SAMPLE)
    closing = "connection: close\r\n" if kind == "fresh" else ""
    head = f"POST /v2/models/iris/{path} HTTP/1.1\r\nhost: x\r\n{closing}content-length: {len(sent)}\r\n\r\n"
    return (head + sent).encode()


async def answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return head, await reader.readexactly(length)


async def one_connection(port: int, name: str, kind: str, counted: Counter[str]) -> bool:
    """Send requests until the server closes the connection. Returns: whether to connect again."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    closing = False
    try:
        while not closing:
            request_id = f"{name}-{counted['sent']}"
            counted["sent"] += 1
            writer.write(request(request_id, kind))
            head, body = await answer(reader)
            if TURNED_AWAY["HTTP"] in body.decode():
                counted["sent"] -= 1
                return False
            good = body == b'"iris-setosa"' if kind == "hooked" else json.loads(body).get("id") == request_id
            counted["answered" if good else body.decode()] += 1
            closing = "connection: close" in head
            if kind == "slow":
                await asyncio.sleep(0.003)
    except (OSError, asyncio.IncompleteReadError):
        counted["lost"] += 1
    finally:
        writer.close()
    return True


async def client(port: int, number: int, counted: Counter[str]) -> None:
    kind = ("kept", "fresh", "slow", "hooked")[number % 4]
    connections = 0
    while await one_connection(port, f"{number}.{connections}", kind, counted):
        connections += 1


async def idle(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    rest = await reader.read()
    writer.close()
    return rest


def grpc_request(request_id: str) -> bytes:
    message = service_pb2.ModelInferRequest(model_name="iris", id=request_id)
    message.inputs.add(name="input", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(struct.pack("<4f", *TENSOR["data"]))
    message.parameters["hooks"].bool_param = False
    written: bytes = message.SerializeToString()
    return written


async def grpc_client(port: int, number: int, counted: Counter[str]) -> None:
    """Send requests, on a connection of its own, until the server rejects one or is unreachable."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        while True:
            request_id = f"{number}-{counted['sent']}"
            try:
                answered = await infer(grpc_request(request_id), timeout=20)
            except grpc.aio.AioRpcError as error:
                text = error.details() or ""
                if error.code() is not grpc.StatusCode.UNAVAILABLE or not (
                    "onnect" in text or text in TURNED_AWAY.values()
                ):
                    counted[text] += 1
                return
            counted["sent"] += 1
            good = service_pb2.ModelInferResponse.FromString(answered).id == request_id
            counted["answered" if good else "wrong"] += 1


async def no_idle_client(port: int) -> bytes:
    return b""


Client = Callable[[int, int, Counter[str]], Awaitable[None]]
OVER: dict[str, tuple[Client, Callable[[int], Awaitable[bytes]], tuple[str, ...]]] = {
    "HTTP": (client, idle, ("--http-port=0", "--allow-grpc=false")),
    "gRPC": (grpc_client, no_idle_client, ("--grpc-port=0", "--allow-http=false")),
}


async def terminate_under_load(protocol: str, delay_s: float) -> tuple[int, Counter[str]]:
    request_forever, idle_client, flags = OVER[protocol]
    words = ("-m", "penstock.server.cli", "serve", str(IRIS), "--allow-metrics=false", *flags)
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=asyncio.subprocess.PIPE)
    try:
        if process.stderr is None:
            raise AssertionError("no pipe")
        port = 0
        async for line in process.stderr:
            message: str = json.loads(line)["msg"]
            if f"{protocol} on" in message:
                port = int(message.rpartition(":")[2])
            if message.startswith("ready"):
                break
        counted: Counter[str] = Counter()
        clients = [asyncio.ensure_future(request_forever(port, number, counted)) for number in range(CLIENTS)]
        waiting = asyncio.ensure_future(idle_client(port))
        # under load for a different time each round: the test is about when the signal arrives
        await asyncio.sleep(delay_s)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            await asyncio.gather(*clients)
            assert await waiting == b""
            await process.stderr.read()
            return await process.wait(), counted
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("protocol", OVER)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_sigterm_under_load_loses_no_accepted_request(number: int, protocol: str) -> None:
    status, counted = asyncio.run(terminate_under_load(protocol, 0.2 + 0.013 * (number % 10)))

    assert status == 0
    assert counted == {"sent": counted["sent"], "answered": counted["sent"]}
    assert counted["sent"] > CLIENTS
