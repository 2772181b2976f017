"""Components: the PATH of a server that serves a Seldon component, and its Repository. Made by dialect.py.

A PATH is the working folder of a component's container, one `Name.py`, or a graph, which graph/ reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec, WorkerSpec
from penstock.server.carrying.repository import CarriedRepository
from penstock.server.repository.address import is_remote
from penstock.server.repository.changes import fingerprint_files
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.findings import Finding, MistakesError
from penstock.server.repository.repository import Repository
from penstock.server.settings import Settings

from . import parameters
from .graph.graph_file import is_graph, read_valid
from .graph.nodes import NodeClass
from .modules import MODEL_NAME, S2I, component_modules, image_variables, syntax_errors, variables_of

SELDON = "seldon"
"""The name of the backend."""
REQUIRED_PACKAGES = ("protobuf",)
"""Packages a component needs even if its requirements.txt omits them: seldon-core brought them, and gRPC uses them."""
_UNKNOWN_COMPONENT = (
    f"no component is named: pass --seldon-component Name, set {MODEL_NAME} in {S2I} or the environment, or have one "
    "Name.py with a class Name"
)


class Components:
    """One folder or file, and the name of the component in it. Used instead of Mirrors.

    Threads: any thread, for methods that block.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self.settings = settings
        self.path = Path(settings.model_repository[0]).absolute()
        self.graph = is_graph(self.path)
        self._environ = environ

    @property
    def folder(self) -> Path:
        """The component's working folder."""
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def component(self) -> str:
        """The component's name, as first found; "" if it is not configured or is ambiguous."""
        if self.settings.seldon_component:
            return self.settings.seldon_component
        if not self.path.is_dir():
            return self.path.stem
        name = self._image_variables().get(MODEL_NAME) or self._environ.get(MODEL_NAME)
        if name:
            return name
        names = component_modules(self.path)
        return names[0] if len(names) == 1 else ""

    @property
    def name(self) -> str:
        """The model's name: that of its class."""
        return self.component.rpartition(".")[2]

    @property
    def parameters(self) -> str:
        """The component's parameters, as JSON."""
        return self.settings.seldon_parameters or self._environ.get("PREDICTIVE_UNIT_PARAMETERS", "[]")

    def repository(self, defaults: Defaults) -> Repository:
        """Return the Repository of the component or of the graph."""
        if self.graph:
            from .graph.repository import GraphRepository

            return GraphRepository(self.settings, self.path, defaults, self._environ)
        return ComponentRepository(self, defaults)

    def invalid_path(self) -> Finding | None:
        """Return the finding for a PATH that cannot be served, None if it is valid."""
        first, *others = self.settings.model_repository
        if is_remote(first):
            return Finding(Path(first), "a component is served from a folder on this machine")
        if others:
            return Finding(Path(others[0]), "a component has a single PATH; to serve several components, use a graph")
        if not self.path.exists():
            return Finding(self.path, "no such file or folder")
        if not self.graph and not self.path.is_dir() and self.path.suffix != ".py":
            return Finding(self.path, "no component: neither a folder, nor Name.py, nor a graph (.yaml, .json)")
        return None

    def mistakes(self) -> list[Finding]:
        """List what prevents the component from being served, without running its code; blocks."""
        found = []
        if not self.component:
            candidates = [f"{name}.py" for name in component_modules(self.folder)]
            text = _UNKNOWN_COMPONENT + (f"; found: {', '.join(candidates)}" if candidates else "")
            found.append(Finding(self.path, text))
            found += [Finding(path, error.msg, error.lineno or 0) for path, error in syntax_errors(self.folder).items()]
        try:
            parameters.read(self.parameters)
        except parameters.BadParameterError as error:
            found.append(Finding(self.path, str(error)))
        return found

    def open(self) -> None:
        """Check the PATH as a whole; blocks. Raises: MistakesError."""
        if self.graph:
            read_valid(self.path)
        elif found := self.mistakes():
            raise MistakesError(found)

    def close(self) -> None:
        """Do nothing: nothing was copied."""

    def spec(self) -> ModelSpec:
        """Make the component's ModelSpec; blocks."""
        environment = image_variables(self.path, self._environ) if self.path.is_dir() else {}
        return spec_of(self.settings, self.name, NodeClass(self.folder, self.component), self.parameters, environment)

    def fingerprint(self) -> bytes:
        """Return a value that changes when a file of the component changes; blocks."""
        if self.settings.model_control_mode == "none":
            return b"-"  # the files are not polled, and a folder may be large
        paths = [self.path, self.folder / S2I] if self.path.is_dir() else sorted(self.folder.glob("*.py"))
        return fingerprint_files(path for path in paths if path.exists())

    def _image_variables(self) -> dict[str, str]:
        return variables_of(self.folder / S2I) if self.path.is_dir() else {}


def spec_of(
    settings: Settings, name: str, code: NodeClass, parameters: str, environment: Mapping[str, str]
) -> ModelSpec:  # fmt: skip
    """Make the ModelSpec of a component: `parameters` is JSON, `environment` has further variables."""
    requirements = Path(settings.seldon_requirements).absolute() if settings.seldon_requirements else None
    options = {
        "component": code.component,
        "parameters": parameters,
        "strict": str(settings.seldon_strict).lower(),
        "batching": str(settings.seldon_batching).lower(),
        "max_requests": str(settings.seldon_max_requests),
        "max_requests_jitter": str(settings.seldon_max_requests_jitter),
    }
    worker = WorkerSpec(
        settings.seldon_interpreter, requirements, timeout_s=settings.seldon_timeout_secs,
        environment={**environment, "SELDON_LOG_LEVEL": _log_level(settings)},
        packages=() if requirements is None else REQUIRED_PACKAGES,
    )  # fmt: skip
    return ModelSpec(
        name, 1, code.folder, SELDON, options=options, worker=worker,
        instances=(InstanceGroup(count=settings.seldon_workers),),
        policy=BatchPolicy(default_max_batch_rows=settings.default_max_batch_size),
    )  # fmt: skip


def _log_level(settings: Settings) -> str:
    """Return the lowest level that the server logs: user code need not produce records below it."""
    levels = {
        "DEBUG": settings.log_verbose > 0, "INFO": settings.log_info, "WARNING": settings.log_warning,
        "ERROR": settings.log_error,
    }  # fmt: skip
    return next((level for level, enabled in levels.items() if enabled), "CRITICAL")


class ComponentRepository(CarriedRepository):
    """The component as the only model of a repository, named after its class."""

    unconfigurable = "it is in the class"

    def __init__(self, components: Components, defaults: Defaults) -> None:
        super().__init__(components.path, defaults)
        self._components = components

    def names(self) -> list[str]:
        """List its only name."""
        return [self._components.name]

    def spec(self, name: str) -> ModelSpec:
        """Make the component's ModelSpec; blocks."""
        return self._components.spec()

    def fingerprint(self, name: str) -> bytes:
        """Return a value that changes when a file of the component changes, b"" for another name; blocks."""
        return self._components.fingerprint() if name == self._components.name else b""
