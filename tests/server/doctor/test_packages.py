from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.doctor import packages
from penstock.server.doctor.facts import AT_LOAD, CUDNN, LATER, TENSORRT, Library
from tests.server.doctor.elf_files import library


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """The folder of an ONNX Runtime for CUDA 13."""
    folder = tmp_path / "onnxruntime" / "capi"
    folder.mkdir(parents=True)
    (folder / "build_and_package_info.py").write_text("package_name = 'onnxruntime-gpu'\ncuda_version = '13.0'\n")
    (folder / "libonnxruntime_providers_tensorrt.so").write_bytes(library(["libcublas.so.13", "libnvinfer.so.10"]))
    names = ["libcublas.so.13", "libcudart.so.13", "libcuda.so.1", "libstdc++.so.6"]
    (folder / "libonnxruntime_providers_cuda.so").write_bytes(library(names))
    return folder


def test_libraries_of_the_cuda_provider_are_needed_at_load_and_the_rest_later(runtime: Path) -> None:
    assert packages.cuda_major(runtime) == 13
    assert [(each.name, each.needed_when) for each in packages.find_needed(runtime)] == [
        ("libcublas.so.13", AT_LOAD), ("libcudart.so.13", AT_LOAD), ("libcuda.so.1", AT_LOAD),
        ("libcudnn.so.9", CUDNN), ("libcufft.so.12", LATER), ("libnvinfer.so.10", TENSORRT),
    ]  # fmt: skip


def test_without_a_cuda_provider_no_libraries_are_needed(tmp_path: Path) -> None:
    assert packages.find_needed(tmp_path) == []
    assert packages.cuda_major(tmp_path) == 0


def test_a_library_is_found_by_the_loader_first_then_in_the_folders_of_pip(tmp_path: Path) -> None:
    lib = tmp_path / "site" / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    for name in ("libcudart.so.13", "libcublas.so.13"):
        (lib / name).touch()
    folders = packages.pip_folders([str(tmp_path / "site"), "", str(tmp_path / "none")])

    by = [
        packages.locate(Library(name=name), {"libcudart.so.13": "/usr/lib/libcudart.so.13"}, folders)
        for name in ("libcudart.so.13", "libcublas.so.13", "libcudnn.so.9")
    ]

    assert folders == [lib]
    assert [(each.path, each.found_by) for each in by] == [
        ("/usr/lib/libcudart.so.13", "loader"), (str(lib / "libcublas.so.13"), "pip"), ("", ""),
    ]  # fmt: skip


def test_ld_library_path_is_searched_for_libraries(tmp_path: Path) -> None:
    (tmp_path / "liba.so").touch()
    environment = {"LD_LIBRARY_PATH": f":/none:{tmp_path}"}

    assert packages.search_library_path(["liba.so", "libb.so"], environment) == {"liba.so": str(tmp_path / "liba.so")}


def test_the_cache_of_the_loader_is_parsed() -> None:
    text = (
        "2 libs found in cache\n\tlibm.so.6 (libc6,x86-64) => /lib/libm.so.6\n\tlibm.so.6 (libc6) => /lib32/libm.so.6\n"
    )

    assert packages.parse_cache(text) == {"libm.so.6": "/lib/libm.so.6"}


@given(st.text())
@settings(max_examples=30)
def test_any_text_is_parsed_as_a_loader_cache(text: str) -> None:
    assert all(packages.parse_cache(text).values())


def test_the_versions_of_installed_packages_are_read() -> None:
    found = packages.read_packages()

    assert {"penstock", "numpy", "tritonclient"} <= found.keys()
    assert all(found.values())
