"""The part of a traceback that is in user code. Used for logs, in the server's process and in a worker's."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import TracebackType

_INTERNAL_PATHS = (str(Path(__file__).parent), "<frozen importlib", importlib.__file__)


def user_frames(error: BaseException) -> TracebackType | None:
    """Return the error's traceback without the leading frames of this package and of the import system.

    Returns: all of it if none is in user code, as for an error of our own.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_INTERNAL_PATHS):
        frames = frames.tb_next
    return frames or error.__traceback__
