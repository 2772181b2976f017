"""Validation of a component's metadata. Source: seldon-core 1.17.1."""

from __future__ import annotations

import os
from typing import Any


class SeldonInvalidMetadataError(Exception):
    """Invalid metadata."""


def validate_model_metadata(data: dict[str, Any]) -> dict[str, Any]:
    """Return metadata, with defaults from the image's name. Raises: SeldonInvalidMetadataError."""
    from penstock.server.seldon.inside.metadata import find_mistake, metadata_of

    class Stated:
        def init_metadata(self) -> dict[str, Any]:
            return data

    image = "PREDICTIVE_UNIT_IMAGE"
    found = metadata_of(Stated(), {image: os.environ[image]} if image in os.environ else {})
    if found is None:
        raise SeldonInvalidMetadataError(find_mistake(data))
    return found
