"""Decides where a project's handler runs: in the server or in workers, and on which Python.

Called by entries.py and check.py.

Cortex ran each replica in a container: with the packages below, the project's requirements, the project as the working
folder and at /mnt/project, and processes of its own. A handler that depends on none of these runs in the server's
process, where a call is cheapest; any other runs in workers.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.backends.cpus import usable_cpus
from penstock.backends.errors import Code, InferError
from penstock.batching.spec import WorkerSpec
from penstock.server.hooks.writes import (
    MACHINE,
    PICKLE_SUFFIXES,
    PROCESS,
    GlobalWrite,
    find_global_writes,
    source_files,
)

SHARED_WORKERS = 4
"""The most workers of a handler without state: any of them takes any call, and requests enter the model while it runs,
so that batches do not need more workers than CPUs."""
EXCLUSIVE_WORKERS = 8
"""The same for a handler that may keep state between its hooks: each worker has one request at a time, so a batch has
at most as many rows as there are workers. As many as instances in the server."""
_TENSORFLOW = "tensorflow-cpu" if platform.machine() in {"x86_64", "AMD64"} else "tensorflow"
PREINSTALLED: Mapping[str, str] = {
    "boto3": "boto3", "botocore": "boto3", "dill": "dill", "msgpack": "msgpack", "numpy": "numpy",
    "onnxruntime": "onnxruntime", "requests": "requests", "tensorflow": _TENSORFLOW,
}  # fmt: skip
"""The packages that Cortex installed, by import name. Without its versions: those of 2019 have no wheels for current
Pythons. Source: Cortex 0.9 and 0.10."""
HEAVY = frozenset((
    "catboost", "cupy", "fastai", "flair", "jax", "keras", "lightgbm", "mxnet", "paddle", "pyspark",
    "pytorch_lightning", "ray", "spacy", "tensorflow", "tensorflow_hub", "tensorflow_probability", "tensorflow_text",
    "theano", "torch", "torchvision", "transformers", "xgboost",
))  # fmt: skip
"""What the server's process does not import: packages with threads and libraries of their own, which conflict with
onnxruntime's."""
_FILE_FUNCTIONS = frozenset((
    "Path", "chdir", "exists", "fromfile", "genfromtxt", "getcwd", "glob", "iglob", "imread", "isdir", "isfile",
    "listdir", "load_model", "load_workbook", "loadtxt", "open", "read_csv", "read_excel", "read_json", "read_parquet",
    "read_pickle", "read_table", "scandir", "walk",
))  # fmt: skip
"""Functions that take paths, which may be relative to the project."""
_LOADERS = frozenset(("joblib", "numpy", "np", "pickle", "dill"))
_LOGGING_SETTERS = frozenset(
    ("basicConfig", "dictConfig", "fileConfig", "disable", "captureWarnings", "setLoggerClass", "shutdown")
)
_TEXT_SUFFIXES = (".py", ".json", ".yaml", ".yml", ".txt", ".cfg", ".ini", ".toml", ".csv")
_MOUNT_PREFIX = b"/mnt"
_MAX_FILES, _MAX_FILE_BYTES = 500, 256 << 10
_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a handler depends on. `reasons`: why it has workers, for a person.

    Without reasons, it runs in the server, unless measurements show that it blocks the server. `writes` are the places
    where it may keep state. `packages` are those that its environment needs in addition to `requirements`.
    """

    reasons: tuple[str, ...] = ()
    requirements: Path | None = None
    packages: tuple[str, ...] = ()
    writes: tuple[GlobalWrite, ...] = ()
    heavy: bool = False

    @property
    def worker(self) -> WorkerSpec:
        """The Python on which its workers run, if it has any."""
        return WorkerSpec(requirements=self.requirements, packages=self.packages)

    @property
    def workers(self) -> int | None:
        """The number of workers; None if it needs none."""
        if not self.reasons:
            return None
        reaches = {write.reach for write in self.writes}
        if MACHINE in reaches:
            return 1  # another request must not change what it leaves on disk
        if self.writes:
            return max(2, min(usable_cpus(), EXCLUSIVE_WORKERS)) if self.heavy else EXCLUSIVE_WORKERS
        return max(1, min(usable_cpus(), SHARED_WORKERS))


def roots_of(project: Path, python_path: str) -> tuple[Path, ...]:
    """Return the folders that contain a project's modules, the project first. Raises: InferError (INVALID)."""
    if not python_path:
        return (project,)
    folder = (project / python_path).resolve()
    if not folder.is_dir() or not folder.is_relative_to(project.resolve()):
        raise InferError(Code.INVALID, f"python_path: {python_path}: no such folder in the project")
    return (project,) if folder == project.resolve() else (project, project / folder.relative_to(project.resolve()))


