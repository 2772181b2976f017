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
from .cuda import LOST_STATUSES, CudaError, to_infer_error
from .cuda_copies import DeviceCopy, fill_host_buffer, gather_into_pinned
from .cuda_gate import GATE
from .device_array import HOST, DeviceArray
from .errors import Code, DeviceLost, InferError
from .gathering import copy_array
from .onnx_binding import RunPlan
from .onnx_cuda_bound_run import CudaBoundRun, Parts, Targets
from .onnx_cuda_session import CudaSession, bound_options
from .onnx_cuda_slabs import DeviceSlabs
from .onnx_failures import error_text
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
        self._bound_options = [bound_options(shrink=cuda.gpu_options.shrink)]
        self._capture_thread = 0
        self._input_parts: dict[int, Parts] = {}
        self._output_targets: dict[int, Targets] = {}
        self._in_flight: tuple[CudaBoundRun, tuple[int, ...]] | None = None
        self._finished_outputs: list[Any] | None = None
        super().__init__(cuda, graph, signature, capacity_rows, run_options)
        self._run_bound = self._session.run_with_iobinding
        try:
            self._input_stream, self._output_stream = self._resources.create_stream(), self._resources.create_stream()
            self._copied_event, self._started_event, self._computed_event, self._done_event = (
                self._resources.create_event() for _ in range(4)
            )
        except BaseException:
            self.release()
            raise

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        """Return the pinned input buffers for a run; the same ones for the same shapes."""
        if self._input_parts or self._output_targets:
            self._input_parts, self._output_targets = {}, {}
        return super().acquire_buffers(rows, shapes)

    def run(self, wanted: Sequence[int]) -> list[Any]:
        """Run the model on the acquired buffers."""
        self.begin(wanted)
        return self.end()

    def begin(self, wanted: Sequence[int]) -> None:
        """Queue the run of the acquired and filled buffers; a run that cannot be bound runs right here."""
        plan = self._plan
        if plan is None:
            raise ValueError("run without acquire_buffers")
        self.can_trim = True
        try:
            self._begin(plan, tuple(wanted))
        except BaseException:
            self._input_parts, self._output_targets = {}, {}
            raise

    def _begin(self, plan: RunPlan, key: tuple[int, ...]) -> None:
        try:
            bound_run = plan.bound_runs[key] if key in plan.bound_runs else self._bind_run(plan, key)
            if not isinstance(bound_run, CudaBoundRun):
                self._finished_outputs = self._run_on_host(plan, key)
                return
            with self._cuda.queue, GATE.shared():
                self._enqueue(bound_run)
        except InferError as error:
            device_error = self._abort_work()
            if device_error is not None and device_error.status in LOST_STATUSES:
                raise to_infer_error(device_error) from error
            raise
        except CudaError as error:
            raise to_infer_error(self._abort_work() or error) from error
        except Exception as error:  # it does not say who is to blame; a fed run does
            if (device_error := self._abort_work()) is not None:
                raise to_infer_error(device_error) from error
            self._fill_host(plan)
            with self._cuda.queue, GATE.shared():
                self._finished_outputs = self._write_targets(self._retry_fed(plan, key, error), key)
            return
        self._in_flight = bound_run, key

    def end(self) -> list[Any]:
        """Wait for the run that was begun, and return its outputs."""
        if self._finished_outputs is not None:
            outputs, self._finished_outputs, self.device_ns = self._finished_outputs, None, 0
            self._input_parts, self._output_targets = {}, {}
            return outputs
        if self._in_flight is None:
            raise ValueError("end without begin")
        (bound_run, key), self._in_flight = self._in_flight, None
        targets, self._output_targets = self._output_targets, {}
        try:
            self._runtime.set_device(self.device)
            self._runtime.synchronize_event(self._done_event)
            self.device_ns = self._runtime.elapsed_ns(self._started_event, self._computed_event)
        except CudaError as error:
            raise to_infer_error(self._abort_work() or error) from error
        finally:
            self._input_parts = {}
        return [
            np.empty_like(output) if _covers(targets.get(position), output) else copy_array(output)
            for position, output in zip(key, bound_run.outputs, strict=True)
        ]

    def is_done(self) -> bool:
        """Whether `end` would return, or raise, at once."""
        try:
            return self._in_flight is None or self._runtime.is_event_done(self._done_event)
        except CudaError:
            return True

    def stop(self) -> None:
        """End the current run while it is being queued; what the device has begun ends by itself."""
        for options in self._bound_options:
            options.terminate = True
        super().stop()

    def _clear_stop(self) -> None:
        super()._clear_stop()
        for options in self._bound_options:
            options.terminate = False

    def can_copy(self, part: DeviceArray) -> bool:
        """Whether the device can copy a tensor itself: from its own, another's, or pinned memory."""
        if part.memory.device != HOST:
            return True
        is_pinnable = part.nbytes >= PINNED_BYTES and self._cuda.gpu_options.pinned
        return is_pinnable and self._runtime.pins.ensure_pinned(part.memory, self.device)

    def set_input_parts(self, position: int, parts: Parts) -> None:
        """Take an input's rows from parts, on the device if ONNX Runtime wants it there. Raises: PartUnreadable."""
        buffer = self._plan.buffers[position] if self._plan is not None else None
        if buffer is None:
            raise ValueError("set_input_parts without acquire_buffers")
        if self._is_on_device("in", position):
            self._input_parts[position] = gather_into_pinned(buffer, parts, self.can_copy)
        else:
            fill_host_buffer(buffer, parts)

    def set_output_targets(self, position: int, targets: Targets) -> bool:
        """Write an output's rows to targets on the device, if its shape is known beforehand."""
        if self._plan is None or position not in self._bindable or not self._is_on_device("out", position):
            return False
        shape = self._output_shape(self._plan, position)
        row_bytes = math.prod(shape[1:]) * self._outputs[position][1].type.size_bytes
        for first, target in targets:
            rows = target.shape[0] if target.shape else 0
            fits = target.shape[1:] == shape[1:] and first + rows <= shape[0] and target.nbytes == rows * row_bytes
            if not fits:
                return False
        self._output_targets[position] = targets
        return True

    def prepare(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Run the acquired and filled buffers so that kernels are chosen, then capture a CUDA graph if enabled.

        In this order: a capture keeps everything else off the device, and choosing takes many times as long.
        Threads: the one that will run it: ONNX Runtime keeps graphs by thread (PerThreadContext).
        Raises: InferError: INVALID if graphs are required and impossible; DeviceLost.
        """
        self._capture_thread = self._capture_thread or threading.get_ident()
        self.acquire_buffers(rows, shapes)
        plan = self._plan
        if plan is None:
            return
        trial_succeeded = self._cuda.trial_succeeded(self._run_shapes(plan), self._trial_run)
        can_capture = self._cuda.graphs and self._capture_thread == threading.get_ident()
        if can_capture and (
            self._cuda.gpu_options.graphs != "auto" or (trial_succeeded and self._cuda.has_memory_for_graph())
        ):
            self._prepare_graph(plan)
            # if the capture failed, there is another session, which has not run these shapes
            self._cuda.trial_succeeded(self._run_shapes(plan), self._trial_run)

    def _trial_run(self) -> bool:
        """Run the acquired buffers, ignoring failures: other values, or more free memory, may work later."""
        try:
            self.run(tuple(sorted(self._bindable)) or (0,))
        except DeviceLost:
            raise
        except InferError:
            return False  # the next run fails too, and reports it
        return True

    def _prepare_graph(self, plan: RunPlan) -> None:
        if self._run_shapes(plan) in self._captured_graphs:
            return
        if not self._can_bind(plan, tuple(range(len(self._outputs)))):
            self._cuda.disable_graphs("a tensor of the model is not bound")
            return
        graph_id = self._cuda.next_graph_id()
        obstacle = self._capture(plan, graph_id)
        if obstacle:
            # not while an exception, or anything else, refers to the session
            self._cuda.restart_without_graphs(obstacle)
            return
        self._captured_graphs[self._run_shapes(plan)] = options = bound_options(graph_id)
        self._bound_options.append(options)
        self._discard_bound_runs()

    @property
    def graphs(self) -> int:
        """How many graphs it has captured."""
        return len(self._captured_graphs)

    def trim_memory(self) -> None:
        """Have ONNX Runtime release unused arena memory; that takes a run, so only once after other runs.

        Captured graphs use memory that the arena considers free: with them, nothing is released.
        """
        if self._plan is None or not self.can_trim or self._captured_graphs or self._in_flight is not None:
            return
        self.can_trim = False
        saved_options, self._run_options = self._run_options, self._cuda.shrinking_options()
        try:
            self._run_on_host(self._plan, (0,))
        except InferError:
            return  # the next run fails too, and reports it
        finally:
            self._run_options = saved_options

    def use_new_session(self) -> None:
        """Continue with the current session."""
        self._session = self._cuda.session
        self._run_bound = getattr(self._session, "run_with_iobinding", None)
        self._captured_graphs.clear()
        self._discard_bound_runs()

    def release(self) -> None:
        """Release the session, all buffers, streams and events, after current work. Never raises."""
        self._in_flight = self._finished_outputs = None
        super().release()
        # only when everything is over: these may keep clients' memory mapped
        self._input_parts, self._output_targets = {}, {}

    # --- a run

    def _capture(self, plan: RunPlan, graph_id: int) -> str:
        """Run with all outputs bound, and capture; return why that is impossible, or "". Raises: InferError."""
        bound_run = self._bind_run(plan, tuple(range(len(self._outputs))))
        if not isinstance(bound_run, CudaBoundRun) or not bound_run.is_fully_bound(self._inputs, self._outputs):
            return "a tensor of the model is not bound on the device"
        try:
            with self._cuda.queue, GATE.exclusive():
                self._runtime.set_device(self.device)
                self._copy(bound_run.input_copies, self._cuda.stream, "read")
                self._runtime.synchronize_stream(self._cuda.stream)
                # ONNX Runtime runs it as often as needed before it captures
                self._run_bound(bound_run.binding, bound_options(graph_id, waits=True))
                self._runtime.synchronize_stream(self._cuda.stream)
        except Exception as error:  # noqa: BLE001 - whatever it was, it may not occur without graphs
            return error_text(error)
        return ""

    def _enqueue(self, bound_run: CudaBoundRun) -> None:
        runtime, compute = self._runtime, self._cuda.stream
        replays = bound_run.replay is not None and self._capture_thread == threading.get_ident()
        input_copies, output_copies = bound_run.input_copies, bound_run.output_copies
        if self._input_parts or self._output_targets or bound_run.is_rebound:
            input_copies, output_copies = bound_run.bind_in_place(self._input_parts, self._output_targets)
        runtime.set_device(self.device)
        self._copy(input_copies, self._input_stream, "read")
        runtime.record_event(self._copied_event, self._input_stream)
        runtime.wait_event(compute, self._copied_event)
        runtime.record_event(self._started_event, compute)
        self._run_bound(bound_run.binding, bound_run.replay if replays else self._bound_options[0])
        runtime.record_event(self._computed_event, compute)
        runtime.wait_event(self._output_stream, self._computed_event)
        self._copy(output_copies, self._output_stream, "write to")
        runtime.record_event(self._done_event, self._output_stream)

    def _copy(self, copies: Sequence[DeviceCopy], stream: int, action: str) -> None:
        copy, pageable = self._runtime.copy, not self._cuda.gpu_options.pinned
        for destination, source, size, part in copies:
            try:
                copy(destination, source, size, stream, pageable=pageable)
            except CudaError as error:
                if part is None or error.status in LOST_STATUSES:
                    raise
                raise part.memory.access_error(action, error) from error

    def _run_on_host(self, plan: RunPlan, wanted: tuple[int, ...]) -> list[Any]:
        self._fill_host(plan)
        with self._cuda.queue, GATE.shared():
            return self._write_targets(self._run_fed(plan, wanted), wanted)

    def _fill_host(self, plan: RunPlan) -> None:
        for position, parts in self._input_parts.items():
            buffer = plan.buffers[position]
            if buffer is not None:
                fill_host_buffer(buffer, parts)

    def _write_targets(self, results: list[Any], wanted: tuple[int, ...]) -> list[Any]:
        """Write outputs that came to the host to their targets on the device."""
        for position, result in zip(wanted, results, strict=True):
            for first, target in self._output_targets.get(position, ()):
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
                    raise target.memory.access_error("write to", error) from error
        return results

    def _abort_work(self) -> CudaError | None:
        """End all current work, so that the buffers can be used again; return the device's error."""
        self._in_flight = None
        return self._resources.synchronize(self._cuda.stream)


def _covers(targets: Targets | None, output: Array) -> bool:
    return targets is not None and sum(target.nbytes for _, target in targets) == output.nbytes
