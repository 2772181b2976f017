"""The generator's gRPC against Penstock's own, over sockets."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.signature import Signature, TensorSpec
from penstock.perf.generator.grpc import GrpcOpener, ask
from penstock.perf.generator.grpc_calls import CallError
from penstock.perf.generator.orders import GrpcCall, Target, Tls
from penstock.server.grpc.limits import GrpcLimits
from penstock.server.grpc.tls import context_for
from penstock.server.http2.limits import Http2Limits
from penstock.server.protobuf import service_pb2
from penstock.server.settings import Settings
from tests.fakes import FakeBackend, fake_loader
from tests.keys import certificate
from tests.live import Live, live_server
from tests.perf.generator.grpc_peer import FakeSlot, message
from tests.server.grpc import echo_server
from tests.server.http2.wire import ECHO

GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
INFER, STREAM = (f"/inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "ModelStreamInfer"))
REQUESTS = 20


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("models")
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.onnx").touch()
    with live_server(root, loaders={"onnxruntime": fake_loader(FakeBackend(GRAPH, list))}) as live:
        yield live


def infer(model: str = "m") -> bytes:
    request = service_pb2().ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=(1, 4))
    request.raw_input_contents.append(np.ones(4, np.float32).tobytes())
    return message(request.SerializeToString())


async def load(target: Target, request: bytes, slots: int = 8, each: int = REQUESTS) -> list[FakeSlot]:
    """Have some slots each send some requests, one after the other."""
    opener, losses = GrpcOpener(target), list[str]()
    channels = [await opener.open(losses.append) for _ in range(2)]
    counting_slots: list[FakeSlot] = []
    done = asyncio.Event()

    class Counting(FakeSlot):
        def on_answer(self, now_ns: int, error: str) -> None:
            super().on_answer(now_ns, error)
            if not self.again and all(len(slot.ends) == each for slot in counting_slots):
                done.set()

    for number in range(slots):
        channel = channels[number % 2]
        counting_slots.append(Counting(again=each - 1, send=lambda slot, channel=channel: channel.send(request, slot)))  # type: ignore[misc]
        channel.send(request, counting_slots[-1])
    async with asyncio.timeout(20):
        await done.wait()
    for channel in channels:
        channel.close()
    assert not losses
    return list(counting_slots)


@pytest.mark.parametrize("compression", ["none", "gzip", "deflate"])
@pytest.mark.parametrize("streaming", [False, True])
def test_requests_are_answered_and_counted_by_the_server(live: Live, compression: str, streaming: bool) -> None:
    async def count() -> int:
        return live.server.engine.model("m").statistics.snapshot().success.count

    call = GrpcCall(STREAM if streaming else INFER, streaming=streaming, compression=compression)
    before = live.call(count())
    slots = asyncio.run(load(Target("127.0.0.1", live.grpc_port, grpc=call), infer()))

    assert [slot.ends for slot in slots] == [[""] * REQUESTS] * 8
    assert live.call(count()) - before == 8 * REQUESTS


@pytest.mark.parametrize("streaming", [False, True])
def test_an_error_of_the_server_is_reported(live: Live, streaming: bool) -> None:
    call = GrpcCall(STREAM if streaming else INFER, streaming=streaming)
    slots = asyncio.run(load(Target("localhost", live.grpc_port, grpc=call), infer("other"), slots=2, each=2))

    text = "Request for unknown model: 'other' is not found"
    assert [slot.ends for slot in slots] == [[text if streaming else f"NOT_FOUND: {text}"] * 2] * 2


def test_messages_of_many_frames_pass_small_windows_both_ways() -> None:
    limits = GrpcLimits(http2=Http2Limits(stream_window_bytes=70_000, connection_window_bytes=100_000))
    with echo_server.served(limits) as live:
        target = Target("127.0.0.1", live.served.listener.port)
        content = np.random.default_rng(1).bytes(3_000_000)

        assert asyncio.run(ask(target, GrpcCall(ECHO), content)) == content
        slots = asyncio.run(
            load(Target(target.host, target.port, grpc=GrpcCall(ECHO)), message(content[:300_000]), each=3)
        )
        assert [slot.ends for slot in slots] == [[""] * 3] * 8


def test_tls_works_with_a_client_certificate(tmp_path: Path) -> None:
    (server, server_key), (client, client_key) = certificate(tmp_path, "server"), certificate(tmp_path, "client")
    settings = Settings(
        grpc_use_ssl_mutual=True, grpc_server_cert=server, grpc_server_key=server_key, grpc_root_cert=client
    )
    with echo_server.served(tls=context_for(settings)) as live:

        def ask_with(tls: Tls) -> bytes:
            return asyncio.run(ask(Target("127.0.0.1", live.served.listener.port, tls), GrpcCall(ECHO), b"hello"))

        assert ask_with(Tls(roots=server, certificate=client, key=client_key)) == b"hello"
        assert ask_with(Tls(verify_peer=False, certificate=client, key=client_key)) == b"hello"
        with pytest.raises(ssl.SSLCertVerificationError):
            ask_with(Tls(certificate=client, key=client_key))
        with pytest.raises((OSError, CallError)):
            ask_with(Tls(roots=server))


def test_a_tls_server_that_does_not_choose_http2_is_an_error(tmp_path: Path) -> None:
    certificate_file, key = certificate(tmp_path)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate_file, key)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=server_side) as server:
            target = Target("127.0.0.1", server.sockets[0].getsockname()[1], Tls(roots=certificate_file))
            with pytest.raises(OSError, match="ALPN"):
                await ask(target, GrpcCall(ECHO), b"")

    asyncio.run(scenario())
