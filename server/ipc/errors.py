"""InferErrors between the processes of one server, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.backends.errors import Code, InferError


def error_to_json(error: InferError) -> list[Any]:
    """Return an error in JSON form: the name of its code, its message, and when to retry."""
    return [error.code.name, error.message, error.retry_after_ns]


def error_from_json(encoded: Sequence[Any], error_class: type[InferError] = InferError) -> InferError:
    """Create the error from the result of `error_to_json`. Raises: ValueError, TypeError or LookupError."""
    code, message, retry_after_ns = encoded
    return error_class(Code[code], str(message), int(retry_after_ns))


def write_error(error: InferError) -> bytes:
    """Encode an error."""
    return json.dumps(error_to_json(error)).encode()


def read_error(body: bytes | str) -> InferError:
    """Decode the result of `write_error`. Raises: as `error_from_json`."""
    return error_from_json(json.loads(body))
