"""Project: a folder with a cortex.yaml of Cortex 0.9 or 0.10, parsed and validated. Called by repository.py.

Only that file is read: the repository checks whether models and handlers exist. Source of rules and texts: Cortex v0.9
and v0.10, pkg/operator/api/userconfig; of the formats of later versions, v0.12 to v0.42, docs/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.server.repository.findings import Finding, MistakeError, read_text
from penstock.server.settings import nearest
from penstock.server.yaml_nodes import YamlError, YamlNode, parse

from .api import Api, Tracker
from .paths import HEALTH_PATH, is_penstock_path
from .yaml_mapping import YamlMapping, alternatives, quoted

CONFIG = "cortex.yaml"
MAX_BYTES = 1 << 18
KINDS = ("deployment", "api")
FORMATS = ("tensorflow", "onnx", "predictor")
_NEW_KEYS = (*FORMATS, "endpoint")
_OLD_KEYS = ("model", "model_format", "request_handler", "tf_signature_key")
_MODEL_KEYS = ("model", "request_handler", "python_path", "signature_key")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_ENDPOINT = re.compile(r"[a-zA-Z0-9_\-./]*")
_MAX_NAME_LENGTH = 63

_NOT_DNS_1035 = (
    "must contain only lower case letters, numbers, and dashes, start with a letter, and cannot end with a dash"
)
_NOT_ENDPOINT = "must consist of lower case alphanumeric characters, '/', '-', '_', or '.'"
_NO_PREDICTORS = (
    "predictor APIs are not supported: write the model as onnx or tensorflow, with a request_handler, "
    'or migrate the predictor as in docs/cortex.md, "Later versions"'
)
_LATER = (
    "APIs of Cortex 0.12 or later are not supported, only models with the request handlers of 0.9 and 0.10: "
    'docs/cortex.md, "Later versions", describes how to migrate them'
)
_LATER_KINDS = ("SyncAPI", "RealtimeAPI", "BatchAPI", "AsyncAPI", "TaskAPI", "APISplitter", "TrafficSplitter")


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
        deployment, apis = _read_resources(file, parse(read_text(file)), findings)
    except MistakeError as error:
        findings.append(error.finding)
        deployment, apis = "", ()
    except YamlError as error:
        findings.append(Finding(file, str(error), error.line))
        deployment, apis = "", ()
    return Project(file.parent, file, deployment, apis, tuple(sorted(findings, key=lambda finding: finding.line)))


def _read_resources(file: Path, root: YamlNode, findings: list[Finding]) -> tuple[str, tuple[Api, ...]]:
    resources = root.value if isinstance(root.value, list) else []
    invalid_lines = [each.line for each in resources if not isinstance(each.value, dict)]
    if invalid_lines or not isinstance(root.value, list):
        text = "cortex YAML configuration files must contain a list of maps"
        raise MistakeError(Finding(file, text, invalid_lines[0] if invalid_lines else root.line))
    if (later := _later_api(resources)) is not None:
        raise MistakeError(Finding(file, _LATER, later.line))
    mappings: dict[str, list[YamlMapping]] = {kind: [] for kind in KINDS}
    for number, node in enumerate(resources):
        mapping = YamlMapping(file, node, (), findings)
        kind, name = mapping.peek_text("kind"), mapping.peek_text("name")
        title = kind if kind in KINDS else "resource"
        mapping.location = (title, name) if name else (f"{title} at index {number}",)
        mapping.api = name if kind == "api" else ""
        if mapping.text("kind", required=True) in KINDS:
            mappings[kind].append(mapping)
        elif kind:
            mapping.mistake(f"unknown kind {quoted(kind)}{nearest(kind, KINDS)}", "kind")
    deployment = _read_deployment(file, root, mappings["deployment"], findings)
    apis = [
        (mapping, api)
        for mapping in mappings["api"]
        if (api := _read_api(mapping, file.parent, deployment)) is not None
    ]
    _reject_duplicates(apis)
    return deployment, tuple(api for _, api in apis)


def _later_api(resources: Iterable[YamlNode]) -> YamlNode | None:
    """Return the first resource that only a later version can have. All are known to be maps."""
    return next((node for node in resources if isinstance(node.value, dict) and _is_later(node.value)), None)


def _is_later(keys: dict[str, YamlNode]) -> bool:
    kind, predictor = keys.get("kind"), keys.get("predictor")
    if kind is None:
        return predictor is not None  # some of these versions have neither deployments nor kinds
    # the predictor of 0.10 and 0.11 is a module and has no type
    typed = predictor is not None and isinstance(predictor.value, dict) and "type" in predictor.value
    return kind.unwrapped in _LATER_KINDS or typed


def _read_deployment(file: Path, root: YamlNode, mappings: list[YamlMapping], findings: list[Finding]) -> str:
    """Read the only deployment. Returns: its name."""
    if not mappings:
        findings.append(Finding(file, "cortex.yaml must define a deployment resource", root.line))
        return ""
    for mapping in mappings[1:]:
        mapping.mistake(f"deployment resource may only be defined once (also in line {mappings[0].line})")
    names = [_read_name(mapping) for mapping in mappings]
    for mapping in mappings:
        mapping.finish()
    return names[0]


def _read_name(mapping: YamlMapping) -> str:
    name = mapping.text("name", required=True)
    if name and (_DNS_1035.fullmatch(name) is None or len(name) > _MAX_NAME_LENGTH):
        problem = (
            _NOT_DNS_1035 if len(name) <= _MAX_NAME_LENGTH else f"must be no more than {_MAX_NAME_LENGTH} characters"
        )
        mapping.mistake(f"{quoted(name)} {problem}", "name")
    return name


def _reject_duplicates(apis: list[tuple[YamlMapping, Api]]) -> None:
    """Reject a name or an endpoint of an earlier API."""
    names: dict[str, YamlMapping] = {}
    endpoints: dict[str, tuple[YamlMapping, str]] = {}
    for mapping, api in apis:
        if api.name in names:
            line = names[api.name].line
            mapping.mistake(f"name {quoted(api.name)} must be unique across apis (also in line {line})", "name")
        elif api.endpoint in endpoints:
            before, name = endpoints[api.endpoint]
            where = f"{name} (line {before.line})"
            text = f"endpoint {quoted(api.endpoint)} must be unique across apis: {where} has the same one"
            mapping.mistake(text, "endpoint")
        names.setdefault(api.name, mapping)
        endpoints.setdefault(api.endpoint, (mapping, api.name))


def _read_api(mapping: YamlMapping, project: Path, deployment: str) -> Api | None:
    """Read an API, in the generation of its keys. Returns: None if it has no name or no model."""
    name = _read_name(mapping)
    old = [key for key in _OLD_KEYS if key in mapping]
    new = [key for key in _NEW_KEYS if key in mapping]
    fields: dict[str, Any] = {}
    endpoint = f"/{deployment}/{name}"
    if old and new:
        text = f"{quoted(old[0])} is of Cortex 0.9 and {quoted(new[0])} of 0.10: an API is written in one of the two"
        mapping.mistake(text, old[0])
        mapping.accept_keys(*_OLD_KEYS, *_NEW_KEYS)
    elif old:
        fields = _read_old_model(mapping)
    else:
        endpoint = _read_endpoint(mapping) or endpoint
        fields = _read_new_model(mapping)
    tracker, compute = _read_tracker(mapping), _read_compute(mapping)
    mapping.finish()
    if not name or not fields.get("model"):
        return None
    fields["lines"]["compute"] = mapping.line_of("compute")
    return Api(
        project, deployment, name, endpoint, tracker=tracker, compute=compute, generation="0.9" if old else "0.10",
        line=mapping.line, **fields,
    )  # fmt: skip


def _read_old_model(mapping: YamlMapping) -> dict[str, Any]:
    """Read a model in the form of 0.9."""
    model = mapping.text("model", required=True)
    lines = {key: mapping.line_of(key) for key in ("model", "request_handler", "tf_signature_key") if key in mapping}
    kind = mapping.text("model_format", choices=FORMATS[:2]) or ("onnx" if model.endswith(".onnx") else "tensorflow")
    fields = {
        "kind": kind, "model": model, "handler": mapping.text("request_handler"),
        "signature_key": mapping.text("tf_signature_key"), "relaxed_shapes": mapping.boolean("relaxed_shapes"),
        "lines": lines,
    }  # fmt: skip
    mapping.ignore("tags", "is accepted but has no effect")
    if kind == "onnx":
        _reject_zip(mapping, model)
    _reject_foreign_keys(mapping, "onnx" if kind == "tensorflow" else "tensorflow", fields)
    return fields


def _read_new_model(mapping: YamlMapping) -> dict[str, Any]:
    """Read a model in the form of 0.10."""
    formats = [key for key in FORMATS if key in mapping]
    mapping.accept_keys(*FORMATS)
    if not formats:
        mapping.mistake(f"please specify a model format ({alternatives(FORMATS)})")
        return {}
    if len(formats) > 1:
        text = f"specified ({alternatives(formats, 'and')}), "
        text += f"please specify only one model format ({alternatives(FORMATS)})"
        mapping.mistake(text, max(formats, key=mapping.line_of))
        return {}
    kind = formats[0]
    if kind == "predictor":
        mapping.mistake(_NO_PREDICTORS, kind)
        return {}
    section = mapping.mapping(kind)
    if section is None:
        return {}
    fields: dict[str, Any] = {
        "kind": kind, "model": section.text("model", required=True), "handler": section.text("request_handler"),
        "python_path": section.text("python_path").rstrip("/"), "metadata": section.any_mapping("metadata"),
        "lines": {key: section.line_of(key) for key in _MODEL_KEYS if key in section},
    }  # fmt: skip
    if kind == "onnx":
        fields["relaxed_shapes"] = section.boolean("relaxed_shapes")
        _reject_zip(section, fields["model"])
    else:
        fields["signature_key"] = section.text("signature_key")
    section.finish()
    return fields


def _reject_zip(mapping: YamlMapping, model: str) -> None:
    if model.endswith(".zip"):
        mapping.mistake("zip files are not supported for ONNX models", "model")


def _reject_foreign_keys(mapping: YamlMapping, other: str, fields: Mapping[str, Any]) -> None:
    """Reject keys for another kind of model."""
    for key, value, kind in (
        ("tf_signature_key", fields["signature_key"], "tensorflow"),
        ("relaxed_shapes", fields["relaxed_shapes"], "onnx"),
    ):  # fmt: skip
        if value and kind == other:
            mapping.mistake(f"is for {kind} models, and this one is {fields['kind']}", key)


def _read_endpoint(mapping: YamlMapping) -> str:
    """Read an API's endpoint, "" if it is unset."""
    endpoint = mapping.text("endpoint")
    if not endpoint:
        return ""
    path = f"/{endpoint.strip('/')}"
    if _ENDPOINT.fullmatch(endpoint) is None:
        mapping.mistake(f"{quoted(endpoint)} {_NOT_ENDPOINT}", "endpoint")
    elif "//" in endpoint:
        mapping.mistake(f"{quoted(endpoint)} cannot contain adjacent slashes", "endpoint")
    elif path == "/":
        mapping.mistake('"/" is not allowed (a path must be specified)', "endpoint")
    else:
        if is_penstock_path(path) or path == HEALTH_PATH:
            mapping.warn(f"hides what this server itself has at {path}", "endpoint")
        return path
    return ""


