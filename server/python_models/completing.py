"""Completing: whether a model.py has a say in its configuration, read without running it, and a class at all.

Called by loading.py, and by `penstock check`.

To ask it takes a process that imports all that it imports, and does nothing else: for many models half of their load.
"""

from __future__ import annotations

import ast
from pathlib import Path

_CLASS = "TritonPythonModel"
_SAYS = b"auto_complete_config"
_MOST_BYTES = 16 << 10
"""Of larger files it is not looked for: to parse one holds the interpreter's lock, for 14 ms on a busy core."""
_ELSEWHERE = frozenset({"exec", "eval", "globals", "locals", "vars", "setattr", "__setattr__", "__dict__"})
"""By what a class, or what it has, may come to be there without being written."""


def may_complete(file: Path) -> bool:
    """Tell whether it may have an `auto_complete_config`: not, where it nowhere says so, nor takes its class elsewhere.

    What cannot be read may: whoever runs it says why.
    """
    try:
        source = file.read_bytes()
        if _SAYS in source or len(source) > _MOST_BYTES:
            return True
        tree = ast.parse(source, str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == _CLASS]
    if len(found) != 1 or found[0].bases or found[0].keywords or found[0].decorator_list:
        return True
    return any(_binds(node) for node in ast.walk(tree) if node is not found[0])


def lacks_class(tree: ast.AST) -> bool:
    """Tell whether a model.py has certainly no TritonPythonModel: nothing in it names one, or may bring it."""
    dynamic = {"modules", "__getattr__"}
    return not any(
        _binds(node)
        or dynamic & {getattr(node, "name", None), getattr(node, "attr", None)}
        or (isinstance(node, ast.ClassDef) and node.decorator_list)  # which may do with it what it likes
        for node in ast.walk(tree)
    )


def _binds(node: ast.AST) -> bool:
    """Tell whether the class, or what it has, may come from here, too."""
    if isinstance(node, ast.alias):
        return (node.asname or node.name) in {_CLASS, "*"}
    if isinstance(node, ast.Name):
        return node.id == _CLASS or node.id in _ELSEWHERE
    if isinstance(node, ast.Attribute):
        return node.attr == _CLASS or node.attr in _ELSEWHERE
    return getattr(node, "name", None) == _CLASS
