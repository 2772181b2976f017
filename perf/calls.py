"""What the load programs send: calls over HTTP/1.1 and messages over gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.server.grpc.framing import PREFIX

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Call:
    """What every connection sends repeatedly. Several bodies are sent in turn."""

    path: str
    bodies: tuple[bytes, ...]
    headers: Mapping[str, str]

    def request(self) -> bytes:
        """Encode the request with the first body."""
        return encode_post(self.path, self.headers, self.bodies[0])


def encode_post(path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Encode a POST request of HTTP/1.1, head and body."""
    fields = {"Host": HOST, **headers, "Content-Length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def encode_grpc_message(message: bytes) -> bytes:
    """Encode a gRPC message with its five-byte prefix."""
    return PREFIX.pack(0, len(message)) + message
