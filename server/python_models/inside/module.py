"""The module that model.py imports as `triton_python_backend_utils`: every public name, bound to one server.

Source: python_backend, README.md and src/pb_stub.cc, which define these names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from penstock.backends.backend import Array

from . import model_config as config
from . import tensors
from .errors import TritonError, TritonModelException, as_text
from .metrics import Logger, Metric, MetricFamily, MetricKind
from .requests import (
    MEMORY_CPU,
    MEMORY_GPU,
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
    ReceivedRequest,
)
from .responses import FINAL, InferenceResponse, ResponseIterator, ResponseSender
from .server_proxy import ServerProxy

NAME = "triton_python_backend_utils"


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> tensors.Tensor | None:
    """Return an input of a request, None if it has no such input."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> tensors.Tensor | None:
    """Return an output of a response, None if it has no such output."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


_SERVER_INDEPENDENT: dict[str, Any] = {
    "InferenceResponse": InferenceResponse,
    "InferenceResponseSender": ResponseSender,
    "InferenceTrace": InferenceTrace,
    "Metric": Metric,
    "MetricKind": MetricKind,
    "ModelConfig": config.ModelConfig,
    "PreferredMemory": PreferredMemory,
    "ResponseIterator": ResponseIterator,
    "Tensor": tensors.Tensor,
    "TritonError": TritonError,
    "TritonModelException": TritonModelException,
    "TRITONSERVER_MEMORY_CPU": MEMORY_CPU,
    "TRITONSERVER_MEMORY_GPU": MEMORY_GPU,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START": 1,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END": 2,
    "TRITONSERVER_REQUEST_RELEASE_ALL": RELEASE_ALL,
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE": RELEASE_RESCHEDULE,
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL": FINAL,
    "TRITON_STRING_TO_NUMPY": tensors.TRITON_STRING_TO_NUMPY,
    "json": json,  # the original file imports these three, and models take them from it
    "np": np,
    "struct": struct,
    "deserialize_bytes_tensor": tensors.deserialize_bytes_tensor,
    "get_input_config_by_name": config.get_input_config_by_name,
    "get_input_tensor_by_name": get_input_tensor_by_name,
    "get_output_config_by_name": config.get_output_config_by_name,
    "get_output_tensor_by_name": get_output_tensor_by_name,
    "numpy_to_triton_type": tensors.numpy_to_triton_type,
    "serialize_byte_tensor": tensors.serialize_byte_tensor,
    "triton_string_to_numpy": tensors.triton_string_to_numpy,
    "triton_to_numpy_type": tensors.triton_to_numpy_type,
    "using_decoupled_model_transaction_policy": config.using_decoupled_model_transaction_policy,
}
"""The names that are the same for every server."""


def make_module(server: ServerProxy, model_dir: str) -> ModuleType:
    """Make the module for a model in `model_dir`."""
    module = ModuleType(NAME, "Triton's interface for models in Python, served by Penstock.")
    vars(module).update(_SERVER_INDEPENDENT)
    vars(module).update(_control_functions(server))
    vars(module).update(
        InferenceRequest=type("InferenceRequest", (InferenceRequest,), {"__slots__": (), "_server": server}),
        MetricFamily=type("MetricFamily", (MetricFamily,), {"_server": server}),
        Logger=type("Logger", (Logger,), {"_server": server}),
        get_model_dir=lambda: model_dir,
    )
    return module


def make_request_class(module: ModuleType, model: Mapping[str, Any]) -> type[ReceivedRequest]:
    """Make the class of the requests passed to a model of this configuration."""
    bf16_inputs = {tensor["name"] for tensor in model.get("input", ()) if tensor.get("data_type") == "TYPE_BF16"}
    return type(
        "InferenceRequest", (ReceivedRequest, module.InferenceRequest),
        {
            "__slots__": (),
            "_datatypes": dict.fromkeys(bf16_inputs, tensors.BF16),
            "_outputs": frozenset(tensor["name"] for tensor in model.get("output", ())),
            "_decoupled": config.using_decoupled_model_transaction_policy(dict(model)),
        },
    )  # fmt: skip


def _control_functions(server: ServerProxy) -> dict[str, Any]:
    """Return the functions that load, unload and query models. Raises: TritonModelException."""

    def control(fields: dict[str, Any], arrays: list[Array | None]) -> bool:
        message = {"model": "", "version": "", "config": "", "files": [], "dependents": False} | fields
        return server.control(message, arrays)

    def load_model(model_name: str | bytes, config: str | bytes = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, from a configuration and files if given."""
        files = files or {}
        arrays: list[Array | None] = [np.frombuffer(content, np.uint8) for content in files.values()]
        names = {"model": as_text("model_name", model_name), "config": as_text("config", config)}
        control({"do": "load", "files": list(files)} | names, arrays)

    def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:
        """Unload a model."""
        control({"do": "unload", "model": as_text("model_name", model_name), "dependents": unload_dependents}, [])

    def is_model_ready(model_name: str | bytes, model_version: str | bytes = "") -> bool:
        """Return whether a model, or a version of it, is ready."""
        names = {"model": as_text("model_name", model_name), "version": as_text("model_version", model_version)}
        return control({"do": "ready"} | names, [])

    return {"load_model": load_model, "unload_model": unload_model, "is_model_ready": is_model_ready}
