"""Protobuf: the generated modules that tritonclient ships, loaded without its gRPC client, and Penstock's own messages.

Used by the repository (ModelConfig) and `server/v2/rpc` (gRPC messages). Nothing else imports protobuf descriptors.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "tritonclient.grpc"


def model_config_pb2() -> Any:
    """Return the generated module for config.pbtxt messages."""
    return _generated("model_config_pb2")


def service_pb2() -> Any:
    """Return the generated module for GRPCInferenceService messages.

    It imports a sibling from its package. If the package has not been imported, an empty package with that sibling
    stands in for it temporarily.
    """
    name = f"{_PACKAGE}.service_pb2"
    if name in sys.modules:
        return sys.modules[name]
    if _PACKAGE in sys.modules:
        return _generated("service_pb2")
    package: Any = ModuleType(_PACKAGE)
    package.model_config_pb2 = model_config_pb2()
    sys.modules[_PACKAGE] = package
    try:
        return _generated("service_pb2")
    finally:
        if sys.modules.get(_PACKAGE) is package:
            del sys.modules[_PACKAGE]


def _generated(stem: str) -> Any:
    """Load a generated module by path, because importing its package needs grpcio, which Penstock does not require.

    It is registered in `sys.modules` under its own name, so that a later import gets the same message classes.
    """
    name = f"{_PACKAGE}.{stem}"
    if name in sys.modules:
        return sys.modules[name]
    package = importlib.util.find_spec("tritonclient")
    folder = next(iter((package.submodule_search_locations if package else None) or ()), "")
    spec = importlib.util.spec_from_file_location(name, Path(folder, "grpc", f"{stem}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"tritonclient/grpc/{stem}.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
