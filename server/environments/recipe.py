"""Recipe: how to build an environment, read from a requirements.txt, a Pipfile or a packed environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from penstock.backends.errors import Code, InferError

PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
# Folders left by builds, which are not part of a project.
_IGNORED_NAMES = frozenset(("__pycache__", "build", "node_modules"))


@dataclass(frozen=True, slots=True)
class Install:
    """One run of pip: its arguments after `install`, and requirements that are written to a file for it."""

    arguments: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to build an environment. `digest` changes with everything that determines its content.

    `installs` run in order, in the folder of `source`. `python` is the requested version, "" for any. `packed`:
    `source` is an archive of the whole environment, with its Python.
    """

    source: Path
    digest: str
    installs: tuple[Install, ...] = ()
    python: str = ""
    packed: bool = False


class Digest:
    """A hash of everything that determines an environment, in reading order."""

    def __init__(self) -> None:
        self._hash = sha256()

    def add(self, value: str | bytes) -> None:
        """Add a text together with its length."""
        content = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        self._hash.update(len(content).to_bytes(8, "little") + content)

    def add_path(self, path: Path) -> None:
        """Add a file's content, or the names and contents of a folder, without build leftovers."""
        if path.is_file():
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    self.add(part)
            self.add(b"")
            return
        for child in sorted(path.iterdir()):
            if not (child.name in _IGNORED_NAMES or child.name.startswith(".") or child.name.endswith(".egg-info")):
                self.add(child.name)
                self.add_path(child)

    def __str__(self) -> str:
        return self._hash.hexdigest()


def make_recipe(path: Path | None, packages: Sequence[str], label: str) -> Recipe:
    """Read the Recipe of a file, and add packages to it; without a file, the Recipe is the packages alone.

    A packed environment stays unchanged. Raises: InferError (INVALID).
    """
    recipe = Recipe(Path(", ".join(packages)), "") if path is None else read_recipe(path, label)
    if recipe.packed or not packages:
        return recipe
    digest = Digest()
    for part in (recipe.digest, *packages):
        digest.add(part)
    return replace(recipe, digest=str(digest), installs=(*recipe.installs, Install(tuple(packages))))


def read_recipe(path: Path, label: str) -> Recipe:
    """Read the Recipe of a file; the file's name determines its kind.

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
    # it has gigabytes and every starting process reads it: path, size and time must suffice
    stat = path.stat()
    return Recipe(path, f"{path} {stat.st_size} {stat.st_mtime_ns}", packed=True)