def needs_of(project: Path, handler: Path, roots: Sequence[Path]) -> Needs:
    """Find what a handler depends on. No code is run; loading reports a handler that cannot be read."""
    trees = _parse_trees(handler, roots)
    imported = set(_imported_packages(trees, roots)) | ({"dill"} if handler.suffix in PICKLE_SUFFIXES else set())
    writes = _find_writes(handler, roots)
    requirements = _requirements_file(project)
    reasons = list(_reasons(project, handler, trees))
    required = {PREINSTALLED[name] for name in imported if name in PREINSTALLED}
    missing = sorted(name for name in imported if name in PREINSTALLED and importlib.util.find_spec(name) is None)
    heavy = sorted(imported & HEAVY)
    if requirements is not None:
        reasons.insert(0, f"{requirements.name} lists packages to install")
    if missing:
        reasons.append(f"it imports {', '.join(missing)}, which the server's Python lacks")
    if heavy:
        reasons.append(f"it imports {', '.join(heavy)}, which the server's process must not import")
    reasons += sorted({f"it may keep {write}" for write in writes if write.reach in {PROCESS, MACHINE}})
    packages: tuple[str, ...] = ()
    if requirements is not None or missing:
        requirements_text = _requirements_text(requirements) if requirements is not None else ""
        packages = tuple(sorted(each for each in required - {"numpy"} if not _lists_package(requirements_text, each)))
    return Needs(tuple(reasons), requirements, packages, tuple(writes), bool(heavy))


def _parse_trees(handler: Path, roots: Sequence[Path]) -> list[ast.Module]:
    if handler.suffix in PICKLE_SUFFIXES:
        return []
    try:
        return [tree for _, tree in source_files(handler, roots)]
    except (OSError, SyntaxError, ValueError):
        return []  # loading reports what is wrong


def _find_writes(handler: Path, roots: Sequence[Path]) -> list[GlobalWrite]:
    try:
        return find_global_writes(handler, roots=roots, strict=True)
    except (OSError, SyntaxError, ValueError):
        return []


def _imported_packages(trees: Sequence[ast.Module], roots: Sequence[Path]) -> Iterator[str]:
    """Yield the top-level names of imports, except modules of the project."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for top in {name.partition(".")[0] for name in names}:
            if not any((root / f"{top}.py").is_file() or (root / top / "__init__.py").is_file() for root in roots):
                yield top


def _requirements_file(project: Path) -> Path | None:
    """Return the file that lists the packages to install; None if there are none."""
    requirements_txt = project / "requirements.txt"
    if requirements_txt.is_file() and _requirements_text(requirements_txt).strip():
        return requirements_txt
    pipfile = next((project / name for name in ("Pipfile", "Pipfile.lock") if (project / name).is_file()), None)
    return pipfile if not requirements_txt.is_file() else None


def _requirements_text(requirements: Path) -> str:
    try:
        return _COMMENT.sub("", requirements.read_text("utf-8", "replace"))
    except OSError:
        return "?"  # building the environment reports what is wrong


def _lists_package(requirements_text: str, package: str) -> bool:
    """Return whether a requirements file or Pipfile names a package, or another build of it."""
    word = "tensorflow" if package.startswith("tensorflow") else package
    builds = r"([_-](cpu|gpu))?" if word in {"tensorflow", "onnxruntime"} else ""
    return (
        re.search(
            rf'^["\s]*{re.escape(word)}{builds}\s*($|[\[=<>!~;@"])', requirements_text, re.MULTILINE | re.IGNORECASE
        )
        is not None
    )


def _reasons(project: Path, handler: Path, trees: Sequence[ast.Module]) -> Iterator[str]:
    """Yield why its code depends on a process or a folder of its own."""
    if any(_MOUNT_PREFIX in content for content in _text_contents(project)):
        yield "its files refer to /mnt, where the project is"
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if handler.suffix not in PICKLE_SUFFIXES and _opens_files(project, nodes):
        yield "it may open files, with the project as its folder"
    calls = {getattr(node.func, "attr", getattr(node.func, "id", "")) for node in nodes if isinstance(node, ast.Call)}
    if settings := sorted(calls & _LOGGING_SETTERS):
        yield f"it calls {', '.join(settings)}, which would change the server's logging"
    if "subprocess" in {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}:
        yield "it starts programs, with the project as their folder"


def _opens_files(project: Path, nodes: Sequence[ast.AST]) -> bool:
    for node in nodes:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            owner = getattr(getattr(node.func, "value", None), "id", "")
            if name in _FILE_FUNCTIONS and not (
                name == "open" and owner in {"Image", "webbrowser"} and not _may_take_path(node)
            ):
                return True
            if name == "load" and owner in _LOADERS:
                return True
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_project_file(project, node.value):
            return True
    return False


def _may_take_path(call: ast.Call) -> bool:
    """Return whether a call's first argument may be a path: `Image.open(BytesIO(...))` opens none."""
    return not (call.args and isinstance(call.args[0], ast.Call))


def _is_project_file(project: Path, text: str) -> bool:
    if not text or len(text) > 255 or "\n" in text or "\0" in text or text in {".", "..", "/"}:
        return False
    # Path.exists raises for a name that is too long, even if it has few letters
    return not text.startswith("/") and ("." in text or "/" in text) and os.path.exists(project / text)  # noqa: PTH110


def _text_contents(project: Path) -> Iterator[bytes]:
    """Yield the contents of the project's small text files."""
    count = 0
    for path in sorted(project.rglob("*")):
        hidden = any(part.startswith(".") or part == "site-packages" for part in path.relative_to(project).parts)
        if hidden or path.suffix not in _TEXT_SUFFIXES or not path.is_file():
            continue
        count += 1
        if count > _MAX_FILES:
            return
        with contextlib.suppress(OSError):  # loading reports what is wrong, if the file is needed
            if path.stat().st_size <= _MAX_FILE_BYTES:
                yield path.read_bytes()
