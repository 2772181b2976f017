"""Loading of a user's hook file, each time as a separate instance, and the rules for its two functions.

Used on a replica's thread when a model is loaded, and by `penstock check`, which runs no user code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.server.workers.submodules import import_submodules_on_use

from .private_modules import PrivateModules
from .scopes import own_nodes
from .writes import HOOK_NAMES, PICKLE_SUFFIXES, parse_source

PRE, POST = HOOK_NAMES

# The argument names distinguish the generations: with three, `metadata` is the configuration's table; with two, it is
# the model's signature. Source: Cortex 0.10 and 0.9. `parameters` is Penstock's.
_EXTRA_ARGUMENTS = ("signature", "metadata", "parameters")
ARGUMENT_FORMS: dict[str, tuple[tuple[str, ...], ...]] = {
    name: ((value, *_EXTRA_ARGUMENTS[:2]), (value, "metadata"), (value, *_EXTRA_ARGUMENTS))
    for name, value in ((PRE, "sample"), (POST, "prediction"))
}
_CORTEX_ARGUMENT_FORMS = {name: forms[:2] for name, forms in ARGUMENT_FORMS.items()}

_INTERNAL_PATHS = (str(Path(__file__).parent), "<frozen importlib", importlib.__file__)
"""Of frames that are not user code: this package's and the import system's."""

HookFunction = Callable[[Any, Any], Any]
"""A hook bound to its signature and metadata: takes the sample or prediction, and the request's parameters."""


class HookModule:
    """One instance of a hook file, with its own globals.

    `is_async`: at least one of the hooks is `async def`. `yields`: post_inference is a generator function, which is
    allowed only for a decoupled model. `functions` maps names to hooks.
    """

    def __init__(
        self, path: Path, *, decoupled: bool = False, roots: Sequence[Path] = (), dialect: str = "", label: str = ""
    ) -> None:
        """Run the file and find its hooks. Its own modules are those in `roots`, or without these the ones beside it.

        `dialect` determines the allowed forms of hooks, and the error texts. `label` is part of the modules' names.
        Raises: InferError (INVALID), caused by the file's own exception if it raised one.
        """
        import_submodules_on_use()
        rules = _rules(dialect)
        self._modules = PrivateModules(path, roots, rules.extra_folders, label)
        try:
            self.functions = _load_functions(path, self._modules, rules)
            self.yields = _check_kinds(path, self.functions, rules, decoupled=decoupled)
        except BaseException:
            self._modules.close()
            raise
        self.is_async = any(
            inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inspect.unwrap(function))
            for function in self.functions.values()
        )

    def bind(self, name: str, signature: Any, metadata: Any) -> HookFunction | None:
        """Return a hook as a function of its per-call arguments; None if the file does not have it."""
        function = self.functions.get(name)
        if function is None:
            return None
        argument_count = len(inspect.signature(function).parameters)
        if argument_count == 4:
            return lambda value, parameters: function(value, signature, metadata, parameters)
        if argument_count == 3:
            return lambda value, _: function(value, signature, metadata)
        return lambda value, _: function(value, signature)

    def bind_all(self, inputs: Sequence[Any], outputs: Sequence[Any], metadata: Any) -> dict[str, HookFunction | None]:
        """Return both hooks, each with the description of its side of the model."""
        return {PRE: self.bind(PRE, inputs, metadata), POST: self.bind(POST, outputs, metadata)}

    def takes_parameters(self, name: str) -> bool:
        """Return whether the file has this hook and it accepts the request's parameters."""
        function = self.functions.get(name)
        return function is not None and len(inspect.signature(function).parameters) == len(_EXTRA_ARGUMENTS) + 1

    def close(self) -> None:
        """Discard the instance."""
        self._modules.close()


class _HookRules:
    """The allowed forms of hooks, and the error texts for others."""

    forms = ARGUMENT_FORMS
    extra_folders: tuple[Path, ...] = ()
    requires_hook = True
    includes_location = False

    def form_error(self, name: str, found: str, *, is_plain: bool = True) -> str:
        """Return the error for wrong arguments of a hook; `is_plain`: all of them are plain."""
        return f"function {name}: expected function arguments {self._expected_forms(name)} but found {found}"

    def not_callable_error(self, name: str, found: Any) -> str:
        """Return the error for a name that is not a function."""
        return f"{name} is not a function: {type(found).__name__}"

    def kind_error(self, name: str, *, is_async: bool, yields: bool, decoupled: bool) -> str:
        """Return the error for a disallowed kind of hook, "" if it is allowed."""
        if not yields:
            return ""
        if name == PRE:
            return f"{PRE} must not yield: a sample makes one set of inputs; {POST} may yield"
        if is_async:
            return f"{POST} yields in an async def; use a plain def"
        if not decoupled:
            text = f"{POST} yields, and this model has one answer for each request"
            return f"{text}: model_transaction_policy {{ decoupled: true }} in its config.pbtxt says otherwise"
        return ""

    def _expected_forms(self, name: str) -> str:
        return " or ".join(f"({', '.join(form)})" for form in self.forms[name])


