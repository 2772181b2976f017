"""A run bound on a device for a set of outputs, and the copies that it needs. Used by the CUDA Binding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .backend import Array
from .cuda_copies import DeviceCopy, Slab, plan_input_copies, plan_output_copies
from .device_array import DeviceArray
from .onnx_binding import BoundRun
from .signature import TensorSpec

Parts = Sequence[Array | DeviceArray]
Targets = Sequence[tuple[int, DeviceArray]]


class BoundTensor:
    """A tensor bound on the device at `pointer`: the address of its slab, unless a run is in place.

    Shapes: `shape` is the run's; `slab.host` has as many bytes for an input, and those of the rows of the run for an
    output.
    """

    __slots__ = ("bind", "pointer", "shape", "size", "slab", "spec")

    def __init__(self, spec: TensorSpec, shape: tuple[int, ...], slab: Slab, bind: Callable[..., None]) -> None:
        self.spec = spec
        self.shape = shape
        self.slab = slab
        self.bind = bind
        self.size = slab.row_bytes * (shape[0] if shape else 1)
        self.pointer = 0

    def bind_at(self, device: int, pointer: int) -> None:
        """Bind it at an address, unless it is bound there already."""
        if pointer != self.pointer:
            self.bind(self.spec.name, "cuda", device, self.spec.type.onnx_code, self.shape, pointer)
            self.pointer = pointer


class CudaBoundRun(BoundRun):
    """A BoundRun on a device.

    `input_copies` and `output_copies` are those of an ordinary run. `replay`: options that replay its graph, or None.
    """

    __slots__ = ("bound_inputs", "bound_outputs", "device", "input_copies", "is_rebound", "output_copies", "replay")

    def __init__(self, binding: Any, device: int, replay: Any) -> None:
        super().__init__(binding, [])
        self.device = device
        self.replay = replay
        self.bound_inputs: dict[int, BoundTensor] = {}
        self.bound_outputs: dict[int, BoundTensor] = {}
        self.input_copies: list[DeviceCopy] = []
        self.output_copies: list[DeviceCopy] = []
        self.is_rebound = False

    def bind_input(self, position: int, spec: TensorSpec, shape: tuple[int, ...], slab: Slab) -> None:
        """Bind an input in its slab."""
        self.bound_inputs[position] = bound = BoundTensor(spec, shape, slab, self.binding.bind_input)
        bound.bind_at(self.device, slab.device_pointer)
        if slab.host.nbytes:
            self.input_copies.append(DeviceCopy(slab.device_pointer, slab.host_pointer, slab.host.nbytes))

    def bind_output(
        self, position: int, spec: TensorSpec, shape: tuple[int, ...], slab: Slab, *, copied_to_host: bool
    ) -> None:
        """Bind an output in its slab; if `copied_to_host`, copy it to the host."""
        self.bound_outputs[position] = bound = BoundTensor(spec, shape, slab, self.binding.bind_output)
        bound.bind_at(self.device, slab.device_pointer)
        if copied_to_host:
            self.output_copies.append(DeviceCopy(slab.host_pointer, slab.device_pointer, slab.host.nbytes))

    def is_fully_bound(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
        """Whether all tensors are bound on the device, as a graph requires."""
        return len(self.bound_inputs) == len(inputs) and len(self.bound_outputs) == len(outputs)

    def bind_in_place(
        self, input_parts: Mapping[int, Parts], output_targets: Mapping[int, Targets]
    ) -> tuple[list[DeviceCopy], list[DeviceCopy]]:
        """Bind in place what can be, everything else in its slab; return the copies that this run needs."""
        input_copies: list[DeviceCopy] = []
        output_copies: list[DeviceCopy] = []
        for position, bound in self.bound_inputs.items():
            parts = input_parts.get(position)
            if parts is None:
                bound.bind_at(self.device, bound.slab.device_pointer)
                input_copies += [copy for copy in self.input_copies if copy.destination == bound.slab.device_pointer]
                continue
            usable = self._usable_in_place(parts, bound)
            bound.bind_at(self.device, bound.slab.device_pointer if usable is None else usable.pointer)
            input_copies += plan_input_copies(bound.slab, parts) if usable is None else ()
        read = [part for parts in input_parts.values() for part in parts if isinstance(part, DeviceArray)]
        for position, bound in self.bound_outputs.items():
            targets = output_targets.get(position)
            if targets is None:
                bound.bind_at(self.device, bound.slab.device_pointer)
                output_copies += [copy for copy in self.output_copies if copy.source == bound.slab.device_pointer]
                continue
            usable = self._usable_in_place([target for _, target in targets], bound)
            if usable is not None and any(usable.overlaps(part) for part in read):
                usable = None
            bound.bind_at(self.device, bound.slab.device_pointer if usable is None else usable.pointer)
            output_copies += plan_output_copies(bound.slab, targets) if usable is None else ()
        self.is_rebound = any(
            bound_tensor.pointer != bound_tensor.slab.device_pointer
            for bound_tensor in (*self.bound_inputs.values(), *self.bound_outputs.values())
        )
        return input_copies, output_copies

    def _usable_in_place(self, parts: Parts, bound: BoundTensor) -> DeviceArray | None:
        """Return the single part that a run can use in place; None if there is none. A graph has fixed addresses."""
        part = parts[0] if len(parts) == 1 and self.replay is None else None
        if not isinstance(part, DeviceArray) or part.device != self.device:
            return None
        return part if part.is_aligned and part.nbytes == bound.size else None
