"""Builds cudart_stub.c: libcudart and libcuda for processes on a machine without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")


def build(folder: Path) -> dict[str, str]:
    """Build both libraries in a folder. Return the environment in which a process finds them and their memory."""
    library = folder / "libcudart.so.13"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(library), str(SOURCE)], check=True, timeout=60)
    # one file, so that the loader loads both as one library
    (folder / "libcuda.so.1").symlink_to(library.name)
    memory = folder / "memory"
    memory.mkdir()
    return {"LD_LIBRARY_PATH": str(folder), "STUB_CUDA_FOLDER": str(memory)}
