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

from .cuda import CudaError, Runtime, refusal
from .cuda_gate import GATE
from .errors import Code, InferError

GRAPH = "gpu_graph_id"
SHRINKAGE = "memory.enable_memory_arena_shrinkage"
NO_GRAPH = -1
"""The graph id of a run that is neither captured nor replayed; ONNX Runtime treats a run without one as 0."""

ROOM = 1 / 8
"""The fraction of a device's memory that default graphs leave free: a graph takes 7 to 30 MiB, and a model of eight
lengths and twelve sizes has two hundred (docs/gpu-check.md)."""

logger = logging.getLogger("penstock.backends")


class SessionUser(Protocol):
    """A user of the session: a CudaBinding."""

    @property
    def device_bytes(self) -> int: ...
    @property
    def graphs(self) -> int: ...
    def renew(self) -> None: ...


Start = Callable[[int, bool], Any]
"""Makes a session whose work goes to a stream, with or without graphs. Raises: InferError."""


@dataclass(frozen=True)
class Wishes:
    """What a model's options request of its Bindings.

    `graphs` is "", "auto" or "1". `rows` are the buckets of rows, ascending: a run is padded to the next one. `shrink`:
    the arenas that ONNX Runtime shrinks after every run, such as "gpu:0".
    """

    graphs: str = ""
    rows: tuple[int, ...] = ()
    pinned: bool = True
    shrink: str = ""

    def bucket(self, rows: int, most: int) -> int:
        """Return the rows to run for `rows`, where buckets above `most` are not used."""
        at = bisect.bisect_left(self.rows, rows)
        return self.rows[at] if rows and at < len(self.rows) and self.rows[at] <= most else rows


class CudaSession:
    """One session, one stream. `graphs`: whether runs may be captured; hold `queue` while queueing a run."""

    def __init__(self, runtime: Runtime, device: int, wishes: Wishes, start: Start) -> None:
        """Make the stream, then the session. Raises: InferError, CudaError, leaving nothing behind."""
        self.runtime = runtime
        self.device = device
        self.wishes = wishes
        self.queue = threading.Lock()
        self.graphs = bool(wishes.graphs)
        self.bindings: weakref.WeakSet[SessionUser] = weakref.WeakSet()
        self._numbers = count(1)
        self._tried: dict[Hashable, bool] = {}
        self._start = start
        self.stream = 0
        self.session: Any = None
        try:
            self._open()
        except InferError as error:
            if wishes.graphs != "auto":
                raise
            self.restart(error.message)

    def _open(self) -> None:
        self.stream = self.runtime.stream(self.device)
        try:
            with GATE.shared(long=True):
                self.session = self._start(self.stream, self.graphs)
        except BaseException:
            self._end_stream()
            raise
        self._tried.clear()
        self.inputs = _on_device(self.session, "get_input_memory_infos", self.session.get_inputs())
        self.outputs = _on_device(self.session, "get_output_memory_infos", self.session.get_outputs())

    def no_graphs(self, why: str) -> None:
        """Turn graphs off; the session stays valid. Raises: InferError (INVALID) if graphs are required."""
        self._may_do_without(why)
        self.graphs = False
        logger.info("no CUDA graphs for a model on cuda:%d: %s", self.device, why)

    def without_graphs(self, why: str) -> None:
        """Start over with a new session and stream: a failed capture spoils both.

        Raises: InferError: INVALID if graphs are required; what a load raises.
        """
        self._may_do_without(why)
        self.restart(why)

    def restart(self, why: str) -> None:
        """Start over without graphs. Raises: InferError."""
        self.graphs = False
        self.close()
        try:
            self._open()
        except CudaError as error:
            raise refusal(error) from error
        self._renew()
        logger.warning("no CUDA graphs for a model on cuda:%d: %s", self.device, why)

    def _may_do_without(self, why: str) -> None:
        if self.wishes.graphs != "auto":
            raise InferError(Code.INVALID, f"CUDA graphs are enabled, but {why}")

    def shrinking_options(self) -> Any:
        """Make the options of a run after which the arena releases what it does not use."""
        return bound_options(waits=True, shrink=f"gpu:{self.device}")

    def _renew(self) -> None:
        for binding in self.bindings:
            binding.renew()

    def close(self) -> None:
        """Free the session, once nothing else refers to it, and its stream. Never raises on a lost device."""
        with GATE.shared():
            self.session = None
            self._renew()
        self._end_stream()

    def tried(self, shapes: Hashable, run: Callable[[], bool]) -> bool:
        """Whether a run of these shapes succeeded; it is made once for all Bindings of a session."""
        if shapes not in self._tried:
            self._tried[shapes] = run()
        return self._tried[shapes]

    def has_room(self) -> bool:
        """Whether a graph may be captured by default, leaving memory to others. Raises: InferError."""
        try:
            free, total = self.runtime.memory(self.device)
        except CudaError as error:
            raise refusal(error) from error
        return free >= ROOM * total

    def next_graph(self) -> int:
        """Return an unused graph number."""
        return next(self._numbers)

    def _end_stream(self) -> None:
        stream, self.stream = self.stream, 0
        if stream:
            with suppress(CudaError):
                self.runtime.end_stream(stream, self.device)


def bound_options(graph: int = NO_GRAPH, *, waits: bool = False, shrink: str = "") -> Any:
    """Make the options of a fully bound run: it returns when everything is queued, unless it `waits`."""
    made = onnxruntime.RunOptions()
    made.log_severity_level = 4  # the exception carries the same text, to code that knows the request
    made.add_run_config_entry(GRAPH, str(graph))
    if not waits:
        made.add_run_config_entry("disable_synchronize_execution_providers", "1")
    if shrink:
        made.add_run_config_entry(SHRINKAGE, shrink)
    return made


def _on_device(session: Any, ask: str, nodes: Sequence[Any]) -> frozenset[str] | None:
    """Return the tensors that ONNX Runtime expects or makes on the device; None if this version does not report them.

    It matters: an input that it expects on the host (a shape, for example) is copied from the device when bound, and
    never again. Source: CopyOneInputAcrossDevices.
    """
    told = getattr(session, ask, None)
    if told is None:
        return None
    try:
        places: Iterable[Any] = told()
    except Exception:  # noqa: BLE001 - treated like a version that cannot be asked
        return None
    return frozenset(node.name for node, place in zip(nodes, places, strict=True) if _is_cuda(place.name))


def _is_cuda(place: str) -> bool:
    name = place.casefold()
    return name.startswith(("cuda", "tensorrt")) and "pinned" not in name
