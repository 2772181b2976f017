"""Libraries of custom operators: has a runtime load those that a model's options name.

Used by onnx.py and tensorflow.py. Their code then runs in the process that runs the model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from .errors import Code, InferError

LIBRARY_OPTION = "custom_op_library"
"""Options `custom_op_library.1`, `.2` and so on are the paths of libraries."""
ADVICE = "if it is a custom operator, set runtime.custom_op_libraries in penstock.toml to the library that defines it"
_FOLDERS = re.compile(r"(?<!\w)/\S*/")
logger = logging.getLogger("penstock.backends")


def load_libraries(
    options: Mapping[str, str], load: Callable[[str], object], error_text: Callable[[Exception], str]
) -> None:
    """Load the libraries with `load`, in the order of the options. `error_text` returns the text of its exceptions.

    Raises: InferError (INVALID), with the paths of folders removed from the text.
    """
    for library in [Path(path) for name, path in options.items() if name.startswith(f"{LIBRARY_OPTION}.")]:
        logger.info("loaded custom operators from %s", library)
        try:
            load(str(library))
        except Exception as error:
            reason = _FOLDERS.sub("", error_text(error).replace(f"{library.parent}/", ""))
            text = f"option '{LIBRARY_OPTION}': '{library.name}' could not be registered: {reason}"
            raise InferError(Code.INVALID, text) from error
