"""InferErrors between the processes of one server, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.backends.errors import Code, InferError


def said_of(error: InferError) -> list[Any]:
    """Return an error in JSON form: the name of its code, its message, and when to retry."""
    return [error.code.name, error.message, error.retry_after_ns]


def error_of(said: Sequence[Any], kind: type[InferError] = InferError) -> InferError:
    """Create the error from the result of `said_of`. Raises: ValueError, TypeError or LookupError for anything else."""
    code, message, retry_after_ns = said
    return kind(Code[code], str(message), int(retry_after_ns))


def write_error(error: InferError) -> bytes:
    """Encode an error."""
    return json.dumps(said_of(error)).encode()


def read_error(body: bytes | str) -> InferError:
    """Decode the result of `write_error`. Raises: as `error_of`."""
    return error_of(json.loads(body))
