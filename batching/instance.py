"""Instance: one executor on one device: take a Batch, run it, deliver it.

The work itself is `isolation.execute`, shared by both executors: `ThreadInstance` has a thread of its own; the event
loop acts as an Instance through `Model.dispatch` for batches that run in less time than a hand-over to a thread takes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from penstock.backends.backend import Binding

from .isolation import execute

if TYPE_CHECKING:
    from .model import Model


class ThreadInstance:
    """An Instance on a thread of its own.

    Threads: `wake` is called by others, all else happens on the Instance's thread. It takes a Batch as soon as it is
    woken or free and something is due; it sleeps only when nothing is. It is born asleep.
    """

    def __init__(self, model: Model, binding: Binding, name: str) -> None:
        self._model = model
        self._binding = binding
        self._alarm = threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.idle = True

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """End its sleep. Call with the model's lock held, when `idle` is set."""
        self.idle = False
        self._alarm.release()

    def stop(self) -> None:
        """Let the thread end once what it runs is done. Call with the model's lock held."""
        self._stopping = True
        self._alarm.release()

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def _main(self) -> None:
        model, binding = self._model, self._binding
        self._alarm.acquire()
        while not self._stopping:
            with model.lock:
                batch = model.scheduler.take(time.monotonic_ns())
                if batch is None:
                    self.idle = not self._stopping
                elif model.scheduler.live:
                    model.wake_one()
            if batch is None:
                self._alarm.acquire()
                continue
            ran = execute(model, binding, batch)
            model.finish_from_thread(batch, ran)
