"""GeneratorCall: the answers of a post_inference that yields, produced slightly ahead on its replica.

They are taken on the event loop. Made by `runner.py`, one per request. Other sources of answers (a response sender) may
fill a queue like it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.backends.errors import InferError

from .call import HookCall, ReplicaGoneError
from .conversions import BoundHooks
from .loading import POST
from .packing import INPUTS, tensor_bytes

if TYPE_CHECKING:
    from .replica import Replica

MAX_AHEAD = 8
MAX_AHEAD_BYTES = 256 << 10
"""How far a generator runs ahead of its consumer: this many answers, or up to the one that reaches this size."""
CLOSE_STEP = f"closing {POST}"


class Answer(NamedTuple):
    """One answer of several: its outputs as the caller wants them, or its error; more may follow.

    `final`: it is known to be the last. `more`: the next one is available, so both may be sent together. `parameters`
    were set on it by user code. Units: `infer_ns` is the time to compute it, `output_ns` the time to convert it;
    `nbytes` is its size if it waits here, otherwise 0.
    """

    outputs: Any
    error: InferError | None = None
    final: bool = False
    infer_ns: int = 0
    output_ns: int = 0
    nbytes: int = 0
    parameters: Mapping[str, Any] | None = None
    more: bool = False


class GeneratorCall(HookCall):
    """One generator: a HookCall that is submitted again whenever there is room for answers, until there are no more.

    Invariants: the generator begins, steps and is closed on one replica's thread. It is closed exactly once, unless
    that thread never returns from it. At most MAX_AHEAD answers wait, and no step begins with MAX_AHEAD_BYTES of them.
    Threads: the event loop's; `invoke` and `close_quietly` run on the replica's. `_lock` decides between a pausing
    generator and a disconnecting client. The time limit is per step.
    Units: `exhausted_ns` is the time of the step that found no more answers, -1 before.
    """

    __slots__ = (
        "_ahead", "_arrived", "_closed", "_generator", "_lock", "_loop", "_paused", "_replica", "_turn",
        "_wake_scheduled", "exhausted_ns",
    )  # fmt: skip

    def __init__(self, outputs: list[Any], conversion: int, request_id: str) -> None:
        # a deadline is for waiting: once the model has run, the request is finished
        super().__init__(POST, outputs, conversion, 0, request_id)
        self.exhausted_ns = -1
        self._turn: asyncio.Future[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._ahead: deque[Answer] = deque()
        self._generator: Iterator[Any] | None = None
        self._replica: Replica | None = None
        self._lock = threading.Lock()
        self._paused = self._closed = self._wake_scheduled = False

    # -- on the event loop -------------------------------------------------------------------------------------

    async def next_answer(self, replica: Any) -> Answer | None:
        """Return the next answer, None after the last; once begun, `replica` must stay the same.

        Raises: InferError, after the earlier answers; ReplicaGoneError, if the replica is gone.
        """
        while not self._ahead:
            if self._turn is None or self._turn.done():
                turn, self._turn = self._turn, None
                if turn is not None:
                    turn.result()
                if self.exhausted_ns >= 0:
                    return None
                self._start_turn(replica)
            self._arrived.clear()
            # an answer put before `clear` does not wake the wait
            if not self._ahead:
                await self._arrived.wait()
        answer = self._ahead.popleft()
        turn = self._turn
        if turn is not None and turn.done() and turn.exception() is None and self._has_room():
            with contextlib.suppress(ReplicaGoneError):  # reported after the answers that are ahead
                self._start_turn(replica)
        return answer._replace(more=True) if self._ahead else answer

    def _has_room(self) -> bool:
        """Whether to continue already: not after each answer, or two threads would constantly wait for each other."""
        return self.exhausted_ns < 0 and len(self._ahead) <= MAX_AHEAD // 2 and not self._is_full()

    def _start_turn(self, replica: Any) -> None:
        self._replica, self._paused = replica, False
        self._turn = replica.submit(self)
        self._turn.add_done_callback(self._on_turn_ended)

    def _on_turn_ended(self, turn: asyncio.Future[Any]) -> None:
        if not turn.cancelled():
            # an error is reported by `next_answer`, if it is called again
            turn.exception()
        self._arrived.set()

    def _on_answers(self) -> None:
        self._wake_scheduled = False
        self._arrived.set()

    def close(self) -> None:
        """Close the generator after its current step: its answers are no longer wanted."""
        with self._lock:
            self._closed = True
            is_waiting = self._paused and self._generator is not None
        self._ahead.clear()
        if is_waiting and self._replica is not None:
            with contextlib.suppress(ReplicaGoneError):
                self._replica.submit(_CloseCall(self)).add_done_callback(self._on_turn_ended)

    # -- on the replica's own thread ---------------------------------------------------------------------------

    def invoke(self, bound: BoundHooks) -> None:
        """Step until enough is ahead, another call waits, or it ends. Raises: what a step raises."""
        steps = 0
        try:
            while not self._must_pause(steps):
                steps += 1
                self.limit_start_ns = start_ns = time.monotonic_ns()
                if self._generator is None:
                    self._begin_generator(bound)
                self.in_hook = True
                try:
                    value = next(self._generator)  # type: ignore[arg-type]
                except StopIteration:
                    self._drop_generator()
                    self.exhausted_ns = time.monotonic_ns() - start_ns
                    return
                self.in_hook = False
                self._add_answer(self._make_answer(bound, value, start_ns))
        except BaseException:
            self.close_generator()
            raise
        if self._closed:
            self.close_generator()

    def convert_result(self, bound: BoundHooks, result: Any) -> None:
        pass

    def _begin_generator(self, bound: BoundHooks) -> None:
        self.started = True
        self._generator = iter(super().invoke(bound))
        self.value = None
        self._replica.generators.add(self)  # type: ignore[union-attr]

    def _must_pause(self, steps: int) -> bool:
        """Whether no further step may begin in this turn."""
        with self._lock:
            if not self._closed:
                self._paused = self._is_full() or (steps > 0 and self._replica.has_waiting)  # type: ignore[union-attr]
            return self._closed or self._paused

    def _is_full(self) -> bool:
        ahead = list(self._ahead)
        return len(ahead) >= MAX_AHEAD or sum(each.nbytes for each in ahead) >= MAX_AHEAD_BYTES

    def _make_answer(self, bound: BoundHooks, value: Any, start_ns: int) -> Answer:
        computed_ns = time.monotonic_ns()
        if isinstance(value, InferError):
            return Answer({}, value, infer_ns=computed_ns - start_ns)
        outputs = super().convert_result(bound, value)
        infer_ns, output_ns = computed_ns - start_ns, time.monotonic_ns() - computed_ns
        return Answer(outputs, infer_ns=infer_ns, output_ns=output_ns, nbytes=answer_bytes(outputs))

    def _add_answer(self, answer: Answer) -> None:
        self._ahead.append(answer)
        if not self._wake_scheduled:
            self._wake_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._on_answers)
            except RuntimeError:
                # the loop is closed, and nobody waits
                self._closed = True

    def close_generator(self) -> None:
        """Close the generator: its `finally` runs. Raises: what that raises."""
        generator = self._generator
        self._drop_generator()
        close = getattr(generator, "close", None)
        if close is not None:
            close()

    def close_quietly(self) -> None:
        """Close the generator, ignoring errors: the replica's thread ends."""
        try:
            self.close_generator()
        except BaseException:  # noqa: BLE001 - an error of user code that nobody waits for
            return

    def _drop_generator(self) -> None:
        self._generator = None
        if self._replica is not None:
            self._replica.generators.discard(self)


class _CloseCall(HookCall):
    """The call that closes a paused generator."""

    __slots__ = ("_generator_call",)

    def __init__(self, generator_call: GeneratorCall) -> None:
        super().__init__(CLOSE_STEP, None, INPUTS, 0, generator_call.request_id)
        self._generator_call = generator_call

    def invoke(self, bound: BoundHooks) -> None:
        self._generator_call.close_generator()

    def convert_result(self, bound: BoundHooks, result: Any) -> None:
        pass


def answer_bytes(outputs: Any) -> int:
    """Return the size of an answer, as JSON or as tensors."""
    return len(outputs) if isinstance(outputs, bytes) else tensor_bytes(outputs.values())
