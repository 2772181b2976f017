"""The text for a client of Cortex after `prediction failed: `, by the kind of exception that Cortex raised."""

from __future__ import annotations

from penstock.backends.errors import Code, InferError


def cortex_error(*parts: str) -> InferError:
    """Return an error that Cortex raised itself, about values or handlers: its parts follow the word `error`."""
    return InferError(Code.INVALID, ": ".join(("error", *parts)))


def unexpected_error(text: str) -> InferError:
    """Return an error that Cortex did not foresee: only the exception's own text."""
    return InferError(Code.INVALID, text)


def quoted_key(name: object) -> str:
    """Name a key as Cortex does."""
    return f'key "{name}"'
