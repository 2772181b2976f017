"""Archives: the models of SageMaker's multi-model endpoint, each loaded from where SageMaker has unpacked its archive.

Called by sagemaker.py. Source: Triton server, sagemaker_server.cc; texts: Triton core, model_repository_manager.cc.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.server.repository.overrides import check_name
from penstock.server.repository.scan import CONFIG_FILE

if TYPE_CHECKING:
    from penstock.server.repository.control import ModelControl

NOT_EXPLICIT = "repository registration is not allowed if model control mode is not EXPLICIT"
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_ENSEMBLE = re.compile(r'platform:\s*"ensemble"')


@dataclass(frozen=True, slots=True, eq=False)
class Archive:
    """One archive: its repository folder, the name its model is served by, and the folders of its models."""

    folder: Path
    served_name: str
    models: Mapping[str, Path]


class Archives:
    """Loads and unloads archives; `loaded` maps SageMaker's names to those that serve.

    Their models are links in one folder, `root`, which is served like any repository, so a model can have the name that
    SageMaker uses, whatever its folder is called.
    Invariants: an archive's links exist exactly while it is held, from before its load until after its unload.
    Threads: the event loop's; disk access runs on others.
    """

    def __init__(
        self, root: Path, control: ModelControl, names: Callable[[], Iterable[str]], ready: Callable[[str], bool]
    ) -> None:  # fmt: skip
        """Create it. `names` lists the models of all repositories, and blocks; `ready` returns whether one is ready."""
        self._root = root
        self._control = control
        self._names = names
        self._ready = ready
        self._reserved: dict[Path, Archive] = {}
        self.loaded: dict[str, Archive] = {}

    def is_ready(self, archive: Archive) -> bool:
        """Return whether an archive's model is ready."""
        return self._ready(archive.served_name)

    async def load(self, name: str, url: str, target: str) -> bool:
        """Load the archive unpacked at `url`; its model is served under the name of `target`.

        Returns: False, without any effect, for a system path. Raises: InferError (ALREADY_EXISTS: it is loaded;
        INVALID: a wrong name, or there is no model, or it does not load).
        """
        check_name(escape_target(target))
        # abspath() keeps two leading slashes
        folder = Path("/", os.path.abspath(url).lstrip("/"))  # noqa: PTH100 - resolve() follows links
        if f"{folder}/".startswith(_SYSTEM):
            return False
        archive = await asyncio.to_thread(find_archive, folder, escape_target(target))
        existing = set(await asyncio.to_thread(self._names))
        self._reserve(archive, existing)
        try:
            await asyncio.to_thread(self._link, archive)
            await self._control.load(archive.served_name)
        except BaseException:
            await self._discard(archive)
            raise
        self.loaded[name] = archive
        return True

    async def _discard(self, archive: Archive) -> None:
        """Remove an archive that does not load: SageMaker makes room, and tries again."""
        for name in archive.models:
            with contextlib.suppress(InferError):
                # it would keep the server from being ready, and the models of its steps are still loaded
                await self._control.unload(name)
        await self._release(archive)

    def _reserve(self, archive: Archive, existing: set[str]) -> None:
        """Reserve the folder and the names of an archive. Raises: InferError."""
        if archive.folder in self._reserved:
            text = f"model repository '{archive.folder}' has already been registered"
            raise InferError(Code.ALREADY_EXISTS, text)
        reserved = existing.union(*(other.models for other in self._reserved.values()))
        if archive.served_name in reserved:
            name = archive.served_name
            text = f"failed to register '{name}', there is a conflicting mapping for '{name}'"
            raise InferError(Code.ALREADY_EXISTS, text)
        if conflicts := reserved & archive.models.keys():
            text = (
                f"failed to register '{archive.folder}', its model '{min(conflicts)}' has the name of an existing model"
            )
            raise InferError(Code.INVALID, text)
        self._reserved[archive.folder] = archive

    async def unload(self, name: str) -> bool:
        """Unload an archive's model, and those that were loaded for it. Returns: whether there was one of that name.

        Returns when its accepted requests are finished. Raises: InferError.
        """
        archive = self.loaded.pop(name, None)
        if archive is None:
            return False
        try:
            await self._control.unload(archive.served_name, dependents=True)
        except BaseException:
            self.loaded[name] = archive
            raise
        await self._release(archive)
        return True

    async def _release(self, archive: Archive) -> None:
        await asyncio.to_thread(self._unlink, archive)
        self._reserved.pop(archive.folder, None)

    def _link(self, archive: Archive) -> None:
        try:
            for name, folder in archive.models.items():
                (self._root / name).symlink_to(folder, target_is_directory=True)
        except OSError as error:
            text = f"failed to register '{archive.folder}': {error.strerror}"
            raise InferError(Code.INVALID, text) from None

    def _unlink(self, archive: Archive) -> None:
        for name in archive.models:
            (self._root / name).unlink(missing_ok=True)


def escape_target(target: str) -> str:
    """Return the name under which a target is served: a target may be a path, but a name is a folder's."""
    return target.replace("/", "%2F")


def find_archive(folder: Path, target: str) -> Archive:
    """Inspect the folder of an unpacked archive; blocks.

    The folder is a model, or it contains one, or an ensemble beside the models of its steps.
    Raises: InferError (INVALID).
    """
    try:
        if (folder / CONFIG_FILE).is_file():
            return Archive(folder.parent, target, {target: folder})
        subfolders = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
        ensembles = [subfolder for subfolder in subfolders if _is_ensemble(subfolder / CONFIG_FILE)]
    except (OSError, ValueError):  # a path with a NUL byte
        text = f"failed to register '{folder}', repository not found"
        raise InferError(Code.INVALID, text) from None
    if not subfolders:
        raise InferError(Code.INVALID, f"failed to load '{target}', failed to poll from model repository")
    model_folder = (ensembles or subfolders)[-1]
    others = {subfolder.name: subfolder for subfolder in subfolders if subfolder is not model_folder}
    return Archive(folder, target, {**others, target: model_folder})


def _is_ensemble(config: Path) -> bool:
    return config.is_file() and _ENSEMBLE.search(config.read_text("utf-8", "replace")) is not None


class LinksFolder:
    """The folder of links, new for each server. Its contents belong to the archives."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="penstock-"))
        # also if a failed start does not close it
        self._remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder; the targets of its links stay."""
        self._remove()
