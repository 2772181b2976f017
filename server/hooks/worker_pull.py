"""WorkerPull: the answers of a post_inference that yields in a worker process. Made by `worker_replicas.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from penstock.backends.backend import Array
from penstock.server.ipc.errors import read_error

from .call import HookCall, MovedError, Written
from .packing import (
    HUSH,
    INPUTS,
    NUMBER,
    REFUSED,
    SHUT,
    STEPS,
    TURN,
    YIELDED,
    read_made,
)  # fmt: skip
from .pull import AHEAD, AHEAD_BYTES, CLOSING, Answer, Pull


class WorkerPull(Pull):
    """A Pull whose generator is in a worker process: each turn is a call there, and answers arrive as they are yielded.

    `turn` is the number of the requested turn, and `most` its maximum steps, set by the replica. Threads: the event
    loop's.
    """

    __slots__ = ("most", "turn")

    def __init__(self, outputs: list[Any], form: int, request_id: str) -> None:
        super().__init__(outputs, form, request_id)
        self.turn = 0
        self.most = AHEAD

    def written(self, takes: Sequence[bool]) -> Written:
        """Encode the turn."""
        room_bytes = max(AHEAD_BYTES - sum(answer.nbytes for answer in self._ahead), 1)
        most = max(min(self.most, AHEAD - len(self._ahead)), 1)
        steps = STEPS.pack(self.number, self.turn, self.form, most, room_bytes)
        if self.begun:
            return TURN, steps, None
        _, body, arrays = super().written(takes)
        return TURN, steps + body, arrays

    def taken(self, text: bytes, arrays: list[Array | None], ended_ns: int) -> None:
        """Handle the end of a turn."""
        self.begun, self.value = True, None
        self.ended_ns = ended_ns

    def told(self, body: bytes, arrays: list[Array | None]) -> None:
        """Handle an answer."""
        how, infer_ns, output_ns, nbytes = YIELDED.unpack_from(body)
        text = body[YIELDED.size :]
        self.begun, self.value = True, None
        if self._closed:
            return
        if how == REFUSED:
            self._ahead.append(Answer({}, read_error(text), infer_ns=infer_ns))
        else:
            outputs = read_made(self.form, text, arrays)
            self._ahead.append(Answer(outputs, infer_ns=infer_ns, output_ns=output_ns, nbytes=nbytes))
        self._arrived.set()

    def close(self) -> None:
        """Close the generator after its current step: its answers are no longer wanted."""
        self._closed = True
        self._ahead.clear()
        if self.replica is not None and self.replica.holds(self):
            self.replica.tell(HUSH, self.number)
            with contextlib.suppress(MovedError):
                self.replica.submit(_Shutting(self)).add_done_callback(self._turn_ended)


class _Shutting(HookCall):
    """The call that closes a generator."""

    __slots__ = ()

    def __init__(self, pull: WorkerPull) -> None:
        super().__init__(CLOSING, None, INPUTS, 0, pull.request_id)
        self.number = pull.number

    def written(self, takes: Sequence[bool]) -> Written:
        return SHUT, NUMBER.pack(self.number), None

    def taken(self, text: bytes, arrays: list[Array | None], ended_ns: int) -> None:
        return
