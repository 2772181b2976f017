"""Installed: the models that a Python has, from its installed entry points. Called by entries.py and cli.py.

No model is imported. Source: deepaas 2.6.0, model/loading.py: the namespace.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from importlib import metadata

from penstock.backends.errors import Code, InferError

NAMESPACE = "deepaas.v2.model"
QUERY_LIMIT_S = 120.0
_QUERY = f"""
import json, sys
from importlib import metadata
try:
    version = metadata.version("marshmallow")
except metadata.PackageNotFoundError:
    version = ""
found = [[each.name, each.value] for each in metadata.entry_points(group="{NAMESPACE}")]
sys.stdout.write("\\n" + json.dumps([found, version]))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """What a Python has: models, each a name and `module[:attr]`; and the version of marshmallow, "" for none."""

    entries: list[tuple[str, str]]
    marshmallow: str


def installed_in(python: str = "") -> Installed:
    """Query a Python, "" for this one. Raises: InferError (INVALID). Threads: it blocks."""
    if not python:
        try:
            version = metadata.version("marshmallow")
        except metadata.PackageNotFoundError:
            version = ""
        return _parse([(each.name, each.value) for each in metadata.entry_points(group=NAMESPACE)], version)
    try:
        process = subprocess.run(  # noqa: S603 - the user's own Python
            [python, "-c", _QUERY], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=QUERY_LIMIT_S,
            check=False, cwd="/", env=dict(os.environ),
        )  # fmt: skip
        found, version = json.loads(process.stdout.rpartition("\n")[2])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise InferError(Code.INVALID, f"{python} does not list its models: {error}") from None
    return _parse(found, version)


def _parse(found: list[tuple[str, str]], version: str) -> Installed:
    # `module:attr [extra]`: the installer of the model is responsible for the requirements of the extra
    return Installed([(name, value.partition("[")[0].replace(" ", "")) for name, value in found], version)
