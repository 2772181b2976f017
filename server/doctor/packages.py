"""Packages: which relevant packages are installed, and where CUDA's libraries are. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from .elf import needed_libraries
from .facts import AT_LOAD, CUDNN, LATER, TENSORRT, Library

ONNX = ("onnxruntime", "onnxruntime-gpu")
TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tf-nightly")
PIP_PREFIXES = ("nvidia-c", "nvidia-nv", "tensorrt")
"""The prefixes of packages that contain CUDA's libraries."""
_RELEVANT = ("penstock", *ONNX, *TENSORFLOW, "tritonclient", "numpy")
_PROVIDER, _TENSORRT_PROVIDER = "libonnxruntime_providers_cuda.so", "libonnxruntime_providers_tensorrt.so"
_CUDA = re.compile(r"cuda_version\s*=\s*['\"](\d+)")
_NVIDIA_LIBRARY = re.compile(r"lib(cu|nv)")
DRIVER = "libcuda.so.1"
_CUDNN = ("libcudnn.so.9",)
_LATER = {12: ("libcufft.so.11",), 13: ("libcufft.so.12",)}
"""Libraries that the CUDA provider opens when first needed, some by CUDA version: they are not in its DT_NEEDED.
Source: requirements on the page of ONNX Runtime's CUDA provider; readelf -d of 1.31."""


def read_packages() -> Mapping[str, str]:
    """Return versions by distribution name."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in _RELEVANT or name.startswith(PIP_PREFIXES):
            versions.setdefault(name, distribution.version)  # the first on the path is the one that is imported
    return versions


def runtime_folder() -> Path | None:
    """Find the folder of ONNX Runtime's libraries, without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return next((Path(folder) / "capi" for folder in folders if (Path(folder) / "capi").is_dir()), None)


def cuda_major(folder: Path) -> int:
    """Return the major CUDA version that an ONNX Runtime was built for; 0 if none."""
    try:
        match = _CUDA.search((folder / "build_and_package_info.py").read_text("utf-8", "replace"))
    except OSError:
        return 0
    return int(match[1]) if match else 0


def find_needed(folder: Path) -> list[Library]:
    """List NVIDIA's libraries that a folder's GPU providers need; empty if there are no such providers.

    Raises: OSError, ValueError if they cannot be read.
    """
    at_load, major = _needed_by(folder / _PROVIDER), cuda_major(folder)
    names = {
        AT_LOAD: at_load, CUDNN: _CUDNN if at_load and major in _LATER else (),
        LATER: _LATER.get(major, ()) if at_load else (), TENSORRT: _needed_by(folder / _TENSORRT_PROVIDER),
    }  # fmt: skip
    libraries: dict[str, Library] = {}
    for needed_when, library_names in names.items():
        for name in library_names:
            libraries.setdefault(name, Library(name=name, needed_when=needed_when))
    return list(libraries.values())


def _needed_by(provider: Path) -> tuple[str, ...]:
    if not provider.is_file():
        return ()
    with provider.open("rb") as file:
        return tuple(name for name in needed_libraries(file) if _NVIDIA_LIBRARY.match(name))


def locate(library: Library, loader: Mapping[str, str], folders: Iterable[Path]) -> Library:
    """Locate a library: where the loader finds it (`loader`: path by name), or in one of pip's folders."""
    path, found_by = loader.get(library.name, ""), "loader"
    if not path:
        path, found_by = (
            next((str(each / library.name) for each in folders if (each / library.name).is_file()), ""),
            "pip",
        )
    return Library(name=library.name, path=path, found_by=found_by if path else "", needed_when=library.needed_when)


def pip_folders(paths: Iterable[str] | None = None) -> list[Path]:
    """List the folders where pip puts NVIDIA's libraries: nvidia/NAME/lib beside other packages."""
    package_folders = [Path(path) for path in (sys.path if paths is None else paths) if path]
    return [folder for path in package_folders for folder in sorted(path.glob("nvidia/*/lib")) if folder.is_dir()]


def search_library_path(names: Iterable[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Search LD_LIBRARY_PATH for libraries."""
    folders = [Path(each) for each in environment.get("LD_LIBRARY_PATH", "").split(":") if each]
    paths = {name: next((each / name for each in folders if (each / name).is_file()), None) for name in names}
    return {name: str(path) for name, path in paths.items() if path is not None}


def parse_cache(text: str) -> dict[str, str]:
    """Parse `ldconfig -p`, lines like `libm.so.6 (libc6,x86-64) => /lib/x86_64-linux-gnu/libm.so.6`: paths by name."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        name, arrow, path = line.partition(" => ")
        fields = name.split()
        if arrow and fields and path.strip():
            paths.setdefault(fields[0], path.strip())
    return paths
