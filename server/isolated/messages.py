"""The messages between a Backend's worker and its server, and how they are encoded.

Used on both sides, so it needs only numpy. The Worker's own Link carries messages about Bindings. Each Binding also has
a socket of its own, for one run and its answer at a time.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from penstock.backends.backend import Backend, compiles_each_size, is_stateful, shared_scale
from penstock.backends.errors import RETRY_AFTER_NS, Code, DeviceLost, InferError, OutOfMemory, RunStopped
from penstock.backends.node import Node
from penstock.backends.signature import Signature, TensorSpec
from penstock.server.ipc.errors import error_from_json, error_to_json

BIND = 64
"""Sent with a socket: make a Binding that serves it. Number: the Binding's. Body: JSON, what to bind."""
STOP = 65
"""Stop a run. Number: the Binding's. Body: NUMBER, the run's."""
RUN = 16
"""On a Binding's socket, number: the run's. Body: the rows, then the positions wanted, each as ROWS; input tensors."""
READY = 17
"""The Binding is ready."""
RESULT = 18
"""Output tensors, in the order wanted."""
FAILED = 19
"""JSON, the exception. If the Binding was not ready yet, it does not exist."""

NUMBER = struct.Struct("<Q")
ROWS = struct.Struct("<I")
_ERROR_CLASSES = {each.__name__: each for each in (InferError, OutOfMemory, DeviceLost, RunStopped)}


def write_run(rows: int, wanted: Sequence[int]) -> bytes:
    """Encode a run's parameters."""
    return struct.pack(f"<I{len(wanted)}I", rows, *wanted)


def read_run(body: bytes) -> tuple[int, tuple[int, ...]]:
    """Decode the result of `write_run`."""
    rows, *wanted = struct.unpack(f"<{len(body) // ROWS.size}I", body)
    return rows, tuple(wanted)


def write_binding(signature: Signature, capacity_rows: int) -> bytes:
    """Encode what to bind."""
    return json.dumps([_signature(signature), capacity_rows]).encode()


def read_binding(body: bytes) -> tuple[Signature, int]:
    """Decode the result of `write_binding`."""
    signature, capacity_rows = json.loads(body)
    return read_signature(signature), capacity_rows


def write_backend(backend: Backend) -> bytes:
    """Encode a Backend's description of its model."""
    return json.dumps({
        "graph": _signature(backend.graph),
        "inputs": [Node.from_runtime(node).to_json() for node in backend.node_inputs],
        "outputs": [Node.from_runtime(node).to_json() for node in backend.node_outputs],
        "platform": backend.platform,
        "stateful": is_stateful(backend),
        "compiles_each_size": compiles_each_size(backend),
        "shared_scale": shared_scale(backend),
        "runtime_metadata": dict(backend.runtime_metadata),
    }).encode()  # fmt: skip


def read_nodes(encoded: Sequence[Any]) -> list[Node]:
    """Decode the inputs or outputs in the result of `write_backend`."""
    return [Node.from_json(node) for node in encoded]


def _signature(signature: Signature) -> dict[str, Any]:
    sides = {"inputs": signature.inputs, "outputs": signature.outputs}
    return {"batched": signature.batched, **{side: [asdict(spec) for spec in specs] for side, specs in sides.items()}}


def read_signature(encoded: Mapping[str, Any]) -> Signature:
    """Decode a Signature, with all properties of its tensors."""
    inputs, outputs = (tuple(_spec(spec) for spec in encoded[side]) for side in ("inputs", "outputs"))
    return Signature(inputs, outputs, bool(encoded["batched"]))


def _spec(encoded: Mapping[str, Any]) -> TensorSpec:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in encoded.items()}
    return TensorSpec(**fields)


def write_failure(error: BaseException) -> bytes:
    """Encode an exception: an InferError with its class, anything else as an INTERNAL failure."""
    if isinstance(error, MemoryError):
        error = OutOfMemory(Code.OVERLOADED, "no memory in the model's process", RETRY_AFTER_NS)
    if not isinstance(error, InferError):
        error = InferError(Code.INTERNAL, f"inference failed: {type(error).__name__}")
    name = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERROR_CLASSES), InferError.__name__)
    return json.dumps([name, *error_to_json(error)]).encode()


def read_failure(body: bytes) -> InferError:
    """Decode the result of `write_failure`."""
    name, *encoded = json.loads(body)
    return error_from_json(encoded, _ERROR_CLASSES[name])
