"""Memory: giving back to the system what the allocator keeps of a model opened or closed. Called by opening.py."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Give free pages back, where the C library can; it takes some milliseconds.

    glibc keeps what a model's weights were read into, and the weights themselves when it is closed: of a model of
    32 MB, 68 MB stayed for good, and nothing with this (docs/repository.md tells users that memory is given back).
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
