"""ServerProxy: how a Python model's worker sends messages to its server, other than replies to calls.

Called by the objects that model.py uses. Threads: any; `on_message` is called on the worker's listener thread.
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
from penstock.server.python_models.messages import CALL, CANCEL, CANCEL_CALL, CONTROL, LOG, PAUSE, RESUME

from .errors import TritonModelException, replace_surrogates

OnAnswer = Callable[[dict[str, Any], list[Array | None]], None]
_MAX_CANCELLED = 4096
_CHECK_INTERVAL_S = 1.0


def _json_functions() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Return functions to write and read JSON: orjson's, or json's if the user's interpreter lacks orjson."""
    try:
        import orjson
    except ImportError:
        import json

        # reject what orjson rejects: the server, which reads it, uses orjson
        write = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return lambda message: write(message).encode(), lambda body: json.loads(bytes(body))
    return orjson.dumps, orjson.loads


dumps, loads = _json_functions()


class ServerProxy:
    """The server, as seen by a model.

    `serving`: requests may be made, which is between `initialize` and `finalize`. `closing`: the server takes no more
    CONTROL messages. `cancelled` holds the numbers of cancelled requests, the latest _MAX_CANCELLED of them.
    `rescheduled_senders` maps the numbers of requests that will be executed again to their senders. `creation_lock` is
    held to create objects that must exist once, such as the metric `families`, by name. Without a `channel` there is no
    server: this is a process that model.py has started. A process that it has forked has no server either.
    """

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._pending: dict[int, OnAnswer] = {}
        self._queued: queue.SimpleQueue[tuple[int, int, dict[str, Any]]] = queue.SimpleQueue()
        self.creation_lock = threading.RLock()
        self._sender_thread: threading.Thread | None = None
        self.serving = False
        self.closing = False
        self.cancelled: dict[int, None] = {}
        self.rescheduled_senders: dict[int, Any] = {}
        self._resume_events: dict[int, threading.Event] = {}
        self.families: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    @property
    def is_forked(self) -> bool:
        """Whether model.py created this process by fork."""
        return os.getpid() != self._pid

    def send_message(
        self, kind: int, number: int, message: dict[str, Any], arrays: Sequence[Array | None] | None = None
    ) -> None:
        """Send a message. Raises: TypeError or ValueError for values that cannot be sent; TritonModelException."""
        if self.is_forked or self._channel is None:
            raise TritonModelException("The server can only be reached from the model's own process.")
        self._channel.send(kind, number, dumps(message), arrays)

    def wait_while_paused(self, number: int) -> None:
        """Wait until the server accepts more answers to a request, or is ending."""
        resumed = self._resume_events.get(number)
        while resumed is not None and not self.closing and not resumed.wait(_CHECK_INTERVAL_S):
            pass

    def queue_message(self, kind: int, number: int, message: dict[str, Any]) -> None:
        """Queue a message to the server. The garbage collector may call this, possibly during a `send_message`."""
        self._queued.put((kind, number, message))

    def start_sender(self) -> None:
        """Start the thread that sends queued messages; call before creating objects that use `queue_message`."""
        if self._sender_thread is None:
            with self.creation_lock:
                if self._sender_thread is None:
                    self._sender_thread = threading.Thread(target=self._send_queued, name="sender", daemon=True)
                    self._sender_thread.start()

    def _send_queued(self) -> None:
        while True:
            kind, number, message = self._queued.get()
            try:
                self.send_message(kind, number, message)
            except OSError:
                return

    def call(self, message: dict[str, Any], arrays: Sequence[Array | None], on_answer: OnAnswer) -> int:
        """Request an inference; `on_answer` is called with each answer, on the listener thread. Returns: its number."""
        return self._send_request(CALL, message, arrays, on_answer)

    def cancel_call(self, number: int) -> None:
        """Refuse further answers. After `start_sender`, the garbage collector may call this."""
        if self._pending.pop(number, None) is not None:
            self.queue_message(CANCEL_CALL, number, {})

    def control(self, message: dict[str, Any], arrays: Sequence[Array | None] | None = None) -> bool:
        """Load, unload or query a model. Raises: TritonModelException with the server's text."""
        if self.closing:
            raise TritonModelException("Models cannot be loaded, unloaded or queried in `finalize`.")
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._send_request(CONTROL, message, arrays, lambda answer, _: answers.put(answer))
        answer = answers.get()
        if answer.get("error"):
            raise TritonModelException(answer["error"]["message"])
        return bool(answer.get("result"))

    def _send_request(
        self, kind: int, message: dict[str, Any], arrays: Sequence[Array | None] | None, on_answer: OnAnswer
    ) -> int:
        number = next(self._numbers)
        self._pending[number] = on_answer
        try:
            self.send_message(kind, number, message, arrays)
        except BaseException:
            del self._pending[number]
            raise
        return number

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Handle a message from the server."""
        if kind == PAUSE:
            self._resume_events[number] = threading.Event()
            return
        if kind in {RESUME, CANCEL} and (resumed := self._resume_events.pop(number, None)) is not None:
            resumed.set()
        if kind == RESUME:
            return
        if kind == CANCEL:
            self.cancelled[number] = None
            if (sender := self.rescheduled_senders.pop(number, None)) is not None:
                sender.close()
            if len(self.cancelled) > _MAX_CANCELLED:
                self.cancelled.pop(next(iter(self.cancelled)), None)
            return
        answer = loads(body)
        on_answer = self._pending.get(number)
        if on_answer is None:
            return
        if answer.get("final", True):
            self._pending.pop(number, None)
        with contextlib.suppress(RuntimeError):  # the loop that waits for it has ended
            on_answer(answer, arrays)

    def log(self, level: str, message: str, file: str = "", line: int = 0) -> None:
        """Write a line to the server's log."""
        self.send_message(LOG, 0, {"level": level, "message": replace_surrogates(message), "file": file, "line": line})
