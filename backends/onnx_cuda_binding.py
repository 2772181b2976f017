"""The Binding of `onnx_cuda.py`: copies in, a run and copies out, queued on three streams of a device.

If every wanted output is bound, `begin` queues and `end` waits, so that two Bindings of one session keep the device's
copy engines and kernels busy at once. Everything else runs fed, as on the CPU, within `begin`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from .backend import Array
from .cuda import LOST, CudaError, refusal
from .cuda_gate import GATE
from .cuda_moves import Move, onto_host, onto_pinned
from .device_array import HOST, DeviceArray
from .errors import Code, DeviceLost, InferError
from .gathering import copied
from .onnx_binding import RunPlan
from .onnx_cuda_choice import CudaChoice, Parts, Targets
from .onnx_cuda_session import CudaSession, bound_options
from .onnx_cuda_slabs import DeviceSlabs
from .onnx_failures import words
from .signature import Signature

PINNED_BYTES = 1 << 17
"""From this size on, the device itself copies a tensor from client memory. Up to 64 KiB CUDA may have the CPU read it,
which must not touch that memory; and gathering it takes no longer than a call."""


class CudaBinding(DeviceSlabs):
    """A stream each way, and the session's own between them. `device`: its number; `device_ns` as in Overlapping."""

    def __init__(
        self, cuda: CudaSession, graph: Signature, signature: Signature, capacity_rows: int, run_options: Any
    ) -> None:  # fmt: skip
        """Allocate what can be sized now. Raises: InferError (OutOfMemory: the sizes), leaving nothing behind."""
        self.device_ns = 0
        self._bound_options = [bound_options(shrink=cuda.wishes.shrink)]
        self._thread = 0
        self._placed: dict[int, Parts] = {}
        self._aimed: dict[int, Targets] = {}
        self._begun: tuple[CudaChoice, tuple[int, ...]] | None = None
        self._ready: list[Any] | None = None
        super().__init__(cuda, graph, signature, capacity_rows, run_options)
        self._run_bound = self._session.run_with_iobinding
        try:
            self._in, self._out = self._holdings.stream(), self._holdings.stream()
            self._copied, self._first, self._computed, self._done = (self._holdings.event() for _ in range(4))
        except BaseException:
            self.release()
            raise

    def lend(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        """Return the pinned input buffers for a run; the same ones for the same shapes."""
        if self._placed or self._aimed:
            self._placed, self._aimed = {}, {}
        return super().lend(rows, shapes)

    def run(self, wanted: Sequence[int]) -> list[Any]:
        """Run the model on the lent buffers."""
        self.begin(wanted)
        return self.end()

    def begin(self, wanted: Sequence[int]) -> None:
        """Queue the run of the lent and filled buffers; a run that cannot be bound runs right here."""
        plan = self._lent
        if plan is None:
            raise ValueError("run without lend")
        self.tired = True
        try:
            self._begin(plan, tuple(wanted))
        except BaseException:
            self._placed, self._aimed = {}, {}
            raise

    def _begin(self, plan: RunPlan, key: tuple[int, ...]) -> None:
        try:
            choice = plan.choices[key] if key in plan.choices else self._choose(plan, key)
            if not isinstance(choice, CudaChoice):
                self._ready = self._fed(plan, key)
                return
            with self._cuda.queue, GATE.shared():
                self._queue(choice)
        except InferError as error:
            met = self._drained()
            if met is not None and met.status in LOST:
                raise refusal(met) from error
            raise
        except CudaError as error:
            raise refusal(self._drained() or error) from error
        except Exception as error:  # it does not say who is to blame; a fed run does
            if (met := self._drained()) is not None:
                raise refusal(met) from error
            self._fill_host(plan)
            with self._cuda.queue, GATE.shared():
                self._ready = self._deliver(self._run_again(plan, key, error), key)
            return
        self._begun = choice, key

    def end(self) -> list[Any]:
        """Wait for the run that was begun, and return its outputs."""
        if self._ready is not None:
            ready, self._ready, self.device_ns = self._ready, None, 0
            self._placed, self._aimed = {}, {}
            return ready
        if self._begun is None:
            raise ValueError("end without begin")
        (choice, key), self._begun = self._begun, None
        aimed, self._aimed = self._aimed, {}
        try:
            self._runtime.use(self.device)
            self._runtime.synchronize(self._done)
            self.device_ns = self._runtime.elapsed_ns(self._first, self._computed)
        except CudaError as error:
            raise refusal(self._drained() or error) from error
        finally:
            self._placed = {}
        return [
            np.empty_like(output) if _covers(aimed.get(position), output) else copied(output)
            for position, output in zip(key, choice.outputs, strict=True)
        ]

    def ended(self) -> bool:
        """Whether `end` would return, or raise, at once."""
        try:
            return self._begun is None or self._runtime.told(self._done)
        except CudaError:
            return True

    def stop(self) -> None:
        """End the current run while it is being queued; what the device has begun ends by itself."""
        for options in self._bound_options:
            options.terminate = True
        super().stop()

    def _go_on(self) -> None:
        super()._go_on()
        for options in self._bound_options:
            options.terminate = False

    def reaches(self, part: DeviceArray) -> bool:
        """Whether the device can copy a tensor itself: from its own, another's, or pinned memory."""
        if part.memory.device != HOST:
            return True
        may = part.nbytes >= PINNED_BYTES and self._cuda.wishes.pinned
        return may and self._runtime.pins.has(part.memory, self.device)

    def place(self, position: int, parts: Parts) -> None:
        """Take an input's rows from parts, on the device if ONNX Runtime wants it there. Raises: PartUnreadable."""
        buffer = self._lent.buffers[position] if self._lent is not None else None
        if buffer is None:
            raise ValueError("place without lend")
        if self._is_on_device("in", position):
            self._placed[position] = onto_pinned(buffer, parts, self.reaches)
        else:
            onto_host(buffer, parts)

    def aim(self, position: int, targets: Targets) -> bool:
        """Write an output's rows to targets on the device, if its shape is known beforehand."""
        if self._lent is None or position not in self._bindable or not self._is_on_device("out", position):
            return False
        shape = self._output_shape(self._lent, position)
        row_bytes = math.prod(shape[1:]) * self._outputs[position][1].type.size_bytes
        for first, target in targets:
            rows = target.shape[0] if target.shape else 0
            fits = target.shape[1:] == shape[1:] and first + rows <= shape[0] and target.nbytes == rows * row_bytes
            if not fits:
                return False
        self._aimed[position] = targets
        return True

    def prepare(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Run the lent and filled buffers so that kernels are chosen, then capture a CUDA graph if enabled.

        In this order: a capture keeps everything else off the device, and choosing takes many times as long.
        Threads: the one that will run it: ONNX Runtime keeps graphs by thread (PerThreadContext).
        Raises: InferError: INVALID if graphs are required and impossible; DeviceLost.
        """
        self._thread = self._thread or threading.get_ident()
        self.lend(rows, shapes)
        plan = self._lent
        if plan is None:
            return
        goes = self._cuda.tried(self._run_shapes(plan), self._try_out)
        captures = self._cuda.graphs and self._thread == threading.get_ident()
        if captures and (self._cuda.wishes.graphs != "auto" or (goes and self._cuda.has_room())):
            self._prepare_graph(plan)
            # if the capture failed, there is another session, which has not run these shapes
            self._cuda.tried(self._run_shapes(plan), self._try_out)

    def _try_out(self) -> bool:
        """Run the lent buffers, ignoring failures: other values, or more free memory, may work later."""
        try:
            self.run(tuple(sorted(self._bindable)) or (0,))
        except DeviceLost:
            raise
        except InferError:
            return False  # the next run fails too, and reports it
        return True

    def _prepare_graph(self, plan: RunPlan) -> None:
        if self._run_shapes(plan) in self._captured:
            return
        if not self._can_bind(plan, tuple(range(len(self._outputs)))):
            self._cuda.no_graphs("a tensor of the model is not bound")
            return
        number = self._cuda.next_graph()
        why = self._capture(plan, number)
        if why:
            # not while an exception, or anything else, refers to the session
            self._cuda.without_graphs(why)
            return
        self._captured[self._run_shapes(plan)] = options = bound_options(number)
        self._bound_options.append(options)
        self._forget_choices()

    @property
    def graphs(self) -> int:
        """How many graphs it has captured."""
        return len(self._captured)

    def rest(self) -> None:
        """Have ONNX Runtime release unused arena memory; that takes a run, so only once after other runs.

        Captured graphs use memory that the arena considers free: with them, nothing is released.
        """
        if self._lent is None or not self.tired or self._captured or self._begun is not None:
            return
        self.tired = False
        usual, self._run_options = self._run_options, self._cuda.shrinking_options()
        try:
            self._fed(self._lent, (0,))
        except InferError:
            return  # the next run fails too, and reports it
        finally:
            self._run_options = usual

    def renew(self) -> None:
        """Continue with the current session."""
        self._session = self._cuda.session
        self._run_bound = getattr(self._session, "run_with_iobinding", None)
        self._captured.clear()
        self._forget_choices()

    def release(self) -> None:
        """Release the session, all buffers, streams and events, after current work. Never raises."""
        self._begun = self._ready = None
        super().release()
        # only when everything is over: these may keep clients' memory mapped
        self._placed, self._aimed = {}, {}

    # --- a run

    def _capture(self, plan: RunPlan, number: int) -> str:
        """Run with all outputs bound, and capture; return why that is impossible, or "". Raises: InferError."""
        choice = self._choose(plan, tuple(range(len(self._outputs))))
        if not isinstance(choice, CudaChoice) or not choice.is_whole(self._inputs, self._outputs):
            return "a tensor of the model is not bound on the device"
        try:
            with self._cuda.queue, GATE.alone():
                self._runtime.use(self.device)
                self._copy(choice.into, self._cuda.stream, "read")
                self._runtime.drain(self._cuda.stream)
                # ONNX Runtime runs it as often as needed before it captures
                self._run_bound(choice.binding, bound_options(number, waits=True))
                self._runtime.drain(self._cuda.stream)
        except Exception as error:  # noqa: BLE001 - whatever it was, it may not occur without graphs
            return words(error)
        return ""

    def _queue(self, choice: CudaChoice) -> None:
        runtime, compute = self._runtime, self._cuda.stream
        replays = choice.replay is not None and self._thread == threading.get_ident()
        into, out = choice.into, choice.out
        if self._placed or self._aimed or choice.moved:
            into, out = choice.in_place(self._placed, self._aimed)
        runtime.use(self.device)
        self._copy(into, self._in, "read")
        runtime.record(self._copied, self._in)
        runtime.wait(compute, self._copied)
        runtime.record(self._first, compute)
        self._run_bound(choice.binding, choice.replay if replays else self._bound_options[0])
        runtime.record(self._computed, compute)
        runtime.wait(self._out, self._computed)
        self._copy(out, self._out, "write to")
        runtime.record(self._done, self._out)

    def _copy(self, moves: Sequence[Move], stream: int, doing: str) -> None:
        copy, pageable = self._runtime.copy, not self._cuda.wishes.pinned
        for to, source, size, part in moves:
            try:
                copy(to, source, size, stream, pageable=pageable)
            except CudaError as error:
                if part is None or error.status in LOST:
                    raise
                raise part.memory.failed(doing, error) from error

    def _fed(self, plan: RunPlan, wanted: tuple[int, ...]) -> list[Any]:
        self._fill_host(plan)
        with self._cuda.queue, GATE.shared():
            return self._deliver(self._run_fed(plan, wanted), wanted)

    def _fill_host(self, plan: RunPlan) -> None:
        for position, parts in self._placed.items():
            buffer = plan.buffers[position]
            if buffer is not None:
                onto_host(buffer, parts)

    def _deliver(self, results: list[Any], wanted: tuple[int, ...]) -> list[Any]:
        """Write outputs that came to the host to their targets on the device."""
        for position, result in zip(wanted, results, strict=True):
            for first, target in self._aimed.get(position, ()):
                rows = np.ascontiguousarray(result[first : first + target.shape[0]] if target.shape else result)
                if rows.nbytes != target.nbytes:
                    name = self._outputs[position][0].name
                    raise InferError(
                        Code.INVALID,
                        f"output '{name}' does not have the shape that its shared memory was registered for",
                    )
                try:
                    self._runtime.write(target.pointer, self.device, rows.tobytes())
                except CudaError as error:
                    raise target.memory.failed("write to", error) from error
        return results

    def _drained(self) -> CudaError | None:
        """End all current work, so that the buffers can be used again; return the device's error."""
        self._begun = None
        return self._holdings.drain(self._cuda.stream)


def _covers(targets: Targets | None, output: Array) -> bool:
    return targets is not None and sum(target.nbytes for _, target in targets) == output.nbytes
