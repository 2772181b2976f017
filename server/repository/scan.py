"""Scan: reads what is on disk, all of it or one model, into ModelSpecs and findings.

Used by Repository and `penstock check`. A model repository holds `<model>/<version>/model.onnx`, and beside the
versions optionally `config.pbtxt` and `penstock.toml`. A path may also be one `.onnx` file or one SavedModel. See
docs/repository.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.batching.spec import ModelSpec
from penstock.server.protobuf import model_config_pb2

from . import isolated, placing, python, tensorflow
from .defaults import Defaults
from .fields.identity import BACKEND, PYTHON, TENSORFLOW
from .findings import DUPLICATE, Finding, MistakeError
from .inapplicable import find_inapplicable
from .libraries import with_libraries
from .model_config import MODEL_FILE
from .model_config import read as read_config
from .names import (
    folder_problem,
    is_single,
    model_name,
    name_problem,
    path_problem,
    single_problem,
    version_folder_text,
)
from .parsed_config import ParsedConfig, make_spec, merge
from .pbtxt import parse
from .penstock_toml import NATIVE_FILE, read_toml
from .versions import VERSION, choose_versions, list_versions, locate_version, set_policy

CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model on disk: its folder or file, one ModelSpec per version to serve, its declared ModelConfig.

    A mistake about the whole model leaves `specs` empty; one about a version omits that version. `locations` has the
    file and line of each setting, by its name in penstock.toml.
    """

    name: str
    path: Path
    specs: tuple[ModelSpec, ...] = ()
    config: Any = None
    findings: tuple[Finding, ...] = field(default=())
    locations: Mapping[str, tuple[Path, int]] = field(default_factory=dict)

    @property
    def dependencies(self) -> frozenset[str]:
        """The models of an ensemble's steps."""
        steps = [step for spec in self.specs[:1] if spec.ensemble is not None for step in spec.ensemble.steps]
        return frozenset(step.model for step in steps)


def scan(paths: Iterable[Path], defaults: Defaults) -> tuple[list[ModelEntry], list[Finding]]:
    """Read everything under the paths.

    Returns: a ModelEntry per model, by name, and the findings that concern no model.
    """
    entries: list[ModelEntry] = []
    findings: list[Finding] = []
    for path in _distinct(paths):
        try:
            if is_single(path):
                found, general = _read_single(path, defaults)
            elif path.is_dir():
                found, general = _scan_repository(path, defaults)
            else:
                found, general = [], [Finding(path, path_problem(path), unusable_path=True)]
        except OSError as error:
            found, general = [], [Finding(path, f"cannot be read: {error.strerror}", unusable_path=True)]
        entries += found
        findings += general
    return _merge_duplicates(entries), findings


def _distinct(paths: Iterable[Path]) -> Iterable[Path]:
    """Return the paths as absolute ones; of those that lead to the same place, only one."""
    return {path.resolve(): path.absolute() for path in paths}.values()


def locate(paths: Iterable[Path], name: str) -> list[Path]:
    """Find the folders and files that a scan would take for the model `name`. More than one is a mistake."""
    found: list[Path] = []
    # resolving every path for each of hundreds of single models would take long
    for path in _distinct(path for path in paths if path.suffix != ".onnx" or name in {path.stem, path.name}):
        folder = path / name
        if is_single(path):
            found += [path] if model_name(path) == name else []
        elif path.is_dir() and name_problem(name) is None and not name.startswith(".") and folder.is_dir():
            found.append(folder)
    return found


def list_names(paths: Iterable[Path], unreadable: dict[Path, str] | None = None) -> list[str]:
    """List the names of all models under the paths, without reading them. A duplicate is listed twice.

    Paths, and folders in them, that cannot be read are left out, and added to `unreadable` with the reason.
    """
    names: list[str] = []
    unreadable = {} if unreadable is None else unreadable
    for path in _distinct(paths):
        try:
            if is_single(path):
                names.append(model_name(path))
            elif path.suffix != ".onnx":
                names += [folder.name for folder in path.iterdir() if _is_readable_model(folder, unreadable)]
        except OSError as error:
            unreadable[path] = str(error.strerror)
    return sorted(names)


def _is_readable_model(folder: Path, unreadable: dict[Path, str]) -> bool:
    try:
        return _is_model(folder)
    except OSError as error:
        unreadable[folder] = str(error.strerror)
        return False


def _is_model(folder: Path) -> bool:
    if folder.name.startswith(".") or name_problem(folder.name) is not None or not folder.is_dir():
        return False
    return any((folder / file).is_file() for file in (CONFIG_FILE, NATIVE_FILE)) or any(
        VERSION.fullmatch(child.name) and child.is_dir() for child in folder.iterdir()
    )


