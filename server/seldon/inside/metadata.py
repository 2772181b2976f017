"""Metadata: a component's own description, validated. Source: seldon-core 1.17.1, metadata.py, and its JSON schema."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from .originals import SeldonNotImplementedError

logger = logging.getLogger("seldon_core")

DATATYPES = frozenset((
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES",
))  # fmt: skip
_ARRAYS = frozenset(("tensor", "ndarray", "tftensor"))
_PLAIN = frozenset(("strData", "binData"))


def metadata_of(user: Any, environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return the answer of `/metadata`: from the image's name, init_metadata() and MODEL_METADATA.

    Each overrides those before it. Returns: None if it is invalid, which is logged. Raises: the exceptions of user
    code.
    """
    made: Any = {}
    if hasattr(user, "init_metadata"):
        with contextlib.suppress(SeldonNotImplementedError):
            made = user.init_metadata()
    if not isinstance(made, dict):
        logger.error("init_metadata must return dict")
        made = {}
    name, version = "", ""
    image = environ.get("PREDICTIVE_UNIT_IMAGE")
    if image is not None:
        name, _, version = image.rpartition(":")
    defaults = {"name": name, "versions": [version], "platform": "", "inputs": [], "outputs": [], "custom": {}}
    found = {**defaults, **made, **_said(environ.get("MODEL_METADATA", ""))}
    mistake = wrong(found)
    if mistake:
        logger.error("Metadata validation error: %s", mistake)
        logger.error("Failed to validate metadata %s", found)
        return None
    return found


def wrong(metadata: dict[str, Any]) -> str:
    """Return what is invalid in metadata; "" if nothing is."""
    for key, value in metadata.items():
        if key in {"name", "platform"}:
            fits = isinstance(value, str)
        elif key == "versions":
            fits = _is_list(value, _is_text)
        elif key in {"inputs", "outputs"}:
            fits = _is_list(value, _is_tensor)
        elif key == "custom":
            fits = isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
        else:
            return f"there is no {key!r} in metadata"
        if not fits:
            return f"{key!r} cannot be {value!r}"
    return ""


def _said(text: str) -> dict[str, Any]:
    """Parse MODEL_METADATA, which is YAML. Unreadable text is logged."""
    if not text:
        return {}
    try:
        import yaml
    except ImportError:  # a component's own Python may lack it; most values are JSON
        try:
            said: Any = json.loads(text)
        except ValueError:
            logger.exception("MODEL_METADATA is not read: this Python has no PyYAML, and it is no JSON")
            return {}
    else:
        try:
            said = yaml.safe_load(text)
        except yaml.YAMLError:
            logger.exception("Reading metadata from MODEL_METADATA env variable failed")
            return {}
    return {**said}


def _is_tensor(said: Any) -> bool:
    """Return whether an input or output is described in the form of one of the two protocols."""
    if not isinstance(said, dict):
        return False
    if "messagetype" not in said:
        return all(_fits_tensor(key, value) for key, value in said.items())
    kind = said["messagetype"]
    if not isinstance(kind, str) or not said.keys() <= {"messagetype", "schema"}:
        return False
    if "schema" not in said:
        return True
    schema = said["schema"]
    if kind in _PLAIN or not isinstance(schema, dict):
        return False
    if kind in _ARRAYS:
        return (
            schema.keys() <= {"names", "shape"}
            and _is_list(schema.get("names", []), _is_text)
            and _is_list(schema.get("shape", []), _is_whole)
        )
    return True


def _fits_tensor(key: str, value: Any) -> bool:
    if key == "name":
        return isinstance(value, str)
    if key == "datatype":
        return isinstance(value, str) and value in DATATYPES
    return key == "shape" and _is_list(value, _is_whole)


def _is_list(value: Any, fits: Any) -> bool:
    return isinstance(value, list) and all(fits(each) for each in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    """Return whether a value is an integer of JSON schemas: 1.0 is one, true is not."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
