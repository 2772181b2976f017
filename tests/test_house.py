"""The house rules (design sections 2 and 5 to 7) that can be checked automatically."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from penstock.server.settings import known_settings

ROOT = Path(__file__).parents[1]
MODULES = {
    path.relative_to(ROOT).as_posix(): path
    for root in ("server", "batching", "backends", "perf")
    for path in sorted((ROOT / root).rglob("*.py"))
}

# The design aims at 350, 40 and 6. Past these ceilings the exception is listed here with its reason.
MODULE_LINES, FUNCTION_LINES, PARAMETERS = 350, 50, 6
EXCEPTIONS: dict[str, str] = {
    "server/python_models/inside/requests.py::__init__": "the parameters of Triton's pb_utils.InferenceRequest",
    "server/seldon/importable/seldon_core/utils.py::construct_response": "the parameters of seldon_core's",
    "server/seldon/importable/seldon_core/utils.py::construct_response_json": "the parameters of seldon_core's",
}

_SHIM = "server/seldon/importable/seldon_core"
NAMED_BY_OTHERS = {
    "server/python_models/importable/triton_python_backend_utils.py": "what a model.py of Triton's imports",
    **{
        f"{_SHIM}/{name}.py": "what components import of seldon-core"
        for name in ("utils", "flask_utils", "env_utils", "imports_helper")
    },
}
BANNED = {"manager", "handler", "util", "utils", "helper", "helpers", "common", "data", "info"}
BELOW_THE_SERVER = ("batching", "backends")
HEAVY = ("onnxruntime", "tensorflow", "fastapi", "uvicorn", "simdjson", "google.protobuf", "tritonclient", "pynvml")


@functools.cache
def _trees() -> dict[str, ast.Module]:
    """Parse all modules when the first test needs them, not in each process that collects tests."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node


@functools.cache
def _too_big() -> dict[str, str]:
    found = {}
    for name, tree in _trees().items():
        lines = MODULES[name].read_text("utf-8").count("\n")
        if lines > MODULE_LINES:
            found[name] = f"{lines} lines"
        for function, node in _functions(tree):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parameters = sum(parameter.arg not in {"self", "cls"} for parameter in every)
            if length > FUNCTION_LINES or parameters > PARAMETERS:
                found[f"{name}::{function}"] = f"{length} lines, {parameters} parameters"
    return found


def test_modules_and_functions_stay_small_or_are_listed_as_exceptions() -> None:
    assert {name: size for name, size in _too_big().items() if name not in EXCEPTIONS} == {}


def test_every_listed_size_exception_is_still_needed() -> None:
    assert EXCEPTIONS.keys() - _too_big().keys() == set()


# One test per rule for all modules: thousands of tests would cost more than the checks.
def test_every_module_has_a_docstring() -> None:
    assert [name for name, tree in _trees().items() if not ast.get_docstring(tree)] == []


def test_no_module_or_class_has_a_generic_name() -> None:
    found = {}
    for name, tree in _trees().items():
        words = set(re.split(r"[/_.]", name)) - (BANNED if name in NAMED_BY_OTHERS else set())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                words |= {word.lower() for word in re.findall(r"[A-Z]+[a-z]*|[a-z]+", node.name)}
        if words & BANNED:
            found[name] = words & BANNED

    assert found == {}


def test_input_is_not_checked_by_assert() -> None:
    assert [
        f"{name}:{node.lineno}"
        for name, tree in _trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ] == []


def test_code_below_the_server_uses_only_the_monotonic_clock() -> None:
    wrong = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
    last = {word.rpartition(".")[2] for word in wrong}

    assert [
        f"{name}:{node.lineno}"
        for name, tree in _trees().items()
        if name.startswith(BELOW_THE_SERVER)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in last and ast.unparse(node) in wrong
    ] == []


def test_status_codes_and_json_stay_in_the_server() -> None:
    wrong = {"http", "json", "orjson", "simdjson", "socket", "fastapi", "uvicorn"}

    assert [
        f"{name}: {imported}"
        for name, tree in _trees().items()
        if name.startswith(BELOW_THE_SERVER)
        for imported in _imported(tree)
        if imported.partition(".")[0] in wrong
    ] == []


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a module imports, except by relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def _documents() -> dict[str, str]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in found}


def test_every_source_file_named_in_the_docs_exists() -> None:
    ours = re.compile(r"(?<![\w/.])(?:server|batching|backends|perf|tests)/[\w/*]+\.py\b")

    assert [
        f"{document}: {path}"
        for document, text in _documents().items()
        for path in ours.findall(text)
        if not any(ROOT.glob(path))
    ] == []


def test_every_module_named_in_the_architecture_docs_exists() -> None:
    """Elsewhere in the docs, a name without a folder may be a user's file."""
    ours = [*MODULES, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))]

    assert [
        f"{document}: {name}"
        for document, text in _documents().items()
        if document.startswith(("docs/adr/", "docs/architecture.md"))
        for name in re.findall(r"`([\w/*]+\.py)`", text)
        if not any(fnmatch(f"/{path}", f"*/{name}") for path in ours)
    ] == []


def test_every_dotted_penstock_name_in_the_docs_can_be_imported() -> None:
    dotted = re.compile(r"\bpenstock\.((?:server|batching|backends|perf)(?:\.\w+)+)")

    assert [
        f"{document}: {name}"
        for document, text in _documents().items()
        for name in dotted.findall(text)
        if not _is_there(name.replace(".", "/"))
    ] == []


def _is_there(path: str) -> bool:
    """Return whether the path is a module, a package, or a name at the top level of a module."""
    if f"{path}.py" in MODULES or f"{path}/__init__.py" in MODULES:
        return True
    module, _, name = path.rpartition("/")
    tree = _trees().get(f"{module}.py")
    return tree is not None and name in {getattr(node, "name", "") for node in tree.body}


def test_every_setting_has_its_line_in_the_docs() -> None:
    written = (ROOT / "docs" / "settings.md").read_text("utf-8")
    flags = ["--" + item.name.replace("_", "-") for item in known_settings()]

    assert [flag for flag in flags if f"| `{flag}` |" not in written] == []


def test_the_command_line_and_the_backends_import_nothing_heavy() -> None:
    runtimes = ("__init__", "onnx", "tensorflow")  # loading.py imports these with the first model of their kind
    backends = [path.stem for path in (ROOT / "backends").glob("*.py") if not path.stem.startswith(runtimes)]
    program = (
        f"import sys, penstock.server.cli, {', '.join(f'penstock.backends.{name}' for name in sorted(backends))}\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "[]"
