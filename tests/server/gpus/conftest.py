"""A stub NVML library with two GPUs, for the real pynvml."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.gpus.stub import LIBRARY, Stub


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the stub library, built once."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, which is no `cc` here")
    built = tmp_path_factory.mktemp("nvml") / LIBRARY
    source = Path(__file__).with_name("nvml_stub.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(built), str(source)], check=True, timeout=60)
    return built


@pytest.fixture
def stub(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Make pynvml use the stub, which has two GPUs of different kinds."""
    import pynvml

    loaded = ctypes.CDLL(str(library))
    loaded.stub_reset()
    monkeypatch.setattr(pynvml, "nvmlLib", loaded)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    stub = Stub(tmp_path / "nvml", library)
    monkeypatch.setenv("NVML_STUB", str(stub.path))
    yield stub
    stub.release()
