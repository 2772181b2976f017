"""Closing: what ends a Model waits for its device, but not for ever. Called by model.py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

logger = logging.getLogger("penstock.batching")

PATIENCE_S = 10.0
"""How long a device may take to end what it has. A kernel that hangs never does, nor any call that waits for it."""


def patiently(name: str, devices: Collection[str], end: Callable[[], None]) -> None:
    """Call what ends a model on these devices, and wait for that: no longer than `PATIENCE_S` where one is no CPU.

    After that it goes on by itself, so that whoever unloads or replaces the model, or ends the server, does not hang
    with the device. Raises: whatever `end` raises on a CPU.
    """
    if all(device == "cpu" for device in devices):
        end()
        return
    ending = threading.Thread(target=end, name=f"{name} ends", daemon=True)
    try:
        ending.start()
    except RuntimeError:  # no thread can be had now
        end()
        return
    ending.join(PATIENCE_S)
    if ending.is_alive():
        text = "model %s: its device has not answered for %.0f s, what it holds there is freed only when it does"
        logger.error(text, name, PATIENCE_S)
