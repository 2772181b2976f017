"""Components: the PATH of a server that serves a Seldon component, and the Repository of it. Made by dialect.py.

A PATH is the folder that a component's container works in, one `Name.py`, or a graph, which graph/ reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec, WorkerSpec
from penstock.server.carrying.repository import CarriedRepository
from penstock.server.repository.address import is_remote
from penstock.server.repository.changes import fingerprint
from penstock.server.repository.findings import Finding, MistakesError
from penstock.server.repository.repository import Repository
from penstock.server.repository.scan import Defaults
from penstock.server.settings import Settings

from . import parameters
from .graph.nodes import NodeClass
from .graph.reading import demand, is_graph
from .modules import MODEL_NAME, S2I, built_with, of_their_own_name, unreadable, variables_of

SELDON = "seldon"
"""The backend."""
BESIDE = ("protobuf",)
"""What a component needs that its requirements.txt need not say: seldon-core brought it, and gRPC is read with it."""
_UNKNOWN = (
    f"which component? Say --seldon-component Name, or {MODEL_NAME} in {S2I} or the environment, or have one Name.py "
    "with a class Name"
)


class Components:
    """One folder, or file, and the name of the component in it. It stands where Mirrors stand for repositories.

    Threads: any, for what blocks.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self.settings = settings
        self.path = Path(settings.model_repository[0]).absolute()
        self.graph = is_graph(self.path)
        self._environ = environ

    @property
    def folder(self) -> Path:
        """Where the component works."""
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def component(self) -> str:
        """The component's name, as it was first found; "" where nothing says it, or too much does."""
        if self.settings.seldon_component:
            return self.settings.seldon_component
        if not self.path.is_dir():
            return self.path.stem
        said = self._built().get(MODEL_NAME) or self._environ.get(MODEL_NAME)
        if said:
            return said
        found = of_their_own_name(self.path)
        return found[0] if len(found) == 1 else ""

    @property
    def name(self) -> str:
        """The model's name, that of its class."""
        return self.component.rpartition(".")[2]

    @property
    def parameters(self) -> str:
        """What is said of the parameters, JSON."""
        return self.settings.seldon_parameters or self._environ.get("PREDICTIVE_UNIT_PARAMETERS", "[]")

    def repository(self, defaults: Defaults) -> Repository:
        """Give the Repository of the component, or of a graph's."""
        if self.graph:
            from .graph.repository import GraphRepository

            return GraphRepository(self.settings, self.path, defaults, self._environ)
        return ComponentRepository(self, defaults)

    def wrong(self) -> Finding | None:
        """Say which path is not what it has to be."""
        first, *others = self.settings.model_repository
        if is_remote(first):
            return Finding(Path(first), "a component is served from a folder on this machine")
        if others:
            return Finding(Path(others[0]), "there is one PATH to a component; several are served as a graph")
        if not self.path.exists():
            return Finding(self.path, "no such file or folder")
        if not self.graph and not self.path.is_dir() and self.path.suffix != ".py":
            return Finding(self.path, "no component: neither a folder, nor Name.py, nor a graph (.yaml, .json)")
        return None

    def mistakes(self) -> list[Finding]:
        """Say what keeps the component from being served, before any of its code is run; it blocks."""
        found = []
        if not self.component:
            several = [f"{name}.py" for name in of_their_own_name(self.folder)]
            text = _UNKNOWN + (f"; here are {', '.join(several)}" if several else "")
            found.append(Finding(self.path, text))
            found += [Finding(path, error.msg, error.lineno or 0) for path, error in unreadable(self.folder).items()]
        try:
            parameters.read(self.parameters)
        except parameters.BadParameterError as error:
            found.append(Finding(self.path, str(error)))
        return found

    def open(self) -> None:
        """Check what must be right as a whole; it blocks. Raises: MistakesError."""
        if self.graph:
            demand(self.path)
        elif found := self.mistakes():
            raise MistakesError(found)

    def close(self) -> None:
        """Nothing was copied."""

    def spec(self) -> ModelSpec:
        """Give the component as a model; it blocks."""
        environment = built_with(self.path, self._environ) if self.path.is_dir() else {}
        return spec_of(self.settings, self.name, NodeClass(self.folder, self.component), self.parameters, environment)

    def print(self) -> bytes:
        """Give what changes when a file of the component does; it blocks."""
        if self.settings.model_control_mode == "none":
            return b"-"  # nobody asks again, and a folder may be large
        places = [self.path, self.folder / S2I] if self.path.is_dir() else sorted(self.folder.glob("*.py"))
        return fingerprint(place for place in places if place.exists())

    def _built(self) -> dict[str, str]:
        return variables_of(self.folder / S2I) if self.path.is_dir() else {}


def spec_of(
    settings: Settings, name: str, code: NodeClass, given: str, environment: Mapping[str, str]
) -> ModelSpec:  # fmt: skip
    """Make the ModelSpec of a component: `given` are its parameters, JSON, `environment` further variables."""
    requirements = Path(settings.seldon_requirements).absolute() if settings.seldon_requirements else None
    options = {
        "component": code.component,
        "parameters": given,
        "strict": str(settings.seldon_strict).lower(),
        "batching": str(settings.seldon_batching).lower(),
        "max_requests": str(settings.seldon_max_requests),
        "max_requests_jitter": str(settings.seldon_max_requests_jitter),
    }
    worker = WorkerSpec(
        settings.seldon_interpreter, requirements, timeout_s=settings.seldon_timeout_secs,
        environment={**environment, "SELDON_LOG_LEVEL": _log_level(settings)},
        packages=() if requirements is None else BESIDE,
    )  # fmt: skip
    return ModelSpec(
        name, 1, code.folder, SELDON, options=options, worker=worker,
        instances=(InstanceGroup(count=settings.seldon_workers),),
        policy=BatchPolicy(default_max_batch_rows=settings.default_max_batch_size),
    )  # fmt: skip


def _log_level(settings: Settings) -> str:
    """Give the level from which on the server logs anything: what user code logs below it goes nowhere."""
    levels = {
        "DEBUG": settings.log_verbose > 0, "INFO": settings.log_info, "WARNING": settings.log_warning,
        "ERROR": settings.log_error,
    }  # fmt: skip
    return next((word for word, wanted in levels.items() if wanted), "CRITICAL")


class ComponentRepository(CarriedRepository):
    """The component as the one model of a repository, by the name of its class."""

    unconfigurable = "its class says it"

    def __init__(self, components: Components, defaults: Defaults) -> None:
        super().__init__(components.path, defaults)
        self._components = components

    def names(self) -> list[str]:
        """Give its name."""
        return [self._components.name]

    def spec(self, name: str) -> ModelSpec:
        """Give the component as a model; it blocks."""
        return self._components.spec()

    def fingerprint(self, name: str) -> bytes:
        """Give what changes when a file of the component does; it blocks. b"" of another name."""
        return self._components.print() if name == self._components.name else b""
