"""A fake CUDA device: its memory is host memory filled with garbage, and its streams are lazy.

Queued work is done only when something waits for it: a missing wait, a buffer that is read or
written too early, or a freed address always gives wrong bytes or an error.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.backends.backend import Array
from penstock.backends.cuda import HANDLE_BYTES, LOST_STATUSES, OUT_OF_MEMORY, CudaError
from penstock.backends.cuda_gate import GATE
from penstock.backends.cuda_pins import Pins
from penstock.backends.errors import Code, InferError

GARBAGE = 0x7B
ALIGNED = 256
COPY_NS, COMPUTE_NS = 1_000, 10_000
"""What a copy and a computation take by the device's own clock, which nothing else moves."""
_INVALID, _BAD_DEVICE, _BAD_HANDLE = 1, 101, 400


@dataclass
class Memory:
    """One allocation. `device` -1: pinned host memory."""

    raw: Any
    device: int
    size: int
    opened: int = 0

    @property
    def pointer(self) -> int:
        return ctypes.addressof(self.raw) + -ctypes.addressof(self.raw) % ALIGNED


@dataclass
class Event:
    """`recorded` and `completed` count queued and completed records; `clock_ns` is the device's time of the last."""

    device: int
    recorded: int = 0
    completed: int = 0
    clock_ns: int = 0
    stream: Stream | None = None


@dataclass
class Stream:
    """Queued work. `busy`: a thread is doing the first piece."""

    device: int
    work: deque[tuple[str, Any]] = field(default_factory=deque)
    busy: bool = False


