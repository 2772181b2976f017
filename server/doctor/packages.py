"""Packages: which relevant packages are installed, and where CUDA's libraries are. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from .elf import needed
from .facts import AT_LOAD, CUDNN, LATER, TENSORRT, Library

ONNX = ("onnxruntime", "onnxruntime-gpu")
TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tf-nightly")
PIP = ("nvidia-c", "nvidia-nv", "tensorrt")
"""The prefixes of packages that contain CUDA's libraries."""
_NAMED = ("penstock", *ONNX, *TENSORFLOW, "tritonclient", "numpy")
_PROVIDER, _TENSORRT_PROVIDER = "libonnxruntime_providers_cuda.so", "libonnxruntime_providers_tensorrt.so"
_CUDA = re.compile(r"cuda_version\s*=\s*['\"](\d+)")
_OURS = re.compile(r"lib(cu|nv)")
DRIVER = "libcuda.so.1"
_CUDNN = ("libcudnn.so.9",)
_LATER = {12: ("libcufft.so.11",), 13: ("libcufft.so.12",)}
"""Libraries that the CUDA provider opens when first needed, some by CUDA version: they are not in its DT_NEEDED.
Source: requirements on the page of ONNX Runtime's CUDA provider; readelf -d of 1.31."""


def read_packages() -> Mapping[str, str]:
    """Return versions by distribution name."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in _NAMED or name.startswith(PIP):
            found.setdefault(name, distribution.version)  # the first on the path is the one that is imported
    return found


def runtime_folder() -> Path | None:
    """Find the folder of ONNX Runtime's libraries, without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    return next((Path(place) / "capi" for place in places if (Path(place) / "capi").is_dir()), None)


def cuda_major(folder: Path) -> int:
    """Return the major CUDA version that an ONNX Runtime was built for; 0 if none."""
    try:
        found = _CUDA.search((folder / "build_and_package_info.py").read_text("utf-8", "replace"))
    except OSError:
        return 0
    return int(found[1]) if found else 0


def wanted(folder: Path) -> list[Library]:
    """List NVIDIA's libraries that a folder's GPU providers need; empty if there are no such providers.

    Raises: OSError, ValueError if they cannot be read.
    """
    at_load, major = _needed(folder / _PROVIDER), cuda_major(folder)
    names = {
        AT_LOAD: at_load, CUDNN: _CUDNN if at_load and major in _LATER else (),
        LATER: _LATER.get(major, ()) if at_load else (), TENSORRT: _needed(folder / _TENSORRT_PROVIDER),
    }  # fmt: skip
    found: dict[str, Library] = {}
    for wanted, of in names.items():
        for name in of:
            found.setdefault(name, Library(name=name, wanted=wanted))
    return list(found.values())


def _needed(provider: Path) -> tuple[str, ...]:
    if not provider.is_file():
        return ()
    with provider.open("rb") as file:
        return tuple(name for name in needed(file) if _OURS.match(name))


def found(library: Library, loader: Mapping[str, str], folders: Iterable[Path]) -> Library:
    """Locate a library: where the loader finds it (`loader`: path by name), or in one of pip's folders."""
    path, by = loader.get(library.name, ""), "loader"
    if not path:
        path, by = next((str(each / library.name) for each in folders if (each / library.name).is_file()), ""), "pip"
    return Library(name=library.name, path=path, found_by=by if path else "", wanted=library.wanted)


def pip_folders(paths: Iterable[str] | None = None) -> list[Path]:
    """List the folders where pip puts NVIDIA's libraries: nvidia/NAME/lib beside other packages."""
    beside = [Path(path) for path in (sys.path if paths is None else paths) if path]
    return [folder for path in beside for folder in sorted(path.glob("nvidia/*/lib")) if folder.is_dir()]


def on_path(names: Iterable[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Search LD_LIBRARY_PATH for libraries."""
    folders = [Path(each) for each in environment.get("LD_LIBRARY_PATH", "").split(":") if each]
    places = {name: next((each / name for each in folders if (each / name).is_file()), None) for name in names}
    return {name: str(place) for name, place in places.items() if place is not None}


def parse_cache(text: str) -> dict[str, str]:
    """Parse `ldconfig -p`, lines like `libm.so.6 (libc6,x86-64) => /lib/x86_64-linux-gnu/libm.so.6`: paths by name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, arrow, path = line.partition(" => ")
        words = name.split()
        if arrow and words and path.strip():
            found.setdefault(words[0], path.strip())
    return found
