"""Recipe: what an environment is made of, read from a requirements.txt, a Pipfile or a packed environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from penstock.backends.errors import Code, InferError

PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
# What building a project leaves in it, and what is not part of it.
_NOT_PART = frozenset(("__pycache__", "build", "node_modules"))


@dataclass(frozen=True, slots=True)
class Install:
    """One run of pip: its arguments after `install`, and requirements that are written to a file for it."""

    arguments: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an environment is made. `digest` changes with whatever decides what is in it.

    `installs` are run in turn, in the folder of `source`. `python` is the version that it asks for, "" for any.
    `packed`: `source` is an archive of the whole environment, with its Python.
    """

    source: Path
    digest: str
    installs: tuple[Install, ...] = ()
    python: str = ""
    packed: bool = False


class Digest:
    """What decides an environment, in the order in which it is read."""

    def __init__(self) -> None:
        self._hash = sha256()

    def add(self, what: str | bytes) -> None:
        """Add one text; where it ends is part of it."""
        content = what.encode("utf-8", "surrogateescape") if isinstance(what, str) else what
        self._hash.update(len(content).to_bytes(8, "little") + content)

    def add_path(self, path: Path) -> None:
        """Add a file's content, or names and contents of a folder; of what a build leaves there nothing."""
        if path.is_file():
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    self.add(part)
            self.add(b"")
            return
        for child in sorted(path.iterdir()):
            if not (child.name in _NOT_PART or child.name.startswith(".") or child.name.endswith(".egg-info")):
                self.add(child.name)
                self.add_path(child)

    def __str__(self) -> str:
        return self._hash.hexdigest()


def recipe_of(path: Path | None, packages: Sequence[str], label: str) -> Recipe:
    """Read what an environment is to be made of, and add packages; of packages alone, where there is no file.

    A packed environment is as it is. Raises: InferError (INVALID).
    """
    recipe = Recipe(Path(", ".join(packages)), "") if path is None else read_recipe(path, label)
    if recipe.packed or not packages:
        return recipe
    digest = Digest()
    for part in (recipe.digest, *packages):
        digest.add(part)
    return replace(recipe, digest=str(digest), installs=(*recipe.installs, Install(tuple(packages))))


def read_recipe(path: Path, label: str) -> Recipe:
    """Read what an environment is to be made of; which kind of file it is, its name says.

    Raises: InferError (INVALID).
    """
    from .pipfile import read_pipfile
    from .requirements import read_requirements

    path = path.absolute()
    try:
        if path.name.endswith(PACKED):
            return _packed(path)
        if path.name in {"Pipfile", "Pipfile.lock"}:
            return read_pipfile(path)
        return read_requirements(path)
    except OSError as error:
        text = f"{label}: {error.filename or path}: {error.strerror or error}"
        raise InferError(Code.INVALID, text) from error
    except ValueError as error:
        raise InferError(Code.INVALID, f"{label}: {error}") from error


def _packed(path: Path) -> Recipe:
    # gigabytes, and read by every process that starts: where it is, its size and its time have to do
    about = path.stat()
    return Recipe(path, f"{path} {about.st_size} {about.st_mtime_ns}", packed=True)
