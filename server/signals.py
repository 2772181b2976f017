"""Signals: delivered to the process that installed the handler, and not to processes forked from it by user code.

Used by processes that stop on a signal: the server's, and those of a supervisor.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def on_signal(number: int, callback: Callable[[int], object]) -> None:
    """Call `callback` with the signal number when this process receives the signal.

    A fork of it (by multiprocessing in a hook) inherits the handler, but no loop that would react. In the fork the
    signal has its default action; otherwise `Process.terminate` and the end of a Pool would wait forever.
    Threads: the main one.
    """
    owner = os.getpid()

    def on_signal(number: int, _frame: object) -> None:
        if os.getpid() == owner:
            callback(number)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(number, on_signal)
