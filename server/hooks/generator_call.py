"""Pull: the answers of a post_inference that yields, produced a little ahead on its replica, taken on the event loop.

Made by `runner.py`, one per request. Other sources of answers (a response sender) may fill a queue like it.
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

from .bound_hooks import BoundHooks
from .call import HookCall, ReplicaGoneError
from .loading import POST
from .packing import INPUTS, tensor_bytes

if TYPE_CHECKING:
    from .replica import Replica

AHEAD = 8
AHEAD_BYTES = 256 << 10
"""How far a generator runs ahead of its consumer: this many answers, or up to the one that reaches this size."""
CLOSING = f"closing {POST}"


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
    that thread never returns from it. At most AHEAD answers wait, and no step begins with AHEAD_BYTES of them.
    Threads: the event loop's; `invoke` and `abandon` run on the replica's. `_lock` decides between a pausing generator
    and a disconnecting client. The time limit is per step.
    Units: `ended_ns` is the time of the step that found no more answers, -1 before.
    """

    __slots__ = (
        "_ahead", "_arrived", "_closed", "_generator", "_lock", "_loop", "_paused", "_replica", "_turn",
        "_woken", "ended_ns",
    )  # fmt: skip

    def __init__(self, outputs: list[Any], form: int, request_id: str) -> None:
        # a deadline is for waiting: once the model has run, the request is finished
        super().__init__(POST, outputs, form, 0, request_id)
        self.ended_ns = -1
        self._turn: asyncio.Future[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._ahead: deque[Answer] = deque()
        self._generator: Iterator[Any] | None = None
        self._replica: Replica | None = None
        self._lock = threading.Lock()
        self._paused = self._closed = self._woken = False

    # -- on the event loop -------------------------------------------------------------------------------------

    async def next(self, replica: Any) -> Answer | None:
        """Return the next answer, None after the last; once begun, `replica` must stay the same.

        Raises: InferError, after the earlier answers; ReplicaGoneError, if the replica is gone.
        """
        while not self._ahead:
            if self._turn is None or self._turn.done():
                turn, self._turn = self._turn, None
                if turn is not None:
                    turn.result()
                if self.ended_ns >= 0:
                    return None
                self._go_on(replica)
            self._arrived.clear()
            # an answer put before `clear` does not wake the wait
            if not self._ahead:
                await self._arrived.wait()
        answer = self._ahead.popleft()
        turn = self._turn
        if turn is not None and turn.done() and turn.exception() is None and self._has_room():
            with contextlib.suppress(ReplicaGoneError):  # reported after the answers that are ahead
                self._go_on(replica)
        return answer._replace(more=True) if self._ahead else answer

    def _has_room(self) -> bool:
        """Whether to continue already: not after each answer, or two threads would constantly wait for each other."""
        return self.ended_ns < 0 and len(self._ahead) <= AHEAD // 2 and not self._is_full()

    def _go_on(self, replica: Any) -> None:
        self._replica, self._paused = replica, False
        self._turn = replica.submit(self)
        self._turn.add_done_callback(self._turn_ended)

    def _turn_ended(self, turn: asyncio.Future[Any]) -> None:
        if not turn.cancelled():
            # an error is reported by `next`, if it is called again
            turn.exception()
        self._arrived.set()

    def _look(self) -> None:
        self._woken = False
        self._arrived.set()

    def close(self) -> None:
        """Close the generator after its current step: its answers are no longer wanted."""
        with self._lock:
            self._closed = True
            waits = self._paused and self._generator is not None
        self._ahead.clear()
        if waits and self._replica is not None:
            with contextlib.suppress(ReplicaGoneError):
                self._replica.submit(_Closing(self)).add_done_callback(self._turn_ended)

    # -- on the replica's own thread ---------------------------------------------------------------------------

    def invoke(self, bound: BoundHooks) -> None:
        """Step until enough is ahead, another call waits, or it ends. Raises: what a step raises."""
        steps = 0
        try:
            while not self._pauses(steps):
                steps += 1
                self.since_ns = start_ns = time.monotonic_ns()
                if self._generator is None:
                    self._begin(bound)
                self.in_hook = True
                try:
                    value = next(self._generator)  # type: ignore[arg-type]
                except StopIteration:
                    self._forget()
                    self.ended_ns = time.monotonic_ns() - start_ns
                    return
                self.in_hook = False
                self._put(self._answer(bound, value, start_ns))
        except BaseException:
            self.shut()
            raise
        if self._closed:
            self.shut()

    def made(self, bound: BoundHooks, result: Any) -> None:
        pass

    def _begin(self, bound: BoundHooks) -> None:
        self.begun = True
        self._generator = iter(super().invoke(bound))
        self.value = None
        self._replica.pulls.add(self)  # type: ignore[union-attr]

    def _pauses(self, steps: int) -> bool:
        """Whether no further step may begin in this turn."""
        with self._lock:
            if not self._closed:
                self._paused = self._is_full() or (steps > 0 and self._replica.awaited)  # type: ignore[union-attr]
            return self._closed or self._paused

    def _is_full(self) -> bool:
        ahead = list(self._ahead)
        return len(ahead) >= AHEAD or sum(each.nbytes for each in ahead) >= AHEAD_BYTES

    def _answer(self, bound: BoundHooks, value: Any, start_ns: int) -> Answer:
        computed_ns = time.monotonic_ns()
        if isinstance(value, InferError):
            return Answer({}, value, infer_ns=computed_ns - start_ns)
        outputs = super().made(bound, value)
        infer_ns, output_ns = computed_ns - start_ns, time.monotonic_ns() - computed_ns
        return Answer(outputs, infer_ns=infer_ns, output_ns=output_ns, nbytes=size_of(outputs))

    def _put(self, answer: Answer) -> None:
        self._ahead.append(answer)
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._look)
            except RuntimeError:
                # the loop is closed, and nobody waits
                self._closed = True

    def shut(self) -> None:
        """Close the generator: its `finally` runs. Raises: what that raises."""
        generator = self._generator
        self._forget()
        close = getattr(generator, "close", None)
        if close is not None:
            close()

    def abandon(self) -> None:
        """Close the generator, ignoring errors: the replica's thread ends."""
        try:
            self.shut()
        except BaseException:  # noqa: BLE001 - an error of user code that nobody waits for
            return

    def _forget(self) -> None:
        self._generator = None
        if self._replica is not None:
            self._replica.pulls.discard(self)


class _Closing(HookCall):
    """The call that closes a paused generator."""

    __slots__ = ("_pull",)

    def __init__(self, pull: GeneratorCall) -> None:
        super().__init__(CLOSING, None, INPUTS, 0, pull.request_id)
        self._pull = pull

    def invoke(self, bound: BoundHooks) -> None:
        self._pull.shut()

    def made(self, bound: BoundHooks, result: Any) -> None:
        pass


def size_of(outputs: Any) -> int:
    """Return the size of an answer, as JSON or as tensors."""
    return len(outputs) if isinstance(outputs, bytes) else tensor_bytes(outputs.values())
