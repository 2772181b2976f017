"""ONNX Runtime: loads an .onnx file on the CPU or on one GPU, and provides Bindings. Only onnx*.py import it.

Used through `loading.py`. The reasons for how a run works, with figures, are in docs/adr/0004-onnx-runtime-binding.md.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort

from .backend import FREE_ROWS, Binding, device_number
from .cpus import usable_cpus
from .datatypes import BY_ONNX_NAME
from .errors import Code, InferError
from .libraries import load_libraries
from .node import Node
from .onnx_binding import OnnxBinding
from .onnx_failures import advice, error_text, is_unavailable, run_error
from .onnx_file import file_advice
from .onnx_log import route_log
from .onnx_operators import SHARED_SCALES, never_empty, operators
from .onnx_providers import CPU
from .onnx_rows import with_free_rows
from .signature import Signature, TensorSpec

_GRAPH_LEVELS = {
    "disabled": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_EXECUTION_MODES = {
    "0": onnxruntime.ExecutionMode.ORT_SEQUENTIAL,
    "1": onnxruntime.ExecutionMode.ORT_PARALLEL,
}
_FLAGS = {"0": False, "1": True, "false": False, "true": True}
# A spinning pool thread occupies the core that the front end needs: at 16 to 64 rows of mlp, spinning takes 8 to 13%
# less time for half as much CPU again (docs/adr/0004).
_SESSION_DEFAULTS = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
_WEIGHTS_FOLDER_ENTRY = "session.model_external_initializers_file_folder_path"
_SHRINKAGE_ENTRY = "memory.enable_memory_arena_shrinkage"
_OPTIONAL = re.compile(r"optional\((tensor\(\w+\))\)")


def load(path: Path, device: str, options: Mapping[str, str]) -> OnnxBackend:
    """Load a model on `device` ("cpu", "cuda:0", ...).

    Options: intra_op_thread_count (0: all usable CPUs), inter_op_thread_count, execution_mode (0 sequential, 1
    parallel), enable_mem_arena, enable_mem_pattern, graph_optimization_level (all, extended, basic, disabled),
    memory.enable_memory_arena_shrinkage; penstock.free_rows (1: see onnx_rows.py); custom_op_library.1, .2 and so on
    (paths); `session.*` is passed to the session unchanged. For those of a GPU see onnx_cuda.py.
    Raises: InferError (NOT_FOUND: no such file; UNSUPPORTED: an unsupported type or device; else INVALID).
    """
    number = device_number(device)
    if number is not None:
        from .onnx_cuda import load_on_gpu  # built on this module

        backend: OnnxBackend = load_on_gpu(path, number, options)
    else:
        model, config, freed_tensors = prepare_session(path, options)
        backend = OnnxBackend(
            open_session(path, lambda: create_session(model, config, [(CPU, {})])), options, freed_tensors
        )
    model_operators = operators(path)
    backend.never_empty = min(model_operators & never_empty(onnxruntime.__version__), default="")
    backend.shared_scale = min(model_operators & SHARED_SCALES, default="")
    return backend


def prepare_session(path: Path, options: Mapping[str, str]) -> tuple[str | bytes, Any, frozenset[str]]:
    """Return what a session loads, its options, and the tensors whose rows were freed in it. Raises: InferError."""
    config = session_options(options)
    load_libraries(options, config.register_custom_ops_library, error_text)
    model, freed = _model_to_load(path, options, config)
    return model, config, freed


def create_session(model: str | bytes, config: Any, providers: Sequence[tuple[str, dict[str, str]]]) -> Any:
    """Make a session. Raises: what ONNX Runtime does."""
    route_log()
    # enable_fallback: otherwise a provider that fails is replaced by the CPU, with a print
    return onnxruntime.InferenceSession(model, config, providers=list(providers), enable_fallback=0)


def open_session(path: Path, create: Callable[[], Any], *, on_gpu: bool = False) -> Any:
    """Make a session.

    Raises: InferError (NOT_FOUND; INVALID; on a GPU also OutOfMemory, DeviceLost, and UNSUPPORTED if it is
    unavailable).
    """
    try:
        session = create()
    except InferError:
        raise
    except Exception as error:
        if on_gpu and is_unavailable(error):
            raise InferError(Code.UNSUPPORTED, error_text(error, path)) from error
        failure = run_error(error, on_gpu=on_gpu)
        if on_gpu and type(failure) is not InferError:
            raise failure from error
        code = Code.NOT_FOUND if isinstance(error, ort.NoSuchFile) else Code.INVALID
        text = error_text(error, path)
        raise InferError(code, f"{text}{file_advice(path)}{advice(text)}") from error
    session.disable_fallback()
    return session


def _model_to_load(path: Path, options: Mapping[str, str], config: Any) -> tuple[str | bytes, frozenset[str]]:
    """Return what the session loads, and the tensors whose rows were freed in it. Raises: InferError."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        text = "ONNX Runtime requires a UTF-8 path, and the path of the model is not UTF-8"
        raise InferError(Code.INVALID, text) from None
    if options.get(FREE_ROWS) != "1":
        return str(path), frozenset()
    try:
        model, freed = with_free_rows(path.read_bytes())
    except OSError as error:
        raise InferError(Code.NOT_FOUND, f"{path}: {error.strerror}") from error
    config.add_session_config_entry(_WEIGHTS_FOLDER_ENTRY, str(path.parent))
    return model, freed


