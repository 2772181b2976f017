"""Closing: ending a Model waits for its device, but not forever. Used by model.py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

logger = logging.getLogger("penstock.batching")

END_TIMEOUT_S = 10.0
"""How long a device may take to finish its work. A kernel that hangs never finishes, nor does any call that waits for
it."""


def end_with_timeout(name: str, devices: Collection[str], end: Callable[[], None]) -> None:
    """Call what ends a model on these devices and wait for it, at most `END_TIMEOUT_S` if one of them is not a CPU.

    After that it continues in the background, so that unloading or replacing the model, or stopping the server, does
    not hang with the device. Raises: whatever `end` raises on a CPU.
    """
    if all(device == "cpu" for device in devices):
        end()
        return
    thread = threading.Thread(target=end, name=f"{name} ends", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started now
        end()
        return
    thread.join(END_TIMEOUT_S)
    if thread.is_alive():
        text = "model %s: its device has not responded for %.0f s, and its memory there cannot be freed until it does"
        logger.error(text, name, END_TIMEOUT_S)
