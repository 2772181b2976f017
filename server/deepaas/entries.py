"""Entries: the models of a server, each a name and the location of its code, and their Repository.

Made by dialect.py. A PATH is `name=package.module[:attr]`; without any PATH, the installed entry points are served.
Source: deepaas 2.6.0, model/loading.py and model/v2: the namespace, which models are served, the default model.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.backends.errors import InferError
from penstock.batching.spec import InstanceGroup, ModelSpec, WorkerSpec
from penstock.server.carrying.repository import CarriedRepository
from penstock.server.environments.environments import Environments
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.findings import Finding, MistakesError
from penstock.server.settings import Settings

from .installed import NAMESPACE, Installed, installed_in

logger = logging.getLogger("penstock.deepaas")

DEEPAAS = "deepaas"
"""The name of the backend."""
EXTRA_PACKAGES = ("aiohttp", "marshmallow>=3.13,<4", "setuptools<82", "webargs")
"""Packages that models need even if their requirements.txt omits them: deepaas brought them, and arguments are parsed
with them. setuptools is for `pkg_resources`, with which the template of DEEPaaS modules reads its metadata; version
82 removed it."""
MODEL_VARIABLE = "DEEPAAS_V2_MODEL"
_PATH = re.compile(r"([^=/]+)=([^\W\d]\w*(?:\.[^\W\d]\w*)*(?::[^\W\d]\w*(?:\.[^\W\d]\w*)*)?)")
_NO_MODEL = "no DEEPaaS model: expected NAME=package.module or NAME=package.module:attr"


@dataclass(frozen=True, slots=True)
class Target:
    """A model: its name, and `module` or `module:attr`."""

    name: str
    target: str


BUILT_IN = Target("deepaas-test", "penstock.server.deepaas.inside.built_in:BuiltIn")
"""What is served if there is no model."""


def parse_target(path: str) -> Target | None:
    """Parse `NAME=package.module[:attr]`; None for any other text."""
    found = _PATH.fullmatch(path)
    return Target(found[1], found[2]) if found else None


class Entries:
    """The models of one server. Used instead of Mirrors.

    `targets` is filled by `open`, since the Python that runs the models must be queried for installed ones.
    Threads: any thread, for methods that block.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self.settings = settings
        self.targets: dict[str, Target] = {}
        self._selected = settings.deepaas_model or environ.get(MODEL_VARIABLE, "")
        self._environments = Environments.from_settings(settings)

    def repository(self, defaults: Defaults) -> EntryRepository:
        """Return the Repository of the models."""
        return EntryRepository(self, defaults)

    def invalid_path(self) -> Finding | None:
        """Return the finding for a PATH or base path that is invalid, None if all are valid."""
        seen: set[str] = set()
        for path in self.settings.model_repository:
            found = parse_target(path)
            if found is None:
                return Finding(Path(path), _NO_MODEL)
            if found.name in seen:
                return Finding(Path(path), f"two models are named '{found.name}'")
            seen.add(found.name)
        base = self.settings.deepaas_base_path
        return Finding(Path(base), "--deepaas-base-path must begin with /") if base[:1] not in ("", "/") else None

    def open(self) -> None:
        """Find the models; blocks, for minutes if an environment is built. Raises: MistakesError."""
        installed = self._installed()
        paths = self.settings.model_repository
        targets = [Target(*path.split("=", 1)) for path in paths] or [Target(*each) for each in installed.entries]
        if self._selected:
            targets = [self._select(targets)]
        elif not targets:
            logger.warning("no model is installed or named: serving %s, an example", BUILT_IN.name)
            targets = [BUILT_IN]
        self.targets = {each.name: each for each in targets}

    def close(self) -> None:
        """Cancel environments being built."""
        self._environments.close()

    def spec(self, target: Target) -> ModelSpec:
        """Make a model's ModelSpec; blocks."""
        settings = self.settings
        options = {
            "target": target.target,
            "warm": str(settings.deepaas_warm).lower(),
            "accept_header": str(settings.deepaas_accept_header).lower(),
            "show_errors": str(settings.deepaas_show_errors).lower(),
        }
        group = InstanceGroup(count=settings.deepaas_workers)
        return ModelSpec(
            target.name, 1, Path.cwd(), DEEPAAS, options=options, worker=self._worker(), instances=(group,)
        )

    def _worker(self) -> WorkerSpec:
        settings = self.settings
        requirements = Path(settings.deepaas_requirements).absolute() if settings.deepaas_requirements else None
        return WorkerSpec(
            settings.deepaas_interpreter, requirements, timeout_s=settings.deepaas_timeout_secs,
            packages=() if requirements is None else EXTRA_PACKAGES,
        )  # fmt: skip

    def _installed(self) -> Installed:
        """Query the Python that runs the models. Raises: MistakesError."""
        try:
            python = self._environments.interpreter(self._worker(), "the models")
            installed = installed_in(python)
        except InferError as error:
            raise MistakesError([Finding(Path(NAMESPACE), error.message)]) from None
        if not installed.marshmallow.startswith("3."):
            has = f"has marshmallow {installed.marshmallow}" if installed.marshmallow else "lacks marshmallow"
            pip = f"{python} -m pip install 'marshmallow<4' webargs" if python else "pip install 'penstock[deepaas]'"
            text = f"the models' Python {has}, but their arguments require marshmallow 3: {pip}"
            raise MistakesError([Finding(Path(NAMESPACE), text)])
        return installed

    def _select(self, targets: Iterable[Target]) -> Target:
        """Return the one selected model; of several installed under one name, the last. Raises: MistakesError."""
        available = {each.name: each for each in targets}
        if self._selected in available:
            return available[self._selected]
        names = ", ".join(available) or "none"
        raise MistakesError([Finding(Path(NAMESPACE), f"there is no model '{self._selected}'; available: {names}")])


class EntryRepository(CarriedRepository):
    """The models as those of a repository."""

    unconfigurable = "it is in the module"

    def __init__(self, entries: Entries, defaults: Defaults) -> None:
        super().__init__(Path.cwd(), defaults)
        self._entries = entries

    def names(self) -> list[str]:
        """List the names."""
        return list(self._entries.targets)

    def spec(self, name: str) -> ModelSpec:
        """Make a model's ModelSpec; blocks."""
        return self._entries.spec(self._entries.targets[name])
