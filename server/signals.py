"""Signals: told to the process that listens, and to none that the user's code has forked from it.

Called by the processes that end when they are asked to: the server's, and those of a supervisor.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def listen(number: int, told: Callable[[int], object]) -> None:
    """Have a signal told to this process, by its number.

    A fork of it (multiprocessing's, in a hook) has the same handler and no loop that would hear of it. There the signal
    does what it does anywhere: without that, `Process.terminate` and the end of a Pool would wait for ever.
    Threads: the main one.
    """
    owner = os.getpid()

    def heard(number: int, _frame: object) -> None:
        if os.getpid() == owner:
            told(number)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(number, heard)
