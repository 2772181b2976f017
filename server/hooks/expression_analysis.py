"""Reading: the values of expressions in a project's functions, and which expressions may keep something.

Used by `state_analysis.py`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from typing import Any

from .known_functions import CONSTANTS, MUTATORS, PLAIN_NAMES, READ_ATTRIBUTES, SAFE_DUNDERS, TEXT_ATTRIBUTES
from .call_analysis import CallAnalysis
from .scopes import COMPREHENSIONS, Scope, bind, inner, own_comprehension
from .sources import CHANGING, CONTAINED, FRESH, SourceFile, SourceTree, Value
from .writes import INSTANCE, PROCESS, GlobalWrite


class ExpressionAnalysis(CallAnalysis):
    """Returns the Value of expressions, and records each use of a held object that is not known to only read it.

    `loading`: the code being analyzed runs when its module is loaded, where everything is allowed and nothing is
    recorded.
    """

    def __init__(self, project: SourceTree) -> None:
        self.project = project
        self.found: set[GlobalWrite] = set()
        self.loading = False
        self._quiet = 0
        self._asked: set[tuple[int, str]] = set()

    def store(self, target: ast.expr, values: Sequence[Value], source: SourceFile, scope: Scope) -> None:
        """Analyze an assignment target."""
        raise NotImplementedError

    def note(self, source: SourceFile, line: int, name: str, reach: str) -> None:
        """Record a place that may keep something."""
        if not self.loading and not self._quiet:
            self.found.add(GlobalWrite(name, line, source.path.name, reach))

    def goes_out(self, value: Value, node: Any, source: SourceFile) -> None:
        """Record a held, mutable object that is passed to where it cannot be tracked."""
        if value.kind == "MODULE":
            if not _is_constant(value):
                self.note(source, node.lineno, value.path, PROCESS)
        elif value.held and value.kind not in {"FIXED", "BUILTIN"}:
            self.note(source, node.lineno, value.held, INSTANCE)

    def at_load(self, node: ast.expr, source: SourceFile, scope: Scope) -> Value:
        """Return the value of an expression at module level."""
        before, self.loading = self.loading, True
        try:
            return self.value(node, source, scope)
        finally:
            self.loading = before

    def value(self, node: ast.expr, source: SourceFile, scope: Scope) -> Value:  # noqa: C901 - one case for each kind
        """Return the value of an expression."""
        match node:
            case ast.Constant():
                return Value("FIXED")
            case ast.Name(id=name):
                return self._name(name, node, source, scope)
            case ast.Attribute():
                return self._attribute(node, source, scope)
            case ast.Subscript():
                return self._item(node, source, scope)
            case ast.Call():
                return self.call(node, source, scope)
            case ast.List(elts=parts) | ast.Set(elts=parts) | ast.Tuple(elts=parts):
                return self._container([self.value(each, source, scope) for each in parts], node)
            case ast.Dict(keys=keys, values=values):
                parts = [*filter(None, keys), *values]
                return self._container([self.value(each, source, scope) for each in parts], node)
            case ast.Lambda():
                within, _ = inner(scope, node)
                for each in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                    self.goes_out(self.value(each, source, scope), each, source)
                self.goes_out(self.value(node.body, source, within), node, source)
                return Value("CODE")
            case ast.BinOp():
                return self._joined([node.left, node.right], source, scope, computed=True)
            case ast.BoolOp(values=parts):
                return self._joined(parts, source, scope)
            case ast.IfExp(test=test, body=first, orelse=second):
                self.value(test, source, scope)
                return self._joined([first, second], source, scope)
            case ast.NamedExpr(value=inside) | ast.Starred(value=inside):
                return self.value(inside, source, scope)
        if isinstance(node, COMPREHENSIONS):
            return self._comprehension(node, source, scope)
        return self._rest(node, source, scope)

    def _rest(self, node: ast.expr, source: SourceFile, scope: Scope) -> Value:
        parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        values = [self.value(each, source, scope) for each in parts]
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom):
            for value in values:
                self.goes_out(value, node, source)
            return FRESH
        for value in values:
            if value.kind not in CONTAINED and not (value.kind == "CLASS" and isinstance(node, ast.Compare)):
                self.goes_out(value, node, source)
        return Value("FIXED")  # comparisons, formatted texts, slices

    def _joined(self, nodes: Sequence[ast.expr], source: SourceFile, scope: Scope, *, computed: bool = False) -> Value:
        values = [self.value(each, source, scope) for each in nodes]
        if not computed:
            return join(values, loading=self.loading)
        for value, node in zip(values, nodes, strict=True):
            if value.kind not in CONTAINED:
                self.goes_out(value, node, source)
        kinds = {value.kind for value in values}
        if kinds <= {"FIXED"}:
            return Value("FIXED")
        if "ARRAY" in kinds or (not self.loading and "PLAIN" not in kinds):
            return Value("ARRAY" if "ARRAY" in kinds else "UNKNOWN")
        return join(values, loading=self.loading)

    def _container(self, values: Sequence[Value], node: ast.expr) -> Value:
        values = [Value("FIXED") if _is_constant(value) else value for value in values]
        kinds = {value.kind for value in values}
        held = next((value.held for value in values if value.held and value.kind != "FIXED"), "")
        if kinds <= {"FIXED"}:
            return Value("FIXED" if isinstance(node, ast.Tuple) else "FLAT")
        return Value("PLAIN" if kinds <= CONTAINED else "UNKNOWN", held)

    def _comprehension(self, node: Any, source: SourceFile, scope: Scope) -> Value:
        within = Scope(scope, in_function=scope.in_function)
        bind(within, list(own_comprehension(node)))
        for position, generator in enumerate(node.generators):
            self.value(generator.iter, source, within if position else scope)
            self.store(generator.target, (), source, within)
            for test in generator.ifs:
                self.value(test, source, within)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        made = self._container([self.value(part, source, within) for part in parts], node)
        return Value("UNKNOWN", made.held) if isinstance(node, ast.GeneratorExp) and self.loading else made

    # -- names, attributes, items ------------------------------------------------------------------------------

    def _name(self, name: str, node: ast.expr, source: SourceFile, scope: Scope) -> Value:
        where = scope.lookup(name)
        if where is None or where is source.scope:
            value = self.module_name(name, source)
            if value.kind == "UNKNOWN" and value.held:
                self.note(source, node.lineno, name, PROCESS if name.startswith("__") else INSTANCE)
                return value if self.loading else FRESH
            return value
        if name in where.carried:
            return Value("PLAIN", name)
        if (id(where), name) in self._asked:
            return FRESH
        self._asked.add((id(where), name))
        self._quiet += 1
        try:
            return self._local(name, where, source)
        finally:
            self._quiet -= 1
            self._asked.discard((id(where), name))

    def _local(self, name: str, where: Scope, source: SourceFile) -> Value:
        values = [self.value(each, source, where) for each in where.aliases.get(name, ())]
        values += [
            what for node in where.imported for bound, what in self.project.bindings(node, source) if bound == name
        ]
        values = [consumed(self._resolved(value)) for value in values]
        # for a local name it only matters whether it may refer to something held; unpacking yields parts
        if not values:
            return Value("CODE") if name in where.functions else FRESH
        return join(values, loading=self.loading)

    def module_name(self, name: str, source: SourceFile) -> Value:
        """Return the value of a module's name, including builtins."""
        if name in source.bound or name in source.scope.bound:
            if (id(source), name) in self._asked:
                return Value("UNKNOWN", name)
            self._asked.add((id(source), name))
            try:
                return self._bound(name, source)
            finally:
                self._asked.discard((id(source), name))
        if name in PLAIN_NAMES:
            return Value("FIXED", name)
        if hasattr(builtins, name) and not source.stars:
            built = getattr(builtins, name)
            simple = isinstance(built, type) and issubclass(built, BaseException)
            return Value("BUILTIN", name, "object" if simple else name)
        return Value("UNKNOWN", name)

    def _bound(self, name: str, source: SourceFile) -> Value:
        values = []
        for what in source.bound.get(name, ()):
            if isinstance(what, Value):
                values.append(self._resolved(what))
            elif isinstance(what, tuple):
                node, _ = what
                plain = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list
                is_class = isinstance(node, ast.ClassDef)
                values.append(Value("FUNCTION" if plain else "CLASS" if is_class else "UNKNOWN", name, name, what))
            else:
                value = self.at_load(what, source, source.scope)
                values.append(item(value) if id(what) in source.iterated else value)
        if not values or any(value.kind == "LAZY" for value in values):
            return Value("UNKNOWN", name)
        if any(value.kind in CHANGING for value in values):
            if name in self.project.filled.changed:
                return Value("UNKNOWN", name)
            put = [self.at_load(each, source, source.scope) for each in self.project.filled.put.get(name, ())]
            values += [
                Value("FLAT" if value.kind == "FIXED" else "PLAIN" if value.kind in CHANGING else "UNKNOWN")
                for value in put
            ]
        elif name in self.project.filled.rebound and values[0].kind == "FIXED":
            return Value("UNKNOWN", name)
        kinds = {value.kind for value in values if value.kind != "FIXED"}
        first = next((value for value in values if value.kind != "FIXED"), values[0])
        if len(kinds) > 1:
            return Value("PLAIN" if kinds <= CONTAINED else "UNKNOWN", name)
        if len({value.path for value in values if value.kind == first.kind}) > 1:
            return Value("UNKNOWN", name)
        return first._replace(held=name)

    def _resolved(self, value: Value) -> Value:
        """Return the value of a name in another module of the project."""
        if value.kind == "OWN" and isinstance(value.of, tuple):
            source, name = value.of
            return (
                self.module_name(name, source)
                if not (source.stars and name not in source.bound)
                else Value("UNKNOWN", name)
            )
        return value

    def _attribute(self, node: ast.Attribute, source: SourceFile, scope: Scope) -> Value:
        owner = self.value(node.value, source, scope)
        return self.attribute(owner, node, source)

    def attribute(self, owner: Value, node: ast.Attribute, source: SourceFile) -> Value:
        """Return the value of an attribute that is not called."""
        name = node.attr
        if name.startswith("__") and name not in SAFE_DUNDERS:
            self.note(source, node.lineno, name, PROCESS)
        if owner.kind == "MODULE":
            return owner._replace(path=f"{owner.path}.{name}")
        if owner.kind == "OWN":
            below = self.project.below(owner.of, name)
            value = Value("OWN", name, name, below) if below else self.module_name(name, owner.of)
            if value.kind in {"UNKNOWN", "BUILTIN"}:
                self.note(source, node.lineno, name, INSTANCE)
                return value if self.loading else FRESH
            return value
        if owner.kind == "FIXED":
            if owner.held and name in MUTATORS:  # a method called later, of a hash or of part of an array
                self.note(source, node.lineno, owner.held, INSTANCE)
            return owner
        if owner.kind in CONTAINED and owner.held:
            if name not in READ_ATTRIBUTES:
                self.note(source, node.lineno, owner.held, INSTANCE)
            return owner
        if owner.kind == "CLASS" and name in SAFE_DUNDERS:
            return Value("FIXED")
        self.goes_out(owner, node, source)
        return Value("FIXED") if name in TEXT_ATTRIBUTES else FRESH if not self.loading else Value("UNKNOWN")

    def _item(self, node: ast.Subscript, source: SourceFile, scope: Scope) -> Value:
        owner = self.value(node.value, source, scope)
        self.goes_out_of_items(self.value(node.slice, source, scope), node, source)
        if owner.kind == "MODULE":
            if owner.path != "os.environ":
                self.note(source, node.lineno, owner.held, PROCESS)
            return Value("FIXED")
        if owner.kind == "FLAT" and not isinstance(node.slice, ast.Slice):
            return Value("FIXED", owner.held)
        if owner.kind not in CONTAINED:
            self.goes_out(owner, node, source)
            return FRESH
        return owner

    def goes_out_of_items(self, value: Value, node: ast.expr, source: SourceFile) -> None:
        """Record what is passed to an object as the key of an item."""
        if value.kind not in CONTAINED:
            self.goes_out(value, node, source)


def join(values: Sequence[Value], *, loading: bool = False) -> Value:
    """Return a value that covers several possible ones; unless loading, only held ones count."""
    counted = values if loading else [value for value in values if value.held]
    if not counted:
        return values[0] if values and len({value.kind for value in values}) == 1 else FRESH
    rest = [value for value in counted if value.kind != "FIXED"] or counted
    kinds = {value.kind for value in rest}
    if len(kinds) == 1 and len({value.path for value in rest}) == 1:
        return rest[0]
    held = next((value.held for value in rest if value.held), "")
    return Value("PLAIN" if kinds <= CONTAINED else "UNKNOWN", held)


def consumed(value: Value) -> Value:
    """Return the value for the items of an iterator."""
    return Value(value.of, value.held) if value.kind == "LAZY" else value


def item(value: Value) -> Value:
    """Return the value of a loop variable over something."""
    value = consumed(value)
    return Value("FIXED", value.held) if value.kind == "FLAT" else value


def _is_constant(value: Value) -> bool:
    """Return whether something of a library or a builtin is known to be constant: numpy.float32, int."""
    if value.kind == "MODULE":
        return CONSTANTS.match(value.path) is not None or value.path.rpartition(".")[2].isupper()
    return value.kind == "BUILTIN"
