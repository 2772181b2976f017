"""The slabs of a CUDA Binding on both sides, and how a choice of outputs is bound in them.

ONNX Runtime determines which tensors are on the device: an input that it expects on the host, such as a shape, is bound
in its pinned buffer, and so is an output that it makes there.
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any

from .backend import Array
from .cuda_gate import GATE
from .cuda_holdings import Holdings
from .cuda_moves import Slab
from .onnx_binding import OnnxBinding, RunPlan
from .onnx_cuda_choice import CudaChoice
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
        self._holdings = Holdings(cuda.runtime, cuda.device)
        # a Binding need not be released: some are made for a trial and dropped
        weakref.finalize(self, self._holdings.free).atexit = False
        self._captured: dict[RunShapes, Any] = {}
        try:
            super().__init__(cuda.session, graph, signature, capacity_rows, run_options)
            if not self._binds():
                return
            for position in sorted(self._bindable):
                spec = self._outputs[position][1]
                self._output_slabs[position] = self._new_slab(spec, self._first_size(spec.shape))
            self._device_slabs()
        except BaseException:
            self._holdings.free()
            raise

    @property
    def device_bytes(self) -> int:
        """The device memory of its slabs."""
        return self._holdings.bytes

    def release(self) -> None:
        """Release the session and everything held. Never raises."""
        self._holdings.drain(self._cuda.stream)
        super().release()
        self._holdings.free()

    def _binds(self) -> bool:
        return bool(self._bindable) and self._cuda.inputs is not None and self._cuda.outputs is not None

    def _can_bind(self, plan: RunPlan, wanted: tuple[int, ...]) -> bool:
        return self._binds() and super()._can_bind(plan, wanted)

    def _is_on_device(self, side: str, position: int) -> bool:
        taken = side == "in"
        names = self._cuda.inputs if taken else self._cuda.outputs
        return names is not None and (self._inputs if taken else self._outputs)[position][1].name in names

    def _run_rows(self, plan: RunPlan) -> int:
        return self._cuda.wishes.bucket(plan.rows, self.capacity_rows)

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
        if self._binds() and self._is_on_device("in", position):
            spec = self._inputs[position][1]
            try:
                wanted = max(size, 2 * self._input_slabs[position].size) * spec.type.size_bytes
                self._holdings.slab(("in", position), wanted)
            finally:
                self._forget_addresses()
        super()._grow(position, size)

    def _new_slab(self, spec: TensorSpec, size: int) -> Array:
        dtype = spec.type.dtype
        if dtype.hasobject or not self._cuda.wishes.pinned:
            return super()._new_slab(spec, size)
        nbytes = size * dtype.itemsize
        return self._holdings.pinned(nbytes)[:nbytes].view(dtype)

    def _device_slabs(self) -> dict[tuple[str, int], int]:
        """Allocate a device slab beside each on the host; return their addresses."""
        had = self._holdings.bytes
        try:
            return {
                (side, position): self._holdings.slab((side, position), slab.nbytes)
                for side, slabs in (("in", dict(enumerate(self._input_slabs))), ("out", self._output_slabs))
                for position, slab in slabs.items()
                if self._is_on_device(side, position)
            }
        finally:
            if self._holdings.bytes != had:
                self._forget_addresses()

    def _forget_addresses(self) -> None:
        """Drop everything bound or captured with the addresses of freed slabs."""
        self._captured.clear()
        self._forget_choices()

    def _forget_choices(self) -> None:
        for plan in self._plans.values():
            plan.choices.clear()

    def _bind_all(self, plan: RunPlan, wanted: tuple[int, ...]) -> CudaChoice:
        with GATE.shared():  # ONNX Runtime uses a stream for each tensor that it is given
            return self._bound(plan, wanted)

    def _bound(self, plan: RunPlan, wanted: tuple[int, ...]) -> CudaChoice:
        slabs = self._device_slabs()
        shapes = self._run_shapes(plan)
        replay = self._captured.get(shapes)
        choice = CudaChoice(self._session.io_binding(), self.device, replay)
        for position, shape in enumerate(shapes):
            if shape is not None:
                self._bind_input(choice, position, shape, slabs.get(("in", position)))
        # a graph writes everything that was bound when it was captured
        for position in range(len(self._outputs)) if replay is not None else wanted:
            self._bind_output(choice, plan, position, slabs.get(("out", position)), shown=position in wanted)
        choice.outputs = [self._output_view(plan, position) for position in wanted]
        return choice

    def _bind_input(self, choice: CudaChoice, position: int, shape: tuple[int, ...], pointer: int | None) -> None:
        spec = self._inputs[position][1]
        host = self._input_slabs[position][: math.prod(shape)]
        if not spec.shape and shape == (1,):
            shape = ()
        if pointer is None:
            choice.binding.bind_input(spec.name, "cpu", 0, spec.type.onnx_code, shape, host.ctypes.data)
        else:
            choice.take(position, spec, shape, Slab(pointer, host, _row_bytes(host, shape)))

    def _bind_output(
        self, choice: CudaChoice, plan: RunPlan, position: int, pointer: int | None, *, shown: bool
    ) -> None:  # fmt: skip
        spec = self._outputs[position][1]
        shape = self._output_shape(plan, position)
        view = self._output_view(plan, position)
        run_shape = (self._run_rows(plan), *shape[1:]) if self._signature.batched else shape
        if pointer is None:
            choice.binding.bind_output(spec.name, "cpu", 0, spec.type.onnx_code, run_shape, view.ctypes.data)
        else:
            choice.give(position, spec, run_shape, Slab(pointer, view, _row_bytes(view, shape)), shown=shown)

    def _output_view(self, plan: RunPlan, position: int) -> Array:
        shape = self._output_shape(plan, position)
        return self._output_slabs[position][: math.prod(shape)].reshape(shape)


def _row_bytes(array: Array, shape: tuple[int, ...]) -> int:
    """Units: bytes of one row of an array whose own shape need not have rows."""
    return array.nbytes // shape[0] if shape and shape[0] else array.nbytes
