"""The gate of CUDA graph captures: a capture must be the only user of CUDA in this process.

During a capture, many calls of any thread on any device (an allocation is one, a plain copy another) fail and spoil the
capture: ONNX Runtime captures in CUDA's global mode. Source: cudaStreamBeginCapture in CUDA's runtime API; onnxruntime,
core/providers/cuda/cuda_graph.cc.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_OPEN_GATE: AbstractContextManager[None] = nullcontext()


class Gate:
    """A reentrant lock: shared by users of CUDA, exclusive for captures. Threads: any.

    Until it is armed (`enable`, when a model with graphs is loaded) it is open and costs nothing.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._changed = threading.Condition()
        self._short_users = 0
        self._long_users = 0
        self._waiting_captures = 0
        self._closing_captures = 0
        self._capturing = False
        self._thread_state = threading.local()

    @property
    def is_held(self) -> bool:
        """Whether this thread is inside, and need not pass again."""
        return bool(getattr(self._thread_state, "holds_gate", False))

    def enable(self) -> None:
        """Make everything pass through the gate from now on."""
        self.enabled = True

    def shared(self, *, long: bool = False) -> AbstractContextManager[None]:
        """Use CUDA together with others; waits while an exclusive user is inside, or about to be.

        `long`: for as long as a load takes. A waiting capture waits for its end without holding up other users.
        """
        return self._share(long) if self.enabled and not self.is_held else _OPEN_GATE

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Be the only user; waits until nothing is inside. Raises: RuntimeError if this thread is."""
        if self.is_held:
            raise RuntimeError("a capture was started while other work was in progress")
        with self._changed:
            self._waiting_captures += 1
            self._changed.wait_for(lambda: not self._long_users and not self._capturing and not self._closing_captures)
            self._closing_captures += 1
            self._thread_state.holds_gate = True
            self._changed.wait_for(lambda: not self._short_users)
            self._waiting_captures -= 1
            self._closing_captures -= 1
            self._capturing = True
        try:
            yield
        finally:
            with self._changed:
                self._changed.notify_all()
                self._capturing = False
                self._thread_state.holds_gate = False

    @contextmanager
    def _share(self, long: bool) -> Iterator[None]:
        self._enter(long=long)
        try:
            yield
        finally:
            self._leave(long=long)

    # Objects that the garbage collector frees, at any call, on a counted thread must not wait for that thread. So
    # `_thread_state` changes together with the count, with no call in between, and waiters have been notified by then.

    def _enter(self, *, long: bool) -> None:
        with self._changed:
            if long:
                self._changed.wait_for(lambda: not self._capturing and not self._waiting_captures)
                self._long_users += 1
            else:
                self._changed.wait_for(lambda: not self._capturing and not self._closing_captures)
                self._short_users += 1
            self._thread_state.holds_gate = True

    def _leave(self, *, long: bool) -> None:
        with self._changed:
            self._changed.notify_all()
            if long:
                self._long_users -= 1
            else:
                self._short_users -= 1
            self._thread_state.holds_gate = False


GATE = Gate()
"""The gate of this process."""
