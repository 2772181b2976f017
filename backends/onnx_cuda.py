"""ONNX Runtime on a GPU: loads an .onnx file on one, within its memory budget, and provides Bindings. Used by onnx.py.

A model configured for a GPU runs there, or its load fails with the reason: ONNX Runtime alone would silently run it on
the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .cuda import (
    LOST_STATUSES,
    OUT_OF_MEMORY,
    UNAVAILABLE_STATUSES,
    CudaError,
    Runtime,
    find_runtime,
    to_infer_error,
    unavailable_reason,
)
from .cuda_budget import LOAD_LOCKS, Budget
from .cuda_gate import GATE
from .errors import Code, DeviceLost, InferError, ProcessLost
from .node import Node
from .onnx import OnnxBackend, create_session, open_session, prepare_session, run_options
from .onnx_binding import OnnxBinding
from .onnx_cuda_binding import CudaBinding
from .onnx_cuda_session import SHRINKAGE, CudaSession, GpuOptions
from .onnx_file import weight_bytes
from .onnx_providers import (
    CPU,
    CUDA,
    ROWS_OPTION,
    TENSORRT,
    Provider,
    check_cudnn,
    check_provider,
    cuda_options,
    start_failure,
    wants_tensorrt,
)
from .onnx_tensorrt import tensorrt_options
from .signature import Signature

GRAPHS_OPTION = "penstock.gpu_graphs"
_ASSIGNMENT_ENTRY = "session.record_ep_graph_assignment_info"
_MAX_NAMED_NODES = 8
"""The most nodes on the CPU that are named in the log."""

logger = logging.getLogger("penstock.backends")


class Dependencies(Protocol):
    """The dependencies of a load: CUDA, and an ONNX Runtime built with it."""

    def runtime(self) -> Runtime:
        """Return CUDA. Raises: InferError (UNSUPPORTED) if there is none."""

    def create_session(self, model: str | bytes, config: Any, providers: Sequence[Provider]) -> Any:
        """Make a session. Raises: what ONNX Runtime does."""


class RealDependencies:
    """The real dependencies, on this machine."""

    def __init__(self, provider: str) -> None:
        self._provider = provider

    def runtime(self) -> Runtime:
        """Find CUDA, after loading ONNX Runtime's own libraries."""
        check_provider(self._provider)
        runtime = find_runtime()
        if runtime is None:
            raise InferError(Code.UNSUPPORTED, unavailable_reason())
        return runtime

    def create_session(self, model: str | bytes, config: Any, providers: Sequence[Provider]) -> Any:
        """Make a session. Raises: InferError (UNSUPPORTED) if cuDNN is missing too."""
        check_cudnn(dict(providers)[CUDA])
        return create_session(model, config, providers)


def load_on_gpu(
    path: Path, device: int, options: Mapping[str, str], dependencies: Dependencies | None = None
) -> CudaBackend:
    """Load a model on GPU `device`.

    Options, besides those of onnx.py: `cuda.*` and `tensorrt.*` are passed to the providers; penstock.tensorrt (1:
    TensorRT first), penstock.engine_cache (the folder of its engines), penstock.rows (the buckets of rows, "1,2,4"),
    penstock.gpu_graphs (1, auto; absent or 0: none), penstock.pinned (0: ordinary host memory),
    penstock.gpu_memory_bytes and penstock.gpu_limit (cuda_budget.py).
    Raises: InferError (UNSUPPORTED: the GPU or the provider is unavailable; OVERLOADED: no room; else as onnx.py).
    ProcessLost on a permanent error: CUDA has one context for all sessions of a process.
    """
    load = _Load(path, device, options)
    dependencies = dependencies or RealDependencies(load.provider)
    try:
        runtime = dependencies.runtime()
        _check_device(runtime, device)
        with LOAD_LOCKS[device]:
            return load.run(runtime, dependencies)
    except DeviceLost as error:
        raise ProcessLost(error.code, error.message) from error
    except InferError as error:
        if error.code is not Code.UNSUPPORTED:
            raise
        raise InferError(error.code, f"device 'cuda:{device}' cannot be used: {error.message}") from error


