"""Modules: what the files in a component's folder show without being run. Called by components.py, check.py, graph/."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from penstock.server.modules import defined_names, parse_file

S2I = Path(".s2i", "environment")
"""The file that s2i reads to build an image: `NAME=VALUE` lines, which become variables of the container."""
MODEL_NAME = "MODEL_NAME"
METHODS = ("predict", "transform_", "route", "aggregate", "send_feedback", "health_status", "__getattr__")
"""The prefixes of a component's methods."""


def variables_of(path: Path) -> dict[str, str]:
    """Parse `NAME=VALUE` lines; {} if there is no such file."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.strip().partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): value for name, equals, value in pairs if equals and name.strip()}


def image_variables(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a folder's image, except those in `environ`, which the container is started with."""
    return {key: value for key, value in variables_of(folder / S2I).items() if key not in environ}


def component_modules(folder: Path) -> list[str]:
    """List the modules of a folder with a class of their own name, without importing them."""
    return [path.stem for path in sorted(folder.glob("*.py")) if path.stem in _classes_of(path)]


def syntax_errors(folder: Path) -> dict[Path, SyntaxError]:
    """Return the modules of a folder with syntax errors."""
    errors = {}
    for path in sorted(folder.glob("*.py")):
        try:
            parse_file(path)
        except SyntaxError as error:
            errors[path] = error
        except (OSError, ValueError):
            continue
    return errors


def _classes_of(path: Path) -> set[str]:
    try:
        return {node.name for node in parse_file(path).body if isinstance(node, ast.ClassDef)}
    except (OSError, SyntaxError, ValueError):
        return set()


def lacks_methods(path: Path, name: str) -> bool:
    """Return whether a class defined in a module has no method that Seldon calls, and no base that could have one.

    Raises: as `module_names`.
    """
    for node in parse_file(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name and not node.decorator_list:
            inherits = any(ast.unparse(base) != "object" for base in node.bases) or node.keywords
            return not inherits and not any(member.startswith(METHODS) for member in defined_names(node))
    return False
