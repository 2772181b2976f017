"""Scopes of Python source: which nodes belong to one, which names it binds, and to what.

Used by the modules that analyze user files: `writes.py`, `sources.py`, `expression_analysis.py`, `state_analysis.py`,
`nonblocking.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(slots=True)
class Scope:
    """One namespace.

    `imports`: names bound by `import`; `imported`: import statements of either form; `functions`: names bound by `def`.
    `aliases`: local names, with the expressions they were bound to. `carried`: parameters that refer to objects that
    outlive the call, with the name to report.
    """

    parent: Scope | None = None
    is_class: bool = False
    in_function: bool = False
    bound: set[str] = field(default_factory=set)
    global_names: set[str] = field(default_factory=set)
    nonlocal_names: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    imported: list[ast.AST] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    aliases: dict[str, list[ast.expr]] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)

    def lookup(self, name: str) -> Scope | None:
        """Return the scope that binds `name`; None is the module (or no scope, which is equivalent here)."""
        scope: Scope = self
        while scope.parent is not None:
            if name in scope.global_names:
                return None
            if name in scope.bound and name not in scope.nonlocal_names and (scope is self or not scope.is_class):
                return scope
            scope = scope.parent
        return None


def own_nodes(roots: list[ast.stmt] | list[ast.expr]) -> Iterator[ast.AST]:
    """Walk one scope: nested functions, classes and comprehensions are yielded, but not entered."""
    stack: list[ast.AST] = list(reversed(roots))
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, FUNCTIONS):
            stack += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            stack += [] if isinstance(node, ast.Lambda) else node.decorator_list
        elif isinstance(node, ast.ClassDef):
            stack += [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, COMPREHENSIONS):
            stack.append(node.generators[0].iter)
        else:
            stack += reversed(list(ast.iter_child_nodes(node)))


def own_comprehension(node: Comprehension) -> Iterator[ast.AST]:
    """Walk a comprehension's own scope; its first iterable belongs to the enclosing scope."""
    results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    for position, generator in enumerate(node.generators):
        yield generator
        outer = [] if position == 0 else [generator.iter]
        yield from own_nodes([generator.target, *outer, *generator.ifs])
    yield from own_nodes(results)


def bind(scope: Scope, nodes: list[ast.AST]) -> None:
    """Record what the nodes of a scope bind, and to what."""
    for node in nodes:
        if (name := _bound_name(node)) is not None:
            scope.bound.add(name)
        if isinstance(node, ast.Import):
            scope.imports |= {_bound_name(alias) or "" for alias in node.names}
        elif isinstance(node, ast.Global):
            scope.global_names |= set(node.names)
        elif isinstance(node, ast.Nonlocal):
            scope.nonlocal_names |= set(node.names)
        elif isinstance(node, COMPREHENSIONS):
            # a walrus in a comprehension binds in the enclosing scope
            bind(scope, [child for child in ast.walk(node) if isinstance(child, ast.NamedExpr)])
        if isinstance(node, ast.Import | ast.ImportFrom):
            scope.imported.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope.functions.add(node.name)
        for target, value in _bindings(node):
            scope.aliases.setdefault(target, []).append(value)


def function_scope(scope: Scope, node: Function) -> tuple[Scope, list[ast.AST]]:
    """Return the scope of a function, and its nodes."""
    nested = Scope(scope, in_function=True)
    arguments = node.args
    nested.bound.update(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    nested.bound.update(argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument)
    nodes = list(own_nodes([node.body] if isinstance(node, ast.Lambda) else node.body))
    bind(nested, nodes)
    return nested, nodes


def _bound_name(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.NamedExpr(target=ast.Name(id=name)):
            return name
        case ast.alias(name=name, asname=asname):
            return asname or name.partition(".")[0]
        case ast.MatchMapping(rest=name):
            return name
    # def, class, except and match patterns
    name = getattr(node, "name", None)
    return name if isinstance(name, str) else None


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a node binds to (part of) the value of an expression."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _pairs(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield from _pairs(target, value)
        case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
            yield from _pairs(target, value)
        case ast.comprehension(target=target, iter=value):
            yield from _pairs(target, value)
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield from _pairs(target, value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Starred):
        yield from _pairs(target.value, value)
    elif isinstance(target, ast.Tuple | ast.List):
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        if len(values) != len(target.elts):
            values = [value] * len(target.elts)
        for element, each in zip(target.elts, values, strict=True):
            yield from _pairs(element, each)


def created_locals(body: list[ast.stmt]) -> set[str]:
    """Return the names of a function that are only bound to lists and dicts created by it."""
    created, other = set[str](), set[str]()
    for node in own_nodes(body):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Dict | ast.ListComp | ast.DictComp):
            created.update(each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            other.update(
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            )
    return created - other


def root_name(node: ast.expr) -> str:
    """Return the name that an expression is a part of."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
