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
from .sources import DATA_KINDS, UNTRACKED, SourceFile, Value
from .writes import INSTANCE, MACHINE, PROCESS

if TYPE_CHECKING:
    from .scopes import Scope

_WRITING = re.compile("[wax+]")
_MODE = re.compile(r"[wax][bt]?\+?[bt]?(:\w*)?|r[bt]?\+[bt]?")
_ONE_OF = {"max", "min", "sum"}
_LAZY = {"enumerate", "filter", "map", "reversed", "zip"}
TYPE_OF = Value("CLASS", "type()")
"""What `type` returns for one argument: it may be passed on and formatted, but not written to."""


class CallArguments:
    """The analyzed arguments of one call."""

    def __init__(self, call: ast.Call, values: list[Value], keyword_arguments: dict[str, Value]) -> None:
        self.call = call
        self.values = values
        self.keyword_arguments = keyword_arguments

    def __iter__(self) -> Iterator[Value]:
        yield from self.values
        yield from self.keyword_arguments.values()

    @property
    def keyword_values(self) -> list[ast.expr]:
        """The expressions passed by keyword."""
        return [each.value for each in self.call.keywords]

    @property
    def held(self) -> list[Value]:
        """The arguments that are mutable and held."""
        return [value for value in self if value.held and value.kind not in {"FIXED", "MODULE", "BUILTIN"}]

    @property
    def parts(self) -> Value:
        """The value of a result that may contain parts of any argument."""
        held = [value for value in self.held if value.kind in DATA_KINDS]
        if not held:
            return UNTRACKED
        kinds = {value.kind for value in held}
        return held[0] if len(kinds) == 1 else Value("PLAIN", held[0].held)


