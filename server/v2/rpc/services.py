"""Services: every method served on the gRPC port: GRPCInferenceService, health and reflection.

Made by the composition root, which supplies their dependencies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.server.grpc.method import Method
from penstock.server.restricted import TRITON_SERVICE, RestrictedApis, restricted_methods

from .calls import Tasks
from .control import RepositoryRpcs, ServerRpcs
from .extensions import MemoryRpcs, SettingsRpcs
from .health import HealthRpcs
from .inference import RpcInference
from .model_infer import ModelInfer
from .reflection import Reflection
from .stream import ModelStreamInfer
from .ticker import Ticker

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.server.engines import ServingEngine
    from penstock.server.health import Health
    from penstock.server.hooks.runner import Hooks
    from penstock.server.v2.cuda_regions import CudaRegions
    from penstock.server.v2.forwarding import Forwarding
    from penstock.server.v2.logging_settings import LogSettings
    from penstock.server.v2.regions import Regions
    from penstock.server.v2.repository import LoadsModels
    from penstock.server.v2.system_regions import SystemRegions
    from penstock.server.v2.trace_settings import TraceSettings

    from .control import Configurations


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceDependencies:
    """The dependencies of inference."""

    engine: ServingEngine
    health: Health
    hooks_of: Callable[[Model], Hooks]
    regions: Regions | None = None
    forwarding: Forwarding | None = None
    restricted: RestrictedApis | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcDependencies(InferenceDependencies):
    """The dependencies of all methods. `name` is the server's.

    `files` are the FileDescriptorProtos of a dialect, which reflection serves besides Penstock's.
    """

    repository: Configurations
    control: LoadsModels
    system: SystemRegions
    cuda: CudaRegions
    traces: TraceSettings
    logs: LogSettings
    name: str = "triton"
    extensions: Sequence[str] = ()
    files: Sequence[Any] = ()


def methods(parts: RpcDependencies) -> dict[str, Method]:
    """Return every method, by path."""
    ticker, tasks = Ticker(), Tasks()
    served = (
        *_inference(parts, ticker, tasks),
        *ServerRpcs(parts.engine, parts.repository, parts.health, parts.name).methods(parts.extensions, tasks),
        *RepositoryRpcs(parts.control).methods(tasks),
        *MemoryRpcs(parts.system, parts.cuda).methods(),
        *SettingsRpcs(parts.traces, parts.logs).methods(),
        *HealthRpcs(parts.health, ticker).methods(),
        *Reflection(parts.health, ticker, parts.files).methods(),
    )
    return restricted_methods({method.path: method for method in served}, parts.restricted or RestrictedApis())


def inference_methods(parts: InferenceDependencies) -> dict[str, Method]:
    """Return the methods that a front end answers itself, by path: inference and reflection."""
    ticker = Ticker()
    served = (*_inference(parts, ticker, Tasks()), *Reflection(parts.health, ticker).methods())
    return restricted_methods({method.path: method for method in served}, parts.restricted or RestrictedApis())


def _inference(parts: InferenceDependencies, ticker: Ticker, tasks: Tasks) -> tuple[Method, Method]:
    inference = RpcInference(parts.engine, parts.hooks_of, parts.regions, parts.forwarding)
    infer = ModelInfer(inference, tasks)
    stream = ModelStreamInfer(inference, parts.health, ticker)
    return (
        Method(TRITON_SERVICE + "ModelInfer", infer.begin),
        Method(TRITON_SERVICE + "ModelStreamInfer", streaming=stream.open),
    )
