"""Static inspection of Python files: what a module defines, without running it. Used to check user code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path


def module_names(path: Path) -> set[str]:
    """Return the names a module defines: classes, functions, imports and assignments; "*" for a star import.

    Raises: OSError, SyntaxError, ValueError.
    """
    return defined_names(parse_file(path))


def defined_names(tree: ast.AST) -> set[str]:
    """Return the names defined at or below a node."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def parse_file(path: Path) -> ast.Module:
    """Read and parse a file. Raises: as `module_names`."""
    return ast.parse(path.read_bytes(), path)


def find_module_file(module: str, folders: Iterable[str], *, installed: bool) -> Path | None:
    """Find a module's file without importing it; None if it has no file. Raises: ModuleNotFoundError.

    `installed`: if it is not in these folders, it may be anywhere that this Python imports from, which includes
    editable installations that are not on its path.
    """
    # the path is searched as a whole: a folder without __init__.py is a package only if there is no other
    paths = [*folders, *(sys.path if installed else ())]
    parents: list[str] = []
    spec = None
    for name in module.split("."):
        parents.append(name)
        spec = PathFinder.find_spec(".".join(parents), paths)
        if spec is None and installed and parents == [name]:
            spec = next(filter(None, (finder.find_spec(name, None) for finder in sys.meta_path)), None)
        if spec is None:
            raise ModuleNotFoundError(name=".".join(parents))
        paths = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None
