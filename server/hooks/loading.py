"""A user's hook file: what its two functions must look like, and loading it, as often as wanted, each time anew.

Called on a replica's thread when a model is loaded, and by `penstock check`, which runs none of the user's code.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.backends.errors import Code, InferError

from .scopes import own_nodes
from .siblings import Siblings
from .writes import HOOK_NAMES, parsed

PRE, POST = HOOK_NAMES

# The argument names tell the generations apart: with three, `metadata` is the configuration's table; with two, it is
# the model's signature. Source: Cortex 0.10 and 0.9. `parameters` is ours.
_MORE = ("signature", "metadata", "parameters")
FORMS: dict[str, tuple[tuple[str, ...], ...]] = {
    name: ((value, *_MORE[:2]), (value, "metadata"), (value, *_MORE))
    for name, value in ((PRE, "sample"), (POST, "prediction"))
}

HookFunction = Callable[[Any, Any], Any]
"""A hook with its signature and metadata filled in: takes the sample or prediction, and the request's parameters."""


class HookModule:
    """One instance of a hook file, with globals of its own.

    `is_async`: at least one of the hooks is `async def`. `yields`: post_inference is a generator function, which only
    a decoupled model may have.
    """

    def __init__(self, path: Path, *, decoupled: bool = False) -> None:
        """Run the file and find its hooks.

        Raises: InferError (INVALID); the file's own exception, if it raised one, is the cause.
        """
        self._siblings = Siblings(path)
        try:
            self._functions = _found(path, self._siblings)
            self.yields = _yields(path, self._functions, decoupled=decoupled)
        except BaseException:
            self._siblings.close()
            raise
        self.is_async = any(
            inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inspect.unwrap(function))
            for function in self._functions.values()
        )

    def bind(self, name: str, signature: Any, metadata: Any) -> HookFunction | None:
        """Give a hook as a function of what changes from call to call; None where the file has no such hook."""
        function = self._functions.get(name)
        if function is None:
            return None
        wanted = len(inspect.signature(function).parameters)
        if wanted == 4:
            return lambda value, parameters: function(value, signature, metadata, parameters)
        if wanted == 3:
            return lambda value, _: function(value, signature, metadata)
        return lambda value, _: function(value, signature)

    def bound(self, inputs: Sequence[Any], outputs: Sequence[Any], metadata: Any) -> dict[str, HookFunction | None]:
        """Give both, with what describes the model on their side of it."""
        return {PRE: self.bind(PRE, list(inputs), metadata), POST: self.bind(POST, list(outputs), metadata)}

    def takes_parameters(self, name: str) -> bool:
        """Tell whether the file has a hook that is given the request's own parameters."""
        function = self._functions.get(name)
        return function is not None and len(inspect.signature(function).parameters) == len(_MORE) + 1

    def close(self) -> None:
        """Forget the instance."""
        self._siblings.close()


def _found(path: Path, siblings: Siblings) -> dict[str, Callable[..., Any]]:
    if not path.is_file():
        raise InferError(Code.INVALID, f"hooks file {path}: no such file")
    try:
        module = siblings.run()
    except SyntaxError as error:
        where = Path(error.filename).name if error.filename else path.name
        raise InferError(Code.INVALID, f"hooks file {path}: {where}, line {error.lineno}: {error.msg}") from error
    except BaseException as error:  # a module may well call sys.exit
        raise InferError(Code.INVALID, f"hooks file {path} cannot be loaded: {brief(error)}") from error
    functions = {name: getattr(module, name) for name in HOOK_NAMES if hasattr(module, name)}
    if not functions:
        raise InferError(Code.INVALID, _neither(path))
    for name, function in functions.items():
        if not callable(function):
            raise InferError(Code.INVALID, f"hooks file {path}: {name} is no function: {type(function).__name__}")
        names, plain, text = _parameters(function)
        if not plain or names not in FORMS[name]:
            raise InferError(Code.INVALID, f"hooks file {path}: {_wrong_form(name, text)}")
    return functions


