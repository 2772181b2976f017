"""Metadata: a component's own description, validated. Source: seldon-core 1.17.1, metadata.py, and its JSON schema."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from .seldon_core_classes import SeldonNotImplementedError

logger = logging.getLogger("seldon_core")

DATATYPES = frozenset((
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES",
))  # fmt: skip
_ARRAYS = frozenset(("tensor", "ndarray", "tftensor"))
_SCALARS = frozenset(("strData", "binData"))


def metadata_of(user: Any, environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return the answer of `/metadata`: from the image's name, init_metadata() and MODEL_METADATA.

    Each overrides those before it. Returns: None if it is invalid, which is logged. Raises: the exceptions of user
    code.
    """
    declared: Any = {}
    if hasattr(user, "init_metadata"):
        with contextlib.suppress(SeldonNotImplementedError):
            declared = user.init_metadata()
    if not isinstance(declared, dict):
        logger.error("init_metadata must return dict")
        declared = {}
    name, version = "", ""
    image = environ.get("PREDICTIVE_UNIT_IMAGE")
    if image is not None:
        name, _, version = image.rpartition(":")
    defaults = {"name": name, "versions": [version], "platform": "", "inputs": [], "outputs": [], "custom": {}}
    found = {**defaults, **declared, **_environment_metadata(environ.get("MODEL_METADATA", ""))}
    mistake = find_mistake(found)
    if mistake:
        logger.error("Metadata validation error: %s", mistake)
        logger.error("Failed to validate metadata %s", found)
        return None
    return found


def find_mistake(metadata: dict[str, Any]) -> str:
    """Return what is invalid in metadata; "" if nothing is."""
    for key, value in metadata.items():
        if key in {"name", "platform"}:
            is_valid = isinstance(value, str)
        elif key == "versions":
            is_valid = _is_list(value, _is_text)
        elif key in {"inputs", "outputs"}:
            is_valid = _is_list(value, _is_tensor)
        elif key == "custom":
            is_valid = isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
        else:
            return f"there is no {key!r} in metadata"
        if not is_valid:
            return f"{key!r} cannot be {value!r}"
    return ""


def _environment_metadata(text: str) -> dict[str, Any]:
    """Parse MODEL_METADATA, which is YAML. Unreadable text is logged."""
    if not text:
        return {}
    try:
        import yaml
    except ImportError:  # a component's own Python may lack it; most values are JSON
        try:
            values: Any = json.loads(text)
        except ValueError:
            logger.exception("MODEL_METADATA cannot be read: this Python has no PyYAML, and it is not JSON")
            return {}
    else:
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError:
            logger.exception("Reading metadata from MODEL_METADATA env variable failed")
            return {}
    return {**values}


def _is_tensor(entry: Any) -> bool:
    """Return whether an input or output is described in the form of one of the two protocols."""
    if not isinstance(entry, dict):
        return False
    if "messagetype" not in entry:
        return all(_is_tensor_field(key, value) for key, value in entry.items())
    kind = entry["messagetype"]
    if not isinstance(kind, str) or not entry.keys() <= {"messagetype", "schema"}:
        return False
    if "schema" not in entry:
        return True
    schema = entry["schema"]
    if kind in _SCALARS or not isinstance(schema, dict):
        return False
    if kind in _ARRAYS:
        return (
            schema.keys() <= {"names", "shape"}
            and _is_list(schema.get("names", []), _is_text)
            and _is_list(schema.get("shape", []), _is_integer)
        )
    return True


def _is_tensor_field(key: str, value: Any) -> bool:
    if key == "name":
        return isinstance(value, str)
    if key == "datatype":
        return isinstance(value, str) and value in DATATYPES
    return key == "shape" and _is_list(value, _is_integer)


def _is_list(value: Any, fits: Any) -> bool:
    return isinstance(value, list) and all(fits(each) for each in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    """Return whether a value is an integer of JSON schemas: 1.0 is one, true is not."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
