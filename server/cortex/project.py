"""Project: a folder with a cortex.yaml of Cortex 0.9 or 0.10, parsed and validated. Called by repository.py.

Only that file is read: the repository checks whether models and handlers exist. Source of rules and texts: Cortex v0.9
and v0.10, pkg/operator/api/userconfig.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.server.repository.findings import Finding, MistakeError, read_text
from penstock.server.settings import nearest

from .api import Api, Tracker
from .later_formats import LATER, later_api
from .paths import HEALTH_PATH, is_ours
from .yaml_mapping import YamlMapping, either, quoted
from .yaml_nodes import YamlError, YamlNode, parse

CONFIG = "cortex.yaml"
MAX_BYTES = 1 << 18
KINDS = ("deployment", "api")
FORMATS = ("tensorflow", "onnx", "predictor")
_NEW_KEYS = (*FORMATS, "endpoint")
_OLD_KEYS = ("model", "model_format", "request_handler", "tf_signature_key")
_MODEL_KEYS = ("model", "request_handler", "python_path", "signature_key")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_ENDPOINT = re.compile(r"[a-zA-Z0-9_\-./]*")
_LONGEST_NAME = 63

_NOT_DNS_1035 = (
    "must contain only lower case letters, numbers, and dashes, start with a letter, and cannot end with a dash"
)
_NOT_ENDPOINT = "must consist of lower case alphanumeric characters, '/', '-', '_', or '.'"
_NO_PREDICTORS = (
    "predictor APIs are not served: write the model as onnx or tensorflow, with a request_handler, "
    'or the predictor as docs/cortex.md, "Later versions", says'
)


@dataclass(frozen=True, slots=True)
class Project:
    """A project: its folder, its file, and the content. With mistakes, `apis` are those that could be read."""

    folder: Path
    file: Path
    deployment: str
    apis: tuple[Api, ...]
    findings: tuple[Finding, ...]

    @property
    def mistakes(self) -> list[Finding]:
        """The findings that prevent it from being deployed."""
        return [finding for finding in self.findings if finding.is_mistake]


def project_file(path: Path) -> Path:
    """Return the cortex.yaml of a PATH, which is its folder or the file itself."""
    return path / CONFIG if path.is_dir() else path


def read_project(path: Path) -> Project:
    """Read a project, given as its folder or its cortex.yaml, with everything wrong with it among the findings."""
    file = project_file(path.absolute())
    findings: list[Finding] = []
    try:
        if file.is_file() and file.stat().st_size > MAX_BYTES:
            raise MistakeError(Finding(file, f"has more than {MAX_BYTES} bytes"))
        deployment, apis = _read(file, parse(read_text(file)), findings)
    except MistakeError as error:
        findings.append(error.finding)
        deployment, apis = "", ()
    except YamlError as error:
        findings.append(Finding(file, str(error), error.line))
        deployment, apis = "", ()
    return Project(file.parent, file, deployment, apis, tuple(sorted(findings, key=lambda finding: finding.line)))


def _read(file: Path, root: YamlNode, findings: list[Finding]) -> tuple[str, tuple[Api, ...]]:
    resources = root.value if isinstance(root.value, list) else []
    wrong = [each.line for each in resources if not isinstance(each.value, dict)]
    if wrong or not isinstance(root.value, list):
        text = "cortex YAML configuration files must contain a list of maps"
        raise MistakeError(Finding(file, text, wrong[0] if wrong else root.line))
    if (later := later_api(resources)) is not None:
        raise MistakeError(Finding(file, LATER, later.line))
    parts: dict[str, list[YamlMapping]] = {kind: [] for kind in KINDS}
    for number, node in enumerate(resources):
        part = YamlMapping(file, node, (), findings)
        kind, name = part.word("kind"), part.word("name")
        title = kind if kind in KINDS else "resource"
        part.place = (title, name) if name else (f"{title} at index {number}",)
        part.api = name if kind == "api" else ""
        if part.text("kind", required=True) in KINDS:
            parts[kind].append(part)
        elif kind:
            part.mistake(f"unknown kind {quoted(kind)}{nearest(kind, KINDS)}", "kind")
    deployment = _deployment(file, root, parts["deployment"], findings)
    apis = [(part, api) for part in parts["api"] if (api := _api(part, file.parent, deployment)) is not None]
    _refuse_twins(apis)
    return deployment, tuple(api for _, api in apis)


def _deployment(file: Path, root: YamlNode, parts: list[YamlMapping], findings: list[Finding]) -> str:
    """Read the only deployment. Returns: its name."""
    if not parts:
        findings.append(Finding(file, "cortex.yaml must define a deployment resource", root.line))
        return ""
    for part in parts[1:]:
        part.mistake(f"deployment resource may only be defined once (line {parts[0].line} has it too)")
    names = [_name(part) for part in parts]
    for part in parts:
        part.finish()
    return names[0]


def _name(part: YamlMapping) -> str:
    name = part.text("name", required=True)
    if name and (_DNS_1035.fullmatch(name) is None or len(name) > _LONGEST_NAME):
        problem = _NOT_DNS_1035 if len(name) <= _LONGEST_NAME else f"must be no more than {_LONGEST_NAME} characters"
        part.mistake(f"{quoted(name)} {problem}", "name")
    return name


def _refuse_twins(apis: list[tuple[YamlMapping, Api]]) -> None:
    """Reject a name or an endpoint of an earlier API."""
    names: dict[str, YamlMapping] = {}
    endpoints: dict[str, tuple[YamlMapping, str]] = {}
    for part, api in apis:
        if api.name in names:
            line = names[api.name].line
            part.mistake(f"name {quoted(api.name)} must be unique across apis (line {line} has it too)", "name")
        elif api.endpoint in endpoints:
            before, name = endpoints[api.endpoint]
            text = f"endpoint {quoted(api.endpoint)} must be unique across apis: {name} (line {before.line}) has it too"
            part.mistake(text, "endpoint")
        names.setdefault(api.name, part)
        endpoints.setdefault(api.endpoint, (part, api.name))


def _api(part: YamlMapping, project: Path, deployment: str) -> Api | None:
    """Read an API, in the generation of its keys. Returns: None if it has no name or no model."""
    name = _name(part)
    old = [key for key in _OLD_KEYS if key in part]
    new = [key for key in _NEW_KEYS if key in part]
    said: dict[str, Any] = {}
    endpoint = f"/{deployment}/{name}"
    if old and new:
        text = f"{quoted(old[0])} is of Cortex 0.9 and {quoted(new[0])} of 0.10: an API is written in one of the two"
        part.mistake(text, old[0])
        part.know(*_OLD_KEYS, *_NEW_KEYS)
    elif old:
        said = _old(part)
    else:
        endpoint = _endpoint(part) or endpoint
        said = _new(part)
    tracker, compute = _tracker(part), _compute(part)
    part.finish()
    if not name or not said.get("model"):
        return None
    said["lines"]["compute"] = part.line_of("compute")
    return Api(
        project, deployment, name, endpoint, tracker=tracker, compute=compute, generation="0.9" if old else "0.10",
        line=part.line, **said,
    )  # fmt: skip


def _old(part: YamlMapping) -> dict[str, Any]:
    """Read a model in the form of 0.9."""
    model = part.text("model", required=True)
    lines = {key: part.line_of(key) for key in ("model", "request_handler", "tf_signature_key") if key in part}
    kind = part.text("model_format", of=FORMATS[:2]) or ("onnx" if model.endswith(".onnx") else "tensorflow")
    said = {
        "kind": kind, "model": model, "handler": part.text("request_handler"),
        "signature_key": part.text("tf_signature_key"), "relaxed_shapes": part.flag("relaxed_shapes"), "lines": lines,
    }  # fmt: skip
    part.ignored("tags", "is kept, and means nothing here")
    if kind == "onnx":
        _refuse_zip(part, model)
    _refuse_foreign(part, "onnx" if kind == "tensorflow" else "tensorflow", said)
    return said


def _new(part: YamlMapping) -> dict[str, Any]:
    """Read a model in the form of 0.10."""
    found = [key for key in FORMATS if key in part]
    part.know(*FORMATS)
    if not found:
        part.mistake(f"please specify a model format ({either(FORMATS)})")
        return {}
    if len(found) > 1:
        text = f"specified ({either(found, 'and')}), please specify only one model format ({either(FORMATS)})"
        part.mistake(text, max(found, key=part.line_of))
        return {}
    kind = found[0]
    if kind == "predictor":
        part.mistake(_NO_PREDICTORS, kind)
        return {}
    inner = part.part(kind)
    if inner is None:
        return {}
    said: dict[str, Any] = {
        "kind": kind, "model": inner.text("model", required=True), "handler": inner.text("request_handler"),
        "python_path": inner.text("python_path").rstrip("/"), "metadata": inner.anything("metadata"),
        "lines": {key: inner.line_of(key) for key in _MODEL_KEYS if key in inner},
    }  # fmt: skip
    if kind == "onnx":
        said["relaxed_shapes"] = inner.flag("relaxed_shapes")
        _refuse_zip(inner, said["model"])
    else:
        said["signature_key"] = inner.text("signature_key")
    inner.finish()
    return said


def _refuse_zip(part: YamlMapping, model: str) -> None:
    if model.endswith(".zip"):
        part.mistake("zip files are not supported for ONNX models", "model")


def _refuse_foreign(part: YamlMapping, other: str, said: Mapping[str, Any]) -> None:
    """Reject keys for another kind of model."""
    for key, value, kind in (
        ("tf_signature_key", said["signature_key"], "tensorflow"), ("relaxed_shapes", said["relaxed_shapes"], "onnx"),
    ):  # fmt: skip
        if value and kind == other:
            part.mistake(f"is for {kind} models, and this one is {said['kind']}", key)


def _endpoint(part: YamlMapping) -> str:
    """Read an API's endpoint, "" if it is unset."""
    said = part.text("endpoint")
    if not said:
        return ""
    path = f"/{said.strip('/')}"
    if _ENDPOINT.fullmatch(said) is None:
        part.mistake(f"{quoted(said)} {_NOT_ENDPOINT}", "endpoint")
    elif "//" in said:
        part.mistake(f"{quoted(said)} cannot contain adjacent slashes", "endpoint")
    elif path == "/":
        part.mistake('"/" is not allowed (a path must be specified)', "endpoint")
    else:
        if is_ours(path) or path == HEALTH_PATH:
            part.warn(f"takes the place of what this server has at {path}", "endpoint")
        return path
    return ""


