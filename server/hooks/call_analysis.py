"""CallAnalysis: the values of calls in a project's functions, and whether the called function may keep something.

The base class of `expression_analysis.py`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .known_functions import (
    ARRAY_MAKERS,
    COPIES,
    FILE_WRITERS,
    FIXED_MAKERS,
    GIVES_PART,
    KEEPS_NOTHING,
    LOGS,
    MUTATORS,
    NOT_SETS,
    OF_OS,
    PASSES_ON,
    PLAIN_MAKERS,
    PURE_STDLIB,
    READS,
    SETS,
    SIMPLE_BASES,
    TAKES,
    TEXT_METHODS,
    out_position,
)  # fmt: skip
from .sources import CONTAINED, FRESH, SourceFile, Value
from .writes import INSTANCE, MACHINE, PROCESS

if TYPE_CHECKING:
    from .scopes import Scope

_WRITING = re.compile("[wax+]")
_MODE = re.compile(r"[wax][bt]?\+?[bt]?(:\w*)?|r[bt]?\+[bt]?")
_ONE_OF = {"max", "min", "sum"}
_LAZY = {"enumerate", "filter", "map", "reversed", "zip"}


class Given:
    """The analyzed arguments of one call."""

    def __init__(self, call: ast.Call, values: list[Value], named: dict[str, Value]) -> None:
        self.call = call
        self.values = values
        self.named = named

    def __iter__(self) -> Iterator[Value]:
        yield from self.values
        yield from self.named.values()

    @property
    def key(self) -> list[ast.expr]:
        """The expressions passed by keyword."""
        return [each.value for each in self.call.keywords]

    @property
    def held(self) -> list[Value]:
        """The arguments that are mutable and held."""
        return [value for value in self if value.held and value.kind not in {"FIXED", "MODULE", "BUILTIN"}]

    @property
    def parts(self) -> Value:
        """The value of a result that may contain parts of any argument."""
        held = [value for value in self.held if value.kind in CONTAINED]
        if not held:
            return FRESH
        kinds = {value.kind for value in held}
        return held[0] if len(kinds) == 1 else Value("PLAIN", held[0].held)


class CallAnalysis:
    """Analyzes calls. Reading does the rest."""

    loading: bool

    if TYPE_CHECKING:

        def value(self, node: ast.expr, source: SourceFile, scope: Scope) -> Value: ...
        def attribute(self, owner: Value, node: ast.Attribute, source: SourceFile) -> Value: ...
        def note(self, source: SourceFile, line: int, name: str, reach: str) -> None: ...
        def goes_out(self, value: Value, node: Any, source: SourceFile) -> None: ...
        def reach(self, value: Value) -> None: ...

    def call(self, node: ast.Call, source: SourceFile, scope: Scope) -> Value:
        """Return the value of a call."""
        values = [self.value(each, source, scope) for each in node.args]
        named = {each.arg or "**": self.value(each.value, source, scope) for each in node.keywords}
        given = Given(node, values, named)
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, source, scope)
            if owner.kind in {"MODULE", "OWN"}:
                return self._called(self.attribute(owner, node.func, source), given, source)
            return self._method(owner, node.func.attr, given, source)
        return self._called(self.value(node.func, source, scope), given, source)

    def _called(self, function: Value, given: Given, source: SourceFile) -> Value:
        match function.kind:
            case "BUILTIN":
                return self._builtin(function.path, given, source)
            case "MODULE":
                return self._library(function.path, given, source)
            case "FUNCTION":
                self._go_out(given, source)
                self._reach(function)
                return FRESH
            case "CLASS":
                self._go_out(given, source)
                if not _is_simple(function.of[0] if function.of else None):
                    self.note(source, given.call.lineno, function.held, INSTANCE)
                return FRESH
        self.goes_out(function, given.call, source)
        self._go_out(given, source)
        return FRESH

    def _go_out(self, given: Given, source: SourceFile) -> None:
        for value in given:
            if value.kind != "FUNCTION" or value.held:
                self.goes_out(value, given.call, source)

    def _reach(self, function: Value) -> None:
        if not self.loading and function.of:
            self.reach(function)

    def _take_functions(self, given: Given, source: SourceFile) -> None:
        """Analyze functions passed to a callee that calls them and does not keep them."""
        if any(value.kind in {"FUNCTION", "CODE"} for value in given):
            for value in given.held:  # they may be called with parts of it
                if value.kind in {"ARRAY", "PLAIN"}:
                    self.goes_out(value, given.call, source)
        for value in given:
            if value.kind == "FUNCTION":
                self._reach(value)
            elif value.kind == "MODULE":
                continue  # it is passed to a library
            elif value.kind not in CONTAINED:
                self.goes_out(value, given.call, source)

    # -- methods -----------------------------------------------------------------------------------------------

    def _method(self, owner: Value, name: str, given: Given, source: SourceFile) -> Value:
        line = given.call.lineno
        if name.startswith("__") and name.endswith("__"):
            self.note(source, line, name, PROCESS)
        if name in FILE_WRITERS or (name == "open" and _writes_a_file(given.call)):
            self.note(source, line, f".{name}()", MACHINE)
        if owner.kind in {"BUILTIN", "LOGGER"}:
            return self._of_known(owner, name, given, source)
        if owner.held and owner.kind in CONTAINED:
            return self._of_held(owner, name, given, source)
        if owner.held:
            self.goes_out(owner, given.call, source)
        self._given_to_any(name, given, source)
        if given.parts.held and name not in READS:
            return given.parts
        if owner.kind in CONTAINED and name in GIVES_PART | READS and name not in TEXT_METHODS:
            return Value(owner.kind)
        return Value(TEXT_METHODS.get(name, "UNKNOWN"))

    def _of_known(self, owner: Value, name: str, given: Given, source: SourceFile) -> Value:
        line = given.call.lineno
        if owner.kind == "BUILTIN":  # str.join, dict.fromkeys, int.from_bytes are allowed; list.append(x, y) is not
            if name in MUTATORS or name not in READS | GIVES_PART | {"fromkeys", "from_bytes", "maketrans", "fromhex"}:
                self.note(source, line, f"{owner.held}.{name}", PROCESS)
            return given.parts
        if name not in LOGS:
            self.note(source, line, f"{owner.held}.{name}", PROCESS)
        return FRESH

    def _of_held(self, owner: Value, name: str, given: Given, source: SourceFile) -> Value:
        self._take_functions(given, source)
        if owner.kind == "FIXED":
            if name in MUTATORS or SETS.match(name):  # may be part of an array; Struct.pack_into changes another object
                self.note(source, given.call.lineno, owner.held, INSTANCE)
            return Value(TEXT_METHODS.get(name, "FIXED"))
        if name in READS:
            return Value("FIXED")
        if name not in GIVES_PART:
            self.note(source, given.call.lineno, owner.held, INSTANCE)
        if owner.kind == "FLAT" and name == "get":
            return Value("FIXED", owner.held)
        return owner

    def _given_to_any(self, name: str, given: Given, source: SourceFile) -> None:
        """Analyze the arguments of a method of an untracked object, which may keep them unless it is known not to."""
        if name in TAKES or (name == "sort" and not given.values):
            self._take_functions(given, source)
        else:
            self._go_out(given, source)

    # -- builtins ----------------------------------------------------------------------------------------------

    def _builtin(self, name: str, given: Given, source: SourceFile) -> Value:
        line = given.call.lineno
        if name in {"isinstance", "issubclass"}:
            return Value("FIXED")
        if name in KEEPS_NOTHING:
            self._take_functions(given, source)
            return Value({"bytearray": "ARRAY", "object": "UNKNOWN"}.get(name, "FIXED"))
        if name in PASSES_ON:
            return self._passed_on(name, given, source)
        if name == "open":
            mode = next((each.value for each in given.call.keywords if each.arg == "mode"), None)
            mode = given.call.args[1] if len(given.call.args) > 1 else mode
            if mode is not None and not (isinstance(mode, ast.Constant) and not _WRITING.search(str(mode.value))):
                self.note(source, line, "open", MACHINE)
            return FRESH
        if name == "type" and len(given.values) == 1:
            return Value("CLASS", "type()")
        if name in {"getattr", "hasattr"}:
            return self._getattr(name, given, source)
        if name in {"iter", "next", "super"} and not given.held:
            return FRESH
        self.note(source, line, name, PROCESS)
        return FRESH

    def _passed_on(self, name: str, given: Given, source: SourceFile) -> Value:
        if any(isinstance(each, ast.Attribute) for each in (*given.call.args, *given.key)):
            for value in given.held:  # list(map(kept.append, rows))
                if value.kind != "FLAT":
                    self.goes_out(value, given.call, source)
        self._take_functions(given, source)
        if self.loading:
            return _made_at_load(name, given)
        parts = given.parts
        return Value("FIXED", parts.held) if parts.kind == "FLAT" and name in _ONE_OF else parts

    def _getattr(self, name: str, given: Given, source: SourceFile) -> Value:
        word = given.call.args[1] if len(given.call.args) > 1 else None
        plain = isinstance(word, ast.Constant) and not str(word.value).startswith("__")
        if not plain or given.held or given.values[0].kind in {"MODULE", "BUILTIN"}:
            self.note(source, given.call.lineno, name, PROCESS)
        return FRESH

    # -- libraries ---------------------------------------------------------------------------------------------

    def _library(self, path: str, given: Given, source: SourceFile) -> Value:
        if self.loading:
            return _made_by(path, given)
        top, leaf = path.partition(".")[0], path.rpartition(".")[2]
        path = re.sub(r"^np\.", "numpy.", path)
        keeps = top in sys.stdlib_module_names and top not in PURE_STDLIB
        sets = any(SETS.match(word) for word in path.split(".")[1:]) and not NOT_SETS.fullmatch(path)
        if top == "os" and not OF_OS.fullmatch(path):
            self.note(source, given.call.lineno, path, MACHINE)
        elif keeps or (sets and not COPIES.fullmatch(path)):
            self.note(source, given.call.lineno, path, PROCESS)
        copies = COPIES.fullmatch(path) is not None
        if leaf in FILE_WRITERS or (not copies and _writes_a_file(given.call)):
            self.note(source, given.call.lineno, path, MACHINE)
        if "out" in given.named:
            self.goes_out(given.named["out"], given.call, source)
        if path.startswith("numpy."):
            for value in given.values[out_position(path) :]:
                self.goes_out(value, given.call, source)
        if leaf in MUTATORS and given.values and not copies:
            self.goes_out(given.values[0], given.call, source)
        self._take_functions(given, source)
        if path == "logging.getLogger":
            return Value("LOGGER", path)
        return FRESH if copies else given.parts


def _writes_a_file(call: ast.Call) -> bool:
    """Return whether a call has a mode argument that writes files, or makes a permanent temporary file."""
    texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
    texts += [each.value.value for each in call.keywords if each.arg == "mode" and isinstance(each.value, ast.Constant)]
    stays = any(each.arg == "delete" for each in call.keywords)
    return stays or any(isinstance(text, str) and _MODE.fullmatch(text) for text in texts)


def _is_simple(node: Any) -> bool:
    """Return whether a class has only fields: an exception, a named tuple, a dataclass."""
    if not isinstance(node, ast.ClassDef):
        return False
    based = bool(node.bases) and all(SIMPLE_BASES.fullmatch(ast.unparse(base)) for base in node.bases)
    is_dataclass = not node.bases and len(node.decorator_list) == 1
    is_dataclass = is_dataclass and ast.unparse(node.decorator_list[0]).partition("(")[0].endswith("dataclass")
    if not (is_dataclass or (based and not node.decorator_list)) or node.keywords:
        return False
    return all(
        isinstance(each, ast.Pass | ast.AnnAssign | ast.Expr)
        and isinstance(getattr(each, "value", None), ast.Constant | None)
        for each in node.body
    )


def _made_at_load(name: str, given: Given) -> Value:
    """Return the value that list, dict, sorted and the like make of their arguments."""
    kinds = {value.of if value.kind == "LAZY" else value.kind for value in given}
    if name in {"map", "filter"} and given.values:
        casts = given.values[0].kind == "BUILTIN" and given.values[0].path in KEEPS_NOTHING
        kinds = {value.kind for value in given.values[1:]} if casts else {"UNKNOWN"}
    if kinds <= {"FIXED", "FLAT"}:
        kind = "FIXED" if name in _ONE_OF else "FLAT"
    else:
        kind = "PLAIN" if kinds <= CONTAINED else "UNKNOWN"
    return Value("LAZY", of=kind) if name in _LAZY else Value(kind)


def _made_by(path: str, given: Given) -> Value:
    """Return the value that a library function makes when a module is loaded."""
    path = re.sub(r"^np\.", "numpy.", path)
    if path in {"logging.getLogger", "cortex.lib.log.get_logger"}:
        return Value("LOGGER")
    if path.startswith("csv."):
        return Value("LAZY", of="PLAIN")
    if path.startswith("collections.") and not {value.kind for value in given} <= CONTAINED:
        return FRESH
    if path in {"copy.copy", "copy.deepcopy"}:
        return Value(given.values[0].kind) if given.values else FRESH
    for kind, makers in (("FIXED", FIXED_MAKERS), ("ARRAY", ARRAY_MAKERS), ("PLAIN", PLAIN_MAKERS)):
        if makers.fullmatch(path):
            return Value(kind)
    return FRESH
