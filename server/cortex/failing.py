"""What a client of Cortex is told, after `prediction failed: `, by the kind of exception that it was there."""

from __future__ import annotations

from penstock.backends.errors import Code, InferError


def refusal(*parts: str) -> InferError:
    """Give what Cortex raised itself, of values and of handlers: its parts follow the word `error`."""
    return InferError(Code.INVALID, ": ".join(("error", *parts)))


def bare(text: str) -> InferError:
    """Give what went wrong in Cortex unforeseen: the exception's own text, and no more."""
    return InferError(Code.INVALID, text)


def key(name: object) -> str:
    """Name a key as Cortex did."""
    return f'key "{name}"'
