"""Control: the calls to a server other than the load, over either protocol, one at a time.

The gRPC half is `grpc_control.py`. Source: the v2 protocol and Triton's extensions of it.
"""

from __future__ import annotations

import http.client
import json
from base64 import b64encode
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Protocol
from urllib.parse import quote

from penstock.perf.generator.orders import Target
from penstock.perf.generator.tls import context

TIMEOUT_S = 30.0
READY_TIMEOUT_S = 5.0
"""How long to wait for an answer: TIMEOUT_S if the server has work to do, QUICK_S if it only reports."""
LOAD_TIMEOUT_S = 600.0
_TEXT_CHARACTERS = 500
Settings = Mapping[str, str | list[str] | None]


class ControlError(Exception):
    """The server returned an error or could not be reached."""


class RefusedError(ControlError):
    """The server answered with an error, possibly because it lacks an extension."""


class Control(Protocol):
    """Calls a v2 server. All results are as over HTTP: the JSON of Triton's extensions. Raises: ControlError.

    `version` empty: the server's choice; for statistics, every version.
    """

    def server(self) -> dict[str, Any]:
        """Return the server's metadata: name, version, extensions."""
        ...

    def metadata(self, model: str, version: str = "") -> dict[str, Any]:
        """Return a model's metadata."""
        ...

    def config(self, model: str, version: str = "") -> dict[str, Any]:
        """Return a model's configuration; empty if the server lacks the extension."""
        ...

    def statistics(self, model: str, version: str = "") -> list[dict[str, Any]]:
        """Return `model_stats` of a model's versions; empty if the server lacks the extension."""
        ...

    def ready(self, model: str = "", version: str = "") -> bool:
        """Return whether the server, or one of its models, is ready. A server that cannot be reached is not."""
        ...

    def register(self, region: str, key: str, size: int) -> None:
        """Register a region of system shared memory."""
        ...

    def unregister(self, region: str = "") -> None:
        """Unregister it; empty: all."""
        ...

    def register_cuda(self, region: str, handle: bytes, device: int, size: int) -> None:
        """Register an allocation of device memory by its cudaIpcMemHandle."""
        ...

    def unregister_cuda(self, region: str = "") -> None:
        """Unregister it; empty: all."""
        ...

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        """Load a model, or reload it with another configuration. Blocks until the load has ended."""
        ...

    def unload(self, model: str) -> None:
        """Unload a model."""
        ...

    def trace(self, settings: Settings | None = None, model: str = "") -> dict[str, Any]:
        """Change trace settings, of a model or of all, and return them; None changes nothing."""
        ...


def control_for(target: Target, headers: Mapping[str, str] | None = None) -> Control:
    """Return the Control for the target's protocol. `headers` are sent with every call.

    Raises: OSError, ssl.SSLError if a file of the target's TLS settings cannot be used.
    """
    if target.grpc is None:
        return HttpControl(target, headers or {})
    from .grpc_control import GrpcControl  # imports protobuf: not needed for HTTP

    return GrpcControl(target, headers or {})


class HttpControl:
    """Calls over HTTP/1.1, with a connection for each call."""

    def __init__(self, target: Target, headers: Mapping[str, str]) -> None:
        self._target = target
        self._headers = {"Content-Type": "application/json", **headers}
        self._ssl = context(target.tls) if target.tls else None

    def server(self) -> dict[str, Any]:
        return _object(self._ask("GET", "/v2"))

    def metadata(self, model: str, version: str = "") -> dict[str, Any]:
        return _object(self._ask("GET", _path(model, version)))

    def config(self, model: str, version: str = "") -> dict[str, Any]:
        try:
            return _object(self._ask("GET", _path(model, version) + "/config"))
        except RefusedError:
            return {}

    def statistics(self, model: str, version: str = "") -> list[dict[str, Any]]:
        try:
            return _objects(_object(self._ask("GET", _path(model, version) + "/stats")).get("model_stats", []))
        except RefusedError:
            return []

    def ready(self, model: str = "", version: str = "") -> bool:
        try:
            self._ask("GET", f"{_path(model, version)}/ready" if model else "/v2/health/ready", parsed=False)
        except ControlError:
            return False
        return True

    def register(self, region: str, key: str, size: int) -> None:
        path = f"/v2/systemsharedmemory/region/{quote(region, safe='')}/register"
        self._ask("POST", path, {"key": key, "offset": 0, "byte_size": size}, parsed=False)

    def unregister(self, region: str = "") -> None:
        region_path = f"region/{quote(region, safe='')}/" if region else ""
        self._ask("POST", f"/v2/systemsharedmemory/{region_path}unregister", {}, parsed=False)

    def register_cuda(self, region: str, handle: bytes, device: int, size: int) -> None:
        path = f"/v2/cudasharedmemory/region/{quote(region, safe='')}/register"
        encoded_handle = {"b64": b64encode(handle).decode()}
        self._ask("POST", path, {"raw_handle": encoded_handle, "device_id": device, "byte_size": size}, parsed=False)

    def unregister_cuda(self, region: str = "") -> None:
        region_path = f"region/{quote(region, safe='')}/" if region else ""
        self._ask("POST", f"/v2/cudasharedmemory/{region_path}unregister", {}, parsed=False)

    def load(self, model: str, config: Mapping[str, Any] | None = None) -> None:
        body = {} if config is None else {"parameters": {"config": json.dumps(config)}}
        self._ask(
            "POST", f"/v2/repository/models/{quote(model, safe='')}/load", body, parsed=False, wait_s=LOAD_TIMEOUT_S
        )

    def unload(self, model: str) -> None:
        self._ask("POST", f"/v2/repository/models/{quote(model, safe='')}/unload", {}, parsed=False, wait_s=TIMEOUT_S)

    def trace(self, settings: Settings | None = None, model: str = "") -> dict[str, Any]:
        path = f"{_path(model, '') if model else '/v2'}/trace/setting"
        return _object(self._ask("GET", path) if settings is None else self._ask("POST", path, dict(settings)))

    def _ask(self, method: str, path: str, body: Any = None, *, parsed: bool = True, wait_s: float = 0.0) -> Any:
        """Make one call. Returns: the JSON of its answer if `parsed`."""
        try:
            with closing(self._connection(wait_s or READY_TIMEOUT_S)) as connection:
                connection.request(method, path, None if body is None else json.dumps(body), self._headers)
                answer = connection.getresponse()
                content = answer.read()
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: an invalid header or host
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ControlError(f"{method} {path}: {self._target.host}:{self._target.port}: {reason}") from error
        if answer.status != http.client.OK:
            text = content[:_TEXT_CHARACTERS].decode("utf-8", "replace")
            raise RefusedError(f"{method} {path}: {answer.status} {text}".rstrip())
        try:
            return json.loads(content) if parsed else None
        except ValueError as error:
            raise RefusedError(f"{method} {path}: the answer is not JSON") from error

    def _connection(self, wait_s: float) -> http.client.HTTPConnection:
        target = self._target
        if self._ssl is not None:
            return http.client.HTTPSConnection(target.host, target.port, timeout=wait_s, context=self._ssl)
        return http.client.HTTPConnection(target.host, target.port, timeout=wait_s)


def _path(model: str, version: str) -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RefusedError(f"the server answered {json.dumps(value)[:_TEXT_CHARACTERS]} instead of an object")
    return value


def _objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RefusedError(f"the server answered {json.dumps(value)[:_TEXT_CHARACTERS]} instead of an array")
    return [_object(each) for each in value]
