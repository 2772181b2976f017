"""A gRPC client: channels that carry the requests of several slots, over our own HTTP/2.

To the pacing, a channel is a connection; it is replaced when the server requests it (GOAWAY). Six slots share one, as
in perf_analyzer's client library.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from penstock.server.grpc.framing import DEFLATE, GZIP, PREFIX, PREFIX_BYTES, compress
from penstock.server.http2.headers import Fields

from .carriers import Carrier, Slot
from .connecting import Connecting
from .grpc_calls import KeptCall, Unary
from .grpc_status import head_of
from .http2 import Http2Client
from .http2_request_headers import Openings
from .http2_sending import Owner, Stream
from .orders import GrpcCall, Target

_SLOTS_EACH = 6
_OPEN_S = 10.0
_MAX_FAILED_CONNECTIONS = 3
"""The number of connections in a row that the server may end before they have carried anything."""
_CACHED_BYTES = 64 << 20


class Connector:
    """Connects to one target. All connections begin requests of one method in the same way."""

    def __init__(self, target: Target, call: GrpcCall) -> None:
        self._encrypted = target.tls is not None
        self._connecting = Connecting(target, "h2")
        self._openings = Openings(_fields(target, call))

    async def connect(self, owner: Owner) -> Http2Client:
        """Connect, and wait for the server's SETTINGS. Raises: OSError, ssl.SSLError."""
        connection = await self._connecting.connect(lambda: Http2Client(self._openings, head_of, owner))
        try:
            if self._encrypted and connection.alpn != "h2":
                raise ConnectionError("the server does not speak HTTP/2: it has not chosen it by ALPN")
            async with asyncio.timeout(_OPEN_S):
                await connection.ready
            if connection.leaving or connection.transport is None:
                raise ConnectionError("the server ended the connection as soon as it was made")
        except TimeoutError:
            connection.close()
            raise ConnectionError(f"no SETTINGS within {_OPEN_S:g} s: does the server speak HTTP/2?") from None
        except BaseException:
            connection.close()
            raise
        return connection


def _fields(target: Target, call: GrpcCall) -> Fields:
    host = "localhost" if target.host.startswith("/") else f"[{target.host}]" if ":" in target.host else target.host
    fields = [
        (":method", "POST"), (":scheme", "https" if target.tls else "http"), (":path", call.method),
        (":authority", f"{host}:{target.port}"), ("te", "trailers"), ("content-type", "application/grpc"),
        ("user-agent", "penstock-perf"), ("grpc-accept-encoding", "identity,deflate,gzip"),
    ]  # fmt: skip
    if call.compression != "none":
        fields.append(("grpc-encoding", call.compression))
    fields += [(name.lower(), value) for name, value in call.metadata]
    return [(name.encode(), value.encode()) for name, value in fields]


class Compressed:
    """Compresses requests and caches the results. A request that would grow stays uncompressed."""

    def __init__(self, coding: bytes) -> None:
        self._coding = coding
        self._known: dict[bytes, bytes] = {}
        self._bytes = 0

    def __call__(self, request: bytes) -> bytes:
        cached = self._known.get(request)
        if cached is None:
            content = compress(request[PREFIX_BYTES:], self._coding, zlib.Z_DEFAULT_COMPRESSION)
            small = len(content) + PREFIX_BYTES < len(request)
            cached = PREFIX.pack(1, len(content)) + content if small else request
            self._bytes += len(request) + len(cached)
            if self._bytes > _CACHED_BYTES:
                self._known.clear()
                self._bytes = len(request) + len(cached)
            self._known[request] = cached
        return cached


