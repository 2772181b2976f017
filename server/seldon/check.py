"""`penstock check --dialect seldon`: reports what would be served, and every mistake. Called by the command line.

No code of a component is run.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from penstock.batching.spec import ModelSpec
from penstock.server.carrying import check_output
from penstock.server.modules import module_names
from penstock.server.repository.check import CheckReport
from penstock.server.repository.findings import Finding
from penstock.server.settings import Settings

from . import parameters
from .components import Components
from .modules import lacks_methods


def check_components(settings: Settings) -> CheckReport:
    """Check the PATH."""
    components = Components(settings)
    if path_finding := components.invalid_path():
        return CheckReport(findings=[path_finding])
    if components.graph:
        from .graph.check import check_graph

        return check_graph(settings)
    if mistakes := components.mistakes():
        return CheckReport(findings=mistakes)
    spec = components.spec()
    findings = mistakes_of(spec)
    if any(finding.is_mistake for finding in findings):
        return CheckReport(findings=findings)
    return CheckReport(specs=[replace(spec, options={})], findings=findings, extra_lines={spec.name: describe(spec)})


def mistakes_of(spec: ModelSpec) -> list[Finding]:
    """Find what would prevent a component from being opened, as far as its files show."""
    worker = spec.worker
    found = list(_module_mistakes(spec.path, spec.options["component"]))
    if worker.interpreter and shutil.which(worker.interpreter) is None:
        found.append(Finding(Path(worker.interpreter), "--seldon-interpreter: not found, or not executable"))
    if worker.requirements is not None and not worker.requirements.exists():
        found.append(Finding(worker.requirements, "--seldon-requirements: no such file or folder"))
    return found


def _module_mistakes(folder: Path, component: str) -> list[Finding]:
    *parts, name = component.split(".")
    base = folder.joinpath(*(parts or [name]))
    module = next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)
    if module is None:
        text = f"no module {'.'.join(parts or [name])} here: if it is not installed, '{component}' cannot be imported"
        return [Finding(folder, text, is_mistake=not parts)]
    try:
        names = module_names(module)
    except (OSError, SyntaxError, ValueError) as error:
        return [check_output.unreadable_module(module, error)]
    if name not in names and not names & {"*", "__getattr__"}:
        return [Finding(module, f"has no class {name}")]
    if lacks_methods(module, name):
        text = f"{name} has none of a component's methods: predict returns an empty array"
        return [Finding(module, text, is_mistake=False)]
    return []


def describe(spec: ModelSpec) -> list[str]:
    """Describe what a component's ModelSpec does not show."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in parameters.read(spec.options["parameters"]).items())
    lines = check_output.describe_code(spec, "component", f"{spec.options['component']}({arguments})")
    if spec.options["batching"] == "true":
        lines.append("  shares     calls of predict, where answers stay the same")
    return lines
