"""SourceTree: the files of a project that its hooks consist of, and what the names of their modules are bound to.

Made by `state_analysis.py` for one analysis.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .known_functions import KEEPS_NOTHING, MUTATORS, PASSES_ON
from .scopes import Scope, bind, own_nodes
from .writes import MAX_FILES, parse_source, writes_in


class Value(NamedTuple):
    """The value of an expression, as far as it is known.

    `kind`: FIXED (immutable numbers, texts and tuples of them), FLAT (a container of FIXED), ARRAY, PLAIN (containers
    of such, at any depth), FUNCTION and CLASS (of the project), MODULE (or something in one, given by `path`), OWN (a
    module of the project), LOGGER, BUILTIN, or UNKNOWN. `held` names what refers to it, or to part of it, between
    calls; "" if nothing does. `definition` is the definition, or the SourceFile.
    """

    kind: str
    held: str = ""
    path: str = ""
    definition: Any = None


UNTRACKED = Value("UNKNOWN")
MUTABLE_KINDS = {"FLAT", "ARRAY", "PLAIN"}
DATA_KINDS = {"FIXED", *MUTABLE_KINDS}
"""The kinds of numbers, texts and containers of them; those in MUTABLE_KINDS are mutable."""
Bindings = list[Any]
"""What binds a name: expressions, definitions, and Values of imports."""


@dataclass(eq=False, slots=True)
class SourceFile:
    """One file.

    `bound` maps each name of its module to what binds it; `has_star_import`: it has names that only running it would
    show. `iterated_ids` are the ids of expressions in `bound` whose items, not values, the name is bound to.
    """

    path: Path
    scope: Scope
    bound: dict[str, Bindings] = field(default_factory=dict)
    has_star_import: bool = False
    iterated_ids: set[int] = field(default_factory=set)


class NameChanges:
    """What a project's modules do to names besides binding them, by name, regardless of the module.

    `added`: expressions whose values become part of the named object. `changed`: it may contain anything. `rebound`:
    functions assign it other values.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._libraries: set[str] = set()
        self.added: dict[str, list[ast.expr]] = {}
        self.changed: set[str] = set()
        self.rebound: set[str] = set()

    def analyze(self, tree: ast.Module) -> None:
        """Analyze a module."""
        self._libraries = set(self._imported(tree))
        written = {write.name for write in writes_in(tree)}
        self.changed |= written
        self.rebound |= written
        for node in own_nodes(tree.body):
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._analyze_target(target, value)
                    self._analyze_references([value])
                case ast.AugAssign(target=ast.Name(id=name), value=value):
                    self.added.setdefault(name, []).append(value)
                case ast.AugAssign(target=target, value=value) | ast.AnnAssign(target=target, value=value):
                    self._analyze_target(target, value)
                case ast.For(target=target) | ast.withitem(optional_vars=ast.expr() as target):
                    self._analyze_target(target, None)
                case ast.Call():
                    self._analyze_call(node)
                case (
                    ast.List(elts=parts, ctx=ast.Load())
                    | ast.Tuple(elts=parts, ctx=ast.Load())
                    | ast.Set(elts=parts)
                    | ast.Dict(values=parts)
                ):
                    self._analyze_references(parts)

    def _imported(self, tree: ast.Module) -> Iterator[str]:
        """Yield the names that refer to library modules and their contents, not to the project's."""
        for node in own_nodes(tree.body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    module = alias.name if isinstance(node, ast.Import) else node.module or "."
                    top = module.partition(".")[0]
                    own = getattr(node, "level", 0) or any(
                        (root / top).exists() or (root / f"{top}.py").exists() for root in self._roots
                    )
                    if not own:
                        yield alias.asname or alias.name.partition(".")[0]

    def _analyze_target(self, target: ast.expr, value: ast.expr | None) -> None:
        match target:
            case ast.Subscript(value=ast.Name(id=name)) if value is not None:
                self.added.setdefault(name, []).append(value)
            case ast.Subscript() | ast.Attribute():
                self._mark_changed(target)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._analyze_target(part, None)

    def _analyze_call(self, call: ast.Call) -> None:
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute in MUTATORS:
                self.added.setdefault(name, []).extend(arguments)
            case ast.Attribute(value=owner, attr=attribute) if attribute in MUTATORS:
                self._mark_changed(owner)
            case ast.Name(id=name) if name in KEEPS_NOTHING | PASSES_ON:
                return
            case ast.Attribute(value=ast.Constant()):
                return  # "...".format(x)
        top = call.func
        while isinstance(top, ast.Attribute):
            top = top.value
        if isinstance(top, ast.Name) and top.id in self._libraries:
            return
        self._analyze_references(arguments)

    def _analyze_references(self, values: Sequence[ast.expr]) -> None:
        """Record names whose objects also get another reference, through which they may be modified."""
        for value in values:
            inside = value.value if isinstance(value, ast.Starred) else value
            if isinstance(inside, ast.Name):
                self.changed.add(inside.id)

    def _mark_changed(self, target: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.changed.add(node.id)
            elif isinstance(node, ast.Attribute):
                self.changed.add(node.attr)


class SourceTree:
    """The files below `roots`, read on demand; only `read` raises OSError, SyntaxError, ValueError."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self.name_changes = NameChanges(self.roots)
        self._sources: dict[Path, SourceFile | None] = {}

    def read(self, path: Path) -> SourceFile:
        """Read a file."""
        tree = parse_source(path.read_bytes())
        scope = Scope()
        nodes = list(own_nodes(tree.body))
        bind(scope, nodes)
        source = self._sources[path] = SourceFile(path, scope)
        for name, values in scope.aliases.items():
            source.bound.setdefault(name, []).extend(values)
        source.iterated_ids = {id(node.iter) for node in nodes if isinstance(node, ast.For)}
        for node in nodes:
            for name, binding in self.bindings(node, source):
                source.bound.setdefault(name, []).append(binding)
        source.has_star_import = "*" in source.bound
        return source

    def bindings(self, node: ast.AST, source: SourceFile) -> Iterator[tuple[str, Any]]:
        """Yield the names that an import or a definition binds, and what to."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, (node, source)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, self._module(alias.name if alias.asname else top, self.roots)
        elif isinstance(node, ast.ImportFrom):
            start = self.roots if not node.level else (source.path.parents[node.level - 1],)
            for alias in node.names:
                yield (
                    alias.asname or alias.name,
                    self._imported(node.module or "", alias.name, start, own=node.level > 0),
                )

    def _module(self, dotted: str, roots: Sequence[Path]) -> Value:
        own = self._find_module(dotted, roots)
        return Value("OWN", dotted, dotted, own) if own is not None else Value("MODULE", dotted, dotted)

    def _imported(self, module: str, name: str, roots: Sequence[Path], *, own: bool) -> Value:
        """Return what `from module import name` binds."""
        submodule = self._find_module(f"{module}.{name}".strip("."), roots)
        if submodule is not None:
            return Value("OWN", name, f"{module}.{name}", submodule)
        source = self._find_module(module, roots) if module else None
        if source is not None:
            return Value("OWN", name, name, (source, name))
        return Value("UNKNOWN", name) if own else Value("MODULE", name, f"{module}.{name}")

    def _find_module(self, dotted: str, roots: Sequence[Path]) -> SourceFile | None:
        for root in roots:
            base = root.joinpath(*dotted.split("."))
            for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
                if dotted and file.is_file():
                    return self._cached_source(file)
        return None

    def _cached_source(self, file: Path) -> SourceFile | None:
        """Return a file of the project; if it cannot be read, its names are unknown."""
        if file not in self._sources:
            self._sources[file] = SourceFile(file, Scope(), has_star_import=True)
            if len(self._sources) <= MAX_FILES:
                try:
                    self.read(file)
                except (OSError, SyntaxError, ValueError):
                    self._sources[file] = SourceFile(file, Scope(), has_star_import=True)
        return self._sources[file]

    def submodule(self, source: SourceFile, name: str) -> SourceFile | None:
        """Return the module `name` of a package."""
        return self._find_module(name, (source.path.parent,)) if source.path.name == "__init__.py" else None
