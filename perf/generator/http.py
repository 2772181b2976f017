"""An HTTP/1.1 client: one request at a time on each connection.

A good answer that arrives in one read is recognized by its head: a server repeats the same bytes except for the date,
so data that begins like an earlier good answer of the same length is another good answer. All else is parsed in full
(http_answers.py), which takes 4 us more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .carriers import Carrier, Slot
from .connecting import Connecting
from .http_answers import Answer, BadAnswerError, field_in
from .orders import Target

_OK = 200
_HEADS = 512


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection. `heads`: of good answers, by total length; all connections share them.

    `v2`: whether only valid answers to v2's infer are good.
    """

    __slots__ = ("_answer", "_heads", "_on_lost", "_slot", "_transport", "_v2")

    def __init__(self, on_lost: Callable[[str], None], heads: dict[int, bytes], *, v2: bool = False) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._slot: Slot | None = None
        self._answer: Answer | None = None
        self._heads = heads
        self._v2 = v2

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def send(self, request: bytes, slot: Slot) -> None:
        self._slot = slot
        self._transport.write(request)  # type: ignore[union-attr]

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        slot = self._slot
        head = self._heads.get(len(data))
        if head is not None and data.startswith(head) and self._answer is None and slot is not None:
            self._slot = None
            slot.on_answer(now_ns, "")
        else:
            self._read(data, now_ns)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:
            return
        now_ns = time.monotonic_ns()
        answer, self._answer = self._answer, None
        if answer is not None and answer.ends_with_connection() and error is None:
            self._tell(answer, now_ns)
        else:
            self._end(str(error) if error else "the server closed the connection", now_ns)

    def close(self) -> None:
        transport, self._transport = self._transport, None
        self._slot = None
        if transport is not None:
            transport.abort()

    def _read(self, data: bytes, now_ns: int) -> None:
        if self._slot is None:  # no request is outstanding: the server announces that it closes
            self._end("", now_ns)
            return
        one_read = self._answer is None
        answer = self._answer = self._answer or Answer()
        try:
            rest = answer.feed(data)
            if rest:
                raise BadAnswerError(f"more than the answer: {rest[:40]!r}")
        except BadAnswerError as error:
            self._end(str(error), now_ns)
            return
        if rest is not None:
            self._answer = None
            plain = one_read and answer.plain_bytes and answer.status == _OK and answer.keeps_alive
            if plain and not _error(answer, v2=self._v2):
                if len(self._heads) >= _HEADS:
                    self._heads.clear()
                self._heads[len(data)] = data[: answer.plain_bytes]
            self._tell(answer, now_ns)

    def _tell(self, answer: Answer, now_ns: int) -> None:
        slot, self._slot = self._slot, None
        if not answer.keeps_alive:
            self._end("", now_ns)
        if slot is not None:
            slot.on_answer(now_ns, _error(answer, v2=self._v2))

    def _end(self, reason: str, now_ns: int) -> None:
        slot = self._slot
        self.close()
        self._on_lost(reason if slot is not None else "")
        if slot is not None:
            slot.on_lost(now_ns, reason)


def _error(answer: Answer, *, v2: bool) -> str:
    """Describe what is wrong with an answer; empty: nothing. A proxy may send 200 with a page of its own."""
    if not 200 <= answer.status < 300:
        return f"{answer.status}: {answer.text.decode('utf-8', 'replace')}".rstrip(": ")
    if not v2 or b"\r\ninference-header-content-length:" in answer.head:
        return ""
    kind = field_in(answer.head, b"\r\ncontent-type:")
    if not kind or b"json" in kind or answer.text.lstrip()[:1] == b"{":
        return ""
    return f"{answer.status}, but neither JSON nor tensors: {kind.decode('latin-1')}"


class HttpOpener:
    """Connects over HTTP/1.1."""

    slots_each = 1

    def __init__(self, target: Target) -> None:
        self._connecting = Connecting(target)
        self._heads: dict[int, bytes] = {}
        self._v2 = target.v2

    async def open(self, on_lost: Callable[[str], None]) -> Carrier:
        return await self._connecting.connect(lambda: HttpConnection(on_lost, self._heads, v2=self._v2))
