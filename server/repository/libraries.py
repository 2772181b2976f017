"""Libraries of custom operators: locates those that a model names. Used by scan.py, for each version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from penstock.backends.libraries import LIBRARY_OPTION
from penstock.batching.spec import ModelSpec

from .findings import Finding, path_exists
from .parsed_config import ParsedConfig

LIBRARIES = "runtime.custom_op_libraries"
"""The key in penstock.toml. In config.pbtxt it is `model_operations`."""


def with_libraries(
    specs: Iterable[ModelSpec], parsed: ParsedConfig, model_path: Path, findings: list[Finding]
) -> tuple[ModelSpec, ...]:  # fmt: skip
    """Add the libraries' paths to the options of a model's versions. A version that lacks a library is omitted.

    `model_path` is the model's folder, or the file that is the model. A relative path is looked up in the model's
    folder, then in the version's. Findings are sent to clients, so they contain no absolute paths.
    """
    if (names := parsed.get(LIBRARIES)) is None:
        return tuple(specs)
    complete = []
    for spec in specs:
        folders = (model_path, model_path / str(spec.version)) if model_path.is_dir() else (model_path.parent,)
        candidates = {
            name: [path for folder in folders if path_exists(path := folder / name) and path.is_file()]
            for name in names
        }
        for name in (name for name in names if not candidates[name]):
            shown = f"'{Path(name).name}' does not exist"
            if not Path(name).is_absolute():
                shown = f"'{name}' is neither in the model's folder nor in its version's"
            finding = parsed.make_mistake(LIBRARIES, f"the library of custom operators {shown}")
            findings.append(replace(finding, version=spec.version))
        if all(candidates.values()):
            numbered = {f"{LIBRARY_OPTION}.{number}": str(candidates[name][0]) for number, name in enumerate(names, 1)}
            complete.append(replace(spec, options={**spec.options, **numbered}))
    return tuple(complete)
