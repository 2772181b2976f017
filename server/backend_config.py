"""Backend config: the rules of --backend-config, Triton's way of saying what a backend completes. For Settings."""

from __future__ import annotations

from collections.abc import Sequence

BACKEND = "onnxruntime"
SETTING = "default-max-batch-size"
_MOST_ROWS = 2**20


def parse(rules: Sequence[str]) -> int:
    """Read rules of the form `[BACKEND,]SETTING=VALUE`; one of a backend goes before one of all.

    Returns: the max_batch_size that is completed, 0 where none is said. Raises: ValueError.
    """
    sizes: dict[str, int] = {}
    for rule in rules:
        named, equals, value = rule.partition("=")
        backend, _, setting = named.rpartition(",")
        if not equals or not setting:
            raise ValueError(f"got {rule!r}, wanted [BACKEND,]SETTING=VALUE")
        if backend not in {"", BACKEND}:
            raise ValueError(f"{rule!r}: there is no backend '{backend}' with such settings, only '{BACKEND}'")
        if setting != SETTING:
            raise ValueError(f"{rule!r}: '{setting}' cannot be set, only '{SETTING}'")
        if not (value.isascii() and value.isdigit() and 1 <= int(value) <= _MOST_ROWS):
            raise ValueError(f"{rule!r}: got {value!r}, wanted a whole number from 1 to {_MOST_ROWS}")
        if sizes.setdefault(backend, int(value)) != int(value):
            raise ValueError(f"{rule!r}: said twice, and differently")
    return sizes.get(BACKEND) or sizes.get("", 0)
