"""Errors: what a client is told about an exception. Source: seldon-core 1.17.1, wrapper.py and flask_utils.py."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from .seldon_core_classes import SeldonMicroserviceException

logger = logging.getLogger("seldon_core")

INTERNAL = "MICROSERVICE_INTERNAL_ERROR"
UNREPORTABLE = (
    "500 Internal Server Error: The server encountered an internal error and was unable to complete your request. "
    "Either the server is overloaded or there is an error in the application."
)
"""Flask's text for an exception that cannot be reported."""
_OWN_FOLDER = f"{Path(__file__).parent}{os.sep}"
_QUALIFIED = re.compile(r"^(?:[\w<>]+\.)+(?=\w+\(\) )")
"""The qualifying classes that Python adds since 3.10 when a method is called with wrong arguments."""


def failure(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the message for an exception, and log it."""
    if isinstance(error, SeldonMicroserviceException):
        status, message = error.status_code, error.to_dict()
    else:
        with contextlib.suppress(Exception):
            print_traceback(error)
        status, message = 500, error_message(exception_text(error))
    logger.error("%s", message)
    return status, message


def error_message(text: str) -> dict[str, Any]:
    """Return the message that reports a failure of the component."""
    return {"status": {"status": 1, "info": text, "code": -1, "reason": INTERNAL}}


def print_traceback(error: BaseException) -> None:
    """Print an exception with its traceback from user code on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def exception_text(error: BaseException) -> str:
    """Return an exception's text as Python 3.8 wrote it, without later additions."""
    text = str(error)
    return _QUALIFIED.sub("", text) if type(error) is TypeError else text


def http_status(code: Any) -> int:
    """Return the HTTP status for a message's `status.code`, as Werkzeug 2.2 reads it; 500 if it is invalid.

    Raises: TypeError for neither a number nor text.
    """
    if not isinstance(code, (int, str)):
        raise TypeError("Invalid status argument")
    tokens = str(int(code) if isinstance(code, int) else code).split(None, 1)
    if not tokens:
        raise ValueError("Empty status argument")
    try:
        status = int(tokens[0])
    except ValueError:
        return 500
    return status if 100 <= status <= 999 else 500


def is_response(error: Exception) -> bool:
    """Return whether an exception is itself an answer: Flask's abort(response)."""
    exceptions = sys.modules.get("werkzeug.exceptions")
    return exceptions is not None and isinstance(error, exceptions.HTTPException) and error.code is None
