"""Environments: selects the Python of a worker. An environment described by a file is built once and kept.

Created by the composition root. Used by everything that starts workers: hooks, Python models.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Self

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import WorkerSpec
from penstock.server.settings import Settings

from .builder import EnvironmentBuilder
from .locks import FileLock
from .pythons import MIN_PYTHON, Python, inspect_python
from .recipe import Recipe, make_recipe

logger = logging.getLogger("penstock.environments")

REQUIRED_MODULES = ("numpy", "orjson")
"""The modules that code in a worker imports; each has the name of its package."""
FORMAT = "1"
"""Increase this when environments are built differently, so that older ones are not reused."""
MARKER_FILE = "whole.json"
"""The marker file of a complete environment, written last."""


def default_folder(environ: Mapping[str, str]) -> Path:
    """Return the default folder of environments. Source: XDG Base Directory, "cache".

    Raises: RuntimeError if there is no home folder.
    """
    cache = Path(environ.get("XDG_CACHE_HOME", ""))
    root = cache if cache.is_absolute() else Path.home() / ".cache"
    return root / "penstock" / "environments"


class Environments:
    """The environments of one server, in `folder`, which several servers and processes may share.

    Invariants: an environment that is returned is complete. It is built in its final place, since its scripts contain
    that path, and is valid once MARKER_FILE exists; the next builder removes an interrupted build. One process at a
    time builds it (`FOLDER/KEY.lock`); the others wait. `offline`: nothing is downloaded.
    If `folder` is omitted, the user's cache folder is used. It is looked up when first needed, because the user of a
    container often has no home.
    Threads: any; blocks, for minutes if an environment is built.
    """

    def __init__(
        self, folder: Path | None = None, *, offline: bool = False, required_modules: Sequence[str] = REQUIRED_MODULES
    ) -> None:
        self._folder = folder
        self._offline = offline
        self._required_modules = tuple(required_modules)
        self._closed = threading.Event()

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Create the Environments configured by the settings."""
        return cls(Path(settings.environments) if settings.environments else None, offline=settings.offline)

    def interpreter(
        self,
        spec: WorkerSpec,
        label: str,
        required_modules: Sequence[str] | None = None,
        min_version: tuple[int, int] = MIN_PYTHON,
    ) -> str:
        """Return the Python to run workers on, "" for the server's own; build its environment if it is not kept.

        `label` names the owner in messages and logs ("the hooks of model 'iris'"). `required_modules` is what an
        environment made elsewhere has to contain, if that is less than what is installed into one that is built here.
        `min_version` is the oldest suitable Python.
        Raises: InferError that says what to do: INVALID; NOT_READY when the server is stopping.
        """
        required_modules = self._required_modules if required_modules is None else required_modules
        if spec.requirements is None and not spec.packages:
            return (
                _check_existing(spec.interpreter, required_modules, spec, label, min_version)
                if spec.interpreter
                else ""
            )
        if spec.requirements is not None and spec.requirements.is_dir():  # an environment that is already unpacked
            python = spec.requirements / "bin" / "python"
            if not python.exists():
                text = f"{label}: requirements: folder {spec.requirements} is not an environment: it has no bin/python"
                raise InferError(Code.INVALID, text)
            return _check_existing(str(python), required_modules, spec, label, min_version)
        recipe = make_recipe(spec.requirements, spec.packages, label)
        base = (
            inspect_python(spec.interpreter, (), spec.environment, label, min_version)
            if spec.interpreter
            else Python.current()
        )
        if recipe.python and not f"{base.version_text}.".startswith(f"{recipe.python}."):
            # only a warning, as in pipenv: everything written for the images of 2019 asks for 3.6
            logger.warning(
                "%s: %s requires Python %s, but its interpreter is %s, %s: it may be the wrong version",
                label, recipe.source, recipe.python, base.path, base.version_text,
            )  # fmt: skip
        modules = required_modules if recipe.packed else self._required_modules
        folder = self._root(label) / _key(recipe, base, modules)
        return _find_complete(folder) or self._build(folder, recipe, base, label, modules, min_version)

    def _root(self, label: str) -> Path:
        try:
            return self._folder or default_folder(os.environ)
        except RuntimeError as error:
            text = f"{label}: its environment cannot be stored: the user has no home folder; set --environments"
            raise InferError(Code.INVALID, text) from error

    def close(self) -> None:
        """Cancel builds in progress. Threads: any; returns at once."""
        self._closed.set()

    def _build(
        self,
        folder: Path,
        recipe: Recipe,
        base: Python,
        label: str,
        modules: Sequence[str],
        min_version: tuple[int, int],
    ) -> str:
        """Build an environment, or wait until another process has."""
        if self._offline and not recipe.packed:
            raise InferError(
                Code.INVALID,
                f"{label}: the environment of {recipe.source} is not stored in {folder.parent}, and --offline forbids "
                f"downloads: start once without it, with this file and Python {base.version_text} at {base.path}",
            )
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock"), self._closed, label) as lock:
                if (python := _find_complete(folder)) is not None:
                    return python
                _remove(folder)
                start = time.monotonic()
                logger.info("%s: creating the environment of %s in %s", label, recipe.source, folder)
                try:
                    builder = EnvironmentBuilder(folder, recipe, base, label, lock, self._closed)
                    python = builder.build(modules, min_version, offline=self._offline)
                    _write_marker(folder, python, recipe, label)
                except BaseException:
                    _remove(folder)
                    raise
                logger.info("%s: its environment was created in %.0f s", label, time.monotonic() - start)
                return python
        except OSError as error:
            text = f"{label}: its environment cannot be stored in {folder.parent} (--environments): {error}"
            raise InferError(Code.INVALID, text) from error


def _check_existing(
    path: str, modules: Sequence[str], spec: WorkerSpec, label: str, min_version: tuple[int, int]
) -> str:
    python = inspect_python(path, modules, spec.environment, label, min_version)
    if python.missing:
        names = " ".join(python.missing)
        reasons = "; ".join(f"{name}: {why}" for name, why in python.missing.items())
        text = f"{label}: interpreter {path} lacks what a worker needs ({reasons}): {path} -m pip install {names}"
        raise InferError(Code.INVALID, text)
    return python.path


def _key(recipe: Recipe, base: Python, modules: Sequence[str]) -> str:
    """Return an environment's key: a hash of everything that determines its content."""
    parts = [FORMAT, recipe.digest, *sorted(modules)]
    if not recipe.packed:  # a packed one includes its own Python
        parts += [base.build, base.platform, base.prefix]
    return sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _find_complete(folder: Path) -> str | None:
    """Return the Python of a complete environment, if that Python still exists."""
    try:
        python: str = json.loads((folder / MARKER_FILE).read_text("utf-8"))["python"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError) as error:
        logger.warning("%s cannot be read, and is created again: %s", folder, error)
        return None
    return python if os.access(python, os.X_OK) else None


def _write_marker(folder: Path, python: str, recipe: Recipe, label: str) -> None:
    """Write the marker file atomically: it exists only with its content."""
    content = {"python": python, "made_of": str(recipe.source), "for": label}
    partial_file = folder / f"{MARKER_FILE}.half"
    with partial_file.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial_file.rename(folder / MARKER_FILE)


def _remove(folder: Path) -> None:
    if folder.exists():
        (folder / MARKER_FILE).unlink(missing_ok=True)  # first, since it is no longer complete
        shutil.rmtree(folder)
