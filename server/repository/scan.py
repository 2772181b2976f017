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

from . import isolated, placing, python, tensorflow
from . import statement as said
from .defaults import Defaults
from .fields.identity import BACKEND, PYTHON, TENSORFLOW
from .findings import TWICE, Finding, MistakeError
from .libraries import with_libraries
from .misfits import NATIVE_FILE, misfits
from .model_config import MODEL_FILE
from .model_config import read as read_config
from .names import bad_name, bad_single, is_single, name_of, no_model, no_path, one_version
from .pbtxt import model_config_pb2, parse
from .penstock_toml import read_toml
from .statement import Statement
from .versions import VERSION, choose, list_versions, located, say_policy

__all__ = ["CONFIG_FILE", "Defaults", "Entry", "list_names", "locate", "read_folder", "read_model", "scan"]

CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class Entry:
    """One model on disk: its folder or file, one ModelSpec per version to serve, its declared ModelConfig.

    A mistake about the whole model leaves `specs` empty; one about a version omits that version. `places` has the file
    and line of each setting, by its name in penstock.toml.
    """

    name: str
    path: Path
    specs: tuple[ModelSpec, ...] = ()
    config: Any = None
    findings: tuple[Finding, ...] = field(default=())
    places: Mapping[str, tuple[Path, int]] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """The models of an ensemble's steps."""
        steps = [step for spec in self.specs[:1] if spec.ensemble is not None for step in spec.ensemble.steps]
        return frozenset(step.model for step in steps)


def scan(paths: Iterable[Path], defaults: Defaults) -> tuple[list[Entry], list[Finding]]:
    """Read everything under the paths.

    Returns: an Entry per model, by name, and the findings that concern no model.
    """
    entries: list[Entry] = []
    findings: list[Finding] = []
    for path in {path.resolve(): path.absolute() for path in paths}.values():
        try:
            if is_single(path):
                found, more = _single(path, defaults)
            elif path.is_dir():
                found, more = _repository(path, defaults)
            else:
                found, more = [], [Finding(path, no_path(path), whole=True)]
        except OSError as error:
            found, more = [], [Finding(path, f"cannot be read: {error.strerror}", whole=True)]
        entries += found
        findings += more
    return _unique(entries), findings


def locate(paths: Iterable[Path], name: str) -> list[Path]:
    """Find the folders and files that a scan would take for the model `name`. More than one is a mistake."""
    found: list[Path] = []
    near = [path for path in paths if path.suffix != ".onnx" or name in {path.stem, path.name}]  # not all for each
    for path in {path.resolve(): path.absolute() for path in near}.values():
        place = path / name
        if is_single(path):
            found += [path] if name_of(path) == name else []
        elif path.is_dir() and bad_name(name) is None and not name.startswith(".") and place.is_dir():
            found.append(place)
    return found


def list_names(paths: Iterable[Path], unread: dict[Path, str] | None = None) -> list[str]:
    """List the names of all models under the paths, without reading them. A duplicate is listed twice.

    Paths, and folders in them, that cannot be read are left out, and added to `unread` with the reason.
    """
    names: list[str] = []
    unread = {} if unread is None else unread
    for path in {path.resolve(): path.absolute() for path in paths}.values():
        try:
            if is_single(path):
                names.append(name_of(path))
            elif path.suffix != ".onnx":
                names += [place.name for place in path.iterdir() if _is_readable_model(place, unread)]
        except OSError as error:
            unread[path] = str(error.strerror)
    return sorted(names)


def _is_readable_model(place: Path, unread: dict[Path, str]) -> bool:
    try:
        return _is_model(place)
    except OSError as error:
        unread[place] = str(error.strerror)
        return False


def _is_model(place: Path) -> bool:
    if place.name.startswith(".") or bad_name(place.name) is not None or not place.is_dir():
        return False
    return any((place / file).is_file() for file in (CONFIG_FILE, NATIVE_FILE)) or any(
        VERSION.fullmatch(inner.name) and inner.is_dir() for inner in place.iterdir()
    )


def read_model(paths: Iterable[Path], name: str, defaults: Defaults, config: Any = None) -> Entry | None:
    """Read one model, or return None if it does not exist. `config`: the ModelConfig to use instead of config.pbtxt.

    Raises: OSError.
    """
    entries: list[Entry] = []
    for place in locate(paths, name):
        if not is_single(place):
            found = read_folder(place, defaults, config)
            entries += [found] if found else []
        elif config is not None:
            text = "cannot be configured: use a model repository that contains the model as a folder"
            entries.append(Entry(name, place, findings=(Finding(place, text, model=name),)))
        else:
            entries += _single(place, defaults)[0]
    return next(iter(_unique(entries)), None)


