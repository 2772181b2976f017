"""ONNX Runtime: loads an .onnx file on the CPU or on one GPU, and lends Bindings. Only onnx*.py import it.

Used through `loading.py`. The reasons for how a run works, with figures, are in docs/adr/0004-onnx-runtime-binding.md.
"""

from __future__ import annotations

import logging
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
from .node import Node
from .onnx_binding import OnnxBinding
from .onnx_failures import advice, is_absent, run_error, words
from .onnx_file import remark
from .onnx_log import route_log
from .onnx_operators import SHARED_SCALES, never_empty, operators
from .onnx_providers import CPU, said_to
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
_LIBRARY = "custom_op_library"
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
logger = logging.getLogger("penstock.backends")
_FOLDERS = re.compile(r"(?<!\w)/\S*/")
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
        model, made, freed = prepared(path, options)
        backend = OnnxBackend(opened(path, lambda: start(model, made, [(CPU, {})])), options, freed)
    found = operators(path)
    backend.never_empty = min(found & never_empty(onnxruntime.__version__), default="")
    backend.shared_scale = min(found & SHARED_SCALES, default="")
    return backend


def prepared(path: Path, options: Mapping[str, str]) -> tuple[str | bytes, Any, frozenset[str]]:
    """Return what a session loads, its options, and the tensors whose rows were freed in it. Raises: InferError."""
    made = session_options(options)
    _register(made, options)
    model, freed = _model(path, options, made)
    return model, made, freed


def start(model: str | bytes, made: Any, providers: Sequence[tuple[str, dict[str, str]]]) -> Any:
    """Make a session. Raises: what ONNX Runtime does."""
    route_log()
    # enable_fallback: otherwise a provider that fails is replaced by the CPU, with a print
    return onnxruntime.InferenceSession(model, made, providers=list(providers), enable_fallback=0)


def opened(path: Path, make: Callable[[], Any], *, on_gpu: bool = False) -> Any:
    """Make a session.

    Raises: InferError (NOT_FOUND; INVALID; on a GPU also OutOfMemory, DeviceLost, and UNSUPPORTED if it is
    unavailable).
    """
    try:
        session = make()
    except InferError:
        raise
    except Exception as error:
        if on_gpu and is_absent(error):
            raise InferError(Code.UNSUPPORTED, words(error, path)) from error
        failed = run_error(error, on_gpu=on_gpu)
        if on_gpu and type(failed) is not InferError:
            raise failed from error
        code = Code.NOT_FOUND if isinstance(error, ort.NoSuchFile) else Code.INVALID
        said = words(error, path)
        raise InferError(code, f"{said}{remark(path)}{advice(said)}") from error
    session.disable_fallback()
    return session


def _register(made: Any, options: Mapping[str, str]) -> None:
    """Register the operators of libraries, whose code then runs in this process, with a session.

    Raises: InferError (INVALID), with the paths of folders removed from the text.
    """
    for library in map(Path, said_to(options, f"{_LIBRARY}.").values()):
        logger.info("loaded custom operators from %s", library)
        try:
            made.register_custom_ops_library(str(library))
        except Exception as error:
            why = _FOLDERS.sub("", words(error, library))
            text = f"option '{_LIBRARY}': '{library.name}' could not be registered: {why}"
            raise InferError(Code.INVALID, text) from error


def _model(path: Path, options: Mapping[str, str], made: Any) -> tuple[str | bytes, frozenset[str]]:
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
    made.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent))
    return model, freed


def session_options(options: Mapping[str, str]) -> Any:
    """Make the session's options from the model's."""
    made = onnxruntime.SessionOptions()
    made.log_severity_level = 4  # a warning per folded node is no use, and exceptions report errors
    made.intra_op_num_threads = _count(options, "intra_op_thread_count") or usable_cpus()
    made.execution_mode = _choice(options, "execution_mode", _EXECUTION_MODES, "0")
    parallel = made.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    made.inter_op_num_threads = _count(options, "inter_op_thread_count") or (usable_cpus() if parallel else 1)
    made.enable_cpu_mem_arena = _choice(options, "enable_mem_arena", _FLAGS, "1")
    # a pattern is kept for every shape ever seen, and saves no measurable time
    made.enable_mem_pattern = _choice(options, "enable_mem_pattern", _FLAGS, "0")
    made.graph_optimization_level = _choice(options, "graph_optimization_level", _GRAPH_LEVELS, "all")
    entries = _SESSION_DEFAULTS | {name: value for name, value in options.items() if name.startswith("session.")}
    for name, value in entries.items():
        made.add_session_config_entry(name, value)
    return made


