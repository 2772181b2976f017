"""The HTTP client over loopback, against a server that says what the test wrote down."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from penstock.perf.generator.closed_loop import ClosedLoop
from penstock.perf.generator.http import HttpConnection, HttpOpener
from penstock.perf.generator.orders import Load, Part, Target, Tls
from penstock.perf.generator.pacing import LoadContext
from penstock.perf.generator.reconnecting import Reconnector
from penstock.perf.generator.recording import Recorder
from penstock.perf.generator.tls import pem_key
from penstock.perf.payloads.repeated import Repeated
from tests.perf.generator.certificates import Certificates, make_certificates

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSE = object()
"""In a script: the server ends the connection."""


class Outcome:
    """A slot that waits for its end: empty, an error, or `lost: ` and why."""

    def __init__(self) -> None:
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_responses(self, earlier_ns: Sequence[int], count: int) -> None:
        raise AssertionError("HTTP has one response for each request")

    def on_answer(self, now_ns: int, error: str) -> None:
        self.end.set_result(error)

    def on_lost(self, now_ns: int, reason: str) -> None:
        self.end.set_result(f"lost: {reason}")


class Server:
    """Answers each request with the next step of a script; `connections` is how many there were."""

    def __init__(self, script: Sequence[Any]) -> None:
        self.script = list(script)
        self.connections = 0
        self.requests: list[bytes] = []
        self.talks: set[asyncio.Task[None]] = set()

    def met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.talks.add(asyncio.ensure_future(self._talk(reader, writer)))

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while request := await reader.read(1 << 16):
                self.requests.append(request)
                if not await self._say(writer):
                    break
        writer.close()

    async def _say(self, writer: asyncio.StreamWriter) -> bool:
        for piece in self.script.pop(0):
            if piece is CLOSE:
                return False
            writer.write(piece)
            await writer.drain()
        return True


@asynccontextmanager
async def serving(server: Server, path: str = "", tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    if path:
        listening: asyncio.Server = await asyncio.start_unix_server(server.met, path)
        port = 0
    else:
        listening = await asyncio.start_server(server.met, "127.0.0.1", 0, ssl=tls)
        port = listening.sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        listening.close()
        await asyncio.gather(*server.talks)


def over_loopback(case: Callable[[Server, int], Awaitable[None]], *script: Sequence[Any]) -> None:
    async def main() -> None:
        server = Server(script)
        async with serving(server) as port:
            await case(server, port)

    uvloop.run(main())


async def outcome_of(carrier: Any, request: bytes = b"POST / HTTP/1.1\r\n\r\n") -> str:
    slot = Outcome()
    carrier.send(request, slot)
    return await slot.end


def test_unexpected_data_ends_an_idle_connection_without_a_reason() -> None:
    ended: list[str] = []
    transport = Closing()
    connection = HttpConnection(ended.append, {})
    connection.connection_made(transport)

    connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    connection.connection_lost(None)

    assert (ended, transport.aborted) == ([""], True)


class Closing(asyncio.Transport):
    aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_a_connection_is_reused_for_the_next_request() -> None:
    async def case(server: Server, port: int) -> None:
        carrier = await HttpOpener(Target("127.0.0.1", port)).open(lambda reason: None)

        outcomes = [await outcome_of(carrier, b"%d" % number) for number in range(4)]

        assert outcomes == ["", "", "503: busy", ""]
        assert (server.requests, server.connections) == ([b"0", b"1", b"2", b"3"], 1)
        carrier.close()

    over_loopback(case, [OK], [OK], [b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"], [OK])


def test_an_error_without_a_text_is_reported_by_its_status() -> None:
    async def case(server: Server, port: int) -> None:
        carrier = await HttpOpener(Target("127.0.0.1", port)).open(lambda reason: None)

        assert await outcome_of(carrier) == "302"
        carrier.close()

    over_loopback(case, [b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n"])


HTML = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"
TENSORS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: 2\r\n"
    b"Content-Length: 3\r\n\r\n{}x"
)


def test_a_page_of_a_proxy_is_not_an_answer_to_infer_whatever_its_status() -> None:
    async def case(server: Server, port: int) -> None:
        carrier = await HttpOpener(Target("127.0.0.1", port, v2=True)).open(lambda reason: None)

        outcomes = [await outcome_of(carrier) for _ in range(7)]

        wrong = "200, but neither JSON nor tensors: "
        assert outcomes == [wrong + "text/html", wrong + "text/html", "", "", "", "", "503: busy"]
        carrier.close()

    json = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    busy = b"HTTP/1.1 503 Busy\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\nbusy"
    plain_text = json.replace(b"application/json", b"text/plain")
    over_loopback(case, [HTML], [HTML], [json], [TENSORS], [OK], [plain_text], [busy])


def test_running_out_of_file_descriptors_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*words: Any, **more: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def case() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refused)
        with pytest.raises(ConnectionError, match=r"Too many open files \(ulimit -n\)"):
            await HttpOpener(Target("127.0.0.1", 1)).open(lambda reason: None)

    asyncio.run(case())


def test_a_large_answer_may_arrive_in_many_reads() -> None:
    async def case(server: Server, port: int) -> None:
        carrier = await HttpOpener(Target("localhost", port)).open(lambda reason: None)

        assert [await outcome_of(carrier), await outcome_of(carrier), await outcome_of(carrier)] == ["", "", ""]
        carrier.close()

    big = [b"HTTP/1.1 200 OK\r\ncontent-length: 2000000\r\n\r\n", *[bytes(100_000)] * 20]
    over_loopback(case, [b"HTTP/1.1 200 OK\r\nContent-", b"Length: 2\r\n\r\no", b"k"], big, [OK])


def test_an_error_as_long_as_a_good_answer_is_not_mistaken_for_it() -> None:
    async def case(server: Server, port: int) -> None:
        carrier = await HttpOpener(Target("127.0.0.1", port)).open(lambda reason: None)

        assert [await outcome_of(carrier), await outcome_of(carrier)] == ["", "500: ok"]
        carrier.close()

    over_loopback(case, [OK], [OK.replace(b"200 OK", b"500 No")])


def test_a_server_that_closes_after_an_answer_ends_the_connection_in_order() -> None:
    async def case(server: Server, port: int) -> None:
        ends: list[str] = []
        outcomes = []
        for _ in range(3):
            carrier = await HttpOpener(Target("127.0.0.1", port)).open(ends.append)
            outcomes.append(await outcome_of(carrier))

        assert (outcomes, ends) == (["", "", ""], ["", "", ""])

    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    endless = b"HTTP/1.1 200 OK\r\n\r\nuntil the end"
    over_loopback(case, [closing], [endless, CLOSE], [closing, CLOSE])


def test_a_load_continues_over_as_many_connections_as_the_server_ends() -> None:
    async def case(server: Server, port: int) -> None:
        recorder = Recorder()
        loop = ClosedLoop(
            LoadContext(
                Reconnector(HttpOpener(Target("127.0.0.1", port)), recorder), Repeated((b"x",)), recorder, Part()
            )
        )
        await loop.ready(Load(concurrency=1, requests=5))
        loop.start(0)
        assert await loop._idle_event.wait(loop.in_flight, 60)

        window = recorder.take()
        assert (len(window.ends_ns), window.errors, window.failure, server.connections) == (5, {}, "", 5)
        loop.close()

    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    over_loopback(case, *[[closing, CLOSE]] * 5)


def test_the_connection_end_is_reported_before_the_answer_so_that_the_next_request_goes_elsewhere() -> None:
    async def case(server: Server, port: int) -> None:
        order: list[str] = []
        slot = Outcome()
        slot.end.add_done_callback(lambda end: None)
        carrier = await HttpOpener(Target("127.0.0.1", port)).open(
            lambda reason: order.append("answered" if slot.end.done() else "line first")
        )
        carrier.send(b"x", slot)

        assert await slot.end == "lost: the server closed the connection"
        assert order == ["line first"]

    over_loopback(case, [CLOSE])


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([CLOSE], "the server closed the connection"),
        ([OK[:-1], CLOSE], "the server closed the connection"),
        ([b"220 mail.example.org ESMTP\r\n\r\n"], "no head of HTTP/1.1: b'220 mail.example.org ESMTP\\r\\n\\r\\n'"),
        ([OK + b"more"], "more than the answer: b'more'"),
    ],
)
def test_a_request_without_its_answer_is_lost(script: list[Any], reason: str) -> None:
    async def case(server: Server, port: int) -> None:
        ends: list[str] = []
        carrier = await HttpOpener(Target("127.0.0.1", port)).open(ends.append)

        assert await outcome_of(carrier) == f"lost: {reason}"
        assert ends == [reason]

    over_loopback(case, script)


def test_an_idle_connection_closed_by_the_server_ends_in_order() -> None:
    async def case(server: Server, port: int) -> None:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        carrier = await HttpOpener(Target("127.0.0.1", port)).open(ended.set_result)

        assert await outcome_of(carrier) == ""
        assert await ended == ""

    over_loopback(case, [OK, CLOSE])


def test_a_refused_connection_names_the_address() -> None:
    async def case() -> None:
        async with serving(Server([])) as port:
            pass
        with pytest.raises(ConnectionError, match=f"no connection to 127.0.0.1:{port}: "):
            await HttpOpener(Target("127.0.0.1", port)).open(lambda reason: None)

    uvloop.run(case())


def test_a_host_beginning_with_a_slash_is_a_unix_socket(tmp_path: Path) -> None:
    async def case() -> None:
        server = Server([[OK]])
        async with serving(server, path=str(tmp_path / "s")):
            carrier = await HttpOpener(Target(str(tmp_path / "s"), 0)).open(lambda reason: None)
            assert await outcome_of(carrier) == ""
            carrier.close()

    uvloop.run(case())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def encrypted(certificates: Certificates, host: str, tls: Tls, *, mutual: bool = False) -> str:
    """Ask a server whose certificate is for localhost; give what it said."""

    async def case() -> str:
        offered = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        offered.load_cert_chain(certificates.certificate, certificates.key)
        if mutual:
            offered.verify_mode = ssl.CERT_REQUIRED
            offered.load_verify_locations(certificates.certificate)
        async with serving(Server([[OK]]), tls=offered) as port:
            carrier = await HttpOpener(Target(host, port, tls)).open(lambda reason: None)
            outcomes = await outcome_of(carrier)
            carrier.close()
            return outcomes

    return uvloop.run(case())


def test_tls_verifies_the_chain_and_the_name(certificates: Certificates) -> None:
    assert encrypted(certificates, "localhost", Tls(roots=str(certificates.certificate))) == ""


@pytest.mark.parametrize(("host", "roots"), [("localhost", False), ("127.0.0.1", True)])
def test_an_invalid_chain_or_name_is_rejected(certificates: Certificates, host: str, roots: bool) -> None:
    with pytest.raises(ssl.SSLError, match="verify failed"):
        encrypted(certificates, host, Tls(roots=str(certificates.certificate) if roots else ""))


@pytest.mark.parametrize(("chain", "name"), [(True, False), (False, True), (False, False)])
def test_verification_can_be_turned_off(certificates: Certificates, chain: bool, name: bool) -> None:
    roots = str(certificates.certificate) if chain else ""

    assert encrypted(certificates, "127.0.0.1", Tls(roots, verify_peer=chain, verify_host=name)) == ""


@pytest.mark.parametrize("kind", ["PEM", "DER"])
def test_a_client_may_present_a_certificate(certificates: Certificates, kind: str) -> None:
    certificate, key = certificates.of_type(kind)
    tls = Tls(str(certificates.certificate), str(certificate), str(key), certificate_type=kind, key_type=kind)

    assert encrypted(certificates, "localhost", tls, mutual=True) == ""


def test_a_der_key_may_be_of_any_kind_and_other_data_is_rejected(certificates: Certificates) -> None:
    for path in certificates.other_keys:
        assert f"{path.stem.upper()} PRIVATE KEY" in pem_key(path.read_bytes())
    for other in (b"", b"\x30\x03\x02\x01", b"no key"):
        with pytest.raises(ssl.SSLError, match="no private key"):
            pem_key(other)