def _unique(entries: list[Entry]) -> list[Entry]:
    places: dict[str, list[Path]] = {}
    for entry in entries:
        places.setdefault(entry.name, []).append(entry.path)
    kept: dict[str, Entry] = {}
    for entry in entries:
        if len(places[entry.name]) == 1:
            kept[entry.name] = entry
            continue
        finding = Finding(entry.path, TWICE, model=entry.name)
        before = kept.get(entry.name, Entry(entry.name, entry.path))
        kept[entry.name] = replace(before, findings=(*before.findings, finding))
    return [kept[name] for name in sorted(kept)]


def _repository(root: Path, defaults: Defaults) -> tuple[list[Entry], list[Finding]]:
    known = ("*.onnx", python.PYTHON_FILE, tensorflow.SAVED_MODEL_FILE, *tensorflow.GRAPH_FILES)
    inside = [path for name in known for path in root.glob(f"*/{name}")]
    if (root / CONFIG_FILE).is_file() or any(VERSION.fullmatch(path.parent.name) for path in inside):
        text = f"is the folder of one model; pass the folder that contains it: {root.parent}"
        return [], [Finding(root, text, whole=True)]
    entries: list[Entry] = []
    findings: list[Finding] = []
    for path in sorted(root.iterdir()):
        if path.name.startswith("."):
            continue
        try:
            if not path.is_dir():
                findings += _beside_models(path)
            elif (problem := bad_name(path.name)) is not None:
                findings.append(Finding(root, problem))
            elif entry := read_folder(path, defaults):
                entries.append(entry)
            else:
                findings.append(Finding(path, no_model(path), mistake=False))
        except OSError as error:
            findings.append(Finding(path, f"cannot be read: {error.strerror}"))
    if not entries and not any(finding.mistake for finding in findings):
        return [], _without_models(root, known, findings)
    return entries, findings


def _beside_models(path: Path) -> Iterator[Finding]:
    """Report a file that was meant as a model: an .onnx file, or a broken link."""
    if path.is_symlink() and not path.exists():
        yield Finding(path, no_path(path), mistake=False)
    elif path.suffix == ".onnx":
        text = (
            f"is not served: in a repository a model is <name>/<version>/{MODEL_FILE}; PATH may also be the file itself"
        )
        yield Finding(path, text, mistake=False)


def _without_models(root: Path, known: Iterable[str], findings: list[Finding]) -> list[Finding]:
    """Say why a repository is empty, in addition to `findings`; it may be a version's folder."""
    if VERSION.fullmatch(root.name) and any(path for name in known for path in root.glob(name)):
        return [Finding(root, one_version(root), whole=True)]
    return [*findings, Finding(root, "contains no models", mistake=False)]


def _single(path: Path, defaults: Defaults) -> tuple[list[Entry], list[Finding]]:
    """Read a model that is one .onnx file, or one SavedModel."""
    name, what = name_of(path), "SavedModel" if path.is_dir() else ".onnx file"
    if (problem := bad_single(path)) is not None:
        return [], [Finding(path, problem, whole=True)]
    own = path.with_name(f"{name}.toml")
    beside = [place for place in (own, path.parent / NATIVE_FILE) if place.is_file()]
    findings: list[Finding] = []
    stated = _native(beside[0], findings) if beside else Statement(path)
    stated = placing.resolve(stated, TENSORFLOW if path.is_dir() else BACKEND, defaults.gpus)
    findings += [
        stated.mistake(key, f"{key} does not apply to a single {what}")
        for key in ("model.file", "model.versions")
        if key in stated.values
    ]
    config = model_config_pb2().ModelConfig(name=name, default_model_filename=path.name)
    say_policy(config, Statement(path))
    spec = said.spec(name, path, stated, defaults)
    if path.is_dir():
        spec = tensorflow.as_tensorflow(spec, stated, *defaults.of_tensorflow)
    else:
        spec = isolated.as_isolated(spec, stated)
    spec = _placed(spec, stated, defaults, findings)
    findings += misfits(spec, stated)
    return [_entry(spec, stated, config, [(1, path)], findings)], []


