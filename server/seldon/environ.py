"""Environment variables, parsed as the original does. Used by server and workers, so it imports nothing. Pure.

Source: seldon-core 1.17.1, env_utils.py and utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping

UNSET = "NOT_IMPLEMENTED"
"""The default for a component's name, and for the values of metric labels."""
UNSET_IMAGE = f"{UNSET}:{UNSET}"


def read_boolean(environ: Mapping[str, str], name: str) -> bool | None:
    """Parse a boolean variable; None if it is unset. Any word other than those for true is false."""
    value = environ.get(name)
    return None if value is None else value.lower() in {"1", "true", "t"}
