"""Quantities: amounts in Kubernetes' notation: `200m`, `0.5`, `2Gi`, `1e3`. Called by yaml_mapping.py."""

from __future__ import annotations

import re
from decimal import Decimal

_PATTERN = r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$"
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([numkMGTPE]|[KMGTPE]i)?|[eE]([-+]?[0-9]{1,3}))")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}

QUANTITY_MESSAGE = f"quantities must match the regular expression '{_PATTERN}'"
"""Source: k8s.io/apimachinery, quantity.go."""


def parse_quantity(text: str) -> Decimal:
    """Parse a quantity. Raises: ValueError, with Kubernetes' text, for an invalid one."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(QUANTITY_MESSAGE)
    number, suffix, exponent = Decimal(match[1]), match[2], match[3]
    if exponent is not None:
        return number.scaleb(int(exponent))
    if suffix in _BINARY:
        return number * Decimal(1024 ** _BINARY[suffix])
    return number.scaleb(_DECIMAL.get(suffix or "", 0))
