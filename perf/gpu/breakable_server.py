"""A server whose device can be broken, for `faults.py`: `penstock serve` plus a handler for SIGUSR1.

    python -m penstock.perf.gpu.breakable_server serve ...

On that signal a process launches a kernel that traps on the first device, in the primary context, which ONNX Runtime
uses too. The error is sticky, like that of an illegal address in any kernel, and it is certain: a model's own nodes
check their inputs. With --http-workers every process of the supervisor handles the signal. A hook could not do this:
hooks run in front ends, and the context belongs to the engine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from ctypes import byref
from typing import Any

from penstock.backends.cuda_calls import DRIVER, CudaError
from penstock.server import cli
from penstock.server.supervisor import child, child_process

PROGRAM = "penstock.perf.gpu.breakable_server"
SIGNAL = signal.SIGUSR1
BREAK_REPORT = "told to break the device: "
"""What the log contains after the signal was handled, followed by the result."""
_KERNEL = b"""
.version 6.5
.target sm_75
.address_size 64
.visible .entry broken() { trap; ret; }
"""
"""PTX, which the driver compiles for the present device; CUDA 13 supports no target older than this one."""


def run_trapping_kernel(library: str = DRIVER) -> int:
    """Run a kernel that traps on the device; return the CUresult of waiting for it, 0 if it did no harm.

    Raises: OSError, AttributeError (no such library), CudaError (it could not be launched).
    """
    cuda = ctypes.CDLL(library)
    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()

    def do(call: str, *takes: Any) -> None:
        status = getattr(cuda, call)(*takes)
        if status:
            raise CudaError(status, call, "the kernel that traps was not launched")

    do("cuInit", 0)
    do("cuDeviceGet", byref(device), 0)
    do("cuDevicePrimaryCtxRetain", byref(context), device)
    do("cuCtxSetCurrent", context)
    do("cuModuleLoadData", byref(module), _KERNEL)
    do("cuModuleGetFunction", byref(kernel), module, b"broken")
    do("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    return int(cuda.cuCtxSynchronize())


def _on_break_signal(_number: int, _frame: object) -> None:
    try:
        report_line = f"CUDA error {run_trapping_kernel()}"
    except (OSError, AttributeError, CudaError) as error:
        report_line = f"not possible: {error}"
    os.write(2, f"{BREAK_REPORT}{report_line}\n".encode())


def main(arguments: Sequence[str]) -> int:
    """Run as `penstock`, or as one of the processes that its supervisor starts."""
    signal.signal(SIGNAL, _on_break_signal)
    if arguments[:1] == ["serve"]:
        child_process.CHILD_MODULE = PROGRAM
        return cli.main(arguments)
    status = child.main(list(arguments))
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
