"""Signatures: whether a component's method is passed `meta`.

The original tried, and called again without it after any TypeError. Here a method is called again only if the first
call did not enter it, or the callable to which it passes its keywords.
"""

from __future__ import annotations

import inspect
from typing import Any

UNSURE = None
"""It takes any keywords, and may pass them on; or it is not written in Python."""
_ARGUMENT_ERRORS = ("keyword argument", "positional argument", " takes ", " arguments")


def takes_meta(method: Any) -> bool | None:
    """Return whether a method takes two values and the keyword `meta`. UNSURE: only a call can tell."""
    try:
        signature = inspect.signature(method, follow_wrapped=False)
    except Exception:  # noqa: BLE001 - not written in Python, or with a custom signature
        return UNSURE
    try:
        signature.bind(None, None, meta=None)
    except TypeError:
        return False
    return (
        True if "meta" in signature.parameters and signature.parameters["meta"].kind.name != "VAR_KEYWORD" else UNSURE
    )


def rejects_meta(error: TypeError) -> bool:
    """Return whether a callable was not entered, because it takes no `meta`."""
    text = str(error)
    if "argument 'meta'" in text:  # unexpected, or a second value for the second positional one
        return True
    # a callable not written in Python: it has no frame, and texts of its own
    frames = error.__traceback__
    return frames is not None and frames.tb_next is None and any(words in text for words in _ARGUMENT_ERRORS)
