"""Finds whether hooks may keep anything between two calls, from their source; in doubt they may.

Used by `writes.py` for dialects that guarantee each request exclusive use of its replica. While `writes.py` looks for
writes, this looks for what is known not to be one: from the two hooks on, through the functions of the project that
they call, a module-level object may be used only in ways known to only read it, and only if it is of a known kind.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .expression_analysis import ExpressionAnalysis
from .scopes import function_scope
from .sources import SourceFile, SourceTree, Value
from .writes import HOOK_NAMES, INSTANCE, PROCESS, GlobalWrite, source_files

_REWRITES = {"__builtins__", "delattr", "eval", "exec", "globals", "locals", "setattr", "vars"}
"""What may rebind a module's name, wherever it is called."""
_LOGGING_BASES = ("Handler", "Filter", "Formatter")


def find_state(path: Path, roots: Sequence[Path]) -> list[GlobalWrite]:
    """Find the places where the hooks of a file may keep something, or see what another call has kept.

    Raises: OSError, SyntaxError, ValueError.
    """
    project = SourceTree(roots or (path.parent,))
    source = project.read(path)
    analysis = StateAnalysis(project)
    for file, tree in source_files(path, roots):
        project.name_changes.analyze(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in _REWRITES:
                analysis.record(SourceFile(file, source.scope), node.lineno, node.id, PROCESS)
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).endswith(_LOGGING_BASES) for base in node.bases
            ):
                # it is called by a logger, which all instances share
                analysis.record(SourceFile(file, source.scope), node.lineno, node.name, PROCESS)
    for name in HOOK_NAMES:
        for binding in source.bound.get(name, ()):
            analysis.add_root(name, binding, source)
        if name in source.scope.bound and not source.bound.get(name):
            analysis.record(source, 1, name, INSTANCE)
    if source.has_star_import:
        analysis.record(source, 1, "import *", INSTANCE)
    analysis.run()
    return sorted(analysis.writes, key=lambda write: (write.file, write.line, write.name))


class StateAnalysis(ExpressionAnalysis):
    """One analysis of a project: its statements. `writes` is what may keep something."""

    def __init__(self, project: SourceTree) -> None:
        super().__init__(project)
        self._analyzed: set[int] = set()

    def add_root(self, name: str, binding: Any, source: SourceFile) -> None:
        """Start with what is bound to the name of a hook."""
        if isinstance(binding, Value) and binding.kind == "OWN" and isinstance(binding.definition, tuple):
            other_source, inside = binding.definition
            for other in other_source.bound.get(inside, ()) or [None]:
                self.add_root(name, other, other_source)
        elif isinstance(binding, tuple) and isinstance(binding[0], ast.FunctionDef | ast.AsyncFunctionDef):
            node, where = binding
            if node.decorator_list:
                self.record(where, node.lineno, name, INSTANCE)
            self.pending.append((node, where, name))
        else:
            self.record(source, getattr(binding, "lineno", 1), name, INSTANCE)

    def run(self) -> None:
        """Analyze everything reachable."""
        while self.pending:
            node, source, hook = self.pending.pop()
            if id(node) not in self._analyzed:
                self._analyzed.add(id(node))
                self._function(node, source, source.scope, hook)

    def _function(self, node: Any, source: SourceFile, enclosing: Any, hook: str = "", *, top: bool = True) -> None:
        scope, _ = function_scope(enclosing, node)
        if hook:
            # signature and metadata are the same objects on every call
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            scope.carried = {name: name for name in names[1:3]}
        if top:
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                if self.module_value(default, source, source.scope).kind != "FIXED":
                    self.record(source, default.lineno, f"a default of {getattr(node, 'name', 'a lambda')}", INSTANCE)
        if isinstance(node, ast.Lambda):
            self.check_escape(self.value(node.body, source, scope), node.body, source)
        else:
            self._statements(node.body, source, scope, is_hook=bool(hook))

    def _statements(self, body: Sequence[ast.stmt], source: SourceFile, scope: Any, *, is_hook: bool) -> None:
        for statement in body:
            self._statement(statement, source, scope, is_hook=is_hook)
            for part in ("body", "orelse", "finalbody"):
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    self._statements(getattr(statement, part, ()), source, scope, is_hook=is_hook)
            for part in ("handlers", "cases"):
                for each in getattr(statement, part, ()):
                    if isinstance(each, ast.match_case):
                        self._patterns(each, source, scope)
                    elif each.type is not None:
                        self.value(each.type, source, scope)
                    self._statements(each.body, source, scope, is_hook=is_hook)

    def _patterns(self, case: ast.match_case, source: SourceFile, scope: Any) -> None:
        if case.guard is not None:
            self.value(case.guard, source, scope)
        if any(isinstance(node, ast.MatchClass | ast.MatchValue) for node in ast.walk(case.pattern)):
            for node in ast.walk(case.pattern):
                if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
                    self.record(source, node.lineno, ast.unparse(node), INSTANCE)

    def _statement(self, node: ast.stmt, source: SourceFile, scope: Any, *, is_hook: bool) -> None:
        match node:
            case ast.Global(names=names):
                for name in names:
                    self.record(source, node.lineno, name, INSTANCE)
            case ast.Return(value=ast.expr() as value):
                returned = self.value(value, source, scope)
                if not is_hook:
                    self.check_escape(returned, value, source)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for each in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
                    self.check_escape(self.value(each, source, scope), each, source)
                self._function(node, source, scope, top=False)
            case ast.ClassDef():
                # the class lives for one call; what its methods use from outside is analyzed as for any function
                for each in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
                    self.check_escape(self.value(each, source, scope), each, source)
                self._statements(node.body, source, scope, is_hook=False)
            case _:
                self._simple_statement(node, source, scope)

    def _simple_statement(self, node: ast.stmt, source: SourceFile, scope: Any) -> None:
        """Analyze a statement's own expressions: what is stored, and where."""
        stored, target_values = self._parts(node, source, scope)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            before = self.value(ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target), source, scope)
            if before.held and before.kind != "FIXED":  # modifies a list or an array in place
                self.record(source, node.lineno, before.held, INSTANCE)
            for value in target_values:
                if value.kind == "PLAIN":
                    self.check_escape(value, node, source)
        for target in stored:
            self.analyze_target(target, target_values, source, scope)

    def _parts(self, node: ast.stmt, source: SourceFile, scope: Any) -> tuple[list[ast.expr], list[Value]]:
        """Return the targets of a statement, and the values of its other expressions."""
        stored: list[ast.expr] = []
        target_values: list[Value] = []
        for name, part in ast.iter_fields(node):
            parts = part if isinstance(part, list) else [part]
            for each in parts:
                if isinstance(each, ast.withitem):
                    target_values.append(self.value(each.context_expr, source, scope))
                    stored += [each.optional_vars] if each.optional_vars is not None else []
                elif isinstance(each, ast.expr) and name in {"target", "targets"}:
                    stored.append(each)
                elif isinstance(each, ast.expr) and name != "annotation":
                    target_values.append(self.value(each, source, scope))
        if isinstance(node, ast.Match):  # patterns bind parts of the subject
            for value in target_values:
                self.check_escape(value, node, source)
        return stored, target_values
