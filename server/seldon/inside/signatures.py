"""Signatures: whether a method of a component is to be handed `meta`.

The original tried, and called again without it after any TypeError. Here a method is called again only if the first
call did not get into it, or into what it hands its keywords on to.
"""

from __future__ import annotations

import inspect
from typing import Any

UNSURE = None
"""It takes any keywords, and may hand them on; or it is not Python's."""
_COMPLAINTS = ("keyword argument", "positional argument", " takes ", " arguments")


def takes_meta(method: Any) -> bool | None:
    """Tell whether a method takes two values and `meta` by its name. UNSURE: that is seen when it is called."""
    try:
        signature = inspect.signature(method, follow_wrapped=False)
    except Exception:  # noqa: BLE001 - not Python's, or it describes itself in a way of its own
        return UNSURE
    try:
        signature.bind(None, None, meta=None)
    except TypeError:
        return False
    return (
        True if "meta" in signature.parameters and signature.parameters["meta"].kind.name != "VAR_KEYWORD" else UNSURE
    )


def refuses_meta(error: TypeError) -> bool:
    """Tell whether some callable was not called at all, as it takes no `meta`."""
    text = str(error)
    if "argument 'meta'" in text:  # unexpected, or a second value for the one in the place of names
        return True
    # a function that is not Python's: it has no frame, and words of its own
    frames = error.__traceback__
    return frames is not None and frames.tb_next is None and any(words in text for words in _COMPLAINTS)
