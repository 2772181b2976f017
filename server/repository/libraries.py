"""Libraries of custom operators: where those are that an ONNX model names. Called by scan.py, for each version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from penstock.batching.spec import ModelSpec

from .findings import Finding, is_there
from .statement import Statement

LIBRARIES = "runtime.custom_op_libraries"
"""What names them in penstock.toml; in config.pbtxt it is `model_operations`."""
OPTION = "custom_op_library"
"""The Loader's options begin so, one for each library in their order: `custom_op_library.1` is a path."""


def with_libraries(
    specs: Iterable[ModelSpec], stated: Statement, place: Path, findings: list[Finding]
) -> tuple[ModelSpec, ...]:  # fmt: skip
    """Put the libraries' places into the options of a model's versions; one that lacks a library is left out.

    `place` is the model's folder, or the file that is the model. A relative path starts in the model's folder, or else
    in the version's. Findings go to clients, so that they name no place on the machine.
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
