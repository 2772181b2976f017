"""Modules: what the files of a component's folder say of it; none is run. Called by components.py, check.py, graph/."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from penstock.server.modules import made_in, parsed

S2I = Path(".s2i", "environment")
"""What s2i read when it built an image: `NAME=VALUE` lines, which became variables of the container."""
MODEL_NAME = "MODEL_NAME"
METHODS = ("predict", "transform_", "route", "aggregate", "send_feedback", "health_status", "__getattr__")
"""How the names begin of what a component may have."""


def variables_of(path: Path) -> dict[str, str]:
    """Read `NAME=VALUE` lines; {} where there is no such file."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.strip().partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): value for name, equals, value in pairs if equals and name.strip()}


def built_with(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Give the variables of an image of a folder: they go after `environ`, which its container is started with."""
    return {key: value for key, value in variables_of(folder / S2I).items() if key not in environ}


def of_their_own_name(folder: Path) -> list[str]:
    """Name the modules of a folder that have a class of their name, without importing them."""
    return [path.stem for path in sorted(folder.glob("*.py")) if path.stem in _classes_of(path)]


def unreadable(folder: Path) -> dict[Path, SyntaxError]:
    """Say which modules of a folder Python cannot read."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        try:
            parsed(path)
        except SyntaxError as error:
            found[path] = error
        except (OSError, ValueError):
            continue
    return found


def _classes_of(path: Path) -> set[str]:
    try:
        return {node.name for node in parsed(path).body if isinstance(node, ast.ClassDef)}
    except (OSError, SyntaxError, ValueError):
        return set()


def lacks_methods(path: Path, name: str) -> bool:
    """Tell whether a class that stands in a module has nothing that Seldon calls, nor a class that it could have it of.

    Raises: as `names_of`.
    """
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name and not node.decorator_list:
            inherits = any(ast.unparse(base) != "object" for base in node.bases) or node.keywords
            return not inherits and not any(each.startswith(METHODS) for each in made_in(node))
    return False
