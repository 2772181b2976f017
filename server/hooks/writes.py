"""Finds the module-level names that the user's hooks may write while serving, from their source without running it.

Used when a model is loaded and by `penstock check`. The result decides whether one instance of the file may serve
requests whose hooks interleave. When in doubt a write is reported: a false positive costs a few instances, a missed one
would expose one client's values to another.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .scopes import COMPREHENSIONS, FUNCTIONS, Function, Scope, bind, function_scope, own_comprehension, own_nodes

HOOK_NAMES = ("pre_inference", "post_inference")
PICKLE_SUFFIXES = (".pickle", ".pkl")
"""File name endings of pickles, not source: a dict of functions, as written by Cortex's Python client."""
INSTANCE, PROCESS, MACHINE = "instance", "process", "machine"
"""What a write reaches: its own instance of the file, all instances in the process, or other processes too."""

MAX_FILES = 200
"""The most files of a project that are analyzed."""
_MAX_ATTEMPTS = 10
_CONSTRUCTORS = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__setstate__"}
MUTATING_METHODS = {
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft", "fill", "insert",
    "intersection_update", "itemset", "move_to_end", "partition", "pop", "popitem", "popleft", "put", "put_nowait",
    "remove", "resize", "reverse", "rotate", "setdefault", "sort", "subtract", "symmetric_difference_update", "update",
    "__delattr__", "__delitem__", "__setattr__", "__setitem__",
}  # fmt: skip
"""Methods of the built-in containers and of numpy arrays that modify their object."""
FIRST_ARGUMENT_MUTATORS = {
    "copyto", "delattr", "fill_diagonal", "heapify", "heappop", "heappush", "insort", "place", "put", "putmask",
    "setattr", "shuffle",
}  # fmt: skip
"""Functions that modify their first argument."""
# Methods whose result is part of their object.
_ACCESSORS = {"get", "items", "pop", "setdefault", "values"}


@dataclass(frozen=True, slots=True)
class GlobalWrite:
    """A path that may write `name` while a hook runs."""

    name: str
    line: int
    file: str = ""
    reach: str = INSTANCE

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})" if self.file else f"{self.name} (line {self.line})"


def parse_source(source: str | bytes) -> ast.Module:
    """Parse, although another thread may be parsing, or formatting a traceback, which parses too.

    Python 3.11 keeps one recursion depth for all threads and raises SystemError when they mix (CPython gh-106905).
    """
    for _ in range(_MAX_ATTEMPTS):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def find_global_writes(path: Path, *, roots: Sequence[Path] = (), strict: bool = False) -> list[GlobalWrite]:
    """Find writes in a file and, transitively, in the modules beside it, or below `roots`, that it imports.

    `strict`: report everything that may keep something, unless it is known to only read (state_analysis.py).
    Raises: OSError, SyntaxError, ValueError for `path` itself; another module that cannot be read is taken to write
    nothing.
    """
    if path.suffix in PICKLE_SUFFIXES:
        return [GlobalWrite("what it holds", 0, path.name, PROCESS)]
    if strict:
        from .state_analysis import find_state

        return find_state(path, roots)
    writes = []
    for file, tree in source_files(path, roots):
        writes += [GlobalWrite(write.name, write.line, file.name) for write in writes_in(tree)]
    return writes


