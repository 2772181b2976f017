"""The h2 package as an independent peer: both sides agree on every legal conversation, however it is split.

h2 itself checks what it receives against RFC 9113, and raises.
"""

from __future__ import annotations

import os
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .wire import BIDI, ECHO, GIVE, HOLD, REQUEST, Wire, message_of

MAX_STREAMS = 8
SETTINGS: dict[object, h2.settings.SettingCodes] = {
    "window": h2.settings.SettingCodes.INITIAL_WINDOW_SIZE,
    "frame": h2.settings.SettingCodes.MAX_FRAME_SIZE,
    "table": h2.settings.SettingCodes.HEADER_TABLE_SIZE,
}


class Peer:
    """An h2 client on a Wire. `expected` is what each stream should receive; `received` is what it did receive."""

    def __init__(self, cuts: list[int]) -> None:
        self.wire = Wire(begun=False, max_streams=MAX_STREAMS, stream_window_bytes=70_000, max_ping_strikes=0)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.cuts = cuts
        self.expected: dict[int, tuple[bytes, str]] = {}
        self.received: dict[int, bytes] = {}
        self.status: dict[int, str] = {}
        self.held: dict[int, int] = {}
        self.unsent: dict[int, bytes] = {}
        self.reset: set[int] = set()
        self.read = 0
        self.h2.initiate_connection()
        self.exchange()

    def exchange(self, *, acknowledge: bool = True) -> None:
        """Carry bytes in both directions until neither side has any more."""
        while True:
            self.push()
            sent, answered = self.h2.data_to_send(), False
            at = 0
            while at < len(sent):
                size = self.cuts.pop() if self.cuts else len(sent)
                self.wire.feed(sent[at : at + size])
                at += size
            written = bytes(self.wire.transport.written[self.read :])
            self.read += len(written)
            # frame by frame: h2 applies its own new settings from the next call on
            while written:
                size = 9 + int.from_bytes(written[:3], "big")
                for event in self.h2.receive_data(written[:size]):
                    self.take(event)
                written = written[size:]
                answered = True
            if acknowledge:
                self.acknowledge()
            if not sent and not answered:
                return

    def take(self, event: h2.events.Event) -> None:
        assert not isinstance(event, h2.events.ConnectionTerminated)
        if isinstance(event, h2.events.DataReceived):
            self.received[event.stream_id] = self.received.get(event.stream_id, b"") + event.data
            self.held[event.stream_id] = self.held.get(event.stream_id, 0) + event.flow_controlled_length
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            fields: dict[Any, Any] = dict(event.headers)
            self.status[event.stream_id] = fields.get("grpc-status", "")
        elif isinstance(event, h2.events.StreamReset):
            assert event.error_code == 0
            self.unsent.pop(event.stream_id, None)

    def acknowledge(self) -> None:
        """Reopen the windows by the bytes received."""
        for stream, size in self.held.items():
            self.h2.acknowledge_received_data(size, stream)
        self.held.clear()

    def call(self, path: str, messages: list[bytes], end_with_trailers: bool) -> None:
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, list({**REQUEST, ":path": path, "x": f"{stream % 3}"}.items()))
        self.unsent[stream] = b"".join(message_of(message) for message in messages)
        if end_with_trailers and not self.unsent[stream]:
            self.h2.send_headers(stream, [("x", "y")], end_stream=True)
            del self.unsent[stream]
        if path == GIVE:
            self.expected[stream] = (message_of(bytes(int(messages[0]))), "0")
        elif path == HOLD:
            self.expected[stream] = (b"", "")
        elif path == ECHO and len(messages) != 1:
            self.expected[stream] = (b"", "12")
        else:
            self.expected[stream] = (b"".join(message_of(message) for message in messages), "0")

    def push(self) -> None:
        """Send what the windows allow."""
        for stream in list(self.unsent):
            rest = self.unsent[stream]
            while rest:
                room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size, len(rest))
                if not room:
                    break
                self.h2.send_data(stream, rest[:room])
                rest = rest[room:]
            self.unsent[stream] = rest
            if not rest:
                self.h2.end_stream(stream)
                del self.unsent[stream]


messages = st.integers(0, 5).flatmap(
    lambda power: st.integers(0, 10**power).map(
        lambda size: bytes((size + at) % 251 for at in range(min(size, 300))) * (1 + size // 300)
    )
)
calls = st.one_of(
    st.tuples(st.just(ECHO), st.lists(messages, min_size=1, max_size=1), st.booleans()),
    st.tuples(st.just(ECHO), st.lists(messages, max_size=3), st.booleans()),
    st.tuples(st.just(BIDI), st.lists(messages, max_size=5), st.booleans()),
    st.tuples(st.just(GIVE), st.integers(0, 200_000).map(lambda size: [b"%d" % size]), st.just(False)),
    st.tuples(st.just(HOLD), st.just([b""]), st.just(False)),
)
others = st.one_of(
    st.just(("ping",)),
    st.tuples(st.just("window"), st.integers(0, 100_000)),
    st.tuples(st.just("frame"), st.integers(16384, 100_000)),
    st.tuples(st.just("table"), st.integers(0, 8192)),
    st.tuples(st.just("exchange"), st.booleans()),
    st.just(("reset",)),
    st.just(("prioritize",)),
)


def do(peer: Peer, action: tuple[object, ...]) -> None:
    name, *rest = action
    if isinstance(name, str) and name.startswith("/"):
        if peer.h2.open_outbound_streams < MAX_STREAMS:
            peer.call(name, *rest)  # type: ignore[arg-type]
    elif name == "ping":
        peer.h2.ping(b"12345678")
    elif name in {"window", "frame", "table"}:
        # h2 takes any acknowledgment to be for all its settings
        peer.exchange(acknowledge=False)
        peer.h2.update_settings({SETTINGS[name]: rest[0]})  # type: ignore[dict-item]
    elif name == "exchange":
        peer.exchange(acknowledge=bool(rest[0]))
    elif name == "prioritize":
        peer.h2.prioritize(2**31 - 1, weight=7)
    else:
        opened = [stream for stream in peer.expected if stream not in peer.status and stream not in peer.reset]
        if opened:
            peer.h2.reset_stream(opened[0], 8)
            peer.reset.add(opened[0])
            peer.unsent.pop(opened[0], None)


@settings(
    deadline=None,
    max_examples=int(os.environ.get("PEER_EXAMPLES", "60")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(st.one_of(calls, others), max_size=20), st.lists(st.integers(1, 5000), max_size=60))
def test_the_server_and_the_h2_package_agree_on_any_legal_conversation(
    actions: list[tuple[object, ...]], cuts: list[int]
) -> None:
    peer = Peer(cuts)
    for action in actions:
        do(peer, action)
    do(peer, ("window", 65535))
    peer.exchange()
    for call in peer.wire.held:
        call.answer(b"")
    peer.wire.loop.turn()
    peer.exchange()

    for stream, (content, status) in peer.expected.items():
        if stream in peer.reset:
            continue
        held = status == ""
        assert peer.received.get(stream, b"") == (message_of(b"") if held else content)
        assert peer.status[stream] == ("0" if held else status)
    assert peer.wire.connection.streams == {}
    assert peer.wire.connection.outbox.blocked == {}
    assert peer.wire.shared.held_bytes == 0
    assert not peer.wire.transport.over
