"""Inspects a model.py without running it: whether it may complete its configuration, and whether it lacks its class.

Called by loading.py, and by `penstock check`.

Asking the model itself takes a process that imports everything it imports: for many models, half of their load time.
"""

from __future__ import annotations

import ast
from pathlib import Path

_CLASS = "TritonPythonModel"
_METHOD = b"auto_complete_config"
_MAX_PARSED_BYTES = 16 << 10
"""Larger files are not parsed: parsing one holds the GIL, for 14 ms on a busy core."""
_DYNAMIC_NAMES = frozenset({"exec", "eval", "globals", "locals", "vars", "setattr", "__setattr__", "__dict__"})
"""Names through which a class, or its attributes, may be defined without being written out."""


def may_complete(file: Path) -> bool:
    """Return False only if the file nowhere mentions `auto_complete_config` and takes its class from nowhere else.

    True for a file that cannot be read: running it reports the reason.
    """
    try:
        source = file.read_bytes()
        if _METHOD in source or len(source) > _MAX_PARSED_BYTES:
            return True
        tree = ast.parse(source, str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == _CLASS]
    if len(classes) != 1 or classes[0].bases or classes[0].keywords or classes[0].decorator_list:
        return True
    return any(_may_define_class(node) for node in ast.walk(tree) if node is not classes[0])


def lacks_class(tree: ast.AST) -> bool:
    """Return whether a model.py certainly lacks a TritonPythonModel: nothing in it names one, or could provide one."""
    dynamic = {"modules", "__getattr__"}
    return not any(
        _may_define_class(node)
        or dynamic & {getattr(node, "name", None), getattr(node, "attr", None)}
        or (isinstance(node, ast.ClassDef) and node.decorator_list)  # which may do anything with it
        for node in ast.walk(tree)
    )


def _may_define_class(node: ast.AST) -> bool:
    """Return whether a node may provide the class, or its attributes."""
    if isinstance(node, ast.alias):
        return (node.asname or node.name) in {_CLASS, "*"}
    if isinstance(node, ast.Name):
        return node.id == _CLASS or node.id in _DYNAMIC_NAMES
    if isinstance(node, ast.Attribute):
        return node.attr == _CLASS or node.attr in _DYNAMIC_NAMES
    return getattr(node, "name", None) == _CLASS
