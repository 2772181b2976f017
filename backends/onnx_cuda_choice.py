"""A choice of outputs bound on a device, and the copies that a run needs. Used by the CUDA Binding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .backend import Array
from .cuda_moves import Move, Slab, off_device, onto_device
from .device_array import DeviceArray
from .onnx_binding import Choice
from .signature import TensorSpec

Parts = Sequence[Array | DeviceArray]
Targets = Sequence[tuple[int, DeviceArray]]


class BoundTensor:
    """A tensor as a choice binds it: on the device at `at`, which is its slab's own address unless a run is in place.

    Shapes: `shape` is the run's; `slab.host` has as many bytes for an input, and those of the lent rows for an output.
    `move` is the copy between both sides of the slab.
    """

    __slots__ = ("at", "bind", "move", "shape", "size", "slab", "spec")

    def __init__(self, spec: TensorSpec, shape: tuple[int, ...], slab: Slab, bind: Callable[..., None]) -> None:
        self.spec = spec
        self.shape = shape
        self.slab = slab
        self.bind = bind
        self.size = slab.row_bytes * (shape[0] if shape else 1)
        self.at = 0

    def put(self, device: int, at: int) -> None:
        """Bind it at an address, unless it is bound there already."""
        if at != self.at:
            self.bind(self.spec.name, "cuda", device, self.spec.type.onnx_code, self.shape, at)
            self.at = at


class CudaChoice(Choice):
    """`into` and `out` are the copies of an ordinary run. `replay`: the options that replay its graph, or None."""

    __slots__ = ("device", "given", "into", "moved", "out", "replay", "taken")

    def __init__(self, binding: Any, device: int, replay: Any) -> None:
        super().__init__(binding, [])
        self.device = device
        self.replay = replay
        self.taken: dict[int, BoundTensor] = {}
        self.given: dict[int, BoundTensor] = {}
        self.into: list[Move] = []
        self.out: list[Move] = []
        self.moved = False

    def take(self, position: int, spec: TensorSpec, shape: tuple[int, ...], slab: Slab) -> None:
        """Bind an input in its slab."""
        self.taken[position] = bound = BoundTensor(spec, shape, slab, self.binding.bind_input)
        bound.put(self.device, slab.device)
        if slab.host.nbytes:
            self.into.append(Move(slab.device, slab.pinned, slab.host.nbytes))

    def give(self, position: int, spec: TensorSpec, shape: tuple[int, ...], slab: Slab, *, shown: bool) -> None:
        """Bind an output in its slab; if `shown`, copy it to the host."""
        self.given[position] = bound = BoundTensor(spec, shape, slab, self.binding.bind_output)
        bound.put(self.device, slab.device)
        if shown:
            self.out.append(Move(slab.pinned, slab.device, slab.host.nbytes))

    def is_whole(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
        """Whether all tensors are bound on the device, as a graph requires."""
        return len(self.taken) == len(inputs) and len(self.given) == len(outputs)

    def in_place(self, placed: Mapping[int, Parts], aimed: Mapping[int, Targets]) -> tuple[list[Move], list[Move]]:
        """Bind in place what can be, everything else in its slab; return the copies that this run needs."""
        into: list[Move] = []
        out: list[Move] = []
        for position, bound in self.taken.items():
            parts = placed.get(position)
            if parts is None:
                bound.put(self.device, bound.slab.device)
                into += [move for move in self.into if move.to == bound.slab.device]
                continue
            lies = self._whole(parts, bound)
            bound.put(self.device, bound.slab.device if lies is None else lies.pointer)
            into += onto_device(bound.slab, parts) if lies is None else ()
        read = [part for parts in placed.values() for part in parts if isinstance(part, DeviceArray)]
        for position, bound in self.given.items():
            targets = aimed.get(position)
            if targets is None:
                bound.put(self.device, bound.slab.device)
                out += [move for move in self.out if move.source == bound.slab.device]
                continue
            whole = self._whole([target for _, target in targets], bound)
            if whole is not None and any(whole.overlaps(part) for part in read):
                whole = None
            bound.put(self.device, bound.slab.device if whole is None else whole.pointer)
            out += off_device(bound.slab, targets) if whole is None else ()
        self.moved = any(each.at != each.slab.device for each in (*self.taken.values(), *self.given.values()))
        return into, out

    def _whole(self, parts: Parts, bound: BoundTensor) -> DeviceArray | None:
        """Return the single part that a run can use in place; None if there is none. A graph has fixed addresses."""
        part = parts[0] if len(parts) == 1 and self.replay is None else None
        if not isinstance(part, DeviceArray) or part.device != self.device:
            return None
        return part if part.aligned and part.nbytes == bound.size else None
