"""The environment, as the original reads it. Imports nothing: the server and the workers have it. Pure.

Source: seldon-core 1.17.1, env_utils.py and utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping

UNSET = "NOT_IMPLEMENTED"
"""What stands for a component's name, and in the labels of metrics, where no variable says it."""
UNSET_IMAGE = f"{UNSET}:{UNSET}"


def truth(environ: Mapping[str, str], name: str) -> bool | None:
    """Read a variable that is true or false; None where it is not set. Any other word is false."""
    said = environ.get(name)
    return None if said is None else said.lower() in {"1", "true", "t"}
