"""CUDA regions: regions in the memory of a local GPU, which a server maps by their cudaIpcMemHandle."""

from __future__ import annotations

from contextlib import ExitStack, suppress

from penstock.backends.cuda import CudaError, Runtime, find_runtime, unavailable_reason

from .shared_memory import Create, Registrar, Write, forgotten
from .tensors import InputError

DEVICE = 0
"""The device that holds tensors, as in perf_analyzer: the first that this process sees."""


def cuda() -> Create:
    """Return what creates regions of device memory, using the CUDA runtime that this process finds.

    Raises: InputError if there is none; what is returned raises it if there is no memory.
    """
    runtime = find_runtime()
    if runtime is None:
        raise InputError(
            f"--shared-memory cuda: it needs a GPU beside this command: {unavailable_reason()}. Use system or none"
        )

    def create(stack: ExitStack, control: Registrar, region: str, size: int) -> Write:
        try:
            pointer = runtime.allocate(size, DEVICE)
            stack.callback(_freed, runtime, pointer)
            handle = runtime.export_handle(pointer, DEVICE)
        except CudaError as error:
            raise InputError(f"--shared-memory cuda: {error}") from None
        # freed after the server has released it: the reverse order is undefined
        control.register_cuda(region, handle, DEVICE, size)
        stack.callback(forgotten, control.unregister_cuda, region)

        def write(offset: int, raw: bytes) -> None:
            try:
                runtime.write(pointer + offset, DEVICE, raw)
            except CudaError as error:
                raise InputError(f"--shared-memory cuda: {error}") from None

        return write

    return create


def _freed(runtime: Runtime, pointer: int) -> None:
    # a device that is lost has lost the memory too
    with suppress(CudaError):
        runtime.free(pointer, DEVICE)