def _read_tracker(mapping: YamlMapping) -> Tracker | None:
    section = mapping.mapping("tracker")
    if section is None:
        return None
    key, model_type = section.text("key"), section.text("model_type", choices=("classification", "regression"))
    if "model_type" not in section:
        section.warn("model_type is missing: predictions are not counted")
    section.finish()
    return Tracker(model_type, key) if model_type else None


def _read_compute(mapping: YamlMapping) -> dict[str, Any]:
    """Read an API's resources, with Cortex's defaults."""
    section = mapping.mapping("compute") or mapping.empty()
    min_replicas = section.integer("min_replicas", 1, 1)
    fields: dict[str, Any] = {
        "min_replicas": min_replicas, "max_replicas": section.integer("max_replicas", 100, 1),
        "init_replicas": section.integer("init_replicas", min_replicas, 1),
        "target_cpu_utilization": section.integer("target_cpu_utilization", 80, 1, 100),
        "cpu": section.quantity("cpu", "200m"), "gpu": section.integer("gpu", 0, 0),
        "mem": section.quantity("mem", None),
    }  # fmt: skip
    section.finish()
    max_replicas, init_replicas = fields["max_replicas"], fields["init_replicas"]
    if min_replicas > max_replicas:
        section.mistake(
            f"min_replicas cannot be greater than max_replicas ({min_replicas} > {max_replicas})", "min_replicas"
        )
    elif init_replicas > max_replicas:
        section.mistake(
            f"init_replicas cannot be greater than max_replicas ({init_replicas} > {max_replicas})", "init_replicas"
        )
    elif init_replicas < min_replicas:
        section.mistake(
            f"init_replicas cannot be less than min_replicas ({init_replicas} < {min_replicas})", "init_replicas"
        )
    return fields
