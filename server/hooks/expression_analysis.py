"""ExpressionAnalysis: the values of expressions in a project's functions, and which expressions may keep something.

Used by `state_analysis.py`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from typing import Any

from .call_analysis import TYPE_OF, CallAnalysis
from .known_functions import CONSTANTS, MUTATORS, PLAIN_NAMES, READ_ATTRIBUTES, SAFE_DUNDERS, TEXT_ATTRIBUTES
from .scopes import COMPREHENSIONS, Scope, bind, function_scope, own_comprehension
from .sources import DATA_KINDS, MUTABLE_KINDS, UNTRACKED, SourceFile, SourceTree, Value
from .writes import INSTANCE, PROCESS, GlobalWrite

_STORE_CONTEXTS = (ast.Store, ast.Del)
_NEW_VALUES = (ast.Sub, ast.Div, ast.FloorDiv, ast.Pow, ast.MatMult)
"""Operators whose result contains no part of plain data: lists can be added, but not subtracted."""


class ExpressionAnalysis(CallAnalysis):
    """Returns the Value of expressions, and records each use of a held object that is not known to only read it.

    `loading`: the code being analyzed runs when its module is loaded, where everything is allowed and nothing is
    recorded. `pending` are the functions of the project still to be analyzed, each with the hook's name if it is one.
    """

    def __init__(self, project: SourceTree) -> None:
        self.project = project
        self.writes: set[GlobalWrite] = set()
        self.loading = False
        self.pending: list[tuple[Any, SourceFile, str]] = []
        self._suppressed = 0
        self._resolving: set[tuple[int, str]] = set()

    def record(self, source: SourceFile, line: int, name: str, reach: str) -> None:
        """Record a place that may keep something."""
        if not self.loading and not self._suppressed:
            self.writes.add(GlobalWrite(name, line, source.path.name, reach))

    def check_escape(self, value: Value, node: Any, source: SourceFile) -> None:
        """Record a held, mutable object that is passed to where it cannot be tracked."""
        if value.kind == "MODULE":
            if not _is_constant(value):
                self.record(source, node.lineno, value.path, PROCESS)
        elif value.held and value.kind not in {"FIXED", "BUILTIN"}:
            self.record(source, node.lineno, value.held, INSTANCE)

    def analyze_target(self, target: ast.expr, values: Sequence[Value], source: SourceFile, scope: Any) -> None:
        """Analyze a target: held objects may not be changed, or stored where they cannot be tracked."""
        for each in ast.walk(target):
            if isinstance(each, ast.Attribute | ast.Subscript) and isinstance(each.ctx, _STORE_CONTEXTS):
                owner = self.value(each.value, source, scope)
                if isinstance(each, ast.Subscript):
                    self.value(each.slice, source, scope)
                elif each.attr.startswith("__"):
                    self.record(source, each.lineno, each.attr, PROCESS)
                if owner.held:
                    reach = PROCESS if owner.kind in {"MODULE", "BUILTIN", "LOGGER"} else INSTANCE
                    self.record(source, each.lineno, owner.held, reach)
                for value in values:
                    self.check_escape(value, each, source)

    def module_value(self, node: ast.expr, source: SourceFile, scope: Scope) -> Value:
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
                return self._subscript(node, source, scope)
            case ast.Call():
                return self.call(node, source, scope)
            case ast.List(elts=parts) | ast.Set(elts=parts) | ast.Tuple(elts=parts):
                return self._container([self.value(each, source, scope) for each in parts], node)
            case ast.Dict(keys=keys, values=values):
                parts = [*filter(None, keys), *values]
                return self._container([self.value(each, source, scope) for each in parts], node)
            case ast.Lambda():
                inner_scope, _ = function_scope(scope, node)
                for each in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                    self.check_escape(self.value(each, source, scope), each, source)
                self.check_escape(self.value(node.body, source, inner_scope), node, source)
                return Value("CODE")
            case ast.BinOp():
                value = self._joined_value([node.left, node.right], source, scope, computed=True)
                is_new = value.kind == "PLAIN" and isinstance(node.op, _NEW_VALUES) and not self.loading
                return UNTRACKED if is_new else value
            case ast.BoolOp(values=parts):
                return self._joined_value(parts, source, scope)
            case ast.IfExp(test=test, body=first, orelse=second):
                self.value(test, source, scope)
                return self._joined_value([first, second], source, scope)
            case ast.NamedExpr(value=inside) | ast.Starred(value=inside):
                return self.value(inside, source, scope)
        if isinstance(node, COMPREHENSIONS):
            return self._comprehension(node, source, scope)
        return self._other_expression(node, source, scope)

    def _other_expression(self, node: ast.expr, source: SourceFile, scope: Scope) -> Value:
        parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        values = [self.value(each, source, scope) for each in parts]
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom):
            for value in values:
                self.check_escape(value, node, source)
            return UNTRACKED
        for value in values:
            is_read = value.kind == "CLASS" and isinstance(node, ast.Compare | ast.FormattedValue)
            if value.kind not in DATA_KINDS and not is_read:
                self.check_escape(value, node, source)
        return Value("FIXED")  # comparisons, formatted texts, slices

    def _joined_value(
        self, nodes: Sequence[ast.expr], source: SourceFile, scope: Scope, *, computed: bool = False
    ) -> Value:
        values = [self.value(each, source, scope) for each in nodes]
        if not computed:
            return join_values(values, loading=self.loading)
        for value, node in zip(values, nodes, strict=True):
            if value.kind not in DATA_KINDS and value != TYPE_OF:
                self.check_escape(value, node, source)
        kinds = {value.kind for value in values}
        if kinds <= {"FIXED"}:
            return Value("FIXED")
        if "ARRAY" in kinds or (not self.loading and "PLAIN" not in kinds):
            return Value("ARRAY" if "ARRAY" in kinds else "UNKNOWN")
        return join_values(values, loading=self.loading)

    def _container(self, values: Sequence[Value], node: ast.expr) -> Value:
        values = [Value("FIXED") if _is_constant(value) else value for value in values]
        kinds = {value.kind for value in values}
        held = next((value.held for value in values if value.held and value.kind != "FIXED"), "")
        if kinds <= {"FIXED"}:
            return Value("FIXED" if isinstance(node, ast.Tuple) else "FLAT")
        return Value("PLAIN" if kinds <= DATA_KINDS else "UNKNOWN", held)

    def _comprehension(self, node: Any, source: SourceFile, scope: Scope) -> Value:
        inner_scope = Scope(scope, in_function=scope.in_function)
        bind(inner_scope, list(own_comprehension(node)))
        for position, generator in enumerate(node.generators):
            self.value(generator.iter, source, inner_scope if position else scope)
            self.analyze_target(generator.target, (), source, inner_scope)
            for test in generator.ifs:
                self.value(test, source, inner_scope)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        container = self._container([self.value(part, source, inner_scope) for part in parts], node)
        return Value("UNKNOWN", container.held) if isinstance(node, ast.GeneratorExp) and self.loading else container

    # -- names, attributes, items ------------------------------------------------------------------------------

    def _name(self, name: str, node: ast.expr, source: SourceFile, scope: Scope) -> Value:
        where = scope.lookup(name)
        if where is None or where is source.scope:
            value = self.module_name(name, source)
            if value.kind == "UNKNOWN" and value.held:
                self.record(source, node.lineno, name, PROCESS if name.startswith("__") else INSTANCE)
                return value if self.loading else UNTRACKED
            return value
        if name in where.carried:
            return Value("PLAIN", name)
        if (id(where), name) in self._resolving:
            return UNTRACKED
        self._resolving.add((id(where), name))
        self._suppressed += 1
        try:
            return self._local(name, where, source)
        finally:
            self._suppressed -= 1
            self._resolving.discard((id(where), name))

    def _local(self, name: str, where: Scope, source: SourceFile) -> Value:
        values = [self.value(each, source, where) for each in where.aliases.get(name, ())]
        values += [
            binding
            for node in where.imported
            for bound, binding in self.project.bindings(node, source)
            if bound == name
        ]
        values = [consumed_value(self._resolved(value)) for value in values]
        # for a local name it only matters whether it may refer to something held; unpacking yields parts
        if not values:
            return Value("CODE") if name in where.functions else UNTRACKED
        return join_values(values, loading=self.loading)

    def module_name(self, name: str, source: SourceFile) -> Value:
        """Return the value of a module's name, including builtins."""
        if name in source.bound or name in source.scope.bound:
            if (id(source), name) in self._resolving:
                return Value("UNKNOWN", name)
            self._resolving.add((id(source), name))
            try:
                return self._bound(name, source)
            finally:
                self._resolving.discard((id(source), name))
        if name in PLAIN_NAMES:
            return Value("FIXED", name)
        if hasattr(builtins, name) and not source.has_star_import:
            built = getattr(builtins, name)
            simple = isinstance(built, type) and issubclass(built, BaseException)
            return Value("BUILTIN", name, "object" if simple else name)
        return Value("UNKNOWN", name)

    def _bound(self, name: str, source: SourceFile) -> Value:
        values = []
        for binding in source.bound.get(name, ()):
            if isinstance(binding, Value):
                values.append(self._resolved(binding))
            elif isinstance(binding, tuple):
                node, _ = binding
                is_plain_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list
                kind = "FUNCTION" if is_plain_function else "CLASS" if isinstance(node, ast.ClassDef) else "UNKNOWN"
                values.append(Value(kind, name, name, binding))
            else:
                value = self.module_value(binding, source, source.scope)
                values.append(item_value(value) if id(binding) in source.iterated_ids else value)
        if not values or any(value.kind == "LAZY" for value in values):
            return Value("UNKNOWN", name)
        if any(value.kind in MUTABLE_KINDS for value in values):
            if name in self.project.name_changes.changed:
                return Value("UNKNOWN", name)
            added = [
                self.module_value(each, source, source.scope) for each in self.project.name_changes.added.get(name, ())
            ]
            values += [
                Value("FLAT" if value.kind == "FIXED" else "PLAIN" if value.kind in MUTABLE_KINDS else "UNKNOWN")
                for value in added
            ]
        elif name in self.project.name_changes.rebound and values[0].kind == "FIXED":
            return Value("UNKNOWN", name)
        kinds = {value.kind for value in values if value.kind != "FIXED"}
        first = next((value for value in values if value.kind != "FIXED"), values[0])
        if len(kinds) > 1:
            return Value("PLAIN" if kinds <= DATA_KINDS else "UNKNOWN", name)
        if len({value.path for value in values if value.kind == first.kind}) > 1:
            return Value("UNKNOWN", name)
        return first._replace(held=name)

    def _resolved(self, value: Value) -> Value:
        """Return the value of a name in another module of the project."""
        if value.kind == "OWN" and isinstance(value.definition, tuple):
            source, name = value.definition
            if source.has_star_import and name not in source.bound:
                return Value("UNKNOWN", name)
            return self.module_name(name, source)
        return value

    def _attribute(self, node: ast.Attribute, source: SourceFile, scope: Scope) -> Value:
        owner = self.value(node.value, source, scope)
        return self.attribute(owner, node, source)

    def attribute(self, owner: Value, node: ast.Attribute, source: SourceFile) -> Value:
        """Return the value of an attribute that is not called."""
        name = node.attr
        if name.startswith("__") and name not in SAFE_DUNDERS:
            self.record(source, node.lineno, name, PROCESS)
        if owner.kind == "MODULE":
            return owner._replace(path=f"{owner.path}.{name}")
        if owner.kind == "OWN":
            submodule = self.project.submodule(owner.definition, name)
            value = Value("OWN", name, name, submodule) if submodule else self.module_name(name, owner.definition)
            if value.kind in {"UNKNOWN", "BUILTIN"}:
                self.record(source, node.lineno, name, INSTANCE)
                return value if self.loading else UNTRACKED
            return value
        if owner.kind == "FIXED":
            if owner.held and name in MUTATORS:  # a method called later, of a hash or of part of an array
                self.record(source, node.lineno, owner.held, INSTANCE)
            return owner
        if owner.kind in DATA_KINDS and owner.held:
            if name not in READ_ATTRIBUTES:
                self.record(source, node.lineno, owner.held, INSTANCE)
            return owner
        if owner.kind == "CLASS" and name in SAFE_DUNDERS:
            return Value("FIXED")
        self.check_escape(owner, node, source)
        return Value("FIXED") if name in TEXT_ATTRIBUTES else UNTRACKED if not self.loading else Value("UNKNOWN")

    def _subscript(self, node: ast.Subscript, source: SourceFile, scope: Scope) -> Value:
        owner = self.value(node.value, source, scope)
        key = self.value(node.slice, source, scope)
        if key.kind not in DATA_KINDS:
            self.check_escape(key, node, source)
        if owner.kind == "MODULE":
            if owner.path != "os.environ":
                self.record(source, node.lineno, owner.held, PROCESS)
            return Value("FIXED")
        if owner.kind == "FLAT" and not isinstance(node.slice, ast.Slice):
            return Value("FIXED", owner.held)
        if owner.kind not in DATA_KINDS:
            self.check_escape(owner, node, source)
            return UNTRACKED
        return owner


