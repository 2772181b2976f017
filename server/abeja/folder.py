"""Folder: the folder of a handler as what a server serves, and the Repository of it. Made by dialect.py.

Source: abejaruntime 1.1.1 and abeja-platform-model-proxy 2.6.5, for what they make of folders and variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.batching.spec import InstanceGroup, ModelSpec, WorkerSpec
from penstock.server.carrying.repository import CarriedRepository
from penstock.server.repository.address import is_remote
from penstock.server.repository.findings import Finding
from penstock.server.repository.scan import Defaults
from penstock.server.settings import Settings

ABEJA = "abeja"
"""The backend."""
NAME = "handler"
"""The model's name."""
DEFAULT = "main:handler"
MARKER = ".abeja"
LEVELS = 3


class AbejaFolder:
    """The folder that the handler works in, once `open` has found it; `path` is where it is looked for.

    It stands where Mirrors stand for repositories. Threads: any.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self.settings = settings
        self._environ = environ
        given = settings.model_repository[0] if settings.model_repository else environ.get("ABEJA_USER_MODEL_ROOT", "")
        self.path = Path(given or ".").absolute()

    def repository(self, defaults: Defaults) -> AbejaRepository:
        """Give the Repository of the handler."""
        return AbejaRepository(self, defaults)

    def wrong(self) -> Finding | None:
        """Say what is wrong with the path."""
        if self.settings.model_repository and is_remote(self.settings.model_repository[0]):
            return Finding(Path(self.settings.model_repository[0]), "a handler is served from a folder of this machine")
        return None if self.path.is_dir() else Finding(self.path, "no such folder")

    def open(self) -> None:
        """Check what must be right as a whole; it blocks. Raises: MistakesError."""

    def close(self) -> None:
        """Nothing was copied."""

    @property
    def handler(self) -> str:
        """What is served, `module:name`."""
        return self.settings.abeja_handler or self._environ.get("HANDLER", DEFAULT)

    def spec(self) -> ModelSpec:
        """Give the handler as a model; it blocks."""
        settings, place = self.settings, working_folder(self.path)
        options = {"handler": self.handler, "strict": str(settings.abeja_strict).lower()}
        worker = WorkerSpec(
            settings.abeja_interpreter, requirements_of(place) if settings.abeja_install else None,
            environment=self._variables(), timeout_s=settings.abeja_timeout_secs,
        )  # fmt: skip
        group = InstanceGroup(count=settings.abeja_workers)
        return ModelSpec(NAME, 1, place, ABEJA, options=options, worker=worker, instances=(group,))

    def _variables(self) -> dict[str, str]:
        """Give the variables that the handler finds changed."""
        result = self._environ.get("ABEJA_TRAINING_RESULT_DIR", "") or "abejainc_training_result"
        if not os.path.isabs(result):  # noqa: PTH117 - text to text: where nothing is yet, a link is none
            result = os.path.normpath(self.path / result)
        return {"HANDLER": self.handler, "ABEJA_TRAINING_RESULT_DIR": result}


def working_folder(root: Path) -> Path:
    """Find the folder that has one named `.abeja` in it: the root itself, or the nearest below, 3 levels down at most.

    Returns: the root, if there is none. Source: abejaruntime 1.1.1, which takes what the system lists first.
    """
    level = [root]
    for _ in range(LEVELS + 1):
        for folder in level:
            if (folder / MARKER).is_dir():
                return folder
        level = [each for folder in level for each in _folders_in(folder)]
    return root


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.is_dir())
    except OSError:  # one that may not be read
        return []


def requirements_of(folder: Path) -> Path | None:
    """Give the file that says what is to be installed: the Pipfile, where there are both; None for none."""
    return next((path for name in ("Pipfile", "requirements.txt") if (path := folder / name).exists()), None)


class AbejaRepository(CarriedRepository):
    """The handler as the one model of a repository."""

    unconfigurable = "it is a function"

    def __init__(self, folder: AbejaFolder, defaults: Defaults) -> None:
        super().__init__(folder.path, defaults)
        self._folder = folder

    def names(self) -> list[str]:
        """Give its name."""
        return [NAME]

    def spec(self, name: str) -> ModelSpec:
        """Give the handler as a model; it blocks."""
        return self._folder.spec()
