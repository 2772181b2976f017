"""Folder: the folder of a handler, and its Repository. Made by dialect.py.

Source: abejaruntime 1.1.1 and abeja-platform-model-proxy 2.6.5, for their handling of folders and variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.batching.spec import InstanceGroup, ModelSpec, WorkerSpec
from penstock.server.carrying.repository import CarriedRepository
from penstock.server.repository.address import is_remote
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.findings import Finding
from penstock.server.settings import Settings

ABEJA = "abeja"
"""The name of the backend."""
NAME = "handler"
"""The model's name."""
DEFAULT_HANDLER = "main:handler"
MARKER_FOLDER = ".abeja"
MAX_DEPTH = 3


class AbejaFolder:
    """The folder of a handler, used instead of Mirrors. `path` is where the search for its working folder starts.

    Threads: any.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self.settings = settings
        self._environ = environ
        path = settings.model_repository[0] if settings.model_repository else environ.get("ABEJA_USER_MODEL_ROOT", "")
        self.path = Path(path or ".").absolute()

    def repository(self, defaults: Defaults) -> AbejaRepository:
        """Return the Repository of the handler."""
        return AbejaRepository(self, defaults)

    def invalid_path(self) -> Finding | None:
        """Return the finding for an invalid path, None if it is valid."""
        if self.settings.model_repository and is_remote(self.settings.model_repository[0]):
            return Finding(Path(self.settings.model_repository[0]), "a handler must be in a local folder")
        return None if self.path.is_dir() else Finding(self.path, "no such folder")

    def open(self) -> None:
        """Do nothing: a handler is not checked before it is loaded."""

    def close(self) -> None:
        """Do nothing: nothing was copied."""

    @property
    def handler(self) -> str:
        """The handler, as `module:name`."""
        return self.settings.abeja_handler or self._environ.get("HANDLER", DEFAULT_HANDLER)

    def spec(self) -> ModelSpec:
        """Make the handler's ModelSpec; blocks."""
        settings, folder = self.settings, working_folder(self.path)
        options = {"handler": self.handler, "strict": str(settings.abeja_strict).lower()}
        worker = WorkerSpec(
            settings.abeja_interpreter, requirements_of(folder) if settings.abeja_install else None,
            environment=self._variables(), timeout_s=settings.abeja_timeout_secs,
        )  # fmt: skip
        group = InstanceGroup(count=settings.abeja_workers)
        return ModelSpec(NAME, 1, folder, ABEJA, options=options, worker=worker, instances=(group,))

    def _variables(self) -> dict[str, str]:
        """Return the variables that are set for the handler."""
        result_folder = self._environ.get("ABEJA_TRAINING_RESULT_DIR", "") or "abejainc_training_result"
        if not os.path.isabs(result_folder):  # noqa: PTH117 - text to text: a path that does not exist yet has no links
            result_folder = os.path.normpath(self.path / result_folder)
        return {"HANDLER": self.handler, "ABEJA_TRAINING_RESULT_DIR": result_folder}


def working_folder(root: Path) -> Path:
    """Find the folder that contains one named `.abeja`: the root itself, or the nearest below, at most 3 levels down.

    Returns: the root, if there is none. Source: abejaruntime 1.1.1, which takes the first one that the system lists.
    """
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        for folder in level:
            if (folder / MARKER_FOLDER).is_dir():
                return folder
        level = [each for folder in level for each in _folders_in(folder)]
    return root


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.is_dir())
    except OSError:  # not readable
        return []


def requirements_of(folder: Path) -> Path | None:
    """Return the file that lists the packages to install, the Pipfile if there are both; None if there is none."""
    return next((path for name in ("Pipfile", "requirements.txt") if (path := folder / name).exists()), None)


class AbejaRepository(CarriedRepository):
    """The handler as the only model of a repository."""

    unconfigurable = "it is a function"

    def __init__(self, folder: AbejaFolder, defaults: Defaults) -> None:
        super().__init__(folder.path, defaults)
        self._folder = folder

    def names(self) -> list[str]:
        """List its only name."""
        return [NAME]

    def spec(self, name: str) -> ModelSpec:
        """Make the handler's ModelSpec; blocks."""
        return self._folder.spec()