def read_folder(folder: Path, defaults: Defaults, given: Any = None) -> Entry | None:
    """Read a model's folder, or return None if it is not one. `given`: a ModelConfig to use instead of config.pbtxt."""
    findings: list[Finding] = []
    versions = list_versions(folder, findings)
    file = folder / "configs" / f"{defaults.config_name}.pbtxt"
    if not defaults.config_name or not file.is_file():
        file = folder / CONFIG_FILE
    if not versions and given is None and not file.is_file() and not (folder / NATIVE_FILE).is_file():
        return None
    config, stated = _stated(folder, file, given, defaults, findings)
    backend = stated.get("model.backend")
    filename = stated.get("model.file") or _file_name(folder, backend)
    config.name, config.default_model_filename = folder.name, filename
    say_policy(config, stated)
    spec = said.spec(folder.name, folder, stated, defaults)
    findings += misfits(spec, stated)
    if backend == PYTHON:
        spec = python.as_python(spec, stated, config)
    elif backend == TENSORFLOW:
        spec = tensorflow.as_tensorflow(spec, stated, *defaults.of_tensorflow)
    else:
        spec = isolated.as_isolated(spec, stated)
    spec = _placed(spec, stated, defaults, findings)
    if spec.ensemble is not None:
        config.default_model_filename = ""
    if any(finding.mistake for finding in findings):
        return _entry(spec, stated, config, [], findings)
    chosen = choose(folder, stated, versions, findings)
    if spec.ensemble is not None:
        return _entry(spec, stated, config, [(version, folder / str(version)) for version in chosen], findings)
    find = tensorflow.located if backend == TENSORFLOW else located
    found = [(version, path) for version in chosen if (path := find(folder, version, filename, findings))]
    return _entry(spec, stated, config, found, findings)


def _file_name(folder: Path, backend: str | None) -> str:
    """Return the default name of the model's file in each version's folder."""
    if backend == TENSORFLOW:
        return tensorflow.file_name(folder)
    return python.PYTHON_FILE if backend == PYTHON else MODEL_FILE


def _stated(folder: Path, file: Path, given: Any, defaults: Defaults, findings: list[Finding]) -> tuple[Any, Statement]:
    """Read a model's settings: its ModelConfig, and that merged with penstock.toml."""
    config, stated = model_config_pb2().ModelConfig(), Statement(folder)
    try:
        # this name takes the place of a file's in the text of mistakes
        config, lines, file = (given, {}, folder / "config") if given is not None else _parsed(file)
        config.name = "" if folder.parent == defaults.linked else config.name
        if python.lacks_backend(config, folder):
            config.backend, lines = PYTHON, lines or {}
        elif tensorflow.complete_platform(config, folder):
            lines = lines or {}
        if lines is not None:
            place = file if given is not None or file.is_file() else folder
            stated, more = read_config(folder, place, config, lines, defaults.gpus)
            findings += more
        if given is not None:
            stated, more = placing.without_places(stated)
            findings += more
        if (folder / NATIVE_FILE).is_file():
            native = _native(folder / NATIVE_FILE, findings)
            backend = stated.get("model.backend") or native.get("model.backend", BACKEND)
            stated, more = said.merge(stated, placing.resolve(native, backend, defaults.gpus))
            findings += more
    except MistakeError as error:
        findings.append(error.finding)
    return config, stated


def _parsed(file: Path) -> tuple[Any, dict[str, int] | None, Path]:
    """Parse a config.pbtxt. The lines are None if it does not exist. Raises: MistakeError."""
    if not file.is_file():
        return model_config_pb2().ModelConfig(), None, file
    return *parse(file), file


def _native(path: Path, findings: list[Finding]) -> Statement:
    try:
        stated, more = read_toml(path)
    except MistakeError as error:
        stated, more = Statement(path), [error.finding]
    findings += more
    return stated


def _placed(spec: ModelSpec, stated: Statement, defaults: Defaults, findings: list[Finding]) -> ModelSpec:
    spec, more = placing.place(spec, stated, defaults)
    findings += more
    return spec


def _entry(
    spec: ModelSpec, stated: Statement, config: Any, located: list[tuple[int, Path]], findings: list[Finding]
) -> Entry:
    whole = any(finding.mistake and not finding.version for finding in findings)
    specs = () if whole else tuple(replace(spec, version=version, path=path) for version, path in located)
    specs = with_libraries(specs, stated, spec.path, findings)
    about = tuple(finding.about(spec.name) for finding in findings)
    return Entry(spec.name, spec.path, specs, config, about, stated.places)