def join_values(values: Sequence[Value], *, loading: bool = False) -> Value:
    """Return a value that covers several possible ones; unless loading, only held ones count."""
    counted = values if loading else [value for value in values if value.held]
    if not counted:
        return values[0] if values and len({value.kind for value in values}) == 1 else UNTRACKED
    mutable = [value for value in counted if value.kind != "FIXED"] or counted
    kinds = {value.kind for value in mutable}
    if len(kinds) == 1 and len({value.path for value in mutable}) == 1:
        return mutable[0]
    held = next((value.held for value in mutable if value.held), "")
    return Value("PLAIN" if kinds <= DATA_KINDS else "UNKNOWN", held)


def consumed_value(value: Value) -> Value:
    """Return the value for the items of an iterator."""
    return Value(value.definition, value.held) if value.kind == "LAZY" else value


def item_value(value: Value) -> Value:
    """Return the value of a loop variable over something."""
    value = consumed_value(value)
    return Value("FIXED", value.held) if value.kind == "FLAT" else value


def _is_constant(value: Value) -> bool:
    """Return whether something of a library or a builtin is known to be constant: numpy.float32, int."""
    if value.kind == "MODULE":
        return CONSTANTS.match(value.path) is not None or value.path.rpartition(".")[2].isupper()
    return value.kind == "BUILTIN"
