"""The gate of CUDA graph captures: a capture must be the only user of CUDA in this process.

During a capture, many calls of any thread on any device (an allocation is one, a plain copy another) fail and spoil the
capture: ONNX Runtime captures in CUDA's global mode. Source: cudaStreamBeginCapture in CUDA's runtime API; onnxruntime,
core/providers/cuda/cuda_graph.cc.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_OPEN: AbstractContextManager[None] = nullcontext()


class Gate:
    """A reentrant lock: shared by users of CUDA, exclusive for captures. Threads: any.

    Until it is armed (`arm`, when a model with graphs is loaded) it is open and costs nothing.
    """

    def __init__(self) -> None:
        self.armed = False
        self._moved = threading.Condition()
        self._users = 0
        self._long = 0
        self._waiting = 0
        self._closing = 0
        self._taken = False
        self._inside = threading.local()

    @property
    def inside(self) -> bool:
        """Whether this thread is inside, and need not pass again."""
        return bool(getattr(self._inside, "now", False))

    def arm(self) -> None:
        """Make everything pass through the gate from now on."""
        self.armed = True

    def shared(self, *, long: bool = False) -> AbstractContextManager[None]:
        """Use CUDA together with others; waits while an exclusive user is inside, or about to be.

        `long`: for as long as a load takes. A waiting capture waits for its end without holding up other users.
        """
        return self._share(long) if self.armed and not self.inside else _OPEN

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only user; waits until nothing is inside. Raises: RuntimeError if this thread is."""
        if self.inside:
            raise RuntimeError("a capture was started while other work was in progress")
        with self._moved:
            self._waiting += 1
            self._moved.wait_for(lambda: not self._long and not self._taken and not self._closing)
            self._closing += 1
            self._inside.now = True
            self._moved.wait_for(lambda: not self._users)
            self._waiting -= 1
            self._closing -= 1
            self._taken = True
        try:
            yield
        finally:
            with self._moved:
                self._moved.notify_all()
                self._taken = False
                self._inside.now = False

    @contextmanager
    def _share(self, long: bool) -> Iterator[None]:
        self._enter(long=long)
        try:
            yield
        finally:
            self._leave(long=long)

    # Objects that the garbage collector frees, at any call, on a counted thread must not wait for that thread. So
    # `_inside` changes together with the count, with no call in between, and waiters have been notified by then.

    def _enter(self, *, long: bool) -> None:
        with self._moved:
            if long:
                self._moved.wait_for(lambda: not self._taken and not self._waiting)
                self._long += 1
            else:
                self._moved.wait_for(lambda: not self._taken and not self._closing)
                self._users += 1
            self._inside.now = True

    def _leave(self, *, long: bool) -> None:
        with self._moved:
            self._moved.notify_all()
            if long:
                self._long -= 1
            else:
                self._users -= 1
            self._inside.now = False


GATE = Gate()
"""The gate of this process."""
