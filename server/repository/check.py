"""`penstock check`: what would be served, and every mistake with its place, without serving."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.backends.backend import Backend, Loader
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import TensorSpec
from penstock.batching.devices.fallback import CPU_FALLBACK, falls_back, moved
from penstock.batching.ensembles.steps import link
from penstock.batching.loading.completion import complete
from penstock.batching.loading.invariance import probe
from penstock.batching.loading.opening import complete_ensemble
from penstock.batching.loading.samples import check_samples
from penstock.batching.model import Model
from penstock.batching.running.outsides import complete_outside
from penstock.batching.scheduling.room import queue_rows
from penstock.batching.spec import BatchPolicy, ModelSpec, PaddedAxis, SequenceSpec, WorkerSpec
from penstock.server.hooks.loading import check_file
from penstock.server.hooks.plan import plan

from .fields.identity import PYTHON, TENSORFLOW
from .findings import Finding, read_text
from .libraries import LIBRARIES, OPTION
from .order import put_in_order
from .pbtxt import mentioned
from .scan import Defaults, Entry, scan
from .statement import OPTIONS, shown

_UNSAID = ("worker.", "cortex_signature", CPU_FALLBACK)
"""How options begin that are not the user's to say, or are told elsewhere."""
_NAMES = re.compile(r"'([^']+)'|\b(?:input|model|output|tensor) ([\w.-]+)")
"""What a message may name: in quotes, or, in some of Triton's texts, without."""