class OnnxBackend:
    """One session. Its Bindings may run at once: ONNX Runtime's `Run` is thread-safe and releases the GIL."""

    platform = "onnxruntime_onnx"
    device = "cpu"
    """The device that it runs on."""
    never_empty = ""
    """An operator that must not get inputs without elements, if the model has one."""
    shared_scale = ""
    """An operator that takes its scale from all rows of a batch, if the model has one."""
    described: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, session: Any, options: Mapping[str, str], freed: Collection[str] = ()) -> None:
        self._session = session
        self._options = options
        self._bindings: weakref.WeakSet[OnnxBinding] = weakref.WeakSet()
        self.graph = _graph(session)
        self.node_inputs: Sequence[Any] = [_as_written(node, freed) for node in session.get_inputs()]
        self.node_outputs: Sequence[Any] = [_as_written(node, freed) for node in session.get_outputs()]

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        """Allocate a Binding."""
        for spec in (*signature.inputs, *signature.outputs):
            if spec.name not in self.graph.input and spec.name not in self.graph.output:
                raise InferError(Code.INVALID, f"the model has no tensor '{spec.name}'")
        binding = self._make(signature, capacity_rows)
        binding.never_empty = self.never_empty
        self._bindings.add(binding)
        return binding

    def _make(self, signature: Signature, capacity_rows: int) -> OnnxBinding:
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
    made = onnxruntime.RunOptions()
    made.log_severity_level = 4  # the exception carries the same text, to code that knows the request
    made.add_run_config_entry("gpu_graph_id", "-1")
    if _SHRINKAGE in options:
        made.add_run_config_entry(_SHRINKAGE, options[_SHRINKAGE])
    return made


def _count(options: Mapping[str, str], name: str) -> int:
    value = options.get(name, "0")
    if not value.isdecimal():
        raise InferError(Code.INVALID, f"option '{name}' must be a number of threads, not '{value}'")
    return int(value)


def _choice(options: Mapping[str, str], name: str, choices: Mapping[str, Any], default: str) -> Any:
    value = options.get(name, default)
    if value not in choices:
        raise InferError(Code.INVALID, f"option '{name}' must be one of {', '.join(choices)}, not '{value}'")
    return choices[value]


def _graph(session: Any) -> Signature:
    """Read the Signature. An initializer that a caller may override is an optional input, after the others."""
    inputs = [_input(node) for node in session.get_inputs()]
    overridable = [
        replace(_input(node), optional=True)
        for node in session.get_overridable_initializers()
        if node.type in BY_ONNX_NAME
    ]
    outputs = [_output(node) for node in session.get_outputs()]
    strings = any(spec.datatype == "BYTES" for spec in inputs)
    for spec in outputs:
        if strings and spec.datatype == "BF16":
            text = (
                f"output '{spec.name}' is BF16, which ONNX Runtime's Python API cannot return for a model with "
                "string inputs"
            )
            raise InferError(Code.UNSUPPORTED, text)
    return Signature((*inputs, *overridable), tuple(outputs))


def _input(node: Any) -> TensorSpec:
    match = _OPTIONAL.match(node.type)
    row = BY_ONNX_NAME.get(match[1] if match else node.type)
    if row is None:
        raise InferError(Code.UNSUPPORTED, f"input '{node.name}' is {node.type}, which Penstock does not support")
    return TensorSpec(node.name, row.name, _shape(node), optional=bool(match), axes=_axes(node))


def _output(node: Any) -> TensorSpec:
    row = BY_ONNX_NAME.get(node.type)
    if row is not None:
        return TensorSpec(node.name, row.name, _shape(node), axes=_axes(node))
    if not node.type.startswith(("seq(", "map(", "optional(")):
        raise InferError(Code.UNSUPPORTED, f"output '{node.name}' is {node.type}, which Penstock does not support")
    return TensorSpec(node.name, node.type, ())


def _as_written(node: Any, freed: Collection[str]) -> Any:
    """Describe a tensor as in the model file, for hooks that were written for it."""
    return Node(node.name, node.type, [1, *node.shape[1:]]) if node.name in freed else node


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)


def _axes(node: Any) -> tuple[str, ...]:
    """Return the names of the axes (dim_param); empty if none has one."""
    names = tuple(dim if isinstance(dim, str) else "" for dim in node.shape)
    return names if any(names) else ()
