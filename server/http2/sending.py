"""Sender: the sending half of an HTTP/2 connection: flow control, the peer's pace, one write per loop turn.

Part of Http2Connection; `lifetime.py` and `connection.py` add the rest.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .frames import DATA, DEFAULT_WINDOW, HEAD, MIN_FRAME_BYTES, Fault, reset
from .headers import begun_with
from .shared import Http2Shared
from .stream import LOW_BYTES, Stream, Unsent

if TYPE_CHECKING:
    from penstock.server.listening.mapped import Body

_TURN_BYTES = 1 << 18
"""What is put together for one write while more waits. Above it, the transport says whether the peer keeps up."""
_MOST_PAUSED_FRAMES = 10000
"""Frames kept for a peer that does not read. Answers wait in their streams; only replies to frames come to this."""


class Sender(asyncio.Protocol):
    """What goes out.

    Invariants: `out` holds frames in the order in which they leave. `out_window` is the connection's window.
    `quick_bytes` is the most that an answer may have to go straight to `out`: 0 while the transport is full or
    anything waits in `blocked`, otherwise the peer's largest frame. `notice` must begin the next header block. A stream
    with an Unsent is in `blocked`.
    """

    __slots__ = (
        "answered", "blocked", "closed", "dirty", "leaving", "limits", "notice", "out", "out_window", "over_tls",
        "paused", "peer_frame", "peer_window", "quick_bytes", "sent_frames", "shared", "streams", "transport",
    )  # fmt: skip

    def __init__(self, shared: Http2Shared) -> None:
        self.shared = shared
        self.limits = shared.limits
        self.transport: Any = None
        self.streams: dict[int, Stream] = {}
        self.out: list[bytes | memoryview] = []
        self.dirty = False
        self.over_tls = False
        self.paused = False
        self.closed = False
        self.leaving = False
        self.blocked: dict[int, Stream] = {}
        self.out_window = DEFAULT_WINDOW
        self.peer_window = DEFAULT_WINDOW
        self.peer_frame = MIN_FRAME_BYTES
        self.quick_bytes = MIN_FRAME_BYTES
        self.notice = b""
        self.answered = 0
        self.sent_frames = 0

    # -- the transport -----------------------------------------------------------------------------------------

    def write(self, frames: bytes) -> None:
        """Send frames that no window holds back."""
        self.out.append(frames)
        if not self.dirty:
            self.shared.mark(self)

    def flush(self) -> None:
        """Write all of `out`; what ends with it is closed."""
        out = self.out
        if self.transport.is_closing():
            out.clear()
        elif out:
            if self.paused and len(out) > _MOST_PAUSED_FRAMES:
                self.transport.abort()
                return
            if not self.paused:
                self.out = []
                self._write(b"".join(out))
        if self.leaving and not self.streams:
            self.settle()

    def _write(self, data: bytes) -> None:
        if not self.over_tls or len(data) <= _TURN_BYTES:
            self.transport.write(data)
            return
        # TLS passes on all of one write before it learns that the socket is full, and that is counted nowhere
        for at in range(0, len(data), _TURN_BYTES):
            self.transport.write(data[at : at + _TURN_BYTES])
        if self.paused:
            self.shared.untaken.keep(self, self.transport.get_write_buffer_size())

    def settle(self) -> None:
        """Learn that a connection that takes no more calls has finished those it had."""

    def pause_writing(self) -> None:
        """Note that the peer has fallen behind."""
        self.paused = True
        self.quick_bytes = 0
        self.shared.untaken.keep(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Go on with what waited."""
        self.paused = False
        self.shared.untaken.lessen(self)
        if self.out and not self.dirty:
            self.shared.mark(self)
        self.pump()

    def give_up(self) -> None:
        """Drop a peer that does not read: nor would it read why."""
        self.transport.abort()
        # they go when the connection is lost, in a turn to come; counted until then, they would have others dropped
        for stream in self.blocked.values():
            self.shared.untaken.lessen(stream)

    # -- streams -----------------------------------------------------------------------------------------------

    def queue(self, stream: Stream, pieces: tuple[Body, ...]) -> None:
        """Send payload as the windows let it go."""
        unsent = stream.unsent
        if unsent is None:
            unsent = stream.unsent = Unsent()
            self.blocked[stream.stream_id] = stream
        for piece in pieces:
            if piece:
                unsent.pieces.append(memoryview(piece))
                unsent.size += len(piece)
                unsent.kept += len(piece)
        self.pump(stream)
        if stream.unsent is not None:
            self.shared.untaken.keep(stream, stream.unsent.kept)

    def pump(self, only: Stream | None = None) -> None:
        """Send what may be sent, a turn for each stream, until the windows or the transport are full.

        `only`: more has come of this one, and nothing else has changed: what else waits could not be sent before.
        """
        streams = list(self.blocked.values()) if only is None else [only]
        while not self.paused and streams and not self.closed:
            moved = 0
            for stream in streams:
                if stream.unsent is not None:
                    moved += self._send_some(stream, stream.unsent)
                if moved >= _TURN_BYTES:
                    break
            if moved < _TURN_BYTES:
                break
            self.flush()
            streams = list(self.blocked.values())
        if self.out and not self.dirty:
            self.shared.mark(self)
        self.quick_bytes = 0 if self.paused or self.blocked else self.peer_frame

    def _send_some(self, stream: Stream, unsent: Unsent) -> int:
        """Send one stream's share of a turn. Returns: how many bytes."""
        window = min(self.out_window, self.peer_window + stream.credit, _TURN_BYTES)
        pieces, moved = unsent.pieces, 0
        stream_id = stream.stream_id
        while pieces and moved < window:
            room = min(window - moved, self.peer_frame)
            parts, size = [], 0
            while pieces and size < room:
                piece = pieces.popleft()
                if len(piece) > room - size:
                    pieces.appendleft(piece[room - size :])
                    piece = piece[: room - size]
                else:
                    unsent.kept -= len(piece.obj)  # type: ignore[arg-type]
                parts.append(piece)
                size += len(piece)
            self.out.append(HEAD.pack(size << 8 | DATA, 0, stream_id))
            self.out += parts
            self.sent_frames += 1
            moved += size
        if moved:
            unsent.size -= moved
            unsent.waited_s = 0.0
            self.out_window -= moved
            stream.credit -= moved
            self.shared.untaken.lessen(stream, unsent.kept)
        # in turn: who was served goes to the end
        self.blocked.pop(stream_id, None)
        if pieces:
            self.blocked[stream_id] = stream
        else:
            stream.unsent = None
            if unsent.last:
                self.end(stream, unsent.last)
        if unsent.size <= LOW_BYTES:
            stream.left()
        return moved

    def end(self, stream: Stream, last: bytes) -> None:
        """Send the frame that ends a stream, and forget it; the peer's side is reset when it has not ended."""
        self.send_headers(last)
        if not stream.remote_ended:
            self.out.append(reset(stream.stream_id, Fault.NO_ERROR))
        self.forget(stream)

    def send_headers(self, headers: bytes) -> None:
        """Send a HEADERS frame; with the next write, like all of `out`."""
        if self.notice:
            headers, self.notice = begun_with(self.notice, headers), b""
        self.out.append(headers)
        self.sent_frames += 1
        if not self.dirty:
            self.shared.mark(self)

    def forget(self, stream: Stream) -> None:
        """Take a stream out of every list."""
        stream_id = stream.stream_id
        self.streams.pop(stream_id, None)
        if stream.unsent is not None:
            stream.unsent = None
            self.shared.untaken.lessen(stream)
            self.blocked.pop(stream_id, None)
            self.quick_bytes = 0 if self.paused or self.blocked else self.peer_frame
        if not stream.remote_ended:
            self.pardon(stream_id)

    def pardon(self, stream_id: int) -> None:
        """Let frames pass that were on their way when this side ended the stream."""
