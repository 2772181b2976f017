"""Libraries of custom operators: locates those that an ONNX model names. Used by scan.py, for each version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from penstock.batching.spec import ModelSpec

from .findings import Finding, is_there
from .statement import Statement

LIBRARIES = "runtime.custom_op_libraries"
"""The key in penstock.toml. In config.pbtxt it is `model_operations`."""
OPTION = "custom_op_library"
"""Prefix of the Loader's options, one per library in order: `custom_op_library.1` is a path."""


def with_libraries(
    specs: Iterable[ModelSpec], stated: Statement, place: Path, findings: list[Finding]
) -> tuple[ModelSpec, ...]:  # fmt: skip
    """Add the libraries' paths to the options of a model's versions. A version that lacks a library is omitted.

    `place` is the model's folder, or the file that is the model. A relative path is looked up in the model's folder,
    then in the version's. Findings are sent to clients, so they contain no absolute paths.
    """
    if (names := stated.get(LIBRARIES)) is None:
        return tuple(specs)
    found = []
    for spec in specs:
        folders = (place, place / str(spec.version)) if place.is_dir() else (place.parent,)
        places = {
            name: [path for folder in folders if is_there(path := folder / name) and path.is_file()] for name in names
        }
        for name in (name for name in names if not places[name]):
            shown = f"'{Path(name).name}' does not exist"
            if not Path(name).is_absolute():
                shown = f"'{name}' is neither in the model's folder nor in its version's"
            finding = stated.mistake(LIBRARIES, f"the library of custom operators {shown}")
            findings.append(replace(finding, version=spec.version))
        if all(places.values()):
            said = {f"{OPTION}.{number}": str(places[name][0]) for number, name in enumerate(names, 1)}
            found.append(replace(spec, options={**spec.options, **said}))
    return tuple(found)