def _yields(path: Path, functions: Mapping[str, Callable[..., Any]], *, decoupled: bool) -> bool:
    """Tell whether post_inference is a generator function. Raises: InferError (INVALID) where none may be."""
    yields = False
    for name, function in functions.items():
        own = (function, inspect.unwrap(function))
        is_async = any(map(inspect.isasyncgenfunction, own))
        if is_async or any(map(inspect.isgeneratorfunction, own)):
            problem = _wrong_generator(name, is_async=is_async, decoupled=decoupled)
            if problem:
                raise InferError(Code.INVALID, f"hooks file {path}: {problem}")
            yields = True
    return yields


def _wrong_generator(name: str, *, is_async: bool, decoupled: bool) -> str:
    """Say why a hook may not yield; "" if it may."""
    if name == PRE:
        return f"{PRE} yields, and a sample makes one set of inputs; {POST} may"
    if is_async:
        return f"{POST} yields in an async def; one that yields is a plain def"
    if not decoupled:
        text = f"{POST} yields, and this model has one answer for each request"
        return f"{text}: model_transaction_policy {{ decoupled: true }} in its config.pbtxt says otherwise"
    return ""


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], bool, str]:
    """Give a function's argument names, whether they are all plain, and how they were written."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return (), False, "(...)"
    plain = all(
        each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD} and each.default is each.empty
        for each in parameters
    )
    written = [str(each.replace(annotation=each.empty)) for each in parameters]
    return tuple(each.name for each in parameters), plain, f"({', '.join(written)})"


def _neither(path: Path) -> str:
    return f"hooks file {path} defines neither {PRE} nor {POST}"


def _wrong_form(name: str, found: str) -> str:
    forms = " or ".join(f"({', '.join(form)})" for form in FORMS[name])
    return f"function {name}: expected function arguments {forms} but found {found}"


def brief(error: BaseException) -> str:
    """Write an exception on one line, type first, for somebody who cannot see the traceback."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - the user's class, the user's __str__
        text = ""
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def check_file(path: Path, *, decoupled: bool = False) -> list[str]:
    """Find what would keep a hook file from loading, as `file:line: problem`, without running it."""
    try:
        tree = parsed(path.read_bytes())
    except OSError as error:
        return [f"{path}: {error.strerror or error}"]
    except SyntaxError as error:
        return [f"{path}:{error.lineno}: {error.msg}"]
    except ValueError as error:  # null bytes
        return [f"{path}: {error}"]
    problems = []
    found = False
    for node in _module_level(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in HOOK_NAMES:
            found = True
            if not node.decorator_list and (text := _written(node.args)) not in map(_joined, FORMS[node.name]):
                problems.append(f"{path}:{node.lineno}: {_wrong_form(node.name, f'({text})')}")
            if any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in own_nodes(node.body)):
                is_async = isinstance(node, ast.AsyncFunctionDef)
                wrong = _wrong_generator(node.name, is_async=is_async, decoupled=decoupled)
                problems += [f"{path}:{node.lineno}: {wrong}"] if wrong else []
        elif not found:
            found = _may_bind_hook(node)
    return problems if found else [*problems, f"{path}: {_neither(path)}"]


def _joined(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _written(arguments: ast.arguments) -> str:
    """Write a function's parameters without annotations; positional-only ones are as good as plain ones."""
    plain = ast.arguments(
        [], [ast.arg(each.arg) for each in (*arguments.posonlyargs, *arguments.args)],
        arguments.vararg and ast.arg(arguments.vararg.arg), [ast.arg(each.arg) for each in arguments.kwonlyargs],
        arguments.kw_defaults, arguments.kwarg and ast.arg(arguments.kwarg.arg), arguments.defaults,
    )  # fmt: skip
    return ast.unparse(plain)


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Give the statements that run at import, those under `if`, `try`, `with` and loops included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _module_level(getattr(node, part, []))


def _may_bind_hook(node: ast.stmt) -> bool:
    """Tell whether a statement other than `def` may make one of the names, so that only running it can tell."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name) in {*HOOK_NAMES, "*"} for alias in node.names)
    return any(isinstance(inner, ast.Name) and inner.id in {*HOOK_NAMES, "globals", "exec"} for inner in ast.walk(node))
