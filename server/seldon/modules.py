"""Modules: what the files of a component's folder say of it; none is run. Called by components.py, check.py, graph/."""

from __future__ import annotations

import ast
from pathlib import Path

S2I = Path(".s2i", "environment")
"""What s2i read when it built an image: `NAME=VALUE` lines, which became variables of the container."""
MODEL_NAME = "MODEL_NAME"


def variables_of(path: Path) -> dict[str, str]:
    """Read `NAME=VALUE` lines; {} where there is no such file."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.strip().partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): value for name, equals, value in pairs if equals and name.strip()}


def of_their_own_name(folder: Path) -> list[str]:
    """Name the modules of a folder that have a class of their name, without importing them."""
    return [path.stem for path in sorted(folder.glob("*.py")) if path.stem in _classes_of(path)]


def _classes_of(path: Path) -> set[str]:
    try:
        return {node.name for node in _parsed(path).body if isinstance(node, ast.ClassDef)}
    except (OSError, SyntaxError, ValueError):
        return set()


def names_of(path: Path) -> set[str]:
    """Give what a module's lines make: classes, functions, and what it imports or assigns; "*" where it imports all.

    Raises: OSError, SyntaxError, ValueError.
    """
    found: set[str] = set()
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), path)
