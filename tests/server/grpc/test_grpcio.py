"""grpcio as a client, over sockets: unary and streams, cancellation, deadlines, compression, size, TLS, drain."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from penstock.server.grpc.limits import GrpcLimits
from penstock.server.grpc.tls import TlsError, context_for
from penstock.server.http2.limits import Http2Limits
from penstock.server.listening.unread_answers import UnreadAnswers
from penstock.server.settings import Settings
from tests.keys import certificate
from tests.server.http2.wire import BIDI, ECHO, GIVE, HOLD

from .echo_server import Live, served

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
PATIENCE_S = 20


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with served() as started:
        yield started


@pytest.fixture
def channel(live: Live) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(live.address, UNLIMITED) as opened:
        yield opened


def ask(channel: grpc.Channel, path: str, message: bytes, **how: Any) -> bytes:
    answer: bytes = channel.unary_unary(path)(message, **{"timeout": PATIENCE_S, **how})
    return answer


def test_unary_calls_are_answered_with_ok(channel: grpc.Channel) -> None:
    assert ask(channel, ECHO, b"hello") == b"hello"
    assert ask(channel, ECHO, b"") == b""
    for size in (1, 100, 16_378, 16_379, 16_380, 65_530, 65_531, 70_000, 1_000_000):
        assert ask(channel, ECHO, bytes(size)) == bytes(size)


def test_large_and_small_messages_sent_in_parallel_are_echoed_intact(channel: grpc.Channel) -> None:
    sent = [random.Random(number).randbytes(size) for number, size in enumerate((300_000, 10, 2_500_000, 70_000) * 8)]
    futures = [channel.unary_unary(ECHO).future(message, timeout=PATIENCE_S) for message in sent]

    assert [future.result() for future in futures] == sent


@pytest.mark.slow
def test_a_message_of_64_mib_is_received_and_sent(channel: grpc.Channel) -> None:
    message = bytes(range(256)) * (64 << 12)

    assert ask(channel, ECHO, message, timeout=60) == message


def test_thousands_of_parallel_calls_on_one_channel_are_answered(channel: grpc.Channel) -> None:
    futures = [channel.unary_unary(ECHO).future(b"%d" % number, timeout=PATIENCE_S) for number in range(3000)]

    assert [future.result() for future in futures] == [b"%d" % number for number in range(3000)]


def test_a_stream_is_answered_message_by_message(channel: grpc.Channel) -> None:
    sent = [bytes([number]) * number * 1000 for number in range(100)]

    assert list(channel.stream_stream(BIDI)(iter(sent), timeout=PATIENCE_S)) == sent


def test_a_stream_answers_while_it_is_open(channel: grpc.Channel) -> None:
    arrived = threading.Semaphore(0)

    def messages() -> Iterator[bytes]:
        for number in range(5):
            yield b"%d" % number
            assert arrived.acquire(timeout=PATIENCE_S)

    received = []
    for message in channel.stream_stream(BIDI)(messages(), timeout=PATIENCE_S):
        received.append(message)
        arrived.release()
    assert received == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_requests_may_be_compressed(channel: grpc.Channel, compression: grpc.Compression) -> None:
    assert ask(channel, ECHO, b"many " * 10_000, compression=compression) == b"many " * 10_000
    sent = [b"many " * 1000, b"x", b""]
    assert list(channel.stream_stream(BIDI)(iter(sent), compression=compression, timeout=PATIENCE_S)) == sent


def test_answers_may_be_compressed() -> None:
    with served(GrpcLimits(compression=6)) as live, grpc.insecure_channel(live.address) as channel:
        assert ask(channel, GIVE, b"3000000") == bytes(3_000_000)
        sent = [bytes(5000), bytes(3_000_000), b"x"]
        assert list(channel.stream_stream(BIDI)(iter(sent), timeout=PATIENCE_S)) == sent


def test_an_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        ask(channel, "/no.Such/Method", b"x" * 100_000)

    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.details() == "unknown method /no.Such/Method"


def test_an_unread_answer_over_the_limit_for_all_calls_is_resource_exhausted() -> None:
    with served() as live, grpc.insecure_channel(live.address, UNLIMITED) as channel:
        live.served.shared.unread = UnreadAnswers(1 << 20)
        answers = channel.stream_stream(BIDI)(iter([bytes(8 << 20)]), timeout=PATIENCE_S)
        # the answer is never read, so its window lets little of it through
        assert answers.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_passed_deadline_ends_the_call_at_the_client_and_at_the_server(live: Live, channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        ask(channel, HOLD, b"", timeout=0.05)

    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert live.served.began.acquire(timeout=PATIENCE_S)
    assert live.served.cancelled.acquire(timeout=PATIENCE_S)


def test_a_call_cancelled_by_the_client_is_cancelled_at_the_server(live: Live, channel: grpc.Channel) -> None:
    future = channel.unary_unary(HOLD).future(b"")
    assert live.served.began.acquire(timeout=PATIENCE_S)
    future.cancel()

    assert live.served.cancelled.acquire(timeout=PATIENCE_S)


def test_closing_the_channel_cancels_its_calls(live: Live) -> None:
    channel = grpc.insecure_channel(live.address)
    future = channel.unary_unary(HOLD).future(b"")
    assert live.served.began.acquire(timeout=PATIENCE_S)
    channel.close()

    assert live.served.cancelled.acquire(timeout=PATIENCE_S)
    assert future.code() is grpc.StatusCode.CANCELLED


def test_unary_streaming_and_cancelled_calls_work_with_grpc_aio(live: Live) -> None:
    async def play() -> None:
        async with grpc.aio.insecure_channel(live.address, UNLIMITED) as channel:
            echo = channel.unary_unary(ECHO)
            answers = await asyncio.gather(*(echo(b"%d" % number, timeout=PATIENCE_S) for number in range(200)))
            assert answers == [b"%d" % number for number in range(200)]
            call = channel.stream_stream(BIDI)(timeout=PATIENCE_S)
            for number in range(20):
                await call.write(b"%d" % number)
                assert await call.read() == b"%d" % number
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            held = channel.unary_unary(HOLD)(b"")
            assert await asyncio.to_thread(live.served.began.acquire, timeout=PATIENCE_S)
            held.cancel()
            assert await asyncio.to_thread(live.served.cancelled.acquire, timeout=PATIENCE_S)

    asyncio.run(play())


def test_a_client_receives_every_byte_of_several_large_answers(channel: grpc.Channel) -> None:
    futures = [channel.unary_unary(GIVE).future(b"5000000", timeout=PATIENCE_S) for _ in range(8)]

    assert [len(future.result()) for future in futures] == [5_000_000] * 8


def test_keepalive_pings_that_are_too_frequent_end_the_connection() -> None:
    limits = GrpcLimits(http2=Http2Limits(min_ping_interval_s=300.0, max_ping_strikes=1))
    often = [("grpc.keepalive_time_ms", 10), ("grpc.http2.max_pings_without_data", 0)]
    with (
        served(limits) as live,
        grpc.insecure_channel(live.address, often) as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        ask(channel, HOLD, b"")

    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "too_many_pings" in (raised.value.details() or "") + raised.value.debug_error_string()


@pytest.mark.slow
def test_a_drain_finishes_the_calls_in_progress_and_new_calls_are_unavailable() -> None:
    with served() as live, grpc.insecure_channel(live.address) as channel:
        future = channel.unary_unary(HOLD).future(b"", timeout=PATIENCE_S)
        assert live.served.began.acquire(timeout=PATIENCE_S)
        drained = live.drain()
        live.call(live.served.held[0].answer, b"late")

        assert future.result() == b"late"
        assert drained.result() == 0
        with pytest.raises(grpc.RpcError) as raised:
            ask(channel, ECHO, b"")
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
def test_a_drain_under_load_answers_every_accepted_call() -> None:
    async def ask_until_refused(channel: grpc.aio.Channel, answered: list[int], busy: asyncio.Event) -> Any:
        echo = channel.unary_unary(ECHO)
        while True:
            try:
                await echo(b"x", timeout=PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                return error.code()
            answered.append(1)
            if len(answered) >= 500:
                busy.set()

    async def play(live: Live) -> int:
        answered: list[int] = []
        busy = asyncio.Event()
        channels = [grpc.aio.insecure_channel(live.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
        asking = [
            asyncio.ensure_future(ask_until_refused(channel, answered, busy)) for channel in channels for _ in range(8)
        ]
        await busy.wait()
        drained = live.drain()
        assert set(await asyncio.gather(*asking)) == {grpc.StatusCode.UNAVAILABLE}
        assert await asyncio.to_thread(drained.result) == 0
        for channel in channels:
            await channel.close()
        return len(answered)

    with served() as live:
        assert asyncio.run(play(live)) == live.served.message_count


@pytest.mark.slow
def test_a_drain_returns_the_number_of_unfinished_calls() -> None:
    with served() as live, grpc.insecure_channel(live.address) as channel:
        future = channel.unary_unary(HOLD).future(b"", timeout=PATIENCE_S)
        assert live.served.began.acquire(timeout=PATIENCE_S)

        assert live.drain(0.7).result() == 1
        future.cancel()


def test_an_http_client_on_the_grpc_port_is_answered_400_naming_the_protocol(live: Live) -> None:
    with httpclient.InferenceServerClient(live.address) as client, pytest.raises(InferenceServerException) as failure:
        client.get_server_metadata()

    assert (failure.value.status(), failure.value.message()) == ("400", "this port speaks gRPC, over HTTP/2")


# -- TLS -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: certificate(folder, name) for name in ("server", "client", "stranger")}


def read(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.mark.slow
def test_tls_is_served_with_alpn(keys: dict[str, tuple[str, str]]) -> None:
    server = keys["server"]
    settings = Settings(grpc_use_ssl=True, grpc_server_cert=server[0], grpc_server_key=server[1])
    with served(tls=context_for(settings)) as live:
        trusting = grpc.ssl_channel_credentials(read(server[0]))
        with grpc.secure_channel(live.address, trusting, UNLIMITED) as channel:
            assert ask(channel, ECHO, b"hello") == b"hello"
            for message in (random.Random(1).randbytes(5_000_000), b"small", random.Random(2).randbytes(600_000)):
                assert ask(channel, ECHO, message) == message
        client = ssl.create_default_context(cafile=server[0])
        client.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", live.served.listener.port), PATIENCE_S) as plain_socket,
            client.wrap_socket(plain_socket, server_hostname="127.0.0.1") as connection,
        ):
            assert connection.selected_alpn_protocol() == "h2"


@pytest.mark.slow
def test_clients_stalled_in_the_tls_handshake_count_toward_the_connection_limit(
    keys: dict[str, tuple[str, str]],
) -> None:
    server = keys["server"]
    settings = Settings(grpc_use_ssl=True, grpc_server_cert=server[0], grpc_server_key=server[1])
    limits = GrpcLimits(http2=Http2Limits(max_connections=2))
    with served(limits, context_for(settings)) as live:
        where = ("127.0.0.1", live.served.listener.port)
        stalled = [socket.create_connection(where, PATIENCE_S) for _ in range(2)]
        with socket.create_connection(where, PATIENCE_S) as third:
            assert third.recv(1) == b""
        for each in stalled:
            each.close()
        trusting = grpc.ssl_channel_credentials(read(server[0]))
        with grpc.secure_channel(live.address, trusting) as channel:
            assert ask(channel, ECHO, b"hello", wait_for_ready=True) == b"hello"


@pytest.mark.slow
def test_mutual_tls_accepts_only_clients_with_a_trusted_certificate(keys: dict[str, tuple[str, str]]) -> None:
    server, client, stranger = keys["server"], keys["client"], keys["stranger"]
    settings = Settings(
        grpc_use_ssl_mutual=True, grpc_server_cert=server[0], grpc_server_key=server[1], grpc_root_cert=client[0]
    )
    with served(tls=context_for(settings)) as live:
        known = grpc.ssl_channel_credentials(read(server[0]), read(client[1]), read(client[0]))
        with grpc.secure_channel(live.address, known) as channel:
            assert ask(channel, ECHO, b"hello") == b"hello"
        for credentials in (
            grpc.ssl_channel_credentials(read(server[0])),
            grpc.ssl_channel_credentials(read(server[0]), read(stranger[1]), read(stranger[0])),
        ):
            with grpc.secure_channel(live.address, credentials) as channel, pytest.raises(grpc.RpcError) as raised:
                ask(channel, ECHO, b"hello", timeout=5)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"grpc_use_ssl": True}, "requires --grpc-server-cert and --grpc-server-key"),
        (
            {"grpc_use_ssl_mutual": True, "grpc_server_cert": "a", "grpc_server_key": "b"},
            "--grpc-use-ssl-mutual requires --grpc-root-cert",
        ),
        (
            {"grpc_use_ssl": True, "grpc_server_cert": "/none", "grpc_server_key": "/none"},
            "cannot use the certificates of the gRPC port",
        ),
    ],
)
def test_missing_or_unusable_certificates_are_a_tls_error_naming_the_option(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TlsError, match=text):
        context_for(Settings(**options))


def test_a_private_key_with_a_passphrase_is_rejected_without_a_prompt(
    tmp_path: Path, keys: dict[str, tuple[str, str]]
) -> None:
    certificate, key = keys["server"]
    locked = tmp_path / "locked.key"
    words = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(words, check=True, capture_output=True)

    with pytest.raises(TlsError, match=r"locked\.key\): the key has a passphrase"):
        context_for(Settings(grpc_use_ssl=True, grpc_server_cert=certificate, grpc_server_key=str(locked)))


def test_without_tls_there_is_no_context() -> None:
    assert context_for(Settings()) is None
