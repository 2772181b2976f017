"""Entries: an API in the form that the rest of the server serves, with its files on disk. Called by repository.py.

Source of the texts: Cortex v0.10, pkg/operator/api/userconfig/errors.go.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.backends.errors import InferError
from penstock.batching.spec import BatchPolicy, HookSpec, InstanceGroup, ModelSpec
from penstock.server.hooks.plan import LIGHT_REPLICAS
from penstock.server.hooks.writes import HOOK_NAMES, PICKLE_SUFFIXES
from penstock.server.protobuf import model_config_pb2
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.findings import Finding, resolve_inside
from penstock.server.repository.parsed_config import ParsedConfig
from penstock.server.repository.placing import place_model
from penstock.server.repository.scan import ModelEntry

from .api import Api
from .environment import needs_of, roots_of
from .models import MOUNT, ModelFinder, ModelLocation
from .project import CONFIG
from .saved_models import ModelError

HOOK_TIMEOUT_S = 600.0
"""Cortex has no limit. After this time, no client still waits for the answer."""
_GPU = "cuda:0"


def entry_of(api: Api, models: ModelFinder, defaults: Defaults) -> ModelEntry:
    """Locate the files of an API, and make its ModelSpec; blocks.

    A missing file prevents this API from being served, and no other.
    """
    findings: list[Finding] = []
    location, hooks = _locate_model(api, models, findings), _hook_spec(api, findings)
    config = model_config_pb2().ModelConfig(name=api.name)
    specs: tuple[ModelSpec, ...] = ()
    if location is not None and hooks is not None:
        specs = (_spec(api, location, hooks, defaults, findings),)
    return ModelEntry(api.name, api.project, specs, config, tuple(findings))


def finding(api: Api, key: str, message: str, *, mistake: bool = True) -> Finding:
    """Make a finding about a key of an API's model."""
    part = api.kind if api.generation == "0.10" else ""
    text = ": ".join(word for word in ("api", api.name, part, key, message) if word)
    return Finding(api.project / CONFIG, text, api.lines.get(key, api.line), is_mistake=mistake, model=api.name)


def _locate_model(api: Api, models: ModelFinder, findings: list[Finding]) -> ModelLocation | None:
    try:
        return models.find(api)
    except ModelError as error:
        findings.append(finding(api, "model", str(error)))
        return None


def _hook_spec(api: Api, findings: list[Finding]) -> HookSpec | None:
    """Determine how the handler runs; None if it cannot. Without a handler, only Cortex's Conversions apply."""
    settings = {**api.settings, "project": str(api.project)}
    if not api.handler:
        return HookSpec(Path(), dialect="cortex", dialect_settings=settings)
    path = resolve_inside(api.project, api.handler)
    if path is None or Path(api.handler).is_absolute() or not path.is_file():
        findings.append(finding(api, "request_handler", f"{api.handler}: implementation file does not exist"))
        return None
    path = api.project / api.handler
    if not _may_define_hooks(path):
        text = f"{api.handler}: has neither pre_inference nor post_inference, and does nothing"
        findings.append(finding(api, "request_handler", text, mistake=False))
    try:
        roots = roots_of(api.project, api.python_path)
    except InferError as error:
        findings.append(finding(api, "python_path", error.message))
        return None
    needs = needs_of(api.project, path, roots)
    workers, max_replicas = needs.workers, api.compute["max_replicas"]
    # a handler that writes globals needs an instance for each request
    limits_replicas = workers is None and max_replicas < LIGHT_REPLICAS and needs.writes
    return HookSpec(
        path, replicas=max_replicas if limits_replicas else None, timeout_s=HOOK_TIMEOUT_S,
        metadata=api.metadata, workers=workers and min(workers, max_replicas), worker=needs.worker, roots=roots,
        mounts={MOUNT: str(api.project)}, dialect="cortex", dialect_settings=settings,
    )  # fmt: skip


def _may_define_hooks(path: Path) -> bool:
    """Return whether a handler may have a hook: it contains the name of one, or its names cannot be determined."""
    if path.suffix in PICKLE_SUFFIXES:
        return True
    try:
        text = path.read_bytes()
    except OSError:
        return True  # loading reports what is wrong
    return b"import *" in text or any(name.encode() in text for name in HOOK_NAMES)


def _spec(api: Api, location: ModelLocation, hooks: HookSpec, defaults: Defaults, findings: list[Finding]) -> ModelSpec:
    rows, options = defaults.max_batch_rows, dict[str, str]()
    if api.kind == "tensorflow":
        rows, tensorflow_options = defaults.for_tensorflow
        options |= tensorflow_options
        options |= {"TF_SIGNATURE_DEF": api.signature_key} if api.signature_key else {"cortex_signature": "1"}
        options["worker.name"] = api.name
    spec = ModelSpec(
        api.name, location.version, location.path, backend="tensorflow" if api.kind == "tensorflow" else "onnxruntime",
        policy=BatchPolicy(default_max_batch_rows=rows, hold_requests=defaults.hold_requests),
        instances=(InstanceGroup(),), hooks=hooks, options=options, frees_rows=True,
    )  # fmt: skip
    return _place_on_gpu(api, spec, defaults, findings) if api.compute["gpu"] else spec


def _place_on_gpu(api: Api, spec: ModelSpec, defaults: Defaults, findings: list[Finding]) -> ModelSpec:
    """Place it on the first allowed GPU; if none works, on the CPU, with a warning."""
    device = next((f"cuda:{number}" for number in defaults.gpus.numbers or ()), _GPU)
    file = api.project / CONFIG
    values = {"instances": (InstanceGroup(devices=(device,)),), "runtime.cpu_fallback": "1"}
    spec, place_findings = place_model(
        spec, ParsedConfig(file, values, {"instances": (file, api.lines["compute"])}), defaults
    )
    findings += [
        replace(each, message=f"api: {api.name}: compute: gpu: {each.message}", model=api.name)
        for each in place_findings
    ]
    return spec
