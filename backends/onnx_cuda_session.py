"""A session on one device and its computing stream, shared by all Bindings of the session. Used by onnx_cuda.py.

How ONNX Runtime uses the stream, where it waits and when it captures was read in its sources (1.31):
cuda_execution_provider.cc, cuda_graph.cc, cuda_stream_handle.cc, inference_session.cc, io_binding.cc.
"""

from __future__ import annotations

import bisect
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import onnxruntime

from .cuda import CudaError, Runtime, to_infer_error
from .cuda_gate import GATE
from .errors import Code, InferError

GRAPH_ID_ENTRY = "gpu_graph_id"
SHRINKAGE = "memory.enable_memory_arena_shrinkage"
NO_GRAPH = -1
"""The graph id of a run that is neither captured nor replayed; ONNX Runtime treats a run without one as 0."""

MIN_FREE_FRACTION = 1 / 8
"""The fraction of a device's memory that default graphs leave free: a graph takes 7 to 30 MiB, and a model of eight
lengths and twelve sizes has two hundred (docs/gpu-check.md)."""

logger = logging.getLogger("penstock.backends")


class SessionUser(Protocol):
    """A user of the session: a CudaBinding."""

    @property
    def device_bytes(self) -> int: ...
    @property
    def graphs(self) -> int: ...
    def use_new_session(self) -> None: ...


Start = Callable[[int, bool], Any]
"""Makes a session whose work goes to a stream, with or without graphs. Raises: InferError."""


@dataclass(frozen=True)
class GpuOptions:
    """What a model's options request of its Bindings.

    `graphs` is "", "auto" or "1". `rows` are the buckets of rows, ascending: a run is padded to the next one. `shrink`:
    the arenas that ONNX Runtime shrinks after every run, such as "gpu:0".
    """

    graphs: str = ""
    rows: tuple[int, ...] = ()
    pinned: bool = True
    shrink: str = ""

    def bucket(self, rows: int, max_rows: int) -> int:
        """Return the rows to run for `rows`, where buckets above `max_rows` are not used."""
        index = bisect.bisect_left(self.rows, rows)
        return self.rows[index] if rows and index < len(self.rows) and self.rows[index] <= max_rows else rows


class CudaSession:
    """One session, one stream. `graphs`: whether runs may be captured; hold `queue` while queueing a run."""

    def __init__(self, runtime: Runtime, device: int, gpu_options: GpuOptions, start: Start) -> None:
        """Make the stream, then the session. Raises: InferError, CudaError, leaving nothing behind."""
        self.runtime = runtime
        self.device = device
        self.gpu_options = gpu_options
        self.queue = threading.Lock()
        self.graphs = bool(gpu_options.graphs)
        self.bindings: weakref.WeakSet[SessionUser] = weakref.WeakSet()
        self._graph_ids = count(1)
        self._trial_results: dict[Hashable, bool] = {}
        self._create_session = start
        self.stream = 0
        self.session: Any = None
        try:
            self._open()
        except InferError as error:
            if gpu_options.graphs != "auto":
                raise
            self.restart(error.message)

    def _open(self) -> None:
        self.stream = self.runtime.create_stream(self.device)
        try:
            with GATE.shared(long=True):
                self.session = self._create_session(self.stream, self.graphs)
        except BaseException:
            self._end_stream()
            raise
        self._trial_results.clear()
        self.inputs = _names_on_device(self.session, "get_input_memory_infos", self.session.get_inputs())
        self.outputs = _names_on_device(self.session, "get_output_memory_infos", self.session.get_outputs())

    def disable_graphs(self, reason: str) -> None:
        """Turn graphs off; the session stays valid. Raises: InferError (INVALID) if graphs are required."""
        self._check_graphs_optional(reason)
        self.graphs = False
        logger.info("no CUDA graphs for a model on cuda:%d: %s", self.device, reason)

    def restart_without_graphs(self, reason: str) -> None:
        """Start over with a new session and stream: a failed capture spoils both.

        Raises: InferError: INVALID if graphs are required; what a load raises.
        """
        self._check_graphs_optional(reason)
        self.restart(reason)

    def restart(self, reason: str) -> None:
        """Start over without graphs. Raises: InferError."""
        self.graphs = False
        self.close()
        try:
            self._open()
        except CudaError as error:
            raise to_infer_error(error) from error
        self._update_bindings()
        logger.warning("no CUDA graphs for a model on cuda:%d: %s", self.device, reason)

    def _check_graphs_optional(self, reason: str) -> None:
        if self.gpu_options.graphs != "auto":
            raise InferError(Code.INVALID, f"CUDA graphs are enabled, but {reason}")

    def shrinking_options(self) -> Any:
        """Make the options of a run after which the arena releases what it does not use."""
        return bound_options(waits=True, shrink=f"gpu:{self.device}")

    def _update_bindings(self) -> None:
        for binding in self.bindings:
            binding.use_new_session()

    def close(self) -> None:
        """Free the session, once nothing else refers to it, and its stream. Never raises on a lost device."""
        with GATE.shared():
            self.session = None
            self._update_bindings()
        self._end_stream()

    def trial_succeeded(self, shapes: Hashable, run: Callable[[], bool]) -> bool:
        """Whether a run of these shapes succeeded; it is made once for all Bindings of a session."""
        if shapes not in self._trial_results:
            self._trial_results[shapes] = run()
        return self._trial_results[shapes]

    def has_memory_for_graph(self) -> bool:
        """Whether a graph may be captured by default, leaving memory to others. Raises: InferError."""
        try:
            free, total = self.runtime.memory_info(self.device)
        except CudaError as error:
            raise to_infer_error(error) from error
        return free >= MIN_FREE_FRACTION * total

    def next_graph_id(self) -> int:
        """Return an unused graph number."""
        return next(self._graph_ids)

    def _end_stream(self) -> None:
        stream, self.stream = self.stream, 0
        if stream:
            with suppress(CudaError):
                self.runtime.destroy_stream(stream, self.device)


def bound_options(graph: int = NO_GRAPH, *, waits: bool = False, shrink: str = "") -> Any:
    """Make the options of a fully bound run: it returns when everything is queued, unless it `waits`."""
    config = onnxruntime.RunOptions()
    config.log_severity_level = 4  # the exception carries the same text, to code that knows the request
    config.add_run_config_entry(GRAPH_ID_ENTRY, str(graph))
    if not waits:
        config.add_run_config_entry("disable_synchronize_execution_providers", "1")
    if shrink:
        config.add_run_config_entry(SHRINKAGE, shrink)
    return config


def _names_on_device(session: Any, method: str, nodes: Sequence[Any]) -> frozenset[str] | None:
    """Return the tensors that ONNX Runtime expects or makes on the device; None if this version does not report them.

    It matters: an input that it expects on the host (a shape, for example) is copied from the device when bound, and
    never again. Source: CopyOneInputAcrossDevices.
    """
    get_infos = getattr(session, method, None)
    if get_infos is None:
        return None
    try:
        infos: Iterable[Any] = get_infos()
    except Exception:  # noqa: BLE001 - treated like a version that cannot be asked
        return None
    return frozenset(node.name for node, info in zip(nodes, infos, strict=True) if _is_cuda(info.name))


def _is_cuda(memory_name: str) -> bool:
    name = memory_name.casefold()
    return name.startswith(("cuda", "tensorrt")) and "pinned" not in name
