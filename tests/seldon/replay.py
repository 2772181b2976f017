"""How a case is played: over a socket or a channel, without a library that would correct what is sent.

Requests and answers are plain values, as in cases/*.json. Runs on Python 3.8 too, because record.py plays the cases
with seldon-core's interpreter, and test_cases.py with ours.
"""

from __future__ import annotations

import base64
import re
import socket
from typing import Any

HOST = "127.0.0.1"
HEADERS = ("content-type", "allow", "location", "vary", "content-disposition", "x-reason")
"""The headers that are compared, beside `access-control-...`; the rest is the server's own (Date, Connection)."""
USUAL = {"access-control-allow-origin": "*", "content-type": "application/json"}
"""The headers of a recorded answer that lists none."""
_WITHIN_S = 60


def play(case: dict[str, Any], ports: dict[str, Any]) -> dict[str, Any]:
    """Play one case. `ports`: http, metrics, and grpc, which is a channel."""
    return _called(case, ports["grpc"]) if "rpc" in case else _ask(case, ports[case.get("port", "http")])


def text_of(content: bytes, name: str) -> dict[str, str]:
    """Write bytes as `name` if they are text, and otherwise in base64 as `name64`."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return {name + "64": base64.b64encode(content).decode()}
    return {name: text}


def bytes_of(case: dict[str, Any], name: str) -> bytes:
    """Read what text_of wrote."""
    if name + "64" in case:
        return base64.b64decode(case[name + "64"])
    return str(case.get(name, "")).encode()


def _ask(case: dict[str, Any], port: int) -> dict[str, Any]:
    body = bytes_of(case, "body")
    fields = dict(case.get("headers", {}))
    if (body or case["method"] == "POST") and "Transfer-Encoding" not in fields:
        fields["Content-Length"] = str(len(body))
    lines = [f"{case['method']} {case['path']} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    with socket.create_connection((HOST, port), timeout=_WITHIN_S) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        parts = []
        while True:
            part = connection.recv(65536)
            if not part:
                break
            parts.append(part)
    head, _, content = b"".join(parts).partition(b"\r\n\r\n")
    line, *found = head.decode("latin-1").split("\r\n")
    named = {name.lower(): value for name, _, value in (field.partition(": ") for field in found)}
    if "chunked" in named.get("transfer-encoding", ""):
        content = _joined(content)
    headers = {name: named[name] for name in sorted(named) if name in HEADERS or name.startswith("access-control-")}
    answer: dict[str, Any] = {"status": int(line.split(" ")[1]) if line else 0, "headers": headers}
    if "allow" in headers:
        headers["allow"] = ", ".join(sorted(headers["allow"].split(", ")))  # the order differs between runs
    if case.get("unread"):
        return answer
    if case.get("port") == "metrics":
        content = re.sub(rb'worker_id="[^"]*"', b'worker_id="N"', content)
    answer.update(text_of(content, "body"))
    return answer


def _joined(content: bytes) -> bytes:
    joined = b""
    while content:
        size, _, content = content.partition(b"\r\n")
        length = int(size, 16)
        joined, content = joined + content[:length], content[length + 2 :]
    return joined


def _called(case: dict[str, Any], channel: Any) -> dict[str, Any]:
    import grpc

    call = channel.unary_unary(case["rpc"])  # bytes in, bytes out
    try:
        message: bytes = call(base64.b64decode(case["message"]), timeout=_WITHIN_S)
    except grpc.RpcError as error:
        return {"code": error.code().name, "details": error.details()}
    return {"code": "OK", "message": base64.b64encode(message).decode()}