class _CortexHookRules(_HookRules):
    """Cortex's, of both generations. Source: Cortex 0.10, which had the longer form; the texts begin like its own."""

    forms = _CORTEX_ARGUMENT_FORMS
    extra_folders = (Path(__file__).parents[1] / "cortex" / "importable",)
    requires_hook = False
    includes_location = True

    def form_error(self, name: str, found: str, *, is_plain: bool = True) -> str:
        if not is_plain:
            return f"function {name}: invalid function signature, can only accept positional arguments: {found}"
        return f"function {name}: expected function arguments arguments {self._expected_forms(name)} but found {found}"

    def not_callable_error(self, name: str, found: Any) -> str:
        return f"function {name}: not a function: {type(found).__name__}"

    def kind_error(self, name: str, *, is_async: bool, yields: bool, decoupled: bool) -> str:
        if not (is_async or yields):
            return ""
        what = "yields" if yields else "is an async def"
        return f"function {name}: it {what}, but must return its value: use a plain def"


def _rules(dialect: str) -> _HookRules:
    return _CortexHookRules() if dialect == "cortex" else _HookRules()


def _load_functions(path: Path, modules: PrivateModules, rules: _HookRules) -> dict[str, Callable[..., Any]]:
    if not path.is_file():
        raise InferError(Code.INVALID, f"hooks file {path}: no such file")
    try:
        module = _load_pickle(path) if path.suffix in PICKLE_SUFFIXES else modules.load()
    except SyntaxError as error:
        where = Path(error.filename).name if error.filename else path.name
        raise InferError(Code.INVALID, f"hooks file {path}: {where}, line {error.lineno}: {error.msg}") from error
    except InferError:
        raise
    except BaseException as error:  # a module may call sys.exit
        text = f"hooks file {path} cannot be loaded: {exception_line(error)}"
        text += _location(error, modules) if rules.includes_location else ""
        raise InferError(Code.INVALID, text) from error
    functions = {name: getattr(module, name) for name in HOOK_NAMES if hasattr(module, name)}
    if not functions and rules.requires_hook:
        raise InferError(Code.INVALID, _no_hooks_message(path))
    for name, function in functions.items():
        if not callable(function):
            raise InferError(Code.INVALID, f"hooks file {path}: {rules.not_callable_error(name, function)}")
        names, is_plain, text = _argument_names(function)
        if not is_plain or names not in rules.forms[name]:
            raise InferError(Code.INVALID, f"hooks file {path}: {rules.form_error(name, text, is_plain=is_plain)}")
    return functions


def _load_pickle(path: Path) -> SimpleNamespace:
    """Read a pickled dict of functions. Raises: InferError (INVALID), and whatever unpickling raises."""
    try:
        dill = importlib.import_module("dill")
    except ModuleNotFoundError as error:
        text = f"hooks file {path}: a pickle of functions requires dill: pip install dill"
        raise InferError(Code.INVALID, text) from error
    with path.open("rb") as file:
        functions = dill.load(file)
    if not isinstance(functions, Mapping):
        text = f"hooks file {path}: expected a pickled dict of functions, got {type(functions).__name__}"
        raise InferError(Code.INVALID, text)
    return SimpleNamespace(**{name: functions[name] for name in HOOK_NAMES if name in functions})


def _location(error: BaseException, modules: PrivateModules) -> str:
    """Return the innermost place in the user's files where the error was raised, "" if there is none."""
    frames, location = error.__traceback__, ""
    while frames is not None:
        if modules.is_user_file(Path(frames.tb_frame.f_code.co_filename)):
            location = f" ({Path(frames.tb_frame.f_code.co_filename).name}, line {frames.tb_lineno})"
        frames = frames.tb_next
    return location


