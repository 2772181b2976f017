"""Requests that belong together in order: `sequence_batching`."""

from __future__ import annotations

from .notes import Notes

HONOURED: tuple[str, ...] = ()
REFUSED = ("sequence_batching",)


def read(notes: Notes) -> None:
    """Read them."""