def source_files(path: Path, roots: Sequence[Path]) -> Iterator[tuple[Path, ast.Module]]:
    """Yield a file and, transitively, the modules beside it, or below `roots`, that it imports.

    Raises: OSError, SyntaxError, ValueError for `path` itself; other modules that cannot be read are omitted.
    """
    waiting, seen = [path], {path}
    while waiting and len(seen) <= MAX_FILES:
        file = waiting.pop()
        try:
            tree = parse_source(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            if file == path:
                raise
            continue
        yield file, tree
        folders = roots or (path.parent,)
        new_files = [
            imported
            for root in folders
            for imported in _imported_files(tree, root, file.parent)
            if imported not in seen
        ]
        seen.update(new_files)
        waiting += new_files


def _imported_files(tree: ast.Module, root: Path, folder: Path) -> Iterator[Path]:
    """Yield the files under `root` that a module in `folder` imports, including the packages around them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            start = root
        elif isinstance(node, ast.ImportFrom):
            start = root if not node.level else folder.joinpath(*[".."] * (node.level - 1)).resolve()
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        for name in names:
            path = start
            for part in filter(None, name.split(".")):
                yield from (file for file in (path / f"{part}.py", path / part / "__init__.py") if file.is_file())
                path /= part


def writes_in(tree: ast.Module) -> list[GlobalWrite]:
    """Find writes to a module's names in functions, methods, lambdas and anything nested in them.

    Reported are: `global` statements; assignment, augmented assignment, deletion and loop targets that are attributes
    or items of a module-level name, directly or through a local name bound to it; calls of container methods that
    modify their object; and methods, except constructors, that write attributes of their own instance.
    """
    module = Scope()
    nodes = list(own_nodes(tree.body))
    bind(module, nodes)
    found = set(_writes_in_scope(module, nodes, module))
    return sorted((GlobalWrite(name, line) for name, line in found), key=lambda write: (write.line, write.name))


def _writes_in_scope(scope: Scope, nodes: list[ast.AST], module: Scope) -> Iterator[tuple[str, int]]:
    """Find the writes of the scopes nested in `scope`, and of its own nodes if it is (in) a function."""
    for node in nodes:
        if scope.in_function:
            yield from _writes(scope, node, module)
        if isinstance(node, FUNCTIONS):
            nested_scope, nested_nodes = function_scope(scope, node)
            _record_carried(nested_scope, node)
        elif isinstance(node, ast.ClassDef):
            nested_scope = Scope(scope, is_class=True, in_function=scope.in_function)
            nested_nodes = list(own_nodes(node.body))
            bind(nested_scope, nested_nodes)
            nested_scope.carried = {"": node.name}
        elif isinstance(node, COMPREHENSIONS):
            nested_scope, nested_nodes = Scope(scope, in_function=scope.in_function), list(own_comprehension(node))
            bind(nested_scope, nested_nodes)
        else:
            continue
        yield from _writes_in_scope(nested_scope, nested_nodes, module)


def _record_carried(scope: Scope, node: Function) -> None:
    """Record which parameters of a function refer to objects that outlive the call."""
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    outer = scope.parent
    if isinstance(node, ast.Lambda) or outer is None:
        return
    if outer.is_class and positional and node.name not in _CONSTRUCTORS and not _is_static(node):
        # writing an attribute counts if the instance may outlive the call: if its class is at module level
        around = outer.parent
        if around is not None and not around.in_function:
            scope.carried[positional[0]] = outer.carried[""]
    elif outer.parent is None and node.name in HOOK_NAMES:
        # signature and metadata are the same objects on every call; parameters are the request's own
        scope.carried |= {name: name for name in positional[1:3]}


def _is_static(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in node.decorator_list)


def _writes(scope: Scope, node: ast.AST, module: Scope) -> Iterator[tuple[str, int]]:
    """Yield the module-level names that one node of a function may write, with their line."""
    written: set[str] = set()
    match node:
        case ast.Global(names=names):
            written = set(names)
        case (
            ast.Attribute(value=owner, ctx=ast.Store() | ast.Del())
            | ast.Subscript(value=owner, ctx=ast.Store() | ast.Del())
        ):
            written = _global_roots(scope, owner, through_calls=True)
        case ast.AugAssign(target=ast.Name() as target):
            # modifies a list or an array in place
            written = _global_roots(scope, target) if scope.lookup(target.id) is not None else set()
        case ast.Call():
            written = _written_by_call(scope, node, module)
    yield from ((name, node.lineno) for name in written)  # type: ignore[attr-defined]


def _written_by_call(scope: Scope, call: ast.Call, module: Scope) -> set[str]:
    written: set[str] = set()
    function = call.func
    name = ""
    if isinstance(function, ast.Name):
        name = function.id
    elif isinstance(function, ast.Attribute):
        name = function.attr
        if name in MUTATING_METHODS and not _is_module(scope, function.value, module):
            written |= _global_roots(scope, function.value)
    if name in FIRST_ARGUMENT_MUTATORS and call.args:
        written |= _global_roots(scope, call.args[0])
    for keyword in call.keywords:
        if keyword.arg == "out":
            written |= _global_roots(scope, keyword.value)
    return written


def _is_module(scope: Scope, owner: ast.expr, module: Scope) -> bool:
    """Return whether `owner` is an imported module or an attribute of one: `np.add(a, b)` modifies nothing."""
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    if not isinstance(owner, ast.Name):
        return False
    where = scope.lookup(owner.id) or module
    return owner.id in where.imports


def _global_roots(
    scope: Scope, value: ast.expr, *, through_calls: bool = False, seen: frozenset[tuple[int, str]] = frozenset()
) -> set[str]:
    """Return the module-level names whose object, or part of it, may be the expression's value."""
    if isinstance(value, ast.Name):
        where, name = scope.lookup(value.id), value.id
        if where is None:
            return {name}
        if name in where.carried:
            return {where.carried[name]}
        if (id(where), name) in seen:
            return set()
        scope, parts, seen = where, where.aliases.get(name, []), seen | {(id(where), name)}
        through_calls = False
    else:
        parts = _value_parts(value, through_calls=through_calls)
    return set().union(*(_global_roots(scope, part, through_calls=through_calls, seen=seen) for part in parts))


def _value_parts(value: ast.expr, *, through_calls: bool) -> list[ast.expr]:
    """Return the expressions whose value, or part of it, may be the value of an expression."""
    match value:
        case ast.Attribute(value=inside) | ast.Subscript(value=inside) | ast.Starred(value=inside):
            return [inside]
        case ast.NamedExpr(value=inside) | ast.Await(value=inside):
            return [inside]
        case ast.IfExp(body=first, orelse=second):
            return [first, second]
        case ast.BoolOp(values=values):
            return values
        case ast.Call(func=function) if through_calls or getattr(function, "attr", "") in _ACCESSORS:
            return [function]
    return []
