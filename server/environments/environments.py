"""Environments: which Python a worker runs on; one that is made of a file is made once and kept.

Made by the composition root. Asked by whoever starts workers: hooks, Python models.
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

from .locks import Lock
from .making import Making
from .pythons import OLDEST, Python, ask
from .recipe import Recipe, recipe_of

logger = logging.getLogger("penstock.environments")

NEEDS = ("numpy", "orjson")
"""What the code in a worker imports; a package and its module have the same name."""
FORM = "1"
"""To be raised when environments are made in another way, so that older ones are not taken for the new."""
WHOLE = "whole.json"
"""Stands in the folder of an environment that is whole, written last."""


def default_folder(environ: Mapping[str, str]) -> Path:
    """Give where environments are kept unless the settings say otherwise. Source: XDG Base Directory, "cache".

    Raises: RuntimeError where there is no home folder.
    """
    cache = Path(environ.get("XDG_CACHE_HOME", ""))
    root = cache if cache.is_absolute() else Path.home() / ".cache"
    return root / "penstock" / "environments"


class Environments:
    """The environments of one server, in `folder`, which several servers and processes may share.

    Invariants: an environment that is handed out is whole. It is made where it stays, since its scripts name that
    place, and counts from when WHOLE is there; what was interrupted is removed by who comes next. One process at a
    time makes it (`FOLDER/KEY.lock`), the others wait. `offline`: nothing is fetched.
    Without `folder` they are in the user's cache folder, which is looked for when one is needed: the user of a
    container has often no home.
    Threads: any; it blocks, for minutes where an environment is made.
    """

    def __init__(self, folder: Path | None = None, *, offline: bool = False, needs: Sequence[str] = NEEDS) -> None:
        self._given = folder
        self._offline = offline
        self._needs = tuple(needs)
        self._closed = threading.Event()

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Make those that the settings ask for."""
        return cls(Path(settings.environments) if settings.environments else None, offline=settings.offline)

    def interpreter(
        self, spec: WorkerSpec, label: str, must: Sequence[str] | None = None, oldest: tuple[int, int] = OLDEST
    ) -> str:
        """Give the Python to run workers on, "" for the server's own; make its environment if it is not kept.

        `label` says whose it is in messages and logs ("the hooks of model 'iris'"). `must` is what an environment that
        somebody else has made has to bring, where that is less than what is put into one that is made here. `oldest` is
        the first Python that will do.
        Raises: InferError that says what to do: INVALID; NOT_READY when the server is stopping.
        """
        must = self._needs if must is None else must
        if spec.requirements is None and not spec.packages:
            return _as_it_is(spec.interpreter, must, spec, label, oldest) if spec.interpreter else ""
        if spec.requirements is not None and spec.requirements.is_dir():  # an environment that is unpacked already
            python = spec.requirements / "bin" / "python"
            if not python.exists():
                text = f"{label}: requirements: the folder {spec.requirements} is no environment: it has no bin/python"
                raise InferError(Code.INVALID, text)
            return _as_it_is(str(python), must, spec, label, oldest)
        recipe = recipe_of(spec.requirements, spec.packages, label)
        base = ask(spec.interpreter, (), spec.environment, label, oldest) if spec.interpreter else Python.own()
        if recipe.python and not f"{base.spelled}.".startswith(f"{recipe.python}."):
            # no more than a warning, as of pipenv: all that was written for the images of 2019 asks for 3.6
            logger.warning(
                "%s: %s asks for Python %s, and its interpreter is %s, %s: it may not be what it was written for",
                label, recipe.source, recipe.python, base.path, base.spelled,
            )  # fmt: skip
        needs = must if recipe.packed else self._needs
        folder = self._root(label) / _key(recipe, base, needs)
        if (kept := _kept(folder)) is None:
            kept = self._made(folder, recipe, base, label, needs, oldest)
        return kept

    def _root(self, label: str) -> Path:
        try:
            return self._given or default_folder(os.environ)
        except RuntimeError as error:
            text = (
                f"{label}: its environment cannot be kept: the user has no home folder; say where with --environments"
            )
            raise InferError(Code.INVALID, text) from error

    def close(self) -> None:
        """End what is being made. Threads: any; returns at once."""
        self._closed.set()

    def _made(
        self, folder: Path, recipe: Recipe, base: Python, label: str, needs: Sequence[str], oldest: tuple[int, int]
    ) -> str:
        """Make an environment, or wait until another process has."""
        if self._offline and not recipe.packed:
            raise InferError(
                Code.INVALID,
                f"{label}: the environment of {recipe.source} is not kept in {folder.parent}, and --offline says that "
                f"nothing is fetched: start once without it, with this file and Python {base.spelled} ({base.path})",
            )
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with Lock(folder.with_suffix(".lock"), self._closed, label) as lock:
                if (kept := _kept(folder)) is not None:
                    return kept
                _remove(folder)
                start = time.monotonic()
                logger.info("%s: making the environment of %s in %s", label, recipe.source, folder)
                try:
                    making = Making(folder, recipe, base, label, lock, self._closed)
                    python = making.make(needs, oldest, offline=self._offline)
                    _declare_whole(folder, python, recipe, label)
                except BaseException:
                    _remove(folder)
                    raise
                logger.info("%s: its environment is made, in %.0f s", label, time.monotonic() - start)
                return python
        except OSError as error:
            text = f"{label}: its environment cannot be kept in {folder.parent} (--environments): {error}"
            raise InferError(Code.INVALID, text) from error


def _as_it_is(path: str, needs: Sequence[str], spec: WorkerSpec, label: str, oldest: tuple[int, int]) -> str:
    python = ask(path, needs, spec.environment, label, oldest)
    if python.missing:
        words = " ".join(python.missing)
        said = "; ".join(f"{name}: {why}" for name, why in python.missing.items())
        text = f"{label}: interpreter {path} lacks what a worker needs ({said}): {path} -m pip install {words}"
        raise InferError(Code.INVALID, text)
    return python.path


def _key(recipe: Recipe, base: Python, needs: Sequence[str]) -> str:
    """Name an environment by everything that decides what is in it."""
    parts = [FORM, recipe.digest, *sorted(needs)]
    if not recipe.packed:  # which brings a Python of its own
        parts += [base.build, base.platform, base.prefix]
    return sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _kept(folder: Path) -> str | None:
    """Give the Python of an environment that is whole, and whose Python is still there."""
    try:
        python: str = json.loads((folder / WHOLE).read_text("utf-8"))["python"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError) as error:
        logger.warning("%s cannot be read, and is made anew: %s", folder, error)
        return None
    return python if os.access(python, os.X_OK) else None


def _declare_whole(folder: Path, python: str, recipe: Recipe, label: str) -> None:
    """Write what it is, all at once: the name is there when the content is."""
    said = {"python": python, "made_of": str(recipe.source), "for": label}
    half = folder / f"{WHOLE}.half"
    with half.open("w", encoding="utf-8") as file:
        json.dump(said, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    half.rename(folder / WHOLE)


def _remove(folder: Path) -> None:
    if folder.exists():
        (folder / WHOLE).unlink(missing_ok=True)  # first: what is being removed is not whole
        shutil.rmtree(folder)
