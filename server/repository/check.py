"""`penstock check`: reports what would be served, and every mistake with its location, without serving."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.backends.backend import Backend, Loader, shared_scale
from penstock.backends.errors import Code, InferError
from penstock.backends.libraries import LIBRARY_OPTION
from penstock.batching.devices.fallback import can_fall_back, moved_to_cpu
from penstock.batching.ensembles.steps import link_steps
from penstock.batching.loading.completion import complete, unbatched_reason
from penstock.batching.loading.invariance import ProbeResult, probe
from penstock.batching.loading.opening import complete_ensemble
from penstock.batching.loading.samples import check_samples
from penstock.batching.model import Model
from penstock.batching.running.external_models import complete_external
from penstock.batching.spec import ModelSpec
from penstock.server.hooks.loading import check_file
from penstock.server.python_models.source_inspection import lacks_class, may_complete

from .defaults import Defaults
from .fields.identity import PYTHON
from .findings import Finding, read_text
from .libraries import LIBRARIES
from .load_order import sort_by_dependency
from .parsed_config import OPTIONS
from .pbtxt import find_mention
from .scan import ModelEntry, scan
from .version_report import count, describe_version

_NAMES = re.compile(r"'([^']+)'|\b(?:input|model|output|tensor) ([\w.-]+)")
"""Matches the names in a message: quoted, or unquoted as in some of Triton's texts."""


@dataclass(slots=True)
class CheckReport:
    """The completed specs of what would be served, and every finding.

    `unbatched_reasons`: why a model that could have rows has none. `extra_lines`: more lines about a model.
    """

    specs: list[ModelSpec] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    invariance: dict[Path, str] = field(default_factory=dict)
    unbatched_reasons: dict[Path, str] = field(default_factory=dict)
    extra_lines: dict[str, list[str]] = field(default_factory=dict)

    @property
    def mistakes(self) -> list[Finding]:
        """The findings that prevent something from being served."""
        return [finding for finding in self.findings if finding.is_mistake]

    @property
    def exit_status(self) -> int:
        """The exit status: 1 if there is any mistake."""
        return 1 if self.mistakes else 0

    def __str__(self) -> str:
        """Format the report for a person."""
        parts = ["\n".join([self._describe(spec), *self.extra_lines.get(spec.name, ())]) for spec in self.specs]
        if self.findings:
            parts.append("\n".join(str(finding) for finding in self.findings))
        warnings = len(self.findings) - len(self.mistakes)
        counts = [count(len(self.specs), "version") + " would be served", count(len(self.mistakes), "mistake")]
        parts.append(", ".join([*counts, count(warnings, "warning")] if warnings else counts))
        return "\n\n".join(parts)

    def _describe(self, spec: ModelSpec) -> str:
        return describe_version(spec, self.invariance.get(spec.path, ""), self.unbatched_reasons.get(spec.path, ""))


def check(
    paths: Iterable[Path], loaders: Mapping[str, Loader], defaults: Defaults | None = None, *, invariance: bool = False
) -> CheckReport:
    """Read the paths, load each version once to complete it, and free it again. Hooks are read, not run.

    `invariance`: also run each model to find out whether its answers depend on the other rows in the batch.
    """
    return check_entries(*scan(paths, defaults or Defaults()), loaders, invariance=invariance)


def check_entries(
    entries: Sequence[ModelEntry],
    findings: Sequence[Finding],
    loaders: Mapping[str, Loader],
    *,
    invariance: bool = False,
) -> CheckReport:
    """Do the same as `check` for entries that were already read."""
    report = CheckReport(findings=list(findings))
    order, cycles = sort_by_dependency({entry.name: entry.dependencies for entry in entries})
    for entry in sorted(entries, key=lambda entry: order.index(entry.name)):
        report.findings += entry.findings
        for spec in entry.specs:
            try:
                _check_interpreter(spec)
                if entry.name in cycles:
                    raise InferError(Code.INVALID, cycles[entry.name])
                if spec.ensemble is not None:
                    completed = _link_ensemble(spec, report.specs)
                else:
                    completed, report.invariance[spec.path], report.unbatched_reasons[spec.path] = _complete_spec(
                        spec, loaders, invariance
                    )
            except InferError as error:
                path, line = _locate(entry, spec.path, error.message)
                report.findings.append(Finding(path, error.message, line, model=spec.name, version=spec.version))
                continue
            if completed.fallback_reason and not spec.fallback_reason:  # otherwise reading has already reported it
                path, line = _locate(entry, spec.path, completed.fallback_reason)
                text = f"is served on the CPU: {completed.fallback_reason}"
                report.findings.append(Finding(path, text, line, False, spec.name, spec.version))
            problems = [_to_finding(completed, problem) for problem in _hook_problems(spec)]
            report.findings += [finding for finding in problems if finding not in report.findings]
            if not problems:
                report.specs.append(completed)
    return report


def _hook_problems(spec: ModelSpec) -> list[str]:
    """Check the source of a model's hooks, if it has any."""
    hooks = spec.hooks
    if hooks is None or not hooks.has_file:
        return []
    return check_file(hooks.path, decoupled=spec.decoupled, dialect=hooks.dialect)


