"""Modules: what the files of a component's folder say of it; none is run. Called by components.py, check.py, graph/."""

from __future__ import annotations

import ast
from pathlib import Path

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


def of_their_own_name(folder: Path) -> list[str]:
    """Name the modules of a folder that have a class of their name, without importing them."""
    return [path.stem for path in sorted(folder.glob("*.py")) if path.stem in _classes_of(path)]


def unreadable(folder: Path) -> dict[Path, SyntaxError]:
    """Say which modules of a folder Python cannot read."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        try:
            _parsed(path)
        except SyntaxError as error:
            found[path] = error
        except (OSError, ValueError):
            continue
    return found


def _classes_of(path: Path) -> set[str]:
    try:
        return {node.name for node in _parsed(path).body if isinstance(node, ast.ClassDef)}
    except (OSError, SyntaxError, ValueError):
        return set()


def names_of(path: Path) -> set[str]:
    """Give what a module's lines make: classes, functions, and what it imports or assigns; "*" where it imports all.

    Raises: OSError, SyntaxError, ValueError.
    """
    return _made(_parsed(path))


def _made(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def lacks_methods(path: Path, name: str) -> bool:
    """Tell whether a class that stands in a module has nothing that Seldon calls, nor a class that it could have it of.

    Raises: as `names_of`.
    """
    for node in _parsed(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name and not node.decorator_list:
            inherits = any(ast.unparse(base) != "object" for base in node.bases) or node.keywords
            return not inherits and not any(each.startswith(METHODS) for each in _made(node))
    return False


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), path)
