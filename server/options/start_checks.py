"""Problems that prevent a start and can be seen from the settings. Called by the server and by `check`."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.server.grpc.tls import TlsError, context_for
from penstock.server.repository.control import ALL_MODELS
from penstock.server.supervisor.reserved_ports import served_ports
from penstock.server.tracing.config import TRITON, parse

from .cloud_settings import parse_range

if TYPE_CHECKING:
    from penstock.server.settings import Settings

_WILDCARD_ADDRESSES = ("0.0.0.0", "::", "")  # noqa: S104 - what is listened on is compared


def start_problems(settings: Settings) -> list[str]:
    """Say why a server with these settings would not start. Opens no port; reads the certificates."""
    problems = [
        *_model_problems(settings),
        *_port_problems(settings),
        *_cloud_problems(settings),
        *_trace_problems(settings),
    ]
    if settings.http_workers and not hasattr(os, "pidfd_open"):
        problems.append("--http-workers requires Linux")
    if settings.http_workers and (settings.reuse_http_port or settings.reuse_grpc_port):
        problems.append(
            "--http-workers cannot be combined with --reuse-http-port or --reuse-grpc-port: its processes own "
            "their ports"
        )
    if settings.allow_grpc:
        try:
            context_for(settings)
        except TlsError as error:
            problems.append(str(error))
    return problems


def _model_problems(settings: Settings) -> Iterator[str]:
    if settings.load_model and settings.model_control_mode != "explicit":
        yield "--load-model requires --model-control-mode explicit"
    if ALL_MODELS in settings.load_model and len(settings.load_model) > 1:
        yield f"--load-model {ALL_MODELS} loads every model and cannot be combined with another --load-model"


def _trace_problems(settings: Settings) -> Iterator[str]:
    """Say why the trace file cannot be written. It is not created: that happens with the first trace."""
    config = parse(settings.trace_config)
    if config.mode != TRITON or not config.file:
        return
    file = Path(config.file)
    try:
        errno_ = _write_errno(file)
    except OSError as error:
        errno_ = error.errno or errno.EIO
    if errno_:
        yield f"--trace-config file={file}: failed to open trace file: {os.strerror(errno_)}"


def _write_errno(file: Path) -> int:
    """Return the errno that writing to a file would fail with, or 0. Raises: OSError."""
    exists = file.exists()
    if exists and file.is_dir():
        return errno.EISDIR
    if not exists and not file.parent.is_dir():
        return errno.ENOTDIR if file.parent.exists() else errno.ENOENT
    return 0 if os.access(file if exists else file.parent, os.W_OK) else errno.EACCES


def _port_problems(settings: Settings) -> Iterator[str]:
    for (name, (address, port)), (other_name, (other_address, other_port)) in itertools.combinations(
        served_ports(settings).items(), 2
    ):
        if (
            port
            and port == other_port
            and (address == other_address or {address, other_address} & {*_WILDCARD_ADDRESSES})
        ):
            yield f"{name} and {other_name} cannot both be served on port {port}"


def _cloud_problems(settings: Settings) -> Iterator[str]:
    """Use Triton's error texts. Source: command_line_parser.cc, and vertex_ai_server.cc, including its typo."""
    port_range = parse_range(settings.sagemaker_safe_port_range) if settings.allow_sagemaker else None
    for name, (_, port) in served_ports(settings).items():
        if port_range is not None and name != "SageMaker" and not port_range[0] <= port <= port_range[1]:
            triton_name, allowed = name.replace("gRPC", "GRPC"), f"[{port_range[0]}, {port_range[1]}]"
            yield f"The server cannot listen to {triton_name} requests at port {port}, allowed port range is {allowed}"
    if settings.allow_vertex_ai and not settings.vertex_ai_predict_route:
        yield "API_PREDICT_ROUTE is not defined for Vertex AI endpoint"
    elif settings.allow_vertex_ai and not settings.vertex_ai_health_route:
        yield "AIP_HEALTH_ROUTE is not defined for Vertex AI endpoint"
