"""CUDA regions: the same in the memory of a GPU of this machine, which a server maps by its cudaIpcMemHandle."""

from __future__ import annotations

from contextlib import ExitStack, suppress

from penstock.backends.cuda import CudaError, Runtime, find_runtime, why_none

from .regions import Create, Registrar, Write, forgotten
from .tensors import InputError

DEVICE = 0
"""Where tensors lie, as with perf_analyzer: the first device that this process sees."""


def cuda() -> Create:
    """Give what creates regions of device memory, of the runtime that this process finds.

    Raises: InputError where there is none; what it gives raises that too, where there is no memory.
    """
    found = find_runtime()
    if found is None:
        raise InputError(f"--shared-memory cuda: it needs a GPU beside this command: {why_none()}. Use system or none")

    def create(stack: ExitStack, control: Registrar, region: str, size: int) -> Write:
        try:
            pointer = found.allocate(size, DEVICE)
            stack.callback(_freed, found, pointer)
            handle = found.handle_of(pointer, DEVICE)
        except CudaError as error:
            raise InputError(f"--shared-memory cuda: {error}") from None
        # it is freed when the server has let it go: the other way round is undefined
        control.register_cuda(region, handle, DEVICE, size)
        stack.callback(forgotten, control.unregister_cuda, region)

        def write(offset: int, raw: bytes) -> None:
            try:
                found.write(pointer + offset, DEVICE, raw)
            except CudaError as error:
                raise InputError(f"--shared-memory cuda: {error}") from None

        return write

    return create


def _freed(runtime: Runtime, pointer: int) -> None:
    # a device that has gone has forgotten it too
    with suppress(CudaError):
        runtime.free(pointer, DEVICE)
