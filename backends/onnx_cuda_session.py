"""A session on one device and its computing stream, which all Bindings of the session share. Called by onnx_cuda.py.

What ONNX Runtime does with the stream, where it waits and when it captures was read in its sources (1.31):
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
"""The number of a run that is neither captured nor replayed; 0 is what ONNX Runtime takes a run without one for."""

ROOM = 1 / 8
"""So much of a device's memory is left free by graphs that nobody has asked for: a graph takes 7 to 30 MiB, and a model
of eight lengths and twelve sizes has two hundred (docs/gpu-check.md)."""

logger = logging.getLogger("penstock.backends")


class SessionUser(Protocol):
    """What is bound to the session: a CudaBinding."""

    @property
    def device_bytes(self) -> int: ...
    @property
    def graphs(self) -> int: ...
    def renew(self) -> None: ...


Start = Callable[[int, bool], Any]
"""Makes a session whose work goes to a stream, with graphs or without. Raises: InferError."""


@dataclass(frozen=True)
class Wishes:
    """What a model's options ask of its Bindings.

    `graphs` is "", "auto" or "1". `rows` are the buckets of rows, ascending: a run has as many rows as the next one.
    `shrink`: what every run has ONNX Runtime's arenas give back after it, such as "gpu:0".
    """

    graphs: str = ""
    rows: tuple[int, ...] = ()
    pinned: bool = True
    shrink: str = ""

    def bucket(self, rows: int, most: int) -> int:
        """Give the rows that a run of `rows` is made with, `most` at most."""
        at = bisect.bisect_left(self.rows, rows)
        return self.rows[at] if rows and at < len(self.rows) and self.rows[at] <= most else rows


class CudaSession:
    """One session, one stream. `graphs`: whether runs may be captured; `queue` is held by who puts a run in."""

    def __init__(self, runtime: Runtime, device: int, wishes: Wishes, start: Start) -> None:
        """Make the stream, then the session. Raises: InferError, CudaError; nothing is left then."""
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
        """Record none; the session is as good without. Raises: InferError (INVALID) where there must be graphs."""
        self._may_do_without(why)
        self.graphs = False
        logger.info("no CUDA graphs for a model on cuda:%d: %s", self.device, why)

    def without_graphs(self, why: str) -> None:
        """Begin again with a new session and stream: a capture that has gone wrong spoils both.

        Raises: InferError: INVALID where there must be graphs; what a load raises.
        """
        self._may_do_without(why)
        self.restart(why)

    def restart(self, why: str) -> None:
        """Begin again without graphs. Raises: InferError."""
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
            raise InferError(Code.INVALID, f"CUDA graphs were asked for, but {why}")

    def shrinking_options(self) -> Any:
        """Make the options of a run after which the arena gives back what it does not use."""
        return bound_options(waits=True, shrink=f"gpu:{self.device}")

    def _renew(self) -> None:
        for binding in self.bindings:
            binding.renew()

    def close(self) -> None:
        """Free the session, once nobody else has it, and its stream. Never raises on a device that is lost."""
        with GATE.shared():
            self.session = None
            self._renew()
        self._end_stream()

    def tried(self, shapes: Hashable, run: Callable[[], bool]) -> bool:
        """Tell whether a run of these shapes has gone well, which is made once for all Bindings of a session."""
        if shapes not in self._tried:
            self._tried[shapes] = run()
        return self._tried[shapes]

    def has_room(self) -> bool:
        """Tell whether a graph may be recorded by default: others need memory too. Raises: InferError."""
        try:
            free, total = self.runtime.memory(self.device)
        except CudaError as error:
            raise refusal(error) from error
        return free >= ROOM * total

    def next_graph(self) -> int:
        """Give the number of a graph that has none yet."""
        return next(self._numbers)

    def _end_stream(self) -> None:
        stream, self.stream = self.stream, 0
        if stream:
            with suppress(CudaError):
                self.runtime.end_stream(stream, self.device)


def bound_options(graph: int = NO_GRAPH, *, waits: bool = False, shrink: str = "") -> Any:
    """Make the options of a run with all bound: it returns when all is queued, unless it `waits`."""
    made = onnxruntime.RunOptions()
    made.log_severity_level = 4  # the exception says the same, to somebody who knows the request
    made.add_run_config_entry(GRAPH, str(graph))
    if not waits:
        made.add_run_config_entry("disable_synchronize_execution_providers", "1")
    if shrink:
        made.add_run_config_entry(SHRINKAGE, shrink)
    return made


def _on_device(session: Any, ask: str, nodes: Sequence[Any]) -> frozenset[str] | None:
    """Name the tensors that ONNX Runtime wants, or makes, on the device; None where this version does not say.

    It matters: an input that it wants on the host (a shape, say) is copied from the device when it is bound, and never
    again. Source: CopyOneInputAcrossDevices.
    """
    told = getattr(session, ask, None)
    if told is None:
        return None
    try:
        places: Iterable[Any] = told()
    except Exception:  # noqa: BLE001 - as unknown as where it cannot be asked
        return None
    return frozenset(node.name for node, place in zip(nodes, places, strict=True) if _is_cuda(place.name))


def _is_cuda(place: str) -> bool:
    name = place.casefold()
    return name.startswith(("cuda", "tensorrt")) and "pinned" not in name
