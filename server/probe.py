"""Health probe: asks a server on this machine whether it is ready, as the HEALTHCHECK of the images does.

`penstock probe` takes the flags, environment and settings file of `penstock serve`, to know where that server listens.
Without arguments in a container, it uses the flags of the server there. Nothing heavy is imported, because it runs
every few seconds.
"""

from __future__ import annotations

import http.client
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .settings import Settings

PATH = "/v2/health/ready"
TIMEOUT_S = 3.0
_LOCAL_ADDRESSES = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - listening address to local address
_OK = 200
_INIT_CMDLINE = "/proc/1/cmdline"
_SERVE_NAMES = ("serve", "tritonserver")


def container_arguments() -> list[str]:
    """Return the arguments of process 1 if it is a server, as in a container; [] otherwise."""
    try:
        with open(_INIT_CMDLINE, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123 - pathlib takes 5 ms
            arguments = file.read().split("\0")[:-1]
    except OSError:
        return []
    names = [os.path.basename(argument) for argument in arguments]  # noqa: PTH119
    # `tini -- penstock serve ...`, or a link with the name of Triton's program; Python may come before either
    for index, (name, previous) in enumerate(zip(names, ["", *names], strict=False)):
        if name == _SERVE_NAMES[1] or (name == _SERVE_NAMES[0] and previous == "penstock"):
            return arguments[index + 1 :]
    return []


def probe(settings: Settings, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Ask the server; blocks for at most a few times `timeout_s`.

    Returns: the exit status, 0 if the server is ready and 1 otherwise, and one line that explains it.
    """
    if not (settings.allow_http or settings.allow_sagemaker or settings.allow_vertex_ai):
        return 1, "not probed: the probe uses HTTP, but --allow-http is false"
    address, port, path = _target(settings)
    address = _LOCAL_ADDRESSES.get(address, address)
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return 1, f"no answer from {address}:{port}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
    return (0, "ready") if status == _OK else (1, f"not ready: {address}:{port} answered {status} to {path}")


def _target(settings: Settings) -> tuple[str, int, str]:
    """Return the address, port and path to ask: those of the HTTP port, or else of a cloud's port."""
    if settings.allow_http:
        return settings.http_address, settings.http_port, PATH
    if settings.allow_sagemaker:
        return settings.sagemaker_address, settings.sagemaker_port, "/ping"
    return settings.vertex_ai_address, settings.vertex_ai_port, settings.vertex_ai_health_route
