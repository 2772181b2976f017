"""Mutated frames and header blocks: no crash, no hang, no growth; every connection ends or serves a request.

`FUZZ_FRAMES=1000000 pytest tests/server/http2/test_fuzz.py` is the long version; the default is 6,000 frames.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import tracemalloc
from typing import Any

import pytest

from penstock.server.grpc.call import GrpcCall
from penstock.server.http2 import frames

from .wire import BIDI, ECHO, GIVE, HOLD, Wire, message_of, payload

FRAMES = int(os.environ.get("FUZZ_FRAMES", "6000"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
PER_CONNECTION = 40


def legal(wire: Wire, random_: random.Random, stream: int) -> list[bytes]:
    """Return the frames of one legal step."""
    kind = random_.randrange(9 if stream > 1 else 4)
    if kind < 4:
        path = random_.choice((ECHO, BIDI, GIVE, HOLD))
        content = b"%d" % random_.randrange(100_000) if path == GIVE else random_.randbytes(random_.randrange(300))
        fields: dict[str, Any] = {f"x{random_.randrange(5)}": random_.randbytes(5).hex(), "__path": path}
        if not random_.randrange(4):
            fields["grpc_timeout"] = f"{random_.randrange(1000)}m"
        if not random_.randrange(4):
            fields["grpc_encoding"] = random_.choice(("gzip", "deflate", "identity"))
        flag = random_.randrange(8) == 0
        return [wire.headers(stream, **fields), payload(message_of(content, flag), stream, end=random_.random() < 0.8)]
    if kind == 4:
        return [frames.window_update(random_.choice((0, stream - 2)), random_.randrange(1, 2**20))]
    if kind == 5:
        return [frames.settings({random_.randrange(1, 8): random_.choice((0, 1, 16384, 65535, 2**20))})]
    if kind == 6:
        return [frames.reset(stream - 2, frames.ErrorCode.CANCEL)]
    if kind == 7:
        return [frames.frame(frames.PING, random_.randrange(2), 0, random_.randbytes(8))]
    block = wire.headers(stream)[9:]
    cut = random_.randrange(len(block))
    return [frames.frame(1, 0, stream, block[:cut]), frames.frame(9, 4, stream, block[cut:])]


def mutated(sent: bytes, random_: random.Random) -> bytes:
    """Mutate a frame: a bit, bytes, its head or its end; or duplicate it, or replace it by a random frame."""
    changed = bytearray(sent)
    how = random_.randrange(8)
    if how == 0:
        changed[random_.randrange(len(changed))] ^= 1 << random_.randrange(8)
    elif how == 1:
        for _ in range(random_.randrange(1, 8)):
            changed[random_.randrange(len(changed))] = random_.randrange(256)
    elif how == 2:
        changed[random_.randrange(9)] = random_.choice((0, 1, 4, 8, 127, 128, 255))
    elif how == 3:
        content = changed[9 : 9 + random_.randrange(len(changed) - 8)]
        changed[:] = len(content).to_bytes(3, "big") + changed[3:9] + content
    elif how == 4:
        content = changed[9:] + random_.randbytes(random_.randrange(40))
        changed[:] = len(content).to_bytes(3, "big") + changed[3:9] + content
    elif how == 5:
        changed = changed * 2
    elif how == 6:
        return frames.frame(
            random_.randrange(12),
            random_.randrange(256),
            random_.randrange(12),
            random_.randbytes(random_.randrange(60)),
        )
    else:
        at = random_.randrange(len(changed))
        changed[at : at + random_.randrange(5)] = b""
    return bytes(changed)


def one_connection(wire: Wire, random_: random.Random) -> int:
    """Play a conversation in which some frames are mutated. Returns: the number of frames."""
    wire.connect()
    # each connection has an encoder of its own
    wire.encoder = type(wire.encoder)()
    wire.feed(frames.PREFACE + frames.settings({}))
    stream, count = 1, 0
    share = random_.choice((0.02, 0.1, 0.5))
    while count < PER_CONNECTION and not wire.connection.closed:
        steps = [mutated(step, random_) if random_.random() < share else step for step in legal(wire, random_, stream)]
        count += len(steps)
        sent = b"".join(steps)
        cut = random_.randrange(len(sent) + 1)
        wire.feed(sent[:cut])
        wire.feed(sent[cut:])
        stream = max(stream, wire.connection.last_id + 2)
        wire.loop.pass_time(0.001)
        if not random_.randrange(10):
            wire.shared.sweep(random_.choice((0.5, 1.0)))
    return count


def ends(wire: Wire, stream: int) -> None:
    """Check that a connection has ended, times out, or serves one more request."""
    connection, transport = wire.connection, wire.transport
    if connection.closed:
        assert transport.over
    else:
        for _ in range(3):
            wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 65535, frames.HEADER_TABLE_SIZE: 4096}))
        before = len(transport.written)
        wire.feed(wire.call(stream=stream))
        served = message_of(b"hello") in transport.written[before:]
        if not served:
            # it is within a broken frame or block, or its window is closed: the timeouts end it
            for _ in range(70):
                wire.shared.sweep(1.0)
                wire.loop.turn()
            waiting = [stream for stream in connection.streams.values() if isinstance(stream, GrpcCall)]
            assert transport.over or all(call._reader is not None or call in wire.held for call in waiting)
    connection.connection_lost(None)
    assert connection.streams == {}
    assert connection.outbox.blocked == {}
    assert wire.shared.held_bytes == 0
    assert wire.shared.connections == set()
    wire.held.clear()


def test_mutated_frames_cause_no_crash_hang_or_leak(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    random_ = random.Random(SEED)
    wire = Wire(receive_timeout_s=60.0, stream_window_bytes=100_000)
    wire.connection.connection_lost(None)
    for _ in range(20):
        one_connection(wire, random_)
        ends(wire, 10**6 + 1)
    gc.collect()
    tracemalloc.start()
    count = 0
    start = tracemalloc.get_traced_memory()[0]
    while count < FRAMES:
        count += one_connection(wire, random_)
        ends(wire, 10**6 + 1)
    wire.loop.pass_time(3600.0)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()

    assert caplog.records == []
    assert grown < 1 << 20
    assert wire.shared.deadlines._slot_of == {}


def test_corrupted_header_blocks_are_decoded_or_rejected_without_an_internal_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    random_ = random.Random(SEED + 1)
    wire = Wire()
    served = 0
    for _ in range(FRAMES // 20):
        wire.connect()
        wire.encoder = type(wire.encoder)()
        block = bytearray(wire.headers(1)[9:])
        for _ in range(random_.randrange(4)):
            at = random_.randrange(len(block))
            block[at : at + random_.randrange(3)] = random_.randbytes(random_.randrange(4))
        sent = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, bytes(block)) + payload(message_of(b"x"), end=True)
        wire.feed(frames.PREFACE + frames.settings({}) + sent)
        served += message_of(b"x") in wire.transport.written
        assert wire.transport.over or wire.connection.streams == {}
        wire.connection.connection_lost(None)

    assert 0 < served < FRAMES // 20
    assert caplog.records == []
