"""Models made of models: `ensemble_scheduling`."""

from __future__ import annotations

from .notes import Notes

HONOURED: tuple[str, ...] = ()
REFUSED = ("ensemble_scheduling",)


def read(notes: Notes) -> None:
    """Read them."""
