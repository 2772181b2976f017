"""The shared memory extensions over HTTP: register, unregister and status, system and CUDA.

Made by the composition root. Source: Triton server, http_server.cc (paths, members and texts).
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.backends.errors import Code, InferError

from .call_parameters import NOT_UNSIGNED, is_unsigned
from .cuda_regions import CudaRegions
from .parsing import NOT_AN_OBJECT, parse
from .regions import SYSTEM, RegionKind, Regions
from .routes import MAX_BODY_BYTES, MAX_JSON_DEPTH, Route, json_answer, read_body
from .system_regions import SystemRegions

_NAME = {"type": "string"}
_SIZE = {"type": "integer", "minimum": 0}
_SYSTEM = {"key": _NAME, "offset": _SIZE, "byte_size": _SIZE}
_CUDA = {"device_id": _SIZE, "byte_size": _SIZE}
_HANDLE = {"type": "object", "properties": {"b64": _NAME}, "required": ["b64"]}


class SharedMemory:
    """The regions of one server, and their endpoints. gRPC serves the same `regions`, `system` and `cuda`."""

    def __init__(self, *, allowed: bool) -> None:
        self.regions = Regions(allowed=allowed)
        self.system = SystemRegions(self.regions)
        self.cuda = CudaRegions(self.regions)

    def adopt(self, kind: str, description: Mapping[str, Any], descriptors: list[int]) -> None:
        """Add a region that another process of this server has exported; takes over a system region's descriptor.

        Raises: InferError.
        """
        if kind == SYSTEM:
            self.system.adopt(**description, descriptor=descriptors.pop())
        else:
            handle = bytes.fromhex(description["raw_handle"])
            self.cuda.register(description["name"], handle, description["device_id"], description["byte_size"])

    def routes(self) -> tuple[Route, ...]:
        """Return the endpoints."""
        registered_system = _object(_SYSTEM, "key", "byte_size")
        registered_cuda = _object({"raw_handle": _HANDLE, **_CUDA}, "raw_handle", "device_id", "byte_size")
        return (
            *_routes("system", self.system, _object({"name": _NAME, **_SYSTEM})),
            *_routes("cuda", self.cuda, _object({"name": _NAME, **_CUDA})),
            Route(
                "POST", ("/v2/systemsharedmemory/region/{region}/register",), self.register_system,
                "Register system shared memory", None, registered_system, (400, 501),
            ),
            Route(
                "POST", ("/v2/cudasharedmemory/region/{region}/register",), self.register_cuda,
                "Register CUDA shared memory", None, registered_cuda, (400, 501),
            ),
            Route(
                "POST", ("/v2/systemsharedmemory/register", "/v2/cudasharedmemory/register"), self.nameless,
                "Rejected: a region needs a name", errors=(400,),
            ),
        )  # fmt: skip

    async def register_system(self, request: Request) -> Response:
        """Register a part of a POSIX shared memory object."""
        members = await _read_object(request)
        key = _member(members, "key")
        if type(key) is not str:
            raise InferError(Code.INVALID, "attempt to access JSON non-string as string")
        offset = _unsigned(members["offset"]) if "offset" in members else 0
        self.system.register(request.path_params["region"], key, offset, _unsigned(_member(members, "byte_size")))
        return Response()

    async def register_cuda(self, request: Request) -> Response:
        """Register an allocation of device memory."""
        members = await _read_object(request)
        handle = _member(members, "raw_handle")
        encoded = handle.get("b64") if type(handle) is dict else None
        try:
            raw = binascii.a2b_base64(encoded, strict_mode=True) if type(encoded) is str else b""
        except (binascii.Error, ValueError):
            raw = b""
        device, byte_size = (_unsigned(_member(members, name)) for name in ("device_id", "byte_size"))
        self.cuda.register(request.path_params["region"], raw, device, byte_size)
        return Response()

    async def nameless(self, request: Request) -> Response:
        """Reject a registration without a name."""
        kind = "cuda" if "cuda" in request.url.path else "system"
        raise InferError(Code.INVALID, f"'region name' is necessary to register {kind} shared memory region")


def _routes(kind: str, regions: RegionKind, schema: dict[str, Any]) -> tuple[Route, ...]:
    paths = f"/v2/{kind}sharedmemory/", f"/v2/{kind}sharedmemory/region/{{region}}/"

    async def status(request: Request) -> Response:
        return json_answer(regions.status(request.path_params.get("region", "")))

    async def unregister(request: Request) -> Response:
        regions.unregister(request.path_params.get("region", ""))
        return Response()

    kind_name = "CUDA" if kind == "cuda" else kind
    return (
        Route(
            "GET", tuple(path + "status" for path in paths), status, f"The registered {kind_name} shared memory",
            {"type": "array", "items": schema}, errors=(404, 501),
        ),
        Route(
            "POST", tuple(path + "unregister" for path in paths), unregister,
            f"Unregister one region of {kind_name} shared memory, or all", errors=(501,),
        ),
    )  # fmt: skip


def _object(members: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": members} | ({"required": list(required)} if required else {})


async def _read_object(request: Request) -> dict[str, Any]:
    document = parse(await read_body(request, MAX_BODY_BYTES), MAX_JSON_DEPTH, simd=False)
    if type(document) is not dict:
        raise InferError(Code.INVALID, NOT_AN_OBJECT)
    return document


def _member(members: dict[str, Any], name: str) -> Any:
    if name not in members:
        raise InferError(Code.INVALID, f"Shared memory register request has no '{name}' field")
    return members[name]


def _unsigned(value: Any) -> int:
    if not is_unsigned(value):
        raise InferError(Code.INVALID, NOT_UNSIGNED)
    return value
