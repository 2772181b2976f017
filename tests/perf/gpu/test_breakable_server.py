"""A device that is broken on purpose: the calls that do it, and what is asked afterwards. The driver is a stub."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.backends.cuda_calls import DRIVER, CudaError
from penstock.perf.gpu import breakable_server, faults, memory_exhausting_model
from penstock.perf.gpu.context import CheckContext
from tests.backends.cudart_stub import needs_compiler

LAUNCH_FAILED = 719
STUB = """
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int number) { *device = 7; return number; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return device != 7; }
int cuCtxSetCurrent(void *context) { return context != (void *)1; }
int cuModuleLoadData(void **module, const char *ptx) { *module = (void *)2; return LOADED + !strstr(ptx, "trap;"); }
int cuModuleGetFunction(void **kernel, void *module, const char *name) {
    *kernel = (void *)3;
    return module != (void *)2 || strcmp(name, "broken");
}
int cuLaunchKernel(void *kernel, unsigned x, unsigned y, unsigned z, unsigned u, unsigned v, unsigned w, int shared,
                   void *stream, void **takes, void **more) {
    return kernel != (void *)3 || x * y * z * u * v * w != 1 || shared || stream || takes || more;
}
int cuCtxSynchronize(void) { SYNCHRONIZED; }
"""

pytestmark = needs_compiler


def driver(folder: Path, synchronized: str = f"return {LAUNCH_FAILED}", loaded: int = 0) -> str:
    source, library = folder / "stub.c", folder / DRIVER
    source.write_text(STUB.replace("SYNCHRONIZED", synchronized).replace("LOADED", str(loaded)), "utf-8")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source], check=True, timeout=60)
    return str(library)


def test_a_trapping_kernel_is_launched_in_the_context_of_the_process(tmp_path: Path) -> None:
    assert breakable_server.run_trapping_kernel(driver(tmp_path)) == LAUNCH_FAILED


def test_a_kernel_that_cannot_be_launched_names_the_call(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="cuModuleLoadData: CUDA error 218"):
        breakable_server.run_trapping_kernel(driver(tmp_path, loaded=218))


@pytest.mark.slow
def test_a_server_without_a_device_reports_that_and_lives_on(tmp_path: Path) -> None:
    memory_exhausting_model.write(tmp_path / "models")
    first, after = faults._broken_device(CheckContext("cpu", tmp_path, quick=True))

    assert (first.value, first.held) == (200, None)
    assert first.note.startswith("not possible: libcuda")
    assert (after.value, after.held) == ("live, answers 200", True)


@pytest.mark.slow
def test_an_engine_that_dies_of_a_broken_device_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, "_exit(1)")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    memory_exhausting_model.write(tmp_path / "models")
    _, after = faults._broken_engine(CheckContext("cpu", tmp_path, quick=True))

    assert (after.value, after.held) == ("answers 200", True)
    assert after.note.startswith("by another process")