def _link_ensemble(spec: ModelSpec, others: list[ModelSpec]) -> ModelSpec:
    """Complete an ensemble whose models are among those already completed. Raises: InferError."""
    completed = complete_ensemble(spec)

    def find(name: str, version: str) -> Any:
        found = [other for other in others if other.name == name and version in {"", str(other.version)}]
        if not found:
            raise InferError(Code.NOT_FOUND, f"'{name}' is not found")
        last = max(found, key=lambda other: other.version)
        return SimpleNamespace(spec=last, signature=last.signature)

    unreported = {other.name for other in others if other.signature is None}
    steps = () if completed.ensemble is None else completed.ensemble.steps
    # the tensors that a Python model would report are unknown here
    if completed.signature is not None and not any(step.model in unreported for step in steps):
        completed = replace(
            completed,
            decoupled=link_steps(completed, completed.binding_signature or completed.signature, find).decoupled,
        )
    return completed


def _locate(entry: ModelEntry, path: Path, message: str) -> tuple[Path, int]:
    """Return the file and line of what a message names, or the model's `path`.

    A message names a key (`, padding.input_ids.axis: ...`), a Loader's option (`option 'enable_mem_arena'`), a tensor
    or model (`input 'x'`) or a device, or concerns a whole ensemble.
    """
    options = {**OPTIONS, LIBRARIES: LIBRARY_OPTION}
    named = [name for name in entry.locations if f", {name}:" in message or f", {name}." in message]
    named += [name for name in entry.locations if name in options and f"option '{options[name]}'" in message]
    if named:
        return entry.locations[max(named, key=len)]
    files = {file for file, _ in entry.locations.values() if file.suffix in {".pbtxt", ".toml"} and file.is_file()}
    for config in sorted(files, key=lambda file: (file.suffix != ".pbtxt", file)):
        names = [quoted or bare for quoted, bare in _NAMES.findall(message)]
        if line := find_mention(read_text(config, "replace"), [name for name in names if name != entry.name]):
            return config, line
    return entry.locations.get("instances" if message.startswith("device '") else "ensemble", (path, 0))


def _complete_spec(spec: ModelSpec, loaders: Mapping[str, Loader], invariance: bool) -> tuple[ModelSpec, str, str]:
    """Complete a spec. Also return whether its rows affect each other, if requested, and why it is not batched."""
    if spec.backend == PYTHON:
        return _complete_python(spec), "", ""
    loader = loaders.get(spec.backend)
    if loader is None:
        known = ", ".join(sorted(loaders))
        raise InferError(Code.INVALID, f"unknown backend '{spec.backend}' for model '{spec.name}', known: {known}")
    spec, backend = _load(spec, loader)
    try:
        completed = complete(spec, backend.graph)
        check_samples(Model(completed, [backend], lambda *_: None))
        why = "" if completed.policy.max_batch_rows else unbatched_reason(spec, backend.graph)
        return (
            completed,
            _describe_invariance(completed, backend, probe(completed, backend) if invariance else None),
            why,
        )
    finally:
        backend.close()


def _describe_invariance(spec: ModelSpec, backend: Backend, probed: ProbeResult | None) -> str:
    """Describe how rows of a batch affect each other: as probed, or as known without a run."""
    operator = shared_scale(backend)
    shared = operator and not spec.policy.invariant and (spec.policy.max_batch_rows or 0) > 1
    if shared and (probed is None or probed.reason):
        return (
            f"not invariant: {operator} takes its scale from all rows of a batch; max_batch_size = 1 keeps "
            "requests apart"
        )
    return "" if probed is None else str(probed)


def _load(spec: ModelSpec, loader: Loader) -> tuple[ModelSpec, Backend]:
    """Load a model on the first of its devices, or on the CPU if that fails and fallback is allowed."""
    try:
        return spec, loader(spec.path, spec.instances[0].devices[0], spec.options)
    except InferError as error:
        if not can_fall_back(spec, error):
            raise
        spec = moved_to_cpu(spec, error.message)
    return spec, loader(spec.path, spec.instances[0].devices[0], spec.options)


def _complete_python(spec: ModelSpec) -> ModelSpec:
    """Complete a Python model's spec without running its code, which may define what the configuration omits."""
    if not spec.worker.interpreter and spec.worker.requirements is None:  # another Python may have another syntax
        _check_syntax(spec.path)
    if spec.auto_complete and not (spec.inputs and spec.outputs) and may_complete(spec.path):
        return spec
    completed = complete_external(spec)
    check_samples(Model(completed, (), lambda *_: None))
    return completed


def _check_syntax(path: Path) -> None:
    try:
        tree = ast.parse(path.read_bytes(), path)
    except (SyntaxError, ValueError) as error:
        text = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise InferError(Code.INVALID, text) from error
    if lacks_class(tree):
        raise InferError(Code.INVALID, "has no class TritonPythonModel")


def _check_interpreter(spec: ModelSpec) -> None:
    """Look for the Python of a model's workers. Raises: InferError (INVALID) if it does not exist."""
    tables = {"worker": spec.worker} | ({"hooks": spec.hooks.worker} if spec.hooks is not None else {})
    for table, worker in tables.items():
        if worker.interpreter and shutil.which(worker.interpreter) is None:
            text = (
                f"model '{spec.name}', {table}.interpreter: '{worker.interpreter}' does not exist or is not executable"
            )
            raise InferError(Code.INVALID, text)


def _to_finding(spec: ModelSpec, problem: str) -> Finding:
    """Split `path:line: message` into a Finding."""
    path = spec.hooks.path if spec.hooks is not None else spec.path
    match = re.match(r"(?::(\d+))?: (.*)", problem.removeprefix(str(path)), re.DOTALL)
    if match is None:
        return Finding(path, problem, model=spec.name)
    return Finding(path, match[2], int(match[1] or 0), model=spec.name)
