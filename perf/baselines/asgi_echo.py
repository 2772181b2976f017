"""Bare uvicorn and an ASGI application that echoes the body: `python -m penstock.perf.baselines.asgi_echo PORT`.

Same loop and parser as Penstock, no framework, no model: what any Python ASGI server costs before its own work.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

Message = MutableMapping[str, Any]


async def echo(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Answer with the request's own body."""
    message = await receive()
    body = message["body"]
    while message.get("more_body"):
        message = await receive()
        body += message["body"]
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    uvicorn.run(
        echo, port=int(sys.argv[1]), loop="uvloop", http="httptools", lifespan="off", log_level="warning",
        access_log=False,
    )  # fmt: skip
