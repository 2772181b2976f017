"""Protobuf: the generated modules that tritonclient ships, loaded without its gRPC client, and messages of our own.

Called by the repository (ModelConfig) and by `server/v2/rpc` (the messages of gRPC). Nothing else imports protobuf's
descriptors.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "tritonclient.grpc"


def model_config_pb2() -> Any:
    """Give the generated module of config.pbtxt's messages."""
    return _generated("model_config_pb2")


def service_pb2() -> Any:
    """Give the generated module of GRPCInferenceService's messages.

    It imports its neighbour from its package. Where nobody has imported that, an empty one with that neighbour stands
    in for it meanwhile.
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
    """Load a generated module by its path, because importing its package needs grpcio, which Penstock does without.

    It is entered in `sys.modules` under its own name, so that whoever imports it later gets the same message classes.
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
