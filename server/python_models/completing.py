"""Completing: whether a model.py has a say in its configuration, read without running it. Called by loading.py.

To ask it takes a process that imports all that it imports, and does nothing else: for many models half of their load.
"""

from __future__ import annotations

import ast
from pathlib import Path

_CLASS = "TritonPythonModel"
_SAYS = b"auto_complete_config"


def may_complete(file: Path) -> bool:
    """Tell whether it may have an `auto_complete_config`: not, where it nowhere says so, nor takes its class elsewhere.

    What cannot be read may: whoever runs it says why.
    """
    try:
        source = file.read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == _CLASS]
    if _SAYS in source or len(found) != 1 or found[0].bases or found[0].keywords or found[0].decorator_list:
        return True
    return any(_binds(node) for node in ast.walk(tree))


def _binds(node: ast.AST) -> bool:
    """Tell whether the class, or what it has, may come from here, too."""
    if isinstance(node, ast.alias):
        return (node.asname or node.name) in {_CLASS, "*"}
    if isinstance(node, ast.Name):
        return node.id == "setattr" or (node.id == _CLASS and not isinstance(node.ctx, ast.Load))
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == _CLASS
