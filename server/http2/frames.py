"""Frames: HTTP/2's constants and frame builders. Used by everything in this folder.

Source: RFC 9113.
"""

from __future__ import annotations

import enum
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65535
DEFAULT_TABLE_BYTES = 4096
MIN_FRAME_BYTES = 16384
MAX_FRAME_BYTES = 2**24 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

FRAME_HEADER = struct.Struct(">IBI")
"""A frame header: length and type in one word, flags, stream."""
_SETTING = struct.Struct(">HI")
_WORD = struct.Struct(">I")
_TWO_WORDS = struct.Struct(">II")


class ErrorCode(enum.IntEnum):
    """Error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


_RANGES = {
    ENABLE_PUSH: ("ENABLE_PUSH", range(2), ErrorCode.PROTOCOL_ERROR),
    INITIAL_WINDOW_SIZE: ("INITIAL_WINDOW_SIZE", range(MAX_WINDOW + 1), ErrorCode.FLOW_CONTROL_ERROR),
    MAX_FRAME_SIZE: ("MAX_FRAME_SIZE", range(MIN_FRAME_BYTES, MAX_FRAME_BYTES + 1), ErrorCode.PROTOCOL_ERROR),
}


class Http2Error(Exception):
    """An error that ends the connection: the code of its GOAWAY, and a text for debugging the client."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def frame(frame_type: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Build a frame."""
    return FRAME_HEADER.pack(len(payload) << 8 | frame_type, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """Build SETTINGS."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings in a SETTINGS frame, in order.

    Raises: Http2Error, also for a value that is invalid for its setting.
    """
    if len(payload) % _SETTING.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes, not a multiple of 6")
    settings: list[tuple[int, int]] = list(_SETTING.iter_unpack(payload))
    for number, value in settings:
        if number in _RANGES:
            name, values, error_code = _RANGES[number]
            if value not in values:
                raise Http2Error(error_code, f"SETTINGS_{name} of {value}")
    return settings


def read_word(payload: bytes, offset: int = 0) -> int:
    """Read 31 bits; the bit above them is reserved."""
    word: int = _WORD.unpack_from(payload, offset)[0]
    return word & MAX_WINDOW


def window_update(stream_id: int, increment: int) -> bytes:
    """Build WINDOW_UPDATE; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, _WORD.pack(increment))


def reset(stream_id: int, code: ErrorCode) -> bytes:
    """Build RST_STREAM."""
    return frame(RST_STREAM, 0, stream_id, _WORD.pack(code))


def goaway(last_id: int, code: ErrorCode, text: str = "") -> bytes:
    """Build GOAWAY."""
    return frame(GOAWAY, 0, 0, _TWO_WORDS.pack(last_id, code) + text.encode())


def unpadded(payload: bytes) -> bytes:
    """Remove the padding. Raises: Http2Error."""
    if not payload or payload[0] >= len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a frame with more padding than payload")
    return payload[1 : len(payload) - payload[0]]