class Channel:
    """Carries requests that each have one answer.

    Invariants: if `_connection` is None, the channel is being reconnected by `_task`, will be when something is sent,
    or has ended; requests are queued in `_waiting` meanwhile.
    """

    def __init__(
        self, connector: Connector, on_lost: Callable[[str], None], encode: Callable[[bytes], bytes] | None
    ) -> None:
        self._connector = connector
        self._on_lost: Callable[[str], None] | None = on_lost
        self._encode = encode
        self._connection: Http2Client | None = None
        self._waiting: deque[Stream] = deque()
        self._task: asyncio.Task[None] | None = None
        self._failed_connections = 0

    async def connect(self) -> int:
        """Connect. Returns: how many concurrent requests the server accepts. Raises: OSError, ssl.SSLError."""
        self._connection = await self._connector.connect(self)
        return self._connection.most_streams

    def send(self, request: bytes, slot: Slot) -> None:
        self._begin(Unary(request if self._encode is None else self._encode(request), slot))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._on_lost = None
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        if connection is not None:
            connection.close()

    # -- the connection's owner --------------------------------------------------------------------------------

    def on_leaving(self, connection: Http2Client, not_begun: Sequence[Stream]) -> None:
        """Replace a connection that the server wants to end."""
        self._waiting.extend(not_begun)
        if connection is not self._connection:
            if self._waiting:
                self._resume()
            return
        no_answer_yet = connection.no_answer_yet
        self._connection = None
        self._failed_connections = self._failed_connections + 1 if no_answer_yet else 0
        if self._failed_connections >= _MAX_FAILED_CONNECTIONS:
            self._end("the server ends every connection as soon as it is made")
        elif self._waiting:
            self._resume()

    def on_connection_end(self, connection: Http2Client, reason: str, *, had_requests: bool) -> None:
        """Handle the end of a connection. One that was idle is reconnected when needed."""
        if connection is self._connection:
            self._connection = None
            if had_requests:
                self._end(reason)

    # -- steps -------------------------------------------------------------------------------------------------

    def _begin(self, stream: Stream) -> None:
        if self._connection is not None:
            self._connection.begin(stream)
        else:
            self._waiting.append(stream)
            self._resume()

    def _resume(self) -> None:
        """Begin what is queued, on a connection that may have to be made."""
        while self._waiting and self._connection is not None:
            self._connection.begin(self._waiting.popleft())
        if self._waiting and self._task is None and self._on_lost is not None:
            self._task = asyncio.get_running_loop().create_task(self._connect_anew())

    async def _connect_anew(self) -> None:
        try:
            await self.connect()
        except OSError as error:
            self._task = None
            self._end(str(error) or type(error).__name__)
        else:
            self._task = None
            self._resume()

    def _end(self, reason: str) -> None:
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(reason)
        waiting, self._waiting = self._waiting, deque()
        for stream in waiting:
            stream.connection = None
            stream.on_lost(reason)


class GrpcOpener:
    """Opens channels to one target, whose `grpc` is what all requests share. Raises: OSError, ValueError."""

    def __init__(self, target: Target) -> None:
        call = target.grpc or GrpcCall("")
        codings: Mapping[str, bytes] = {"gzip": GZIP, "deflate": DEFLATE}
        self._kind = Channel
        if call.streaming:
            from .grpc_streams import StreamingChannel  # imports protobuf: not needed if answers are not read

            self._kind = StreamingChannel
        self._encode = Compressed(codings[call.compression]) if call.compression != "none" else None
        self._connector = Connector(target, call)
        self._slots_each = _SLOTS_EACH

    @property
    def slots_each(self) -> int:
        """How many slots share a channel: six, or fewer if the server accepts fewer requests at once."""
        return self._slots_each

    async def open(self, on_lost: Callable[[str], None]) -> Carrier:
        channel = self._kind(self._connector, on_lost, self._encode)
        self._slots_each = max(min(self._slots_each, await channel.connect()), 1)
        return channel


class _Single:
    """The owner of a connection for one call; the call's stream is notified of everything."""

    def on_leaving(self, connection: Http2Client, not_begun: Sequence[Stream]) -> None:
        for stream in not_begun:
            stream.on_lost("the server is going away")

    def on_connection_end(self, connection: Http2Client, reason: str, *, had_requests: bool) -> None:
        """Do nothing: the stream has been notified."""


async def ask(target: Target, call: GrpcCall, message: bytes) -> bytes:
    """Make one call on its own connection. Raises: CallError, OSError, ssl.SSLError."""
    connection = await Connector(target, call).connect(_Single())
    try:
        call_stream = KeptCall(PREFIX.pack(0, len(message)) + message)
        connection.begin(call_stream)
        return await call_stream.answer
    finally:
        connection.close()
