"""WorkerGeneratorCall: the answers of a post_inference that yields in a worker. Made by `worker_replicas.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from penstock.backends.backend import Array
from penstock.server.ipc.errors import read_error

from .call import EncodedCall, HookCall, ReplicaGoneError
from .generator_call import CLOSE_STEP, MAX_AHEAD, MAX_AHEAD_BYTES, Answer, GeneratorCall
from .packing import (
    ANSWER_HEADER,
    CANCEL_GENERATOR,
    CLOSE_GENERATOR,
    INFER_ERROR,
    INPUTS,
    REQUEST_NUMBER,
    STEP_GENERATOR,
    STEP_HEADER,
    read_result,
)  # fmt: skip


class WorkerGeneratorCall(GeneratorCall):
    """A GeneratorCall whose generator is in a worker process, which sends each answer as it is yielded.

    Each turn is a call there. `turn` is the number of the requested turn, and `max_steps` its maximum steps, set by the
    replica. Threads: the event loop's.
    """

    __slots__ = ("max_steps", "turn")

    def __init__(self, outputs: list[Any], conversion: int, request_id: str) -> None:
        super().__init__(outputs, conversion, request_id)
        self.turn = 0
        self.max_steps = MAX_AHEAD

    def encode(self, accepts_parameters: Sequence[bool]) -> EncodedCall:
        """Encode the turn."""
        room_bytes = max(MAX_AHEAD_BYTES - sum(answer.nbytes for answer in self._ahead), 1)
        max_steps = max(min(self.max_steps, MAX_AHEAD - len(self._ahead)), 1)
        steps = STEP_HEADER.pack(self.request_number, self.turn, self.conversion, max_steps, room_bytes)
        if self.started:
            return STEP_GENERATOR, steps, None
        _, body, arrays = super().encode(accepts_parameters)
        return STEP_GENERATOR, steps + body, arrays

    def decode_answer(self, text: bytes, arrays: list[Array | None], exhausted_ns: int) -> None:
        """Handle the end of a turn."""
        self.started, self.value = True, None
        self.exhausted_ns = exhausted_ns

    def on_answer(self, body: bytes, arrays: list[Array | None]) -> None:
        """Handle an answer."""
        outcome, infer_ns, output_ns, nbytes = ANSWER_HEADER.unpack_from(body)
        text = body[ANSWER_HEADER.size :]
        self.started, self.value = True, None
        if self._closed:
            return
        if outcome == INFER_ERROR:
            self._ahead.append(Answer({}, read_error(text), infer_ns=infer_ns))
        else:
            outputs = read_result(self.conversion, text, arrays)
            self._ahead.append(Answer(outputs, infer_ns=infer_ns, output_ns=output_ns, nbytes=nbytes))
        self._arrived.set()

    def close(self) -> None:
        """Close the generator after its current step: its answers are no longer wanted."""
        self._closed = True
        self._ahead.clear()
        if self.replica is not None and self.replica.has_generator(self):
            self.replica.notify(CANCEL_GENERATOR, self.request_number)
            with contextlib.suppress(ReplicaGoneError):
                self.replica.submit(_CloseWorkerCall(self)).add_done_callback(self._on_turn_ended)


class _CloseWorkerCall(HookCall):
    """The call that closes a generator."""

    __slots__ = ()

    def __init__(self, generator_call: WorkerGeneratorCall) -> None:
        super().__init__(CLOSE_STEP, None, INPUTS, 0, generator_call.request_id)
        self.request_number = generator_call.request_number

    def encode(self, accepts_parameters: Sequence[bool]) -> EncodedCall:
        return CLOSE_GENERATOR, REQUEST_NUMBER.pack(self.request_number), None

    def decode_answer(self, text: bytes, arrays: list[Array | None], exhausted_ns: int) -> None:
        return
