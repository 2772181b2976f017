"""ServerProxy: how a Python model's worker sends messages to its server, other than replies to calls.

Called by the objects that model.py uses. Threads: any; `on_message` is called on the worker's ear thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.backends.backend import Array
from penstock.server.ipc.channel import Channel
from penstock.server.python_models.messages import CALL, CANCEL, CONTROL, GO_ON, HOLD, LEAVE, LOG

from .errors import TritonModelException, clean

Take = Callable[[dict[str, Any], list[Array | None]], None]
_MOST_CANCELLED = 4096
_LOOKS_S = 1.0


def _json() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Return functions to write and read JSON: orjson's, or json's if the user's interpreter lacks orjson."""
    try:
        import orjson
    except ImportError:
        import json

        # reject what orjson rejects: the server, which reads it, uses orjson
        write = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return lambda said: write(said).encode(), lambda body: json.loads(bytes(body))
    return orjson.dumps, orjson.loads


dumps, loads = _json()


class ServerProxy:
    """The server, as seen by a model.

    `serving`: requests may be made, which is between `initialize` and `finalize`. `ending`: the server takes no more
    CONTROL messages. `cancelled` holds the numbers of cancelled requests, the latest _MOST_CANCELLED of them. `kept`
    maps the numbers of requests that will be executed again to their senders. `making` is a lock for objects that must
    exist once, such as the metric `families`, by name. Without a `channel` there is no server: this is a process that
    model.py has started. A process that it has forked is `elsewhere`, and has no server either.
    """

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Take] = {}
        self._later: queue.SimpleQueue[tuple[int, int, dict[str, Any]]] = queue.SimpleQueue()
        self.making = threading.RLock()
        self._sweeper: threading.Thread | None = None
        self.serving = False
        self.ending = False
        self.cancelled: dict[int, None] = {}
        self.kept: dict[int, Any] = {}
        self._held: dict[int, threading.Event] = {}
        self.families: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    @property
    def elsewhere(self) -> bool:
        """Whether model.py created this process by fork."""
        return os.getpid() != self._pid

    def tell(self, kind: int, number: int, said: dict[str, Any], arrays: Sequence[Array | None] | None = None) -> None:
        """Send a message. Raises: TypeError or ValueError for values that cannot be sent; TritonModelException."""
        if self.elsewhere or self._channel is None:
            raise TritonModelException("The server is reached from the model's own process only.")
        self._channel.send(kind, number, dumps(said), arrays)

    def await_room(self, number: int) -> None:
        """Wait until the server accepts more answers to a request, or is ending."""
        held = self._held.get(number)
        while held is not None and not self.ending and not held.wait(_LOOKS_S):
            pass

    def later(self, kind: int, number: int, said: dict[str, Any]) -> None:
        """Queue a message to the server. The garbage collector may call this, possibly during a `tell`."""
        self._later.put((kind, number, said))

    def sweep(self) -> None:
        """Start the thread that sends the queue of `later`; call before creating objects that use `later`."""
        if self._sweeper is None:
            with self.making:
                if self._sweeper is None:
                    self._sweeper = threading.Thread(target=self._sweep, name="sweeper", daemon=True)
                    self._sweeper.start()

    def _sweep(self) -> None:
        while True:
            kind, number, said = self._later.get()
            try:
                self.tell(kind, number, said)
            except OSError:
                return

    def call(self, said: dict[str, Any], arrays: Sequence[Array | None], take: Take) -> int:
        """Request an inference; `take` is called with each answer, on the ear thread. Returns: its number."""
        return self._ask(CALL, said, arrays, take)

    def leave(self, number: int) -> None:
        """Refuse further answers. After `sweep`, the garbage collector may call this."""
        if self._waiting.pop(number, None) is not None:
            self.later(LEAVE, number, {})

    def control(self, said: dict[str, Any], arrays: Sequence[Array | None] | None = None) -> bool:
        """Load, unload or query a model. Raises: TritonModelException with the server's text."""
        if self.ending:
            raise TritonModelException("Models are neither loaded nor unloaded, nor asked after, in `finalize`.")
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._ask(CONTROL, said, arrays, lambda answer, _: answers.put(answer))
        answer = answers.get()
        if answer.get("error"):
            raise TritonModelException(answer["error"]["message"])
        return bool(answer.get("result"))

    def _ask(self, kind: int, said: dict[str, Any], arrays: Sequence[Array | None] | None, take: Take) -> int:
        number = next(self._numbers)
        self._waiting[number] = take
        try:
            self.tell(kind, number, said, arrays)
        except BaseException:
            del self._waiting[number]
            raise
        return number

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Handle a message from the server."""
        if kind == HOLD:
            self._held[number] = threading.Event()
            return
        if kind in {GO_ON, CANCEL} and (held := self._held.pop(number, None)) is not None:
            held.set()
        if kind == GO_ON:
            return
        if kind == CANCEL:
            self.cancelled[number] = None
            if (sender := self.kept.pop(number, None)) is not None:
                sender.close()
            if len(self.cancelled) > _MOST_CANCELLED:
                self.cancelled.pop(next(iter(self.cancelled)), None)
            return
        said = loads(body)
        take = self._waiting.get(number)
        if take is None:
            return
        if said.get("final", True):
            self._waiting.pop(number, None)
        with contextlib.suppress(RuntimeError):  # the loop that waits for it has ended
            take(said, arrays)

    def log(self, level: str, message: str, file: str = "", line: int = 0) -> None:
        """Write a line to the server's log."""
        self.tell(LOG, 0, {"level": level, "message": clean(message), "file": file, "line": line})