def read_model(paths: Iterable[Path], name: str, defaults: Defaults, config: Any = None) -> ModelEntry | None:
    """Read one model, or return None if it does not exist. `config`: the ModelConfig to use instead of config.pbtxt.

    Raises: OSError.
    """
    entries: list[ModelEntry] = []
    for path in locate(paths, name):
        if not is_single(path):
            found = read_folder(path, defaults, config)
            entries += [found] if found else []
        elif config is not None:
            text = "cannot be configured: use a model repository that contains the model as a folder"
            entries.append(ModelEntry(name, path, findings=(Finding(path, text, model=name),)))
        else:
            entries += _read_single(path, defaults)[0]
    return next(iter(_merge_duplicates(entries)), None)


def _merge_duplicates(entries: list[ModelEntry]) -> list[ModelEntry]:
    paths: dict[str, list[Path]] = {}
    for entry in entries:
        paths.setdefault(entry.name, []).append(entry.path)
    merged: dict[str, ModelEntry] = {}
    for entry in entries:
        if len(paths[entry.name]) == 1:
            merged[entry.name] = entry
            continue
        finding = Finding(entry.path, DUPLICATE, model=entry.name)
        previous = merged.get(entry.name, ModelEntry(entry.name, entry.path))
        merged[entry.name] = replace(previous, findings=(*previous.findings, finding))
    return [merged[name] for name in sorted(merged)]


def _scan_repository(root: Path, defaults: Defaults) -> tuple[list[ModelEntry], list[Finding]]:
    model_files = ("*.onnx", python.PYTHON_FILE, tensorflow.SAVED_MODEL_FILE, *tensorflow.GRAPH_FILES)
    files_inside = [path for name in model_files for path in root.glob(f"*/{name}")]
    if (root / CONFIG_FILE).is_file() or any(VERSION.fullmatch(path.parent.name) for path in files_inside):
        text = f"is the folder of one model; pass the folder that contains it: {root.parent}"
        return [], [Finding(root, text, unusable_path=True)]
    entries: list[ModelEntry] = []
    findings: list[Finding] = []
    for path in sorted(root.iterdir()):
        if path.name.startswith("."):
            continue
        try:
            if not path.is_dir():
                findings += _check_beside_models(path)
            elif (problem := name_problem(path.name)) is not None:
                findings.append(Finding(root, problem))
            elif entry := read_folder(path, defaults):
                entries.append(entry)
            else:
                findings.append(Finding(path, folder_problem(path), is_mistake=False))
        except OSError as error:
            findings.append(Finding(path, f"cannot be read: {error.strerror}"))
    if not entries and not any(finding.is_mistake for finding in findings):
        return [], _explain_empty(root, model_files, findings)
    return entries, findings


def _check_beside_models(path: Path) -> Iterator[Finding]:
    """Report a file that was meant as a model: an .onnx file, or a broken link."""
    if path.is_symlink() and not path.exists():
        yield Finding(path, path_problem(path), is_mistake=False)
    elif path.suffix == ".onnx":
        text = (
            f"is not served: in a repository a model is <name>/<version>/{MODEL_FILE}; PATH may also be the file itself"
        )
        yield Finding(path, text, is_mistake=False)


def _explain_empty(root: Path, model_files: Iterable[str], findings: list[Finding]) -> list[Finding]:
    """Say why a repository is empty, in addition to `findings`; it may be a version's folder."""
    if VERSION.fullmatch(root.name) and any(path for name in model_files for path in root.glob(name)):
        return [Finding(root, version_folder_text(root), unusable_path=True)]
    return [*findings, Finding(root, "contains no models", is_mistake=False)]


def _read_single(path: Path, defaults: Defaults) -> tuple[list[ModelEntry], list[Finding]]:
    """Read a model that is one .onnx file, or one SavedModel."""
    name, title = model_name(path), "SavedModel" if path.is_dir() else ".onnx file"
    if (problem := single_problem(path)) is not None:
        return [], [Finding(path, problem, unusable_path=True)]
    own_toml = path.with_name(f"{name}.toml")
    toml_files = [file for file in (own_toml, path.parent / NATIVE_FILE) if file.is_file()]
    findings: list[Finding] = []
    parsed = _read_native(toml_files[0], findings) if toml_files else ParsedConfig(path)
    parsed = placing.resolve_devices(parsed, TENSORFLOW if path.is_dir() else BACKEND, defaults.gpus)
    findings += [
        parsed.make_mistake(key, f"{key} does not apply to a single {title}")
        for key in ("model.file", "model.versions")
        if key in parsed.values
    ]
    config = model_config_pb2().ModelConfig(name=name, default_model_filename=path.name)
    set_policy(config, ParsedConfig(path))
    spec = make_spec(name, path, parsed, defaults)
    spec = tensorflow.as_tensorflow(spec, parsed, defaults) if path.is_dir() else isolated.as_isolated(spec, parsed)
    spec = _place(spec, parsed, defaults, findings)
    findings += find_inapplicable(spec, parsed)
    return [_make_entry(spec, parsed, config, [(1, path)], findings)], []