def session_options(options: Mapping[str, str]) -> Any:
    """Make the session's options from the model's."""
    config = onnxruntime.SessionOptions()
    config.log_severity_level = 4  # a warning per folded node is no use, and exceptions report errors
    config.intra_op_num_threads = _thread_count(options, "intra_op_thread_count") or usable_cpus()
    config.execution_mode = _choice(options, "execution_mode", _EXECUTION_MODES, "0")
    parallel = config.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    config.inter_op_num_threads = _thread_count(options, "inter_op_thread_count") or (usable_cpus() if parallel else 1)
    config.enable_cpu_mem_arena = _choice(options, "enable_mem_arena", _FLAGS, "1")
    # a pattern is kept for every shape ever seen, and saves no measurable time
    config.enable_mem_pattern = _choice(options, "enable_mem_pattern", _FLAGS, "0")
    config.graph_optimization_level = _choice(options, "graph_optimization_level", _GRAPH_LEVELS, "all")
    entries = _SESSION_DEFAULTS | {name: value for name, value in options.items() if name.startswith("session.")}
    for name, value in entries.items():
        config.add_session_config_entry(name, value)
    return config


class OnnxBackend:
    """One session. Its Bindings may run at once: ONNX Runtime's `Run` is thread-safe and releases the GIL."""

    platform = "onnxruntime_onnx"
    device = "cpu"
    """The device that it runs on."""
    never_empty = ""
    """An operator that must not get inputs without elements, if the model has one."""
    shared_scale = ""
    """An operator that takes its scale from all rows of a batch, if the model has one."""
    runtime_metadata: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, session: Any, options: Mapping[str, str], freed: Collection[str] = ()) -> None:
        self._session = session
        self._options = options
        self._bindings: weakref.WeakSet[OnnxBinding] = weakref.WeakSet()
        self.graph = _read_signature(session)
        self.node_inputs: Sequence[Any] = [_as_in_file(node, freed) for node in session.get_inputs()]
        self.node_outputs: Sequence[Any] = [_as_in_file(node, freed) for node in session.get_outputs()]

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        """Allocate a Binding."""
        for spec in (*signature.inputs, *signature.outputs):
            if spec.name not in self.graph.input and spec.name not in self.graph.output:
                raise InferError(Code.INVALID, f"the model has no tensor '{spec.name}'")
        binding = self._make_binding(signature, capacity_rows)
        binding.never_empty = self.never_empty
        self._bindings.add(binding)
        return binding

    def _make_binding(self, signature: Signature, capacity_rows: int) -> OnnxBinding:
        return OnnxBinding(self._session, self.graph, signature, capacity_rows, run_options(self._options))

    def close(self) -> None:
        """Free the model, including its Bindings' buffers. A NodeArg that a hook still holds keeps the session."""
        for binding in self._bindings:
            binding.release()
        self._session = None
        self.node_inputs = self.node_outputs = ()