def _check_device(runtime: Runtime, device: int) -> None:
    """Raise InferError if a device is unavailable: UNSUPPORTED, unless it is full or was lost under this process."""
    try:
        count = runtime.device_count()
        if device < count:
            runtime.set_device(device)  # creates the context, which fails with another process or a broken driver
    except CudaError as error:
        if error.status == OUT_OF_MEMORY or error.status in LOST_STATUSES - UNAVAILABLE_STATUSES:
            raise to_infer_error(error) from error
        raise InferError(Code.UNSUPPORTED, f"CUDA error {error.status} in {error.call}: {error.text}") from error
    if device >= count:
        gpu_count = f"there are {count} GPUs" if count != 1 else "there is one GPU, 'cuda:0'"
        raise InferError(Code.UNSUPPORTED, f"{gpu_count} (CUDA_VISIBLE_DEVICES determines which GPUs a process sees)")


class _Load:
    """One load and its options."""

    def __init__(self, path: Path, device: int, options: Mapping[str, str]) -> None:
        self.path = path
        self.device = device
        self.options = options
        self.provider = TENSORRT if wants_tensorrt(options) else CUDA
        self.budget = Budget.from_options(device, options)
        self.gpu_options = _gpu_options(options, self.provider)
        self._freed: frozenset[str] = frozenset()

    def run(self, runtime: Runtime, dependencies: Dependencies) -> CudaBackend:
        free_before = self.budget.check_before(runtime, weight_bytes(self.path))
        if self.gpu_options.graphs:
            GATE.enable()
        try:
            cuda = CudaSession(
                runtime,
                self.device,
                self.gpu_options,
                lambda stream, graphs: self._start(runtime, dependencies, stream, graphs),
            )
        except CudaError as error:
            raise to_infer_error(error) from error
        try:
            return CudaBackend(cuda, self.options, self.budget, free_before, self._freed)
        except BaseException:
            cuda.close()
            raise

    def _start(self, runtime: Runtime, dependencies: Dependencies, stream: int, graphs: bool) -> Any:
        load_options = {"intra_op_thread_count": "1", _ASSIGNMENT_ENTRY: "1"} | dict(self.options)
        model, config, self._freed = prepare_session(self.path, load_options)
        budget_bytes = self.budget.budget_bytes
        providers = [(CUDA, cuda_options(self.device, self.options, stream, graphs=graphs, budget_bytes=budget_bytes))]
        if self.provider == TENSORRT:
            providers.insert(0, (TENSORRT, tensorrt_options(self.path, self.device, self.options, stream, runtime)))
        session = open_session(self.path, lambda: dependencies.create_session(model, config, providers), on_gpu=True)
        if session.get_providers()[0] != self.provider:
            del session  # before its stream is destroyed, even if the exception is kept
            text = f"ONNX Runtime's {self.provider} did not start: {start_failure(self.provider)}"
            raise InferError(Code.UNSUPPORTED, text)
        return session


