"""Serve: the composition root, where everything is made and wired.

`Server` is one server on the running loop, which tests can make and close repeatedly; `process.py` wraps it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.backends.backend import Loader
from penstock.backends.loading import LOADERS
from penstock.batching.caching.cache import Cache

from .clouds.clouds import CloudParts, Clouds
from .dialects import DialectParts, dialect_of
from .environments.environments import Environments
from .faults import Faults, own_workers
from .grpc.tls import TlsError, context_for
from .health import Health
from .hooks.engine import HookedEngine
from .isolated.loader import with_isolated
from .listening.listener import Port
from .listening.ports import make_grpc_port, make_http_port, make_metrics_port, share_totals, share_unread_limit
from .listening.sockets import StartError
from .options.sharing import make_devices, parse_cache
from .options.start_checks import start_problems
from .python_models.loading import PythonModels
from .python_models.metrics import CustomMetrics
from .python_models.upcalls import ServerSide
from .repository.control import ModelControl
from .repository.control_options import ControlOptions
from .repository.fields.batching import hold_requests
from .repository.fields.identity import PYTHON
from .repository.fields.sequences import HOLD_BACKLOG_VARIABLE
from .repository.findings import MistakesError
from .repository.mirrors import make_defaults
from .repository.remote import RemoteError
from .repository.transitions import OpensModels
from .settings import Settings
from .telemetry.observability import Observability, make_metrics
from .telemetry.page import make_metrics_app
from .threads import set_threads
from .v2.control import EXTENSIONS, ControlEndpoints
from .v2.forwarding import Forwarding
from .v2.generate import Generate
from .v2.inference import Inference
from .v2.plane import make_app
from .v2.repository import RepositoryEndpoints
from .v2.rpc.services import RpcDependencies, methods
from .v2.shared_memory import SharedMemory

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from penstock.batching.engine import Engine
    from penstock.batching.model import Model

    from .grpc.connection import GrpcListener
    from .grpc.method import Method
    from .hooks.runner import Hooks
    from .http.service import Service
    from .listening.listener import Listener
    from .telemetry.observability import ObservedPort

logger = logging.getLogger("penstock.serve")

METRICS_GRACE_S = 1.0
"""How long the metrics port may take to finish a scrape after everything else has ended."""


class HookedModels(OpensModels, Protocol):
    """What opens and publishes models, and provides their Hooks."""

    def hooks_of(self, model: Model) -> Hooks: ...
    async def stop(self, grace_s: float) -> int: ...


class Server:
    """One server on the running event loop: `open`, `load`, and finally `drain` and `close`.

    Invariants: it answers from `open` on, or from the end of `load`, and is ready once `load` has succeeded. From the
    start of `drain` it is not ready: requests on accepted connections are still answered, and later ones get an error.
    `on_device_lost` is called when the whole process loses a device; from then on the server is not live.
    """

    def __init__(
        self, settings: Settings, loaders: Mapping[str, Loader] = LOADERS,
        models: Callable[[Engine, Environments], HookedModels] = HookedEngine,
    ) -> None:  # fmt: skip
        self.clouds = Clouds(settings)
        self._settings = settings = self.clouds.settings
        self._loop = asyncio.get_running_loop()
        self._stopped = self._is_listening = False
        self.faults = Faults(settings, {"worker": own_workers})
        self.environments = Environments.from_settings(settings)
        self.engine = self.faults.engine(self._loop, with_isolated(loaders, self.environments.interpreter))
        self.engine.devices = devices = make_devices(settings)
        devices.on_lost = self._on_device_lost
        if cache_bytes := parse_cache(settings.cache_config):
            self.engine.cache = Cache(cache_bytes)
        self._models = models(self.engine, self.environments)
        self._dialect = dialect_of(settings)
        self._sources = self._dialect.sources()
        hold_count, backlog = hold_requests(os.environ), hold_requests(os.environ, HOLD_BACKLOG_VARIABLE)
        defaults = replace(make_defaults(settings), hold_requests=hold_count, hold_backlog=backlog)
        defaults = replace(defaults, links_folder=self.clouds.links_folder)
        self.repository = self._sources.repository(defaults)
        self.control = ModelControl(self.repository, self._models, ControlOptions.from_settings(settings))
        self.health = Health(self.repository.ready, self.engine, strict=settings.strict_readiness)
        self.observability = Observability(settings, self.engine)
        self.shared_memory = SharedMemory(allowed=settings.allow_client_shm)
        self._http: Listener | None = None
        self._grpc: GrpcListener | None = None
        self._metrics: Listener | None = None
        self.elsewhere: tuple[ObservedPort, ObservedPort] | None = None
        self.on_device_lost: Callable[[], None] = lambda: None
        self.metrics = make_metrics(settings, self.engine, self._connection_ports, self.faults.counts())
        custom = CustomMetrics()
        upcalls = ServerSide(self.engine, custom, self._models.hooks_of, self.control, self.observability.context_for)
        self.engine.external_loaders[PYTHON] = PythonModels(upcalls, self.environments, defaults)
        service = self._service()
        self.metrics.readiness = self.repository.readiness
        self.metrics.content_type = self._dialect.metrics_content_type or self.metrics.content_type
        self.metrics.extra_lines = lambda: (*custom.render(), *self._dialect.metrics_lines())
        app = self.app()
        if settings.allow_http:
            self._http = make_http_port(settings, app, service, self._dialect)
        if settings.allow_grpc:
            self._grpc = make_grpc_port(settings, self.grpc_methods(), self._loop)
        if settings.allow_metrics:
            self._metrics = make_metrics_port(settings, make_metrics_app(self.metrics, settings.metrics_path))
        parts = CloudParts(self.app, self.engine, self.repository, self.control, self._inference)
        self._extra_ports = [*self._dialect.extra_ports(app), *self.clouds.ports(parts)]
        share_unread_limit(settings, self._ports)
        share_totals(self.metrics.totals, self._request_ports)

    def _inference(self, kind: type[Inference] = Inference, forwarded: str = "") -> Inference:
        """Return the inference Service for HTTP; `forwarded` is the pattern of header fields that become parameters."""
        regions, limits = self.shared_memory.regions, self._settings.limits()
        inference = kind(self.engine, limits, self._models.hooks_of, regions, Forwarding.of(forwarded))
        inference.restricted = self.observability.http_restricted
        return inference

    def _service(self) -> Service:
        """Return the Service that answers HTTP requests."""
        inference = self._inference(forwarded=self._settings.http_header_forward_pattern)
        parts = DialectParts(
            self.engine, self.environments, self.repository, self._models.hooks_of, inference, self.health.ready
        )
        return self._dialect.service(parts)

    def _on_device_lost(self) -> None:
        with suppress(RuntimeError):  # the loop has already ended
            self._loop.call_soon_threadsafe(self._mark_device_lost)

    def _mark_device_lost(self) -> None:
        """Report that only another process can use the devices again, and keep running what does not need them."""
        self.health.device_lost = True
        self.on_device_lost()

    def _connection_ports(self) -> Iterable[ObservedPort | None]:
        """Return the holders of HTTP and gRPC connections: `elsewhere` if those belong to other processes."""
        return self.elsewhere or (self._http, self._grpc)

    def app(self) -> Starlette:
        """Return the control plane's application."""
        repository = RepositoryEndpoints(self.control, self._settings.http_max_input_size)
        generate = Generate(self.engine, self._settings.limits(), self._models.hooks_of)
        control = ControlEndpoints(self.engine, self.repository, self.metrics, self.health, name=self._settings.id)
        endpoints = (repository, self.observability, self.shared_memory, generate, control)
        app = make_app((route for each in endpoints for route in each.routes()), pages=True)
        app.state.restricted = self.observability.http_restricted
        return app

    def grpc_methods(self) -> dict[str, Method]:
        """Return the RPCs by path."""
        own = methods(
            RpcDependencies(
                engine=self.engine,
                repository=self.repository,
                health=self.health,
                hooks_of=self._models.hooks_of,
                name=self._settings.id,
                extensions=EXTENSIONS,
                control=self.control,
                traces=self.observability.traces,
                logs=self.observability.logging,
                restricted=self.observability.grpc_restricted,
                regions=self.shared_memory.regions,
                system=self.shared_memory.system,
                cuda=self.shared_memory.cuda,
                forwarding=Forwarding.of(self._settings.grpc_header_forward_pattern),
                files=self._dialect.grpc_descriptors(),
            )
        )
        return {**own, **self._dialect.grpc_methods(self.observability.grpc_restricted)}

    @property
    def http_port(self) -> int:
        """The port for HTTP, 0 if disabled."""
        return self._http.port if self._http else 0

    @property
    def grpc_port(self) -> int:
        """The port for gRPC, 0 if disabled."""
        return self._grpc.port if self._grpc else 0

    @property
    def metrics_port(self) -> int:
        """The port for metrics, 0 if disabled."""
        return self._metrics.port if self._metrics else 0

    @property
    def urls(self) -> dict[str, str] | None:
        """The URLs it listens on, by name; None if it is not listening."""
        return {each.name: each.url for each in self._ports} if self._is_listening else None

    @property
    def _ports(self) -> list[Port]:
        return [*self._request_ports, *([self._metrics] if self._metrics else ())]

    @property
    def _request_ports(self) -> list[Port]:
        return [port for port in (self._http, self._grpc, *self._extra_ports) if port]

    @property
    def status_line(self) -> str:
        """What it serves, in words, and what keeps it from being ready."""
        names = ", ".join(f"{model.name}/{model.version}" for model in self.engine.models()) or "nothing"
        if self.repository.ready(self._settings.strict_readiness):
            return f"ready, serving {names}"
        missing = [f"{name}/{version}".rstrip("/") for name, version, ready in self.repository.readiness() if not ready]
        return f"not ready, serving {names}" + (f"; unavailable: {', '.join(missing)}" if missing else "")

    def handle_hangup(self) -> None:
        """Log that a single process cannot be replaced without downtime."""
        logger.warning("SIGHUP ignored: only a server with --http-workers replaces its processes")

    def force(self) -> None:
        """Kill the workers. They would end with this process; processes started by user code would not."""
        for pid in own_workers():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    async def open(self) -> None:
        """Listen and answer: live, not yet ready. Ports that open late are opened by `load`.

        Raises: StartError.
        """
        # connections inherit numpy's error state: a number too large for float32 is not worth a warning per request
        np.seterr(all="ignore")
        with suppress(RuntimeError):  # none can be started: the loop keeps those it has
            set_threads(self._loop, self._settings.model_load_thread_count)
        if invalid := self._sources.invalid_path():
            raise StartError(str(invalid))
        if problems := start_problems(self._settings):
            raise StartError("\n".join(problems))
        try:
            await asyncio.to_thread(self._sources.open)
            if self._grpc:
                self._grpc.tls = context_for(self._settings)
        except (TlsError, RemoteError, MistakesError) as error:
            raise StartError(str(error)) from error
        self.engine.set_loading(loading=True)
        await self._listen(late=False)

    async def _listen(self, *, late: bool) -> None:
        """Open the ports that open before or after loading. Raises: StartError."""
        for port in self._ports:
            if self._is_late(port) == late:
                await port.open()
            elif not late:
                await port.bind()  # so a port in use is reported before everything is loaded
        self._is_listening = late or not any(map(self._is_late, self._ports))

    def _is_late(self, port: Port) -> bool:
        """Whether a port opens only after loading: until then, processes that share it receive its connections."""
        shared = self._settings.reuse_http_port, self._settings.reuse_grpc_port
        return self._dialect.opens_late or (port is self._http and shared[0]) or (port is self._grpc and shared[1])

    async def load(self) -> list[str]:
        """Read the repository and load its models.

        Returns: the reason for each version that is not served. Raises: StartError if a required one is not.
        """
        failures = await self.control.start()
        self.engine.set_loading(loading=False)
        if problem := self.clouds.default_model_problem(self.engine):
            raise StartError("\n".join([problem, *failures]))
        if failures and self._dialect.required_kind and not self.engine.models():
            raise StartError("\n".join([f"no {self._dialect.required_kind} can be served:", *failures]))
        if not (failures and self._settings.exit_on_error):  # the server exits at once, and must not take requests
            await self._listen(late=True)
        self.faults.start()
        return failures

    async def drain(self) -> int:
        """Stop being ready, turn away new connections, finish accepted work, and close the ports.

        Accepted work gets at most the exit timeout, which starts after the drain delay.
        Returns: how many were dropped: requests, or connections with unfinished requests.
        """
        self.health.draining = True
        self.faults.stop()
        await asyncio.sleep(self._settings.drain_delay_secs)
        self.health.disconnecting = True
        deadline = self._loop.time() + self._settings.exit_timeout_secs
        for model in self.engine.models():
            if model.inflight:
                logger.info(
                    "Model '%s' (version %s) has %d in-flight inferences", model.name, model.version, model.inflight
                )
        self.engine.flush()  # otherwise connections would wait for batches that wait for more requests
        for port in self._request_ports:
            if port.reuse_port:  # processes that share the port take new connections
                await port.stop_accepting()
        unfinished = sum(await asyncio.gather(*(port.drain(deadline) for port in self._request_ports)))
        self._stopped = True
        await self._dialect.close()
        self.environments.close()  # otherwise the drain would wait for a load that is making an environment
        await self.control.stop()
        dropped = await self._models.stop(max(0.0, deadline - self._loop.time()))
        await asyncio.gather(*(port.close_gracefully() for port in self._request_ports))
        if self._metrics:
            await self._metrics.stop_accepting()
            await self._metrics.drain(self._loop.time() + METRICS_GRACE_S)
        return max(unfinished, dropped)

    async def close(self) -> None:
        """End whatever is left at once."""
        self.environments.close()
        self.faults.stop()
        await asyncio.gather(*(port.close() for port in self._ports))
        if not self._stopped:
            self._stopped = True
            await self._dialect.close()
            await self.control.stop()
            await self._models.stop(0.0)
        await asyncio.to_thread(self._sources.close)
        self.clouds.close()
        await self.observability.stop()