def run_options(options: Mapping[str, str]) -> Any:
    """Make a Binding's run options.

    Passing none costs 0.6 us a run. `gpu_graph_id` -1 means no graph capture; without the entry, onnxruntime 1.31
    raises and catches an exception in every run with IO binding: 30 us.
    """
    config = onnxruntime.RunOptions()
    config.log_severity_level = 4  # the exception carries the same text, to code that knows the request
    config.add_run_config_entry("gpu_graph_id", "-1")
    if _SHRINKAGE_ENTRY in options:
        config.add_run_config_entry(_SHRINKAGE_ENTRY, options[_SHRINKAGE_ENTRY])
    return config


def _thread_count(options: Mapping[str, str], name: str) -> int:
    value = options.get(name, "0")
    if not value.isdecimal():
        raise InferError(Code.INVALID, f"option '{name}' must be a number of threads, not '{value}'")
    return int(value)


def _choice(options: Mapping[str, str], name: str, choices: Mapping[str, Any], default: str) -> Any:
    value = options.get(name, default)
    if value not in choices:
        raise InferError(Code.INVALID, f"option '{name}' must be one of {', '.join(choices)}, not '{value}'")
    return choices[value]


def _read_signature(session: Any) -> Signature:
    """Read the Signature. An initializer that a caller may override is an optional input, after the others."""
    inputs = [_input_spec(node) for node in session.get_inputs()]
    overridable = [
        replace(_input_spec(node), optional=True)
        for node in session.get_overridable_initializers()
        if node.type in BY_ONNX_NAME
    ]
    outputs = [_output_spec(node) for node in session.get_outputs()]
    strings = any(spec.datatype == "BYTES" for spec in inputs)
    for spec in outputs:
        if strings and spec.datatype == "BF16":
            text = (
                f"output '{spec.name}' is BF16, which ONNX Runtime's Python API cannot return for a model with "
                "string inputs"
            )
            raise InferError(Code.UNSUPPORTED, text)
    return Signature((*inputs, *overridable), tuple(outputs))


def _input_spec(node: Any) -> TensorSpec:
    match = _OPTIONAL.match(node.type)
    row = BY_ONNX_NAME.get(match[1] if match else node.type)
    if row is None:
        raise InferError(Code.UNSUPPORTED, f"input '{node.name}' is {node.type}, which Penstock does not support")
    return TensorSpec(node.name, row.name, _shape(node), optional=bool(match), axes=_axes(node))


def _output_spec(node: Any) -> TensorSpec:
    row = BY_ONNX_NAME.get(node.type)
    if row is not None:
        return TensorSpec(node.name, row.name, _shape(node), axes=_axes(node))
    if not node.type.startswith(("seq(", "map(", "optional(")):
        raise InferError(Code.UNSUPPORTED, f"output '{node.name}' is {node.type}, which Penstock does not support")
    return TensorSpec(node.name, node.type, ())


def _as_in_file(node: Any, freed: Collection[str]) -> Any:
    """Describe a tensor as in the model file, for hooks that were written for it."""
    return Node(node.name, node.type, [1, *node.shape[1:]]) if node.name in freed else node


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)


def _axes(node: Any) -> tuple[str, ...]:
    """Return the names of the axes (dim_param); empty if none has one."""
    names = tuple(dim if isinstance(dim, str) else "" for dim in node.shape)
    return names if any(names) else ()