class CudaBackend(OnnxBackend):
    """One session on one GPU, with its own stream.

    `device`: what it runs on. `cpu_nodes`: the nodes that ONNX Runtime left on the CPU, as "Shape name"; None if this
    version does not report them.
    """

    threads_only = True

    def __init__(
        self,
        cuda: CudaSession,
        options: Mapping[str, str],
        budget: Budget,
        free_before: int,
        freed: Collection[str] = (),
    ) -> None:
        """Raise InferError (OVERLOADED) if the session has exceeded the budget."""
        super().__init__(cuda.session, options, freed)
        self._session = None  # the CudaSession owns it, and may replace it
        # copies: a NodeArg kept by a hook would keep the session, its memory, and a stream that is gone by then
        self.node_inputs = [Node.from_runtime(node) for node in self.node_inputs]
        self.node_outputs = [Node.from_runtime(node) for node in self.node_outputs]
        self.device = f"cuda:{cuda.device}"
        self.cpu_nodes = _cpu_nodes(cuda.session)
        self._cuda = cuda
        self._budget = budget
        try:
            self._session_bytes = max(free_before - cuda.runtime.memory_info(cuda.device)[0], 0)
        except CudaError as error:
            raise to_infer_error(error) from error
        budget.check_after(self._session_bytes)

    @property
    def device_bytes(self) -> int:
        """The device memory that the session took while loading, plus that of its Bindings."""
        return self._session_bytes + sum(binding.device_bytes for binding in self._cuda.bindings)

    @property
    def graphs(self) -> int:
        """How many CUDA graphs its Bindings have captured."""
        return sum(binding.graphs for binding in self._cuda.bindings)

    @property
    def host_tensors(self) -> tuple[str, ...] | None:
        """The inputs and outputs that ONNX Runtime places on the host; None if this version does not report that."""
        inputs, outputs = self._cuda.inputs, self._cuda.outputs
        if inputs is None or outputs is None:
            return None
        names = [node.name for node in (*self.node_inputs, *self.node_outputs)]
        return tuple(name for name in names if name not in inputs and name not in outputs)

    def _make_binding(self, signature: Signature, capacity_rows: int) -> OnnxBinding:
        binding = CudaBinding(self._cuda, self.graph, signature, capacity_rows, run_options(self._options))
        try:
            self._budget.check_after(self.device_bytes + binding.device_bytes)
        except InferError:
            binding.release()
            raise
        self._cuda.bindings.add(binding)
        return binding

    def close(self) -> None:
        """Free the model and everything its Bindings hold. Never raises, even on a lost device."""
        super().close()
        self._cuda.close()


def _gpu_options(options: Mapping[str, str], provider: str) -> GpuOptions:
    graphs = _graph_mode(options, provider)
    rows = options.get(ROWS_OPTION, "") if graphs != "0" or provider == TENSORRT else ""
    try:
        buckets = tuple(sorted(int(count) for count in rows.split(","))) if rows else ()
    except ValueError:
        raise InferError(Code.INVALID, f"option '{ROWS_OPTION}' must look like '1,2,4', not '{rows}'") from None
    pinned = options.get("penstock.pinned", "1") != "0"
    return GpuOptions("" if graphs == "0" else graphs, buckets, pinned, options.get(SHRINKAGE, ""))


def _graph_mode(options: Mapping[str, str], provider: str) -> str:
    """Return "0", "1" or "auto". Raises: InferError (INVALID)."""
    graphs = options.get(GRAPHS_OPTION) or options.get("cuda.enable_cuda_graph", "0")
    if graphs not in ("0", "1", "auto"):
        raise InferError(Code.INVALID, f"option '{GRAPHS_OPTION}' must be 0, 1 or auto, not '{graphs}'")
    obstacle = ""
    if provider == TENSORRT:
        obstacle = "with TensorRT, use 'tensorrt.trt_cuda_graph_enable' instead"
    elif "gpu" in options.get(SHRINKAGE, ""):
        obstacle = f"'{SHRINKAGE}' releases the memory that graphs use"
    if obstacle and graphs == "1":
        raise InferError(Code.INVALID, f"option '{GRAPHS_OPTION}': {obstacle}")
    return "0" if obstacle else graphs


def _cpu_nodes(session: Any) -> tuple[str, ...] | None:
    get_assignment = getattr(session, "get_provider_graph_assignment_info", None)
    if get_assignment is None:
        return None
    try:
        parts = [(part.ep_name, part.get_nodes()) for part in get_assignment()]
    except Exception:  # noqa: BLE001 - treated like a version that cannot be asked
        return None
    cpu_nodes = tuple(f"{node.op_type} {node.name}".rstrip() for name, nodes in parts if name == CPU for node in nodes)
    if cpu_nodes:
        named = ", ".join(cpu_nodes[:_MAX_NAMED_NODES]) + (", ..." if len(cpu_nodes) > _MAX_NAMED_NODES else "")
        node_count = sum(len(nodes) for _, nodes in parts)
        logger.info("ONNX Runtime placed %d of %d nodes on the CPU: %s", len(cpu_nodes), node_count, named)
    return cpu_nodes
