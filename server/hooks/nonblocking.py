"""Nonblocking hooks: those certain to return at once, which the event loop may run itself. Used by `replica.py`.

Running a hook on a thread keeps one that waits or spins from blocking everything else. A hook that calculates, looks
into lists and dicts and calls functions listed here can do neither with a small sample, and passing it to a thread and
back takes longer. Anything not listed here runs on a thread.
All values in such a hook are plain: JSON, arrays, texts, and the model's names and shapes. So a method is known by its
name alone, on any object, and every loop is over something that exists and does not grow. It modifies only what it has
created itself. Code that holds the GIL in C, such as for an enormous text, would do so on a thread too.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from .known_functions import out_position
from .plain_values import MAX_MEMBERS, MAX_SMALL_BYTES, PLAIN_TYPES, count_members, has_small_members
from .scopes import created_locals, own_nodes, root_name

_MAX_CALLS = 64
"""The most calls between functions of the file: none is called in a comprehension, so a hook makes no more."""
_MAX_EXPONENT = 4
_MAX_REPEATED_MEMBERS = 64
"""The most members of a global that may be written as text for each item of a comprehension."""

_CONSTANT_TIME_BUILTINS = frozenset(
    ("abs", "bool", "complex", "divmod", "float", "int", "isinstance", "len", "ord", "chr", "round", "str")
)
"""Builtins whose time depends only on their arguments, even if a comprehension calls them often."""
_BUILTINS = _CONSTANT_TIME_BUILTINS | frozenset((
    "all", "any", "dict", "enumerate", "frozenset", "list", "max", "min", "reversed", "set", "sorted", "sum",
    "tuple", "zip",
))  # fmt: skip
_LAZY = frozenset(("enumerate", "reversed", "zip"))
_TEXT_MAKERS = frozenset(("format", "join", "str"))
"""Functions and methods that write all of their arguments as text."""
_NUMPY = frozenset((
    "abs", "absolute", "argmax", "argmin", "argsort", "array", "asarray", "atleast_1d", "atleast_2d", "bool_",
    "ceil", "clip", "concatenate", "exp", "expand_dims", "float16", "float32", "float64", "floor", "int16", "int32",
    "int64", "int8", "log", "max", "maximum", "mean", "min", "minimum", "ravel", "reshape", "round", "sort", "sqrt",
    "squeeze", "stack", "std", "sum", "tanh", "transpose", "uint16", "uint32", "uint64", "uint8", "where",
))  # fmt: skip
_METHODS = frozenset((
    "argmax", "argmin", "argsort", "astype", "copy", "endswith", "flatten", "format", "get", "index", "item",
    "items", "join", "keys", "lower", "lstrip", "max", "mean", "min", "ravel", "replace", "reshape", "round",
    "rstrip", "split", "squeeze", "startswith", "strip", "sum", "title", "tolist", "transpose", "upper", "values",
))  # fmt: skip
_GROWING = frozenset(("append", "extend", "insert", "update"))
"""Methods that make an object grow: not allowed while it is iterated over."""
_ATTRIBUTES = frozenset(("T", "dtype", "name", "ndim", "shape", "size", "type"))
_STATEMENTS = (ast.Pass, ast.Return, ast.Expr, ast.Assign, ast.AnnAssign, ast.If, ast.Raise, ast.Assert)
_EXPRESSIONS = (
    ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Dict, ast.Set, ast.List, ast.Tuple, ast.Slice,
    ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.Starred, ast.keyword,
)  # fmt: skip
_COSTLY_OPERATORS = (ast.Pow, ast.LShift, ast.MatMult)
_TARGETS = (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.expr_context)
_REPEATED = (ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr)
_SYNTAX_NODES = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)


class _NotProvenError(Exception):
    """Something is not listed here."""


def is_nonblocking(hook: Callable[..., Any], tree: ast.Module) -> bool:
    """Return whether a hook, defined in this file, returns at once for a small sample.

    Call this only for files that write no globals, and only after they are loaded: their names must keep their values.
    """
    try:
        _FileFunctions(tree, hook).analyze(hook)
    except (_NotProvenError, RecursionError, SyntaxError):
        return False
    return True


class _FileFunctions:
    """The functions of one file."""

    def __init__(self, tree: ast.Module, hook: Callable[..., Any]) -> None:
        self._definitions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        created = (
            each for each in compile(tree, "", "exec", dont_inherit=True).co_consts if isinstance(each, CodeType)
        )
        self._codes = {code.co_name: code for code in created}
        self._globals = getattr(hook, "__globals__", None)
        self._call_stack: list[FunctionType] = []
        self._calls = 0

    def analyze(self, function: Any) -> None:
        """Analyze a function and those it calls. Raises: _NotProvenError."""
        if (
            type(function) is not FunctionType
            or function.__globals__ is not self._globals
            or function in self._call_stack
        ):
            raise _NotProvenError
        node, code = self._definitions.get(function.__name__), self._codes.get(function.__name__)
        if node is None or function.__code__ != code or code.co_firstlineno != node.lineno:
            raise _NotProvenError  # for example decorated, or one of two with the same name
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._calls += 1
        if self._calls > _MAX_CALLS or not all(type(each) in PLAIN_TYPES for each in defaults):
            raise _NotProvenError  # a list as a default outlives the call
        self._call_stack.append(function)
        _FunctionAnalysis(self, function, node).analyze()
        self._call_stack.pop()


class _FunctionAnalysis:
    """The analysis of one function."""

    def __init__(self, functions: _FileFunctions, function: FunctionType, node: ast.FunctionDef) -> None:
        self._functions = functions
        self._globals: Mapping[str, Any] = function.__globals__
        self._body = node.body
        stored = {each.id for each in own_nodes(node.body) if isinstance(each, ast.Name) and _is_store(each)}
        self._locals = stored | {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        self._created = created_locals(node.body)
        self._comprehension_names: list[str] = []
        """The names that enclosing comprehensions bind at the current place."""
        self._text_locals = set[str]()
        for each in own_nodes(node.body):
            if isinstance(each, ast.Assign | ast.AnnAssign) and each.value and self._may_be_text(each.value):
                self._text_locals |= {
                    part.id for part in ast.walk(each) if isinstance(part, ast.Name) and _is_store(part)
                }

    def analyze(self) -> None:
        for statement in self._body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if not isinstance(node, _STATEMENTS):
            raise _NotProvenError
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child)
            elif not isinstance(node, ast.AnnAssign) or child is not node.annotation:
                self._expression(child)

    def _expression(self, node: ast.AST) -> None:
        """Analyze an expression that may have any value except a lazy iterator, whose source might grow meanwhile."""
        if isinstance(node, ast.GeneratorExp) or (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _LAZY
        ):
            raise _NotProvenError
        self._consumed_expression(node)

    def _consumed_expression(self, node: ast.AST) -> None:
        """Analyze an expression that is consumed at once."""
        match node:
            case ast.Name():
                if not self._is_local(node.id):
                    self._global(node.id)
            case ast.Subscript():
                self._subscript(node)
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[owner]):
                self._lookup(owner, (dict, set, frozenset))
                self._expression(node.left)
            case ast.Call():
                self._call(node)
            case ast.Attribute():
                self._attribute(node)
            case ast.BinOp():
                self._operation(node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._comprehension(node)
            case _:
                self._other(node)

    def _other(self, node: ast.AST) -> None:
        if isinstance(node, ast.FormattedValue):
            self._reject_repeated(node.value)
        if isinstance(node, _EXPRESSIONS):
            for child in ast.iter_child_nodes(node):
                self._expression(child)
        elif not isinstance(node, _SYNTAX_NODES):
            raise _NotProvenError

    def _subscript(self, node: ast.Subscript) -> None:
        if _is_store(node) and not self._is_created_here(node.value):
            raise _NotProvenError
        self._lookup(node.value, () if isinstance(node.slice, ast.Slice) else (list, tuple, dict))
        self._expression(node.slice)

    def _is_created_here(self, node: ast.expr) -> bool:
        """Return whether an object to be modified was created here: a prediction may be kept, as by the cache."""
        return isinstance(node, ast.Name) and node.id in self._created

    def _is_local(self, name: str) -> bool:
        return name in self._locals or name in self._comprehension_names

    def _global(self, name: str) -> None:
        is_global = name in self._globals
        if not (count_members(self._globals[name]) <= MAX_MEMBERS if is_global else _is_type(name)):
            raise _NotProvenError

    def _lookup(self, owner: ast.expr, kinds: tuple[type, ...]) -> None:
        """Analyze an object used for a lookup, whose time does not depend on its size."""
        found = self._globals.get(owner.id) if isinstance(owner, ast.Name) and not self._is_local(owner.id) else None
        if type(found) not in kinds or not has_small_members(found):
            self._expression(owner)

    def _attribute(self, node: ast.Attribute) -> None:
        module = self._module(node.value)
        if module is np and node.attr in _NUMPY | {"newaxis", "pi", "e", "inf", "nan"}:
            return
        if module is math and isinstance(getattr(math, node.attr, None), float):
            return
        if module is not None or node.attr not in _ATTRIBUTES or not isinstance(node.ctx, ast.Load):
            raise _NotProvenError
        self._expression(node.value)

    def _module(self, node: ast.expr) -> ModuleType | None:
        """Return the module that a name refers to."""
        found = self._globals.get(node.id) if isinstance(node, ast.Name) and not self._is_local(node.id) else None
        return found if isinstance(found, ModuleType) else None

    def _operation(self, node: ast.BinOp) -> None:
        power = node.right.value if isinstance(node.right, ast.Constant) else None
        is_square = isinstance(node.op, ast.Pow) and isinstance(power, int | float) and abs(power) <= _MAX_EXPONENT
        if isinstance(node.op, _COSTLY_OPERATORS) and not is_square:
            raise _NotProvenError
        for repeated, times in ((node.left, node.right), (node.right, node.left)):
            if isinstance(node.op, ast.Mult) and isinstance(repeated, _REPEATED) and not self._is_length(times):
                raise _NotProvenError
        self._expression(node.left)
        self._expression(node.right)
        if isinstance(node.op, ast.Mod) and self._may_be_text(node.left):
            self._reject_repeated(node.right)

    def _may_be_text(self, node: ast.expr) -> bool:
        """Return whether the file may give an expression a text as its value: then `%` formats."""
        match node:
            case ast.Constant(value=value):
                return isinstance(value, str)
            case ast.Name(id=name) if self._is_local(name):
                return name in self._text_locals
            case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)):
                return not self._is_local(name) and not isinstance(self._globals.get(name), int | float | np.ndarray)
            case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
                return self._may_be_text(left) or self._may_be_text(right)
        return isinstance(node, ast.JoinedStr)

    def _call(self, node: ast.Call) -> None:
        if any(each.arg in {None, "out"} for each in node.keywords):
            raise _NotProvenError
        is_builtin = isinstance(node.func, ast.Name) and node.func.id not in self._globals
        consumes = is_builtin or (isinstance(node.func, ast.Attribute) and node.func.attr == "join")
        for argument in (*node.args, *node.keywords):
            (self._consumed_expression if consumes else self._expression)(argument)
        if getattr(node.func, "id", getattr(node.func, "attr", "")) in _TEXT_MAKERS:
            self._reject_repeated(*node.args, *node.keywords)
        match node.func:
            case ast.Attribute(value=owner, attr=name):
                self._method(owner, name)
                if self._module(owner) is np and len(node.args) > out_position(f"numpy.{name}"):
                    raise _NotProvenError
            case ast.Name(id=name) if not self._is_local(name):
                self._function(name, node)
            case _:
                raise _NotProvenError

    def _method(self, owner: ast.expr, name: str) -> None:
        module = self._module(owner)
        if module is not None:
            if self._comprehension_names or not (module is math or (module is np and name in _NUMPY)):
                raise _NotProvenError
        elif name not in _METHODS and (
            self._comprehension_names or name not in _GROWING or not self._is_created_here(owner)
        ):
            raise _NotProvenError
        else:
            self._lookup(owner, (dict,) if name == "get" else ())
            if name != "get":
                self._reject_repeated(owner)

    def _reject_repeated(self, *nodes: ast.AST) -> None:
        """Reject the use of whole locals and of large globals, not of their items, for each item of a comprehension."""
        parts = [each for node in nodes for each in ast.walk(node) if self._comprehension_names]
        owners = [each.value for each in parts if isinstance(each, ast.Subscript) and type(each.slice) is not ast.Slice]
        names = [each for each in parts if isinstance(each, ast.Name) and each.id not in self._comprehension_names]
        for name in names:
            is_small = count_members(self._globals.get(name.id)) <= _MAX_REPEATED_MEMBERS
            if name.id in self._locals or not (is_small or name in owners or self._module(name)):
                raise _NotProvenError

    def _function(self, name: str, node: ast.Call) -> None:
        if name in self._globals:
            if self._comprehension_names:
                raise _NotProvenError
            self._functions.analyze(self._globals[name])
        elif name == "range":
            if not all(map(self._is_length, node.args)):
                raise _NotProvenError
        elif name not in _CONSTANT_TIME_BUILTINS and (
            self._comprehension_names or not (name in _BUILTINS or _is_type(name))
        ):
            raise _NotProvenError

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        before = len(self._comprehension_names)
        for part in node.generators:
            if part.is_async or (self._comprehension_names and root_name(part.iter) not in self._comprehension_names):
                raise _NotProvenError  # nested over something else: more iterations than elements
            self._consumed_expression(part.iter)
            target = list(ast.walk(part.target))
            if not all(isinstance(each, _TARGETS) for each in target):
                raise _NotProvenError
            self._comprehension_names += [each.id for each in target if isinstance(each, ast.Name)] or [" "]
            for condition in part.ifs:
                self._expression(condition)
        for each in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self._expression(each)
        del self._comprehension_names[before:]

    def _is_length(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return name == "len"
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                return self._is_length(left) and self._is_length(right)
            case ast.Name(id=name) if not self._is_local(name):
                value = self._globals.get(name)
            case _:
                value = getattr(node, "value", None)
        return type(value) is int and value <= MAX_SMALL_BYTES


def _is_store(node: ast.Name | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_type(name: str) -> bool:
    """Return whether a builtin is an exception, or a listed type."""
    found = getattr(builtins, name, None)
    return isinstance(found, type) and (issubclass(found, Exception) or name in _BUILTINS | {"bytes"})