class FakeRuntime:
    """Implements `cuda.Runtime`. `alive` counts what was created and not freed; `calls` counts the calls.

    `copies` counts the queued copies by kind: "h2d", "d2h", "d2d", "h2h".
    """

    def __init__(self, devices: int = 2, memory: int = 1 << 28) -> None:
        self.total = memory
        self.devices = devices
        self.pins = Pins(self)
        self.calls: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.compute_ns = COMPUTE_NS
        self.pageable = False
        """Whether copies from and to any host memory are allowed, too: the device then cannot distinguish
        a freed device address from a host address."""
        self.clock_ns = 0
        self._ids = iter(range(0x1000, 1 << 30))
        self._memory: dict[int, Memory] = {}
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._used = [0] * devices
        self._pins: dict[int, int] = {}
        self._lost: dict[int, int] = {}
        self._failures: dict[str, deque[int]] = {}
        self._held: set[int] = set()
        self._capturing = 0
        self._moved = threading.Condition()

    # --- for the tests

    @property
    def alive(self) -> dict[str, int]:
        """Count what was created and not freed."""
        device = sum(1 for each in self._memory.values() if each.device >= 0)
        return {
            "device": device,
            "pinned": len(self._memory) - device + len(self._pins),
            "streams": len(self._streams),
            "events": len(self._events),
            "opened": sum(each.opened for each in self._memory.values()),
            "bytes": sum(self._used),
        }

    def fail(self, call: str, status: int, after: int = 0) -> None:
        """Make `call` fail once with a status, after `after` more successes. A status of LOST is permanent."""
        self._failures[call] = deque([0] * after + [status])

    def heal(self) -> None:
        """Clear all failures, permanent ones included."""
        self._failures.clear()
        self._lost.clear()

    @contextmanager
    def hold(self, device: int = 0) -> Iterator[None]:
        """Delay all work queued now or meanwhile on a device's compute streams until the block ends."""
        self.holding(device, held=True)
        try:
            yield
        finally:
            self.holding(device, held=False)

    def holding(self, device: int, *, held: bool) -> None:
        """Hold all computations of a device, or release them."""
        with self._moved:
            self._held = {*self._held, device} if held else self._held - {device}
            self._moved.notify_all()

    def take(self, size: int, device: int) -> None:
        """Use up memory without a pointer, as a session's weights do; negative: free it."""
        if self._used[device] + size > self.total:
            raise self._error("cudaMalloc", OUT_OF_MEMORY)
        self._used[device] += size

    def capture(self, meanwhile: Callable[[], None]) -> None:
        """Enter a capture, during which no other call may be made. Raises CudaError if one was made."""
        self._capturing = threading.get_ident()
        try:
            meanwhile()
        finally:
            spoilt, self._capturing = self._capturing < 0, 0
        if spoilt:
            raise self._error("cudaStreamEndCapture", 901)

    def compute(self, stream: int, do: Callable[[], object]) -> None:
        """Queue a computation."""
        self._enqueue(stream, "compute", do)

    def memory_at(self, pointer: int, size: int) -> Memory:
        """Return the allocation that holds these bytes. Raises CudaError if there is none (any more)."""
        for each in tuple(self._memory.values()):
            if each.pointer <= pointer and pointer + size <= each.pointer + each.size:
                return each
        raise CudaError(_INVALID, "cudaMemcpyAsync", f"no {size} bytes at {pointer:#x}")

    # --- the device

    def device_count(self) -> int:
        self._called("cudaGetDeviceCount")
        return self.devices

    def pci_bus_id(self, device: int) -> str:
        self._called("cudaDeviceGetPCIBusId", device)
        return f"0000:{0x65 + device:02x}:00.0"

    def device_name(self, device: int) -> str:
        self._called("cuDeviceGetName", device)
        return "Fake GPU"

    def capability(self, device: int) -> str:
        self._called("cudaDeviceGetAttribute", device)
        return "9.0"

    def memory_info(self, device: int) -> tuple[int, int]:
        self._called("cudaMemGetInfo", device)
        return self.total - self._used[device], self.total

    def set_device(self, device: int) -> None:
        self._called("cudaSetDevice", device)

    # --- memory

    def allocate(self, size: int, device: int) -> int:
        self._called("cudaMalloc", device)
        self.take(size, device)
        return self._allocated(size, device)

    def free(self, pointer: int, device: int) -> None:
        self._called("cudaFree", device)
        for stream in tuple(self._streams.values()):
            if stream.device == device:
                self._do_until(stream, lambda stream=stream: not stream.work)  # type: ignore[misc]
        self._freed(pointer, device)

    def allocate_pinned(self, size: int, device: int) -> int:
        self._called("cudaHostAlloc", device)
        return self._allocated(size, -1)

    def free_pinned(self, pointer: int, device: int) -> None:
        self._called("cudaFreeHost", device)
        self._freed(pointer, -1)

    def pin(self, pointer: int, size: int, device: int) -> None:
        self._called("cudaHostRegister", device)
        if any(first < pointer + size and pointer < first + had for first, had in self._pins.items()):
            raise self._error("cudaHostRegister", 712)
        self._pins[pointer] = size

    def unpin(self, pointer: int, device: int) -> None:
        self._called("cudaHostUnregister", device)
        if self._pins.pop(pointer, None) is None:
            raise self._error("cudaHostUnregister", 713)

    def _allocated(self, size: int, device: int) -> int:
        # at least a byte, so that no two have the same address
        raw = (ctypes.c_char * (max(size, 1) + ALIGNED))()
        ctypes.memset(raw, GARBAGE, len(raw))
        memory = Memory(raw, device, size)
        self._memory[memory.pointer] = memory
        return memory.pointer

    def _freed(self, pointer: int, device: int) -> None:
        found = self._memory.get(pointer)
        if found is None or found.device != device:
            raise self._error("cudaFree", _INVALID)
        ctypes.memset(found.raw, GARBAGE, len(found.raw))
        del self._memory[pointer]
        if device >= 0:
            self._used[device] -= found.size

    # --- streams and events

    def create_stream(self, device: int) -> int:
        self._called("cudaStreamCreateWithFlags", device)
        number = next(self._ids)
        self._streams[number] = Stream(device)
        return number

    def destroy_stream(self, stream: int, device: int) -> None:
        self._called("cudaStreamDestroy", device)
        found = self._stream(stream)
        self._do_until(found, lambda: not found.work)
        del self._streams[stream]

    def create_event(self, device: int) -> int:
        self._called("cudaEventCreateWithFlags", device)
        number = next(self._ids)
        self._events[number] = Event(device)
        return number

    def destroy_event(self, event: int, device: int) -> None:
        self._called("cudaEventDestroy", device)
        if self._events.pop(event, None) is None:
            raise self._error("cudaEventDestroy", _BAD_HANDLE)

    def copy(self, to: int, source: int, size: int, stream: int, *, pageable: bool = False) -> None:
        self._called("cudaMemcpyAsync", self._stream(stream).device)
        kinds = [self._kind(pointer, size) for pointer in (source, to)]
        assert pageable or "host" not in kinds, "a copy that waits would hold the GIL"
        self.copies[f"{kinds[0][0]}2{kinds[1][0]}"] += 1
        self._enqueue(stream, "copy", (to, source, size))
        if "host" in kinds:
            self.synchronize_stream(stream)

    def _kind(self, pointer: int, size: int) -> str:
        """Return the kind of memory: of the device ("d"), pinned ("h"), or other host memory."""
        if any(first <= pointer and pointer + size <= first + had for first, had in tuple(self._pins.items())):
            return "h"
        try:
            return "d" if self.memory_at(pointer, size).device >= 0 else "h"
        except CudaError:
            if self.pageable:
                return "host"
            raise

    def record_event(self, event: int, stream: int) -> None:
        found, at = self._event(event), self._stream(stream)
        self._called("cudaEventRecord", at.device)
        if found.device != at.device:
            raise self._error("cudaEventRecord", _BAD_HANDLE)
        found.recorded += 1
        found.stream = at
        self._enqueue(stream, "record", (found, found.recorded))

    def wait_event(self, stream: int, event: int) -> None:
        found = self._event(event)
        self._called("cudaStreamWaitEvent", self._stream(stream).device)
        self._enqueue(stream, "wait", (found, found.recorded))

    def is_event_done(self, event: int) -> bool:
        found = self._event(event)
        self._called("cudaEventQuery", found.device)
        return found.completed >= found.recorded

    def synchronize_event(self, event: int) -> None:
        found = self._event(event)
        self._called("cudaEventSynchronize", found.device)
        self._reach(found, found.recorded)
        self._called("the work before an event", found.device)

    def synchronize_stream(self, stream: int) -> None:
        found = self._stream(stream)
        self._called("cudaStreamSynchronize", found.device)
        self._do_until(found, lambda: not found.work)
        self._called("the work of a stream", found.device)

    def elapsed_ns(self, first: int, last: int) -> int:
        self._called("cudaEventElapsedTime")
        begin, end = self._event(first), self._event(last)
        if not begin.completed or not end.completed or begin.completed < begin.recorded or end.completed < end.recorded:
            raise self._error("cudaEventElapsedTime", 600)
        return end.clock_ns - begin.clock_ns

    # --- memory of other processes

    def export_handle(self, pointer: int, device: int) -> bytes:
        self._called("cudaIpcGetMemHandle", device)
        self.memory_at(pointer, 1)
        return str(pointer).encode().ljust(HANDLE_BYTES, b"\0")

    def open_handle(self, handle: bytes, device: int) -> int:
        self._called("cudaIpcOpenMemHandle", device)
        text = handle.rstrip(b"\0")
        if not text.isdigit() or int(text) not in self._memory:
            raise self._error("cudaIpcOpenMemHandle", _BAD_HANDLE)
        self._memory[int(text)].opened += 1
        return int(text)

    def close_handle(self, pointer: int, device: int) -> None:
        self._called("cudaIpcCloseMemHandle", device)
        found = self._memory.get(pointer)
        if found is None or not found.opened:
            raise self._error("cudaIpcCloseMemHandle", _INVALID)
        found.opened -= 1

    def bytes_to_end(self, pointer: int, device: int) -> int:
        self._called("cuMemGetAddressRange_v2", device)
        found = self.memory_at(pointer, 1)
        return found.pointer + found.size - pointer

    def read(self, pointer: int, device: int, into: memoryview) -> None:
        self._called("cudaMemcpy", device)
        self.memory_at(pointer, len(into))
        into[:] = ctypes.string_at(pointer, len(into))

    def write(self, pointer: int, device: int, raw: bytes | memoryview) -> None:
        self._called("cudaMemcpy", device)
        self.memory_at(pointer, len(raw))
        ctypes.memmove(pointer, bytes(raw), len(raw))

    # --- implementation

    def _called(self, call: str, device: int | None = None) -> None:
        with GATE.shared():
            self._call(call, device)

    def _call(self, call: str, device: int | None) -> None:
        self.calls[call] += 1
        if self._capturing and self._capturing != threading.get_ident():
            self._capturing = -1
            raise self._error(call, 900)
        if device is not None and not 0 <= device < self.devices:
            raise self._error(call, _BAD_DEVICE)
        if device in self._lost:
            raise self._error(call, self._lost[device])
        due = self._failures.get(call)
        if due and (status := due.popleft()):
            if status in LOST_STATUSES and device is not None:
                self._lost[device] = status
            raise self._error(call, status)

    def _error(self, call: str, status: int) -> CudaError:
        return CudaError(status, call, "said by the fake device")

    def _stream(self, stream: int) -> Stream:
        if stream not in self._streams:
            raise self._error("a stream", _BAD_HANDLE)
        return self._streams[stream]

    def _event(self, event: int) -> Event:
        if event not in self._events:
            raise self._error("an event", _BAD_HANDLE)
        return self._events[event]

    def _enqueue(self, stream: int, what: str, how: Any) -> None:
        with self._moved:
            self._stream(stream).work.append((what, how))

    def _reach(self, event: Event, record: int) -> None:
        if event.stream is not None:
            self._do_until(event.stream, lambda: event.completed >= record)

    def _do_until(self, stream: Stream, done: Callable[[], bool]) -> None:
        """Do a stream's work in order, and the work of other streams that it waits for."""
        while True:
            with self._moved:
                self._moved.wait_for(lambda: done() or not stream.busy)
                if done() or not stream.work:
                    return
                stream.busy = True
                what, how = stream.work.popleft()
            try:
                self._work(stream, what, how)
            finally:
                with self._moved:
                    stream.busy = False
                    self._moved.notify_all()

    def _work(self, stream: Stream, what: str, how: Any) -> None:
        if what == "compute":
            with self._moved:
                self._moved.wait_for(lambda: stream.device not in self._held)
            how()
            self.clock_ns += self.compute_ns
        elif what == "copy":
            to, source, size = how
            for pointer in (to, source):
                self._kind(pointer, size)
            ctypes.memmove(to, source, size)
            self.clock_ns += COPY_NS
        elif what == "wait":
            self._reach(*how)
        else:
            event, record = how
            event.completed, event.clock_ns = record, self.clock_ns


class FakeMemory:
    """Implements `device_array.DeviceMemory`: memory shared by a client."""

    def __init__(self, runtime: FakeRuntime, size: int, device: int = 0) -> None:
        self.device = device
        self.pointer = runtime.allocate(size, device)
        self.byte_size = size
        self._runtime = runtime
        self._size = size

    @classmethod
    def holding(cls, runtime: FakeRuntime, array: Array, device: int = 0) -> FakeMemory:
        """Make memory with an array's bytes in it."""
        memory = cls(runtime, array.nbytes, device)
        runtime.write(memory.pointer, device, array.tobytes())
        return memory

    def read(self, offset: int, into: Array) -> None:
        self._runtime.read(self.pointer + offset, self.device, into.data.cast("B"))

    def access_error(self, doing: str, error: Exception) -> InferError:
        return InferError(Code.INVALID, f"unable to {doing} shared memory")
