"""The slabs of a CUDA Binding on both sides, and how the outputs of a run are bound in them.

ONNX Runtime determines which tensors are on the device: an input that it expects on the host, such as a shape, is bound
in its pinned buffer, and so is an output that it makes there.
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any

from .backend import Array
from .cuda_copies import Slab
from .cuda_gate import GATE
from .cuda_resources import CudaResources
from .onnx_binding import OnnxBinding, RunPlan
from .onnx_cuda_bound_run import CudaBoundRun
from .onnx_cuda_session import CudaSession
from .signature import Signature, TensorSpec

RunShapes = tuple[tuple[int, ...] | None, ...]


class DeviceSlabs(OnnxBinding):
    """A slab on the device beside each pinned one, allocated for all rows at once if the shapes are known."""

    bound_bytes = sys.maxsize

    def __init__(
        self, cuda: CudaSession, graph: Signature, signature: Signature, capacity_rows: int, run_options: Any
    ) -> None:  # fmt: skip
        self.device = cuda.device
        self._cuda = cuda
        self._runtime = cuda.runtime
        self._resources = CudaResources(cuda.runtime, cuda.device)
        # a Binding need not be released: some are made for a trial and dropped
        weakref.finalize(self, self._resources.free_all).atexit = False
        self._captured_graphs: dict[RunShapes, Any] = {}
        try:
            super().__init__(cuda.session, graph, signature, capacity_rows, run_options)
            if not self._can_bind_on_device():
                return
            for position in sorted(self._bindable):
                spec = self._outputs[position][1]
                self._output_slabs[position] = self._new_slab(spec, self._initial_size(spec.shape))
            self._device_slabs()
        except BaseException:
            self._resources.free_all()
            raise

    @property
    def device_bytes(self) -> int:
        """The device memory of its slabs."""
        return self._resources.bytes

    def release(self) -> None:
        """Release the session and everything held. Never raises."""
        self._resources.synchronize(self._cuda.stream)
        super().release()
        self._resources.free_all()

    def _can_bind_on_device(self) -> bool:
        return bool(self._bindable) and self._cuda.inputs is not None and self._cuda.outputs is not None

    def _can_bind(self, plan: RunPlan, wanted: tuple[int, ...]) -> bool:
        return self._can_bind_on_device() and super()._can_bind(plan, wanted)

    def _is_on_device(self, side: str, position: int) -> bool:
        is_input = side == "in"
        names = self._cuda.inputs if is_input else self._cuda.outputs
        return names is not None and (self._inputs if is_input else self._outputs)[position][1].name in names

    def _run_rows(self, plan: RunPlan) -> int:
        return self._cuda.gpu_options.bucket(plan.rows, self.capacity_rows)

    def _run_shapes(self, plan: RunPlan) -> RunShapes:
        """Return the shapes of a run: with as many rows as the next bucket."""
        if not self._signature.batched:
            return tuple(None if buffer is None else buffer.shape for buffer in plan.buffers)
        rows = self._run_rows(plan)
        return tuple(None if buffer is None else (rows, *buffer.shape[1:]) for buffer in plan.buffers)

    def _make_plan(self, rows: int, shapes: RunShapes) -> RunPlan:
        plan = super()._make_plan(rows, shapes)
        for position, shape in enumerate(self._run_shapes(plan)):
            if shape is not None and math.prod(shape) > self._input_slabs[position].size:
                self._grow(position, math.prod(shape))
                plan = super()._make_plan(rows, shapes)
        return plan

    def _grow(self, position: int, size: int) -> None:
        """Replace a slab that is too small, first on the device: if memory is short there, smaller runs still work."""
        if self._can_bind_on_device() and self._is_on_device("in", position):
            spec = self._inputs[position][1]
            try:
                nbytes = max(size, 2 * self._input_slabs[position].size) * spec.type.size_bytes
                self._resources.device_slab(("in", position), nbytes)
            finally:
                self._discard_bindings()
        super()._grow(position, size)

    def _new_slab(self, spec: TensorSpec, size: int) -> Array:
        dtype = spec.type.dtype
        if dtype.hasobject or not self._cuda.gpu_options.pinned:
            return super()._new_slab(spec, size)
        nbytes = size * dtype.itemsize
        return self._resources.pinned_buffer(nbytes)[:nbytes].view(dtype)

    def _device_slabs(self) -> dict[tuple[str, int], int]:
        """Allocate a device slab beside each on the host; return their addresses."""
        bytes_before = self._resources.bytes
        try:
            return {
                (side, position): self._resources.device_slab((side, position), slab.nbytes)
                for side, slabs in (("in", dict(enumerate(self._input_slabs))), ("out", self._output_slabs))
                for position, slab in slabs.items()
                if self._is_on_device(side, position)
            }
        finally:
            if self._resources.bytes != bytes_before:
                self._discard_bindings()

    def _discard_bindings(self) -> None:
        """Drop everything bound or captured with the addresses of freed slabs."""
        self._captured_graphs.clear()
        self._discard_bound_runs()

    def _discard_bound_runs(self) -> None:
        for plan in self._plans.values():
            plan.bound_runs.clear()

    def _bind_all(self, plan: RunPlan, wanted: tuple[int, ...]) -> CudaBoundRun:
        with GATE.shared():  # ONNX Runtime uses a stream for each tensor that it is given
            return self._bind_on_device(plan, wanted)

    def _bind_on_device(self, plan: RunPlan, wanted: tuple[int, ...]) -> CudaBoundRun:
        slabs = self._device_slabs()
        run_shapes = self._run_shapes(plan)
        replay = self._captured_graphs.get(run_shapes)
        bound_run = CudaBoundRun(self._session.io_binding(), self.device, replay)
        for position, shape in enumerate(run_shapes):
            if shape is not None:
                self._bind_input(bound_run, position, shape, slabs.get(("in", position)))
        # a graph writes everything that was bound when it was captured
        for position in range(len(self._outputs)) if replay is not None else wanted:
            self._bind_output(
                bound_run, plan, position, slabs.get(("out", position)), copied_to_host=position in wanted
            )
        bound_run.outputs = [self._output_view(plan, position) for position in wanted]
        return bound_run

    def _bind_input(self, bound_run: CudaBoundRun, position: int, shape: tuple[int, ...], pointer: int | None) -> None:
        spec = self._inputs[position][1]
        host = self._input_slabs[position][: math.prod(shape)]
        if not spec.shape and shape == (1,):
            shape = ()
        if pointer is None:
            bound_run.binding.bind_input(spec.name, "cpu", 0, spec.type.onnx_code, shape, host.ctypes.data)
        else:
            bound_run.bind_input(position, spec, shape, Slab(pointer, host, _row_bytes(host, shape)))

    def _bind_output(
        self, bound_run: CudaBoundRun, plan: RunPlan, position: int, pointer: int | None, *, copied_to_host: bool
    ) -> None:  # fmt: skip
        spec = self._outputs[position][1]
        shape = self._output_shape(plan, position)
        view = self._output_view(plan, position)
        run_shape = (self._run_rows(plan), *shape[1:]) if self._signature.batched else shape
        if pointer is None:
            bound_run.binding.bind_output(spec.name, "cpu", 0, spec.type.onnx_code, run_shape, view.ctypes.data)
        else:
            bound_run.bind_output(
                position, spec, run_shape, Slab(pointer, view, _row_bytes(view, shape)), copied_to_host=copied_to_host
            )

    def _output_view(self, plan: RunPlan, position: int) -> Array:
        shape = self._output_shape(plan, position)
        return self._output_slabs[position][: math.prod(shape)].reshape(shape)


def _row_bytes(array: Array, shape: tuple[int, ...]) -> int:
    """Units: bytes of one row of an array whose own shape need not have rows."""
    return array.nbytes // shape[0] if shape and shape[0] else array.nbytes