def _check_kinds(
    path: Path, functions: Mapping[str, Callable[..., Any]], rules: _HookRules, *, decoupled: bool
) -> bool:
    """Return whether post_inference is a generator function. Raises: InferError (INVALID) if that is not allowed."""
    any_yields = False
    for name, function in functions.items():
        own = (function, inspect.unwrap(function))
        yields_async = any(map(inspect.isasyncgenfunction, own))
        yields = yields_async or any(map(inspect.isgeneratorfunction, own))
        is_async = yields_async or any(map(inspect.iscoroutinefunction, own))
        if problem := rules.kind_error(name, is_async=is_async, yields=yields, decoupled=decoupled):
            raise InferError(Code.INVALID, f"hooks file {path}: {problem}")
        any_yields = any_yields or yields
    return any_yields


def _argument_names(function: Callable[..., Any]) -> tuple[tuple[str, ...], bool, str]:
    """Return a function's argument names, whether all are plain, and their source form."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return (), False, "(...)"
    is_plain = all(
        each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD} and each.default is each.empty
        for each in parameters
    )
    argument_texts = [str(each.replace(annotation=each.empty)) for each in parameters]
    return tuple(each.name for each in parameters), is_plain, f"({', '.join(argument_texts)})"


def _no_hooks_message(path: Path) -> str:
    return f"hooks file {path} defines neither {PRE} nor {POST}"


def exception_line(error: BaseException) -> str:
    """Format an exception on one line, type first, for a reader who cannot see the traceback."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - __str__ is user code
        text = ""
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def user_frames(error: BaseException) -> TracebackType | None:
    """Return the error's traceback without the leading frames of this package and of the import system.

    Returns: all of it if none is in user code, as for an error of our own.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_INTERNAL_PATHS):
        frames = frames.tb_next
    return frames or error.__traceback__


def check_file(path: Path, *, decoupled: bool = False, dialect: str = "") -> list[str]:
    """Return what would prevent a hook file from loading, as `file:line: problem`, without running it."""
    rules = _rules(dialect)
    if path.suffix in PICKLE_SUFFIXES:
        return [] if path.is_file() else [f"{path}: no such file"]
    try:
        tree = parse_source(path.read_bytes())
    except OSError as error:
        return [f"{path}: {error.strerror or error}"]
    except SyntaxError as error:
        return [f"{path}:{error.lineno}: {error.msg}"]
    except ValueError as error:  # null bytes
        return [f"{path}: {error}"]
    problems = []
    defines_hook = not rules.requires_hook
    for node in _module_level(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in HOOK_NAMES:
            defines_hook = True
            if not node.decorator_list and (text := _argument_text(node.args)) not in map(
                _joined, rules.forms[node.name]
            ):
                is_plain = not set(text) & {"*", "="}
                problems.append(f"{path}:{node.lineno}: {rules.form_error(node.name, f'({text})', is_plain=is_plain)}")
            problem = rules.kind_error(
                node.name, is_async=isinstance(node, ast.AsyncFunctionDef), decoupled=decoupled,
                yields=any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in own_nodes(node.body)),
            )  # fmt: skip
            problems += [f"{path}:{node.lineno}: {problem}"] if problem else []
        elif not defines_hook:
            defines_hook = _may_bind(node, set(HOOK_NAMES))
    return problems if defines_hook else [*problems, f"{path}: {_no_hooks_message(path)}"]


def hook_names_in(path: Path) -> list[str]:
    """Return the hooks that a file may define, without running it; none if it cannot be parsed."""
    try:
        nodes = list(_module_level(parse_source(path.read_bytes()).body))
    except (OSError, SyntaxError, ValueError):
        return []
    return [name for name in HOOK_NAMES if any(_may_define(node, name) for node in nodes)]


def _may_define(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    return _may_bind(node, {name})


def _joined(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _argument_text(arguments: ast.arguments) -> str:
    """Format a function's parameters without annotations; positional-only ones count as plain."""
    plain_arguments = ast.arguments(
        [], [ast.arg(each.arg) for each in (*arguments.posonlyargs, *arguments.args)],
        arguments.vararg and ast.arg(arguments.vararg.arg), [ast.arg(each.arg) for each in arguments.kwonlyargs],
        arguments.kw_defaults, arguments.kwarg and ast.arg(arguments.kwarg.arg), arguments.defaults,
    )  # fmt: skip
    return ast.unparse(plain_arguments)


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run at import, including those under `if`, `try`, `with` and loops."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _module_level(getattr(node, part, []))


def _may_bind(node: ast.stmt, names: set[str]) -> bool:
    """Return whether a statement other than `def` may bind one of the names, which only running it would show."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name) in {*names, "*"} for alias in node.names)
    return any(isinstance(inner, ast.Name) and inner.id in {*names, "globals", "exec"} for inner in ast.walk(node))