@dataclass(slots=True)
class Report:
    """What would be served, as it would be completed, and every finding. `notes` are more lines about a model."""

    specs: list[ModelSpec] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    invariance: dict[Path, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    @property
    def mistakes(self) -> list[Finding]:
        """The findings that keep something from being served."""
        return [finding for finding in self.findings if finding.mistake]

    @property
    def status(self) -> int:
        """The exit status: 1 if there is any mistake."""
        return 1 if self.mistakes else 0

    def __str__(self) -> str:
        """Print all of it, for a person."""
        parts = [
            "\n".join([_described(spec, self.invariance.get(spec.path, "")), *self.notes.get(spec.name, ())])
            for spec in self.specs
        ]
        if self.findings:
            parts.append("\n".join(str(finding) for finding in self.findings))
        warnings = len(self.findings) - len(self.mistakes)
        counts = [_count(len(self.specs), "version") + " would be served", _count(len(self.mistakes), "mistake")]
        parts.append(", ".join([*counts, _count(warnings, "warning")] if warnings else counts))
        return "\n\n".join(parts)


def check(
    paths: Iterable[Path], loaders: Mapping[str, Loader], defaults: Defaults | None = None, *, invariance: bool = False
) -> Report:
    """Read the paths, load each version once to complete it, and free it again. Hooks are read, not run.

    `invariance`: also run each model to find out whether its answers depend on who shares their batch.
    """
    return check_entries(*scan(paths, defaults or Defaults()), loaders, invariance=invariance)


def check_entries(
    entries: Sequence[Entry], findings: Sequence[Finding], loaders: Mapping[str, Loader], *, invariance: bool = False
) -> Report:
    """Do the same with what was read of any paths."""
    report = Report(findings=list(findings))
    order, circles = put_in_order({entry.name: entry.needs for entry in entries})
    for entry in sorted(entries, key=lambda entry: order.index(entry.name)):
        report.findings += entry.findings
        for spec in entry.specs:
            try:
                _find_interpreter(spec)
                if entry.name in circles:
                    raise InferError(Code.INVALID, circles[entry.name])
                if spec.ensemble is not None:
                    done = _linked(spec, report.specs)
                else:
                    done, report.invariance[spec.path] = _completed(spec, loaders, invariance)
            except InferError as error:
                path, line = _place(entry, spec.path, error.message)
                report.findings.append(Finding(path, error.message, line, model=spec.name, version=spec.version))
                continue
            if done.fallback and not spec.fallback:  # else reading has said so
                path, line = _place(entry, spec.path, done.fallback)
                text = f"is served on the CPU: {done.fallback}"
                report.findings.append(Finding(path, text, line, False, spec.name, spec.version))
            found = [_placed(done, problem) for problem in _hook_problems(spec)]
            report.findings += [finding for finding in found if finding not in report.findings]
            if not found:
                report.specs.append(done)
    return report


def _hook_problems(spec: ModelSpec) -> list[str]:
    """Read a model's hooks, if it has any."""
    hooks = spec.hooks
    if hooks is None or not hooks.has_file:
        return []
    return check_file(hooks.path, decoupled=spec.decoupled, dialect=hooks.dialect)


def _linked(spec: ModelSpec, others: list[ModelSpec]) -> ModelSpec:
    """Complete an ensemble whose models are among those completed before. Raises: InferError."""
    done = complete_ensemble(spec)

    def find(name: str, version: str) -> Any:
        found = [other for other in others if other.name == name and version in {"", str(other.version)}]
        if not found:
            raise InferError(Code.NOT_FOUND, f"'{name}' is not found")
        last = max(found, key=lambda other: other.version)
        return SimpleNamespace(spec=last, signature=last.signature)

    known = {other.name for other in others if other.signature is None}
    steps = () if done.ensemble is None else done.ensemble.steps
    # what a Python model will say of itself is not known here
    if done.signature is not None and not any(step.model in known for step in steps):
        done = replace(done, decoupled=link(done, done.bound or done.signature, find).decoupled)
    return done


def _place(entry: Entry, path: Path, message: str) -> tuple[Path, int]:
    """Give the file and line of what a message names, or else the model's `path`.

    It names a key (`, padding.input_ids.axis: ...`), a Loader's option (`option 'enable_mem_arena'`), a tensor or model
    (`input 'x'`), a device, or means all of an ensemble.
    """
    options = {**OPTIONS, LIBRARIES: OPTION}
    named = [name for name in entry.places if f", {name}:" in message or f", {name}." in message]
    named += [name for name in entry.places if name in options and f"option '{options[name]}'" in message]
    if named:
        return entry.places[max(named, key=len)]
    files = {place for place, _ in entry.places.values() if place.suffix in {".pbtxt", ".toml"} and place.is_file()}
    for config in sorted(files, key=lambda place: (place.suffix != ".pbtxt", place)):
        words = [quoted or bare for quoted, bare in _NAMES.findall(message)]
        if line := mentioned(read_text(config, "replace"), [word for word in words if word != entry.name]):
            return config, line
    return entry.places.get("instances" if message.startswith("device '") else "ensemble", (path, 0))


def _completed(spec: ModelSpec, loaders: Mapping[str, Loader], invariance: bool) -> tuple[ModelSpec, str]:
    """Complete a spec; and say of its model whether rows depend on each other, if asked."""
    if spec.backend == PYTHON:
        return _said(spec), ""
    loader = loaders.get(spec.backend)
    if loader is None:
        known = ", ".join(sorted(loaders))
        raise InferError(Code.INVALID, f"unknown backend '{spec.backend}' for model '{spec.name}', known: {known}")
    spec, backend = _loaded(spec, loader)
    try:
        done = complete(spec, backend.graph)
        check_samples(Model(done, [backend], lambda *_: None))
        return done, str(probe(done, backend)) if invariance else ""
    finally:
        backend.close()


def _loaded(spec: ModelSpec, loader: Loader) -> tuple[ModelSpec, Backend]:
    """Load a model on the first of its devices, or on the CPU where that does not work and it may."""
    try:
        return spec, loader(spec.path, spec.instances[0].devices[0], spec.options)
    except InferError as error:
        if not falls_back(spec, error):
            raise
        spec = moved(spec, error.message)
    return spec, loader(spec.path, spec.instances[0].devices[0], spec.options)


def _said(spec: ModelSpec) -> ModelSpec:
    """Complete a Python model's spec without running its code, which may say what the configuration does not."""
    if not spec.worker.interpreter and spec.worker.requirements is None:  # another Python may have another syntax
        _parse(spec.path)
    if spec.auto_complete and not (spec.inputs and spec.outputs):
        return spec
    done = complete_outside(spec)
    check_samples(Model(done, (), lambda *_: None))
    return done


def _parse(path: Path) -> None:
    try:
        ast.parse(path.read_bytes(), path)
    except (SyntaxError, ValueError) as error:
        text = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise InferError(Code.INVALID, text) from error


def _find_interpreter(spec: ModelSpec) -> None:
    """Look for the Python of a model's workers. Raises: InferError (INVALID) where it is not there."""
    tables = {"worker": spec.worker} | ({"hooks": spec.hooks.worker} if spec.hooks is not None else {})
    for table, worker in tables.items():
        if worker.interpreter and shutil.which(worker.interpreter) is None:
            text = f"model '{spec.name}', {table}.interpreter: '{worker.interpreter}' is not there, or may not be run"
            raise InferError(Code.INVALID, text)


def _placed(spec: ModelSpec, problem: str) -> Finding:
    """Take the place out of `path:line: message`."""
    path = spec.hooks.path if spec.hooks is not None else spec.path
    found = re.match(r"(?::(\d+))?: (.*)", problem.removeprefix(str(path)), re.DOTALL)
    if found is None:
        return Finding(path, problem, model=spec.name)
    return Finding(path, found[2], int(found[1] or 0), model=spec.name)


def _described(spec: ModelSpec, invariance: str) -> str:
    kind = "ensemble" if spec.ensemble is not None else spec.backend
    lines = [f"{spec.name} version {spec.version}, {kind}, {spec.path}"]
    if spec.signature is not None:
        lines += _columns("inputs", [_tensor(tensor) for tensor in spec.signature.inputs])
        lines += _columns("outputs", [_tensor(tensor) for tensor in spec.signature.outputs])
        lines += _columns("batching", [_batching(spec)])
    elif spec.backend == PYTHON:
        lines += _columns("inputs", ["as its auto_complete_config says, which is not run here;"])
        lines += _columns("", ["likewise outputs and batching"])
    lines += [line for axis in spec.padding for line in _columns("padding", [_padding(axis)])]
    if spec.sequence is not None:
        lines += _columns("sequences", [_sequences(spec.sequence)])
    if spec.cached or spec.decoupled:
        lines += _columns("answers", ["remembered, with --cache-config" if spec.cached else "any number to a request"])
    if invariance:
        lines += _columns("invariance", [invariance])
    if spec.ensemble is not None:
        lines += _columns("steps", [f"{step.model} {step.version or 'latest'}" for step in spec.ensemble.steps])
        return "\n".join(lines)
    groups = "; ".join(shown(group) for group in spec.instances)
    budget = f", at most {spec.memory_budget_bytes >> 20} MB" if spec.memory_budget_bytes else ""
    lines += _columns("instances", [groups + budget])
    if spec.fallback:
        lines += _columns("fallback", [f"on the CPU: {spec.fallback}"])
    if said := [f"{name} {value}" for name, value in sorted(spec.options.items()) if not name.startswith(_UNSAID)]:
        lines += _columns("runtime", [", ".join(said)])
    return "\n".join([*lines, *_user_code(spec)])


def _user_code(spec: ModelSpec) -> list[str]:
    hooks = spec.hooks
    lines = _columns("worker", [_worker(spec.worker)]) if _has_worker(spec) else []
    if hooks is None or not hooks.has_file:
        return lines
    lines += _columns("hooks", [f"{hooks.path}, timeout: {hooks.timeout_s:g} s", f"replicas: {plan(hooks).reason}"])
    return lines + (_columns("workers", [f"{hooks.workers}, {_worker(hooks.worker)}"]) if hooks.workers else [])


def _has_worker(spec: ModelSpec) -> bool:
    return spec.backend in {PYTHON, TENSORFLOW} or spec.options.get("isolated") == "1"


def _worker(worker: WorkerSpec) -> str:
    """Say what the processes of user code run on, and their limits."""
    parts = [f"Python: {worker.interpreter or 'that of the server'}"]
    if worker.requirements is not None:
        parts.append(f"environment: {worker.requirements}")
    if worker.timeout_s:
        parts.append(f"timeout: {worker.timeout_s:g} s")
    if worker.memory_bytes:
        parts.append(f"memory: at most {worker.memory_bytes >> 20} MB")
    return ", ".join(parts)


def _columns(title: str, texts: list[str]) -> list[str]:
    return [f"  {title if number == 0 else '':<11}{text}" for number, text in enumerate(texts)]


def _tensor(tensor: TensorSpec) -> str:
    if not tensor.is_tensor:
        return f"{tensor.name}: {tensor.datatype}, for hooks only"
    return f"{tensor.name}: {tensor.datatype} {list(tensor.shape)}{', optional' if tensor.optional else ''}"


def _batching(spec: ModelSpec) -> str:
    policy = spec.policy
    if not policy.max_batch_rows:
        found = spec.frees_rows and any(tensor.shape[:1] == (1,) for tensor in spec.signature.inputs)  # type: ignore[union-attr]
        return f"none: the model has no axis for rows{', unless running it shows that its 1 is one' if found else ''}"
    parts = [f"up to {_count(policy.max_batch_rows, 'row')}"]
    if spec.ensemble is not None:
        return parts[0]
    if policy.preferred_rows:
        parts.append(f"preferred {', '.join(map(str, policy.preferred_rows))}")
    if policy.max_queue_delay_us:
        parts.append(f"waits up to {policy.max_queue_delay_us} us")
    parts.append(f"capped at {policy.cap_rows}" if policy.cap_rows else "cap learned")
    if policy.allowed_rows:
        parts.append(f"only of {shown(policy.allowed_rows)} rows")
    return ", ".join([*parts, *_terms(policy), f"queue of {queue_rows(policy)} rows"])


def _terms(policy: BatchPolicy) -> list[str]:
    parts = []
    if policy.priority_levels:
        parts.append(f"{_count(policy.priority_levels, 'level')}, {policy.default_priority} by default")
    if policy.preserve_ordering:
        parts.append("answers in the order of requests")
    if policy.split:
        parts.append("larger requests are split")
    if policy.invariant:
        parts.append("strictly invariant")
    if policy.latency_target_us:
        parts.append(f"to be answered within {policy.latency_target_us / 1000:g} ms")
    if policy.run_limit_us:
        parts.append(f"runs end after {policy.run_limit_us / 1000:g} ms")
    return parts


def _sequences(said: SequenceSpec) -> str:
    parts = ["direct" if said.direct else "oldest", f"forgotten after {said.idle_us / 1e6:g} s"]
    if said.iterative:
        parts.append("a request each, run until the model is done with it")
    if said.controls:
        parts.append(f"told {', '.join(control.name for control in said.controls)}")
    if said.states:
        parts.append(f"remembers {', '.join(state.input for state in said.states)}")
    return ", ".join(parts)


def _padding(padded: PaddedAxis) -> str:
    buckets = shown(padded.buckets) if padded.buckets else "16, 32, 48, ..."
    mask = f", mask {padded.mask}" if padded.mask else ""
    return f"{padded.input}: axis {padded.axis} to {buckets} with {padded.value:g}{mask}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