class CallAnalysis:
    """Analyzes calls. ExpressionAnalysis does the rest."""

    loading: bool
    pending: list[tuple[Any, SourceFile, str]]

    if TYPE_CHECKING:

        def value(self, node: ast.expr, source: SourceFile, scope: Scope) -> Value: ...
        def attribute(self, owner: Value, node: ast.Attribute, source: SourceFile) -> Value: ...
        def record(self, source: SourceFile, line: int, name: str, reach: str) -> None: ...
        def check_escape(self, value: Value, node: Any, source: SourceFile) -> None: ...

    def call(self, node: ast.Call, source: SourceFile, scope: Scope) -> Value:
        """Return the value of a call."""
        values = [self.value(each, source, scope) for each in node.args]
        keyword_arguments = {each.arg or "**": self.value(each.value, source, scope) for each in node.keywords}
        arguments = CallArguments(node, values, keyword_arguments)
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, source, scope)
            if owner.kind in {"MODULE", "OWN"}:
                return self._called(self.attribute(owner, node.func, source), arguments, source)
            return self._method(owner, node.func.attr, arguments, source)
        return self._called(self.value(node.func, source, scope), arguments, source)

    def _called(self, function: Value, arguments: CallArguments, source: SourceFile) -> Value:
        match function.kind:
            case "BUILTIN":
                return self._builtin(function.path, arguments, source)
            case "MODULE":
                return self._library(function.path, arguments, source)
            case "FUNCTION":
                self._check_escapes(arguments, source)
                self._schedule_function(function)
                return UNTRACKED
            case "CLASS":
                self._check_escapes(arguments, source)
                if not _is_simple(function.definition[0] if function.definition else None):
                    self.record(source, arguments.call.lineno, function.held, INSTANCE)
                return UNTRACKED
        self.check_escape(function, arguments.call, source)
        self._check_escapes(arguments, source)
        return UNTRACKED

    def _check_escapes(self, arguments: CallArguments, source: SourceFile) -> None:
        for value in arguments:
            if value.kind != "FUNCTION" or value.held:
                self.check_escape(value, arguments.call, source)

    def _schedule_function(self, function: Value) -> None:
        if not self.loading and function.definition:
            node, source = function.definition
            self.pending.append((node, source, ""))

    def _analyze_passed_functions(self, arguments: CallArguments, source: SourceFile) -> None:
        """Analyze functions passed to a callee that calls them and does not keep them."""
        if any(value.kind in {"FUNCTION", "CODE"} for value in arguments):
            for value in arguments.held:  # they may be called with parts of it
                if value.kind in {"ARRAY", "PLAIN"}:
                    self.check_escape(value, arguments.call, source)
        for value in arguments:
            if value.kind == "FUNCTION":
                self._schedule_function(value)
            elif value.kind == "MODULE" or value == TYPE_OF:
                continue  # it is passed to a library, or printed
            elif value.kind not in DATA_KINDS:
                self.check_escape(value, arguments.call, source)

    # -- methods -----------------------------------------------------------------------------------------------

    def _method(self, owner: Value, name: str, arguments: CallArguments, source: SourceFile) -> Value:
        line = arguments.call.lineno
        if name.startswith("__") and name.endswith("__"):
            self.record(source, line, name, PROCESS)
        if name in FILE_WRITERS or (name == "open" and _writes_file(arguments.call)):
            self.record(source, line, f".{name}()", MACHINE)
        if owner.kind in {"BUILTIN", "LOGGER"}:
            return self._known_method(owner, name, arguments, source)
        if owner.held and owner.kind in DATA_KINDS:
            return self._held_method(owner, name, arguments, source)
        if owner.held:
            self.check_escape(owner, arguments.call, source)
        self._check_method_arguments(name, arguments, source)
        if arguments.parts.held and name not in READS:
            return arguments.parts
        if owner.kind in DATA_KINDS and name in GIVES_PART | READS and name not in TEXT_METHODS:
            return Value(owner.kind)
        return Value(TEXT_METHODS.get(name, "UNKNOWN"))

    def _known_method(self, owner: Value, name: str, arguments: CallArguments, source: SourceFile) -> Value:
        line = arguments.call.lineno
        if owner.kind == "BUILTIN":  # str.join, dict.fromkeys, int.from_bytes are allowed; list.append(x, y) is not
            if name in MUTATORS or name not in READS | GIVES_PART | {"fromkeys", "from_bytes", "maketrans", "fromhex"}:
                self.record(source, line, f"{owner.held}.{name}", PROCESS)
            return arguments.parts
        if name not in LOGS:
            self.record(source, line, f"{owner.held}.{name}", PROCESS)
        return UNTRACKED

    def _held_method(self, owner: Value, name: str, arguments: CallArguments, source: SourceFile) -> Value:
        self._analyze_passed_functions(arguments, source)
        if owner.kind == "FIXED":
            if name in MUTATORS or SETS.match(name):  # may be part of an array; Struct.pack_into changes another object
                self.record(source, arguments.call.lineno, owner.held, INSTANCE)
            return Value(TEXT_METHODS.get(name, "FIXED"))
        if name in READS:
            return Value("FIXED")
        if name not in GIVES_PART:
            self.record(source, arguments.call.lineno, owner.held, INSTANCE)
        if owner.kind == "FLAT" and name == "get":
            return Value("FIXED", owner.held)
        return owner

    def _check_method_arguments(self, name: str, arguments: CallArguments, source: SourceFile) -> None:
        """Analyze the arguments of a method of an untracked object, which may keep them unless it is known not to."""
        if name in TAKES or (name == "sort" and not arguments.values):
            self._analyze_passed_functions(arguments, source)
        else:
            self._check_escapes(arguments, source)

    # -- builtins ----------------------------------------------------------------------------------------------

    def _builtin(self, name: str, arguments: CallArguments, source: SourceFile) -> Value:
        line = arguments.call.lineno
        if name in {"isinstance", "issubclass"}:
            return Value("FIXED")
        if name in KEEPS_NOTHING:
            self._analyze_passed_functions(arguments, source)
            return Value({"bytearray": "ARRAY", "object": "UNKNOWN"}.get(name, "FIXED"))
        if name in PASSES_ON:
            return self._passing_builtin(name, arguments, source)
        if name == "open":
            mode = next((each.value for each in arguments.call.keywords if each.arg == "mode"), None)
            mode = arguments.call.args[1] if len(arguments.call.args) > 1 else mode
            if mode is not None and not (isinstance(mode, ast.Constant) and not _WRITING.search(str(mode.value))):
                self.record(source, line, "open", MACHINE)
            return UNTRACKED
        if name == "type" and len(arguments.values) == 1:
            return TYPE_OF
        if name in {"getattr", "hasattr"}:
            return self._getattr(name, arguments, source)
        if name in {"iter", "next", "super"} and not arguments.held:
            return UNTRACKED
        self.record(source, line, name, PROCESS)
        return UNTRACKED

    def _passing_builtin(self, name: str, arguments: CallArguments, source: SourceFile) -> Value:
        if any(isinstance(each, ast.Attribute) for each in (*arguments.call.args, *arguments.keyword_values)):
            for value in arguments.held:  # list(map(kept.append, rows))
                if value.kind != "FLAT":
                    self.check_escape(value, arguments.call, source)
        self._analyze_passed_functions(arguments, source)
        if self.loading:
            return _builtin_result(name, arguments)
        parts = arguments.parts
        return Value("FIXED", parts.held) if parts.kind == "FLAT" and name in _ONE_OF else parts

    def _getattr(self, name: str, arguments: CallArguments, source: SourceFile) -> Value:
        name_argument = arguments.call.args[1] if len(arguments.call.args) > 1 else None
        is_plain_name = isinstance(name_argument, ast.Constant) and not str(name_argument.value).startswith("__")
        if not is_plain_name or arguments.held or arguments.values[0].kind in {"MODULE", "BUILTIN"}:
            self.record(source, arguments.call.lineno, name, PROCESS)
        return UNTRACKED

    # -- libraries ---------------------------------------------------------------------------------------------

    def _library(self, path: str, arguments: CallArguments, source: SourceFile) -> Value:
        if self.loading:
            return _library_result(path, arguments)
        top, leaf = path.partition(".")[0], path.rpartition(".")[2]
        path = re.sub(r"^np\.", "numpy.", path)
        keeps = top in sys.stdlib_module_names and top not in PURE_STDLIB
        sets = any(SETS.match(name_argument) for name_argument in path.split(".")[1:]) and not NOT_SETS.fullmatch(path)
        if top == "os" and not OF_OS.fullmatch(path):
            self.record(source, arguments.call.lineno, path, MACHINE)
        elif keeps or (sets and not COPIES.fullmatch(path)):
            self.record(source, arguments.call.lineno, path, PROCESS)
        copies = COPIES.fullmatch(path) is not None
        if leaf in FILE_WRITERS or (not copies and _writes_file(arguments.call)):
            self.record(source, arguments.call.lineno, path, MACHINE)
        if "out" in arguments.keyword_arguments:
            self.check_escape(arguments.keyword_arguments["out"], arguments.call, source)
        if path.startswith("numpy."):
            for value in arguments.values[out_position(path) :]:
                self.check_escape(value, arguments.call, source)
        if leaf in MUTATORS and arguments.values and not copies:
            self.check_escape(arguments.values[0], arguments.call, source)
        self._analyze_passed_functions(arguments, source)
        if path == "logging.getLogger":
            return Value("LOGGER", path)
        return UNTRACKED if copies else arguments.parts