def _tracker(part: YamlMapping) -> Tracker | None:
    inner = part.part("tracker")
    if inner is None:
        return None
    key, model_type = inner.text("key"), inner.text("model_type", of=("classification", "regression"))
    if "model_type" not in inner:
        inner.warn("model_type is not said: nothing is counted of predictions")
    inner.finish()
    return Tracker(model_type, key) if model_type else None


def _compute(part: YamlMapping) -> dict[str, Any]:
    """Read an API's resources, with Cortex's defaults."""
    inner = part.part("compute") or part.without()
    least = inner.whole("min_replicas", 1, 1)
    said: dict[str, Any] = {
        "min_replicas": least, "max_replicas": inner.whole("max_replicas", 100, 1),
        "init_replicas": inner.whole("init_replicas", least, 1),
        "target_cpu_utilization": inner.whole("target_cpu_utilization", 80, 1, 100),
        "cpu": inner.quantity("cpu", "200m"), "gpu": inner.whole("gpu", 0, 0), "mem": inner.quantity("mem", None),
    }  # fmt: skip
    inner.finish()
    most, init = said["max_replicas"], said["init_replicas"]
    if least > most:
        inner.mistake(f"min_replicas cannot be greater than max_replicas ({least} > {most})", "min_replicas")
    elif init > most:
        inner.mistake(f"init_replicas cannot be greater than max_replicas ({init} > {most})", "init_replicas")
    elif init < least:
        inner.mistake(f"init_replicas cannot be less than min_replicas ({init} < {least})", "init_replicas")
    return said
