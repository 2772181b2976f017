"""Refusals: InferErrors between the processes of one server, as JSON. Called by who sends and takes messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.backends.errors import Code, InferError


def said_of(error: InferError) -> list[Any]:
    """Give an error as JSON has it: the name of its code, its message, and when a call is worth repeating."""
    return [error.code.name, error.message, error.retry_after_ns]


def error_of(said: Sequence[Any], kind: type[InferError] = InferError) -> InferError:
    """Make the error of what `said_of` has given. Raises: ValueError, TypeError or LookupError for anything else."""
    code, message, retry_after_ns = said
    return kind(Code[code], str(message), int(retry_after_ns))


def write_error(error: InferError) -> bytes:
    """Write an error."""
    return json.dumps(said_of(error)).encode()


def read_error(body: bytes | str) -> InferError:
    """Read what `write_error` has written. Raises: as `error_of`."""
    return error_of(json.loads(body))