def _writes_file(call: ast.Call) -> bool:
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


def _builtin_result(name: str, arguments: CallArguments) -> Value:
    """Return the value that list, dict, sorted and the like make of their arguments."""
    kinds = {value.definition if value.kind == "LAZY" else value.kind for value in arguments}
    if name in {"map", "filter"} and arguments.values:
        casts = arguments.values[0].kind == "BUILTIN" and arguments.values[0].path in KEEPS_NOTHING
        kinds = {value.kind for value in arguments.values[1:]} if casts else {"UNKNOWN"}
    if kinds <= {"FIXED", "FLAT"}:
        kind = "FIXED" if name in _ONE_OF else "FLAT"
    else:
        kind = "PLAIN" if kinds <= DATA_KINDS else "UNKNOWN"
    return Value("LAZY", definition=kind) if name in _LAZY else Value(kind)


def _library_result(path: str, arguments: CallArguments) -> Value:
    """Return the value that a library function makes when a module is loaded."""
    path = re.sub(r"^np\.", "numpy.", path)
    if path in {"logging.getLogger", "cortex.lib.log.get_logger"}:
        return Value("LOGGER")
    if path.startswith("csv."):
        return Value("LAZY", definition="PLAIN")
    if path.startswith("collections.") and not {value.kind for value in arguments} <= DATA_KINDS:
        return UNTRACKED
    if path in {"copy.copy", "copy.deepcopy"}:
        return Value(arguments.values[0].kind) if arguments.values else UNTRACKED
    for kind, makers in (("FIXED", FIXED_MAKERS), ("ARRAY", ARRAY_MAKERS), ("PLAIN", PLAIN_MAKERS)):
        if makers.fullmatch(path):
            return Value(kind)
    return UNTRACKED