def read_folder(folder: Path, defaults: Defaults, override: Any = None) -> ModelEntry | None:
    """Read a model's folder, or return None if it is not one. `override`: a ModelConfig that replaces config.pbtxt."""
    findings: list[Finding] = []
    versions = list_versions(folder, findings)
    file = folder / "configs" / f"{defaults.config_name}.pbtxt"
    if not defaults.config_name or not file.is_file():
        file = folder / CONFIG_FILE
    if not versions and override is None and not file.is_file() and not (folder / NATIVE_FILE).is_file():
        return None
    config, parsed = _read_settings(folder, file, override, defaults, findings)
    backend = parsed.get("model.backend")
    filename = parsed.get("model.file") or _default_file_name(folder, backend)
    config.name, config.default_model_filename = folder.name, filename
    set_policy(config, parsed)
    spec = make_spec(folder.name, folder, parsed, defaults)
    findings += find_inapplicable(spec, parsed)
    if backend == PYTHON:
        spec = python.as_python(spec, parsed, config)
    elif backend == TENSORFLOW:
        spec = tensorflow.as_tensorflow(spec, parsed, defaults)
    else:
        spec = isolated.as_isolated(spec, parsed)
    spec = _place(spec, parsed, defaults, findings)
    if spec.ensemble is not None:
        config.default_model_filename = ""
    if any(finding.is_mistake for finding in findings):
        return _make_entry(spec, parsed, config, [], findings)
    chosen = choose_versions(folder, parsed, versions, findings)
    if spec.ensemble is not None:
        return _make_entry(spec, parsed, config, [(version, folder / str(version)) for version in chosen], findings)
    locate_file = tensorflow.locate_version if backend == TENSORFLOW else locate_version
    files = [(version, path) for version in chosen if (path := locate_file(folder, version, filename, findings))]
    return _make_entry(spec, parsed, config, files, findings)


def _default_file_name(folder: Path, backend: str | None) -> str:
    """Return the default name of the model's file in each version's folder."""
    if backend == TENSORFLOW:
        return tensorflow.file_name(folder)
    return python.PYTHON_FILE if backend == PYTHON else MODEL_FILE


def _read_settings(
    folder: Path, file: Path, override: Any, defaults: Defaults, findings: list[Finding]
) -> tuple[Any, ParsedConfig]:
    """Read a model's settings: its ModelConfig, and that merged with penstock.toml."""
    config, parsed = model_config_pb2().ModelConfig(), ParsedConfig(folder)
    try:
        # this name takes the place of a file's in the text of mistakes
        config, lines, file = (override, {}, folder / "config") if override is not None else _parse_config(file)
        config.name = "" if folder.parent == defaults.links_folder else config.name
        if python.is_undeclared(config, folder):
            config.backend, lines = PYTHON, lines or {}
        elif tensorflow.complete_platform(config, folder):
            lines = lines or {}
        if lines is not None:
            config_path = file if override is not None or file.is_file() else folder
            parsed, more = read_config(folder, config_path, config, lines, defaults.gpus)
            findings += more
        if override is not None:
            parsed, more = placing.without_paths(parsed)
            findings += more
        if (folder / NATIVE_FILE).is_file():
            native = _read_native(folder / NATIVE_FILE, findings)
            backend = parsed.get("model.backend") or native.get("model.backend", BACKEND)
            parsed, more = merge(parsed, placing.resolve_devices(native, backend, defaults.gpus))
            findings += more
    except MistakeError as error:
        findings.append(error.finding)
    return config, parsed


def _parse_config(file: Path) -> tuple[Any, dict[str, int] | None, Path]:
    """Parse a config.pbtxt. The lines are None if it does not exist. Raises: MistakeError."""
    if not file.is_file():
        return model_config_pb2().ModelConfig(), None, file
    return *parse(file), file


def _read_native(path: Path, findings: list[Finding]) -> ParsedConfig:
    try:
        parsed, more = read_toml(path)
    except MistakeError as error:
        parsed, more = ParsedConfig(path), [error.finding]
    findings += more
    return parsed


def _place(spec: ModelSpec, parsed: ParsedConfig, defaults: Defaults, findings: list[Finding]) -> ModelSpec:
    spec, more = placing.place_model(spec, parsed, defaults)
    findings += more
    return spec


def _make_entry(
    spec: ModelSpec, parsed: ParsedConfig, config: Any, located: list[tuple[int, Path]], findings: list[Finding]
) -> ModelEntry:
    all_prevented = any(finding.is_mistake and not finding.version for finding in findings)
    specs = () if all_prevented else tuple(replace(spec, version=version, path=path) for version, path in located)
    specs = with_libraries(specs, parsed, spec.path, findings)
    tagged = tuple(finding.with_model(spec.name) for finding in findings)
    return ModelEntry(spec.name, spec.path, specs, config, tagged, parsed.locations)
