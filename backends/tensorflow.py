"""TensorFlow: loads a SavedModel on the CPU or on one GPU, and provides Bindings. The only file that imports it.

Used through `loading.py`, and never in the server's process: a process with both TensorFlow and ONNX Runtime has two
thread pools, two CUDA allocators and two copies of protobuf's descriptors.
A SavedModel of either generation is loaded as a graph with a session, as in TensorFlow Serving and Triton, and run
without checking the shapes that its placeholders declare.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client.session import Session as TensorflowSession
from tensorflow.python.framework import config as devices
from tensorflow.python.framework import dtypes, load_library, tensor_util, versions
from tensorflow.python.framework.ops import Graph
from tensorflow.python.ops import gen_resource_variable_ops as variables
from tensorflow.python.platform import tf_logging
from tensorflow.python.saved_model import loader_impl

from .backend import FREE_ROWS, Binding, device_number
from .cpus import usable_cpus
from .errors import Code, InferError
from .libraries import load_libraries
from .node import Node
from .signature import Signature
from .tensorflow_binding import TensorflowBinding
from .tensorflow_failures import error_text, load_error
from .tensorflow_rows import free_placeholders, with_free_rows
from .tensorflow_signature import ServedSignature, choose_key, read_signature

MAX_CALLABLES = 32
"""Choices of outputs whose pruned and optimized graph is kept; the oldest is evicted first."""
_SINGLE_THREADED = "SINGLE_THREADED_EXECUTOR"
"""Runs a graph's operations one after another on the calling thread. One row takes 24 instead of 171 us of CPU for
iris, 12 instead of 54 for a network of two layers, 22 instead of 120 for a small convolution; an operation still uses
all its threads. It supports neither references (variables of TensorFlow 1) nor more than one device."""
_UNSUPPORTED_BY_SINGLE_THREADED = "Single-threaded executor does not"
_MUST_COMPILE, _COMPILED_BY_JAX = "_XlaMustCompile", "XlaCallModule"
_GRAPH_FILES = ("saved_model.pb", "saved_model.pbtxt")
_TRUE = {"1", "true", "on", "yes"}
_FALSE = {"0", "false", "off", "no"}


def load(path: Path, device: str, options: Mapping[str, str]) -> TensorflowBackend:
    """Load a SavedModel's folder on `device` ("cpu", "cuda:0", ...).

    Options: TF_GRAPH_TAG (serve; several separated by commas), TF_SIGNATURE_DEF (the signature's key), cortex_signature
    (1: without a key, use Cortex's rule), penstock.free_rows (1: free a first axis that the signature fixes to 1);
    TF_NUM_INTRA_THREADS or intra_op_thread_count (0: all usable CPUs), TF_NUM_INTER_THREADS or inter_op_thread_count
    (0: one operation after another; on a GPU, all CPUs), TF_USE_PER_SESSION_THREADS; allow_growth (1, but 0 if a
    fraction is set) and gpu_memory_fraction; custom_op_library.1, .2 and so on (paths).
    Raises: InferError (NOT_FOUND: no SavedModel there; UNSUPPORTED: an unsupported type or device; else INVALID).
    """
    config = session_config(device, options)
    if not any((path / name).is_file() for name in _GRAPH_FILES):
        raise InferError(Code.NOT_FOUND, f"'{path.name}' is not a SavedModel: it has no {_GRAPH_FILES[0]}")
    tf_logging.get_logger().setLevel("ERROR")  # it logs every restored variable
    load_libraries(options, load_library.load_op_library, error_text)
    return TensorflowBackend(path, config, options, on_gpu=device != "cpu")


def session_config(device: str, options: Mapping[str, str]) -> Any:
    """Make the session's configuration from the model's options. Raises: InferError."""
    config = config_pb2.ConfigProto(
        allow_soft_placement=True
    )  # a graph may name a device of the machine that trained it
    intra = _threads(options, "TF_NUM_INTRA_THREADS", "intra_op_thread_count")
    config.intra_op_parallelism_threads = intra or usable_cpus()
    inter = _threads(options, "TF_NUM_INTER_THREADS", "inter_op_thread_count")
    config.inter_op_parallelism_threads = inter or usable_cpus()
    if device == "cpu" and not inter:
        config.experimental.executor_type = _SINGLE_THREADED
    # a thread that spins for work occupies the core that the front end needs: with 32 rows of iris, 43 instead of 63 us
    config.experimental.disable_thread_spinning = True
    config.use_per_session_threads = _flag(options, "TF_USE_PER_SESSION_THREADS", default=False)
    fraction = _fraction(options, "gpu_memory_fraction")
    config.gpu_options.per_process_gpu_memory_fraction = fraction
    config.gpu_options.allow_growth = _flag(options, "allow_growth", default=not fraction)
    # otherwise a run that does not fit waits ten seconds for others to end; a smaller one may fit at once
    config.gpu_options.experimental.disallow_retry_on_allocation_failure = True
    number = device_number(device)
    if number is None:
        config.device_count["GPU"] = 0
        return config
    gpu_count = len(devices.list_physical_devices("GPU"))
    if number >= gpu_count:
        text = f"device '{device}' is configured, but TensorFlow {versions.VERSION} sees {gpu_count or 'no'} GPU"
        raise InferError(Code.UNSUPPORTED, text if gpu_count else f"{text}: pip install tensorflow[and-cuda]")
    config.gpu_options.visible_device_list = str(number)
    return config


class TensorflowBackend:
    """One SavedModel. Its Bindings may run at once: a session's runs are thread-safe and release the GIL.

    It has one session at a time. The new session opened after a run was stopped is read from the files again: values
    that a model wrote to its variables are lost, as when a process restarts.
    """

    platform = "tensorflow_savedmodel"
    stateful = True

    def __init__(self, path: Path, config: Any, options: Mapping[str, str], *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.bfloat16: Any = dtypes.bfloat16.as_numpy_dtype
        self._path, self._config = path, config
        self._tags = (options.get("TF_GRAPH_TAG") or "serve").split(",")
        self._bindings: weakref.WeakSet[TensorflowBinding] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.serving: ServedSignature
        self.defaults: Mapping[str, Any]
        self._freed: frozenset[str] = frozenset()
        self._session: Session | None = None
        session, meta_graph = self._open()
        self._session = session
        try:
            self.serving, self.defaults = _read_serving_signature(session, meta_graph, options)
            if options.get(FREE_ROWS) == "1":
                self._free_rows()
        except Exception:
            self._session.close()
            raise
        signatures = _as_json(meta_graph)
        self.compiles_each_size = _has_compiled_functions(meta_graph.graph_def)
        self.runtime_metadata: Mapping[str, Any] = {"signature_def": signatures, "signature_key": self.serving.key}
        self.graph: Signature = self.serving.graph
        self.node_inputs: Sequence[Node] = self.serving.inputs
        self.node_outputs: Sequence[Node] = self.serving.outputs

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        """Allocate a Binding."""
        for spec in (*signature.inputs, *signature.outputs):
            if spec.name not in self.graph.input and spec.name not in self.graph.output:
                raise InferError(Code.INVALID, f"the model has no tensor '{spec.name}'")
        binding = TensorflowBinding(self, signature, capacity_rows)
        self._bindings.add(binding)
        return binding

    def open_session(self) -> Session:
        """Return the session to run on. Raises: InferError, if a new one is needed and cannot be opened."""
        session = self._session
        if session is not None and not session.closed:
            return session
        with self._lock:
            if self._session is None:
                raise InferError(Code.NOT_READY, "the model is unloaded")
            if self._session.closed:
                self._session = self._open()[0]
            return self._session

    def switch_executor(self, error: Exception) -> bool:
        """Whether a run failed because the executor cannot run this graph; if so, another is used from now on."""
        executor = self._config.experimental.executor_type
        if not executor or _UNSUPPORTED_BY_SINGLE_THREADED not in str(error):
            return False
        self._config.experimental.executor_type = ""
        if self._session is not None:
            self._session.close()
        return True

    def close(self) -> None:
        """Free the model, including its Bindings' buffers. TensorFlow keeps a GPU's memory until the process ends."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()
        for binding in self._bindings:
            binding.release()

    def _free_rows(self) -> None:
        """Free the first axis, and reopen the session with the changed graph. Nodes stay as they were."""
        graph, fixed = with_free_rows(self.serving.graph)
        names = [self.serving.tensors["input", name] for name in fixed]
        self._freed = frozenset(name.partition(":")[0] for name in names)
        self.serving = replace(self.serving, graph=graph)
        if self._freed and self._session is not None:
            self._session.close()
            self._session = self._open()[0]

    def _open(self) -> tuple[Session, Any]:
        """Load the graph into its own session: variables restored, tables and assets initialized."""
        graph = Graph()
        session = TensorflowSession(graph=graph, config=self._config)
        try:
            loader = loader_impl.SavedModelLoader(str(self._path))
            meta_graph = loader.get_meta_graph_def_from_tags(self._tags)
            if self._freed:
                free_placeholders(meta_graph.graph_def, self._freed)
            with graph.as_default():
                loader.load(session, self._tags)
                _initialize_unread_variables(graph, session)
        except Exception as error:
            session.close()
            if self.switch_executor(error):
                return self._open()
            raise load_error(error, self._path) from error
        return Session(session), meta_graph


class Session:
    """A session and its callables, one for each choice of inputs and outputs.

    Threads: any.
    """

    def __init__(self, session: Any) -> None:
        self.closed = False
        self._session = session
        self._callables: dict[tuple[tuple[str, ...], tuple[str, ...]], Callable[..., list[Any]]] = {}
        self._lock = threading.Lock()

    def callable(self, feeds: tuple[str, ...], fetches: tuple[str, ...]) -> Callable[..., list[Any]]:
        """Return the callable that runs the graph, made on the first use of these names."""
        key = feeds, fetches
        function = self._callables.get(key)
        if function is not None:
            return function
        with self._lock:
            if key not in self._callables:
                options = config_pb2.CallableOptions(feed=feeds, fetch=fetches)
                # The public `make_callable` with feeds is `Session.run`: five times the time, and a check of shapes.
                function = self._session._make_callable_from_options(options)  # noqa: SLF001
                while len(self._callables) >= MAX_CALLABLES:
                    del self._callables[next(iter(self._callables))]
                self._callables[key] = function
            return self._callables[key]

    def has_tensor(self, tensor: str) -> bool:
        """Whether the graph has a tensor of this name."""
        try:
            self._session.graph.get_tensor_by_name(tensor)
        except (KeyError, ValueError):
            return False
        return True

    def close(self) -> None:
        """End all runs."""
        self.closed = True
        self._session.close()


def _initialize_unread_variables(graph: Any, session: Any) -> None:
    """Fill the variables that a load leaves empty, from the saved copies of them.

    `tf.saved_model.save` of a model of Keras 3 makes a second variable of each, initialized with the first, and only
    those second ones are read from the files, while the graph uses the first. TensorFlow's loader for Python finds them
    by their objects; Triton, TensorFlow Serving and others that run the graph fail: "Could not find variable".
    """
    pairs = []
    for assign in graph.get_operations():
        if assign.type != "AssignVariableOp" or assign.inputs[1].op.type != "ReadVariableOp":
            continue
        unread, saved = assign.inputs[1].op.inputs[0], assign.inputs[0]
        if unread.op.type == saved.op.type == "VarHandleOp" and unread is not saved:
            pairs.append((unread, saved, assign.inputs[1].dtype))
    initialized_checks = [
        variables.var_is_initialized_op(resource=variable) for unread, saved, _ in pairs for variable in (unread, saved)
    ]
    states = session.run(initialized_checks) if pairs else []
    session.run([
        variables.assign_variable_op(resource=unread, value=variables.read_variable_op(resource=saved, dtype=dtype))
        for (unread, saved, dtype), is_initialized, is_saved in zip(pairs, states[::2], states[1::2], strict=True)
        if is_saved and not is_initialized
    ])  # fmt: skip


def _has_compiled_functions(graph_def: Any) -> bool:
    """Whether XLA compiles a part of the graph: functions of `jit_compile=True`, or what JAX has exported."""
    functions = graph_def.library.function
    nodes = itertools.chain(graph_def.node, *(function.node_def for function in functions))
    return any(_MUST_COMPILE in each.attr and each.attr[_MUST_COMPILE].b for each in functions) or any(
        node.op == _COMPILED_BY_JAX for node in nodes
    )


def _as_json(meta_graph: Any) -> dict[str, Any]:
    return {key: MessageToDict(signature) for key, signature in meta_graph.signature_def.items()}


def _read_serving_signature(
    session: Session, meta_graph: Any, options: Mapping[str, str]
) -> tuple[ServedSignature, dict[str, Any]]:
    """Choose and read the signature, and the default values of its optional inputs."""
    signatures = _as_json(meta_graph)
    cortex = _flag(options, "cortex_signature", default=False)
    key = choose_key(signatures, options.get("TF_SIGNATURE_DEF", ""), cortex=cortex)
    order = {node.name: position for position, node in enumerate(meta_graph.graph_def.node)}
    serving = read_signature(signatures, key, order)
    for (kind, name), tensor in serving.tensors.items():
        if not session.has_tensor(tensor):
            raise InferError(Code.INVALID, f"{kind} '{name}' is '{tensor}', which the model's graph does not have")
    defaults = getattr(meta_graph.signature_def[key], "defaults", {})  # TensorFlow has them since 2.14
    return serving, {name: tensor_util.MakeNdarray(value) for name, value in defaults.items()}


def _threads(options: Mapping[str, str], *names: str) -> int:
    """Read a number of threads from the first of these options that sets one; 0 if none does."""
    for name in names:
        value = options.get(name, "")
        if not value:
            continue
        if not value.isdecimal():
            raise InferError(Code.INVALID, f"option '{name}' must be a number of threads, not '{value}'")
        if int(value):
            return int(value)
    return 0


def _flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = options.get(name, "").lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    if value:
        raise InferError(Code.INVALID, f"option '{name}' must be 1 or 0, not '{options[name]}'")
    return default


def _fraction(options: Mapping[str, str], name: str) -> float:
    value = options.get(name) or "0"
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise InferError(Code.INVALID, f"option '{name}' must be a number from 0 to 1, not '{value}'")
    return fraction
