"""`penstock check --dialect deepaas`: reports what would be served, and every mistake. Called by the command line.

No code of a model is run: its module is located and parsed. If another Python runs the models, only modules in this
folder are parsed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.batching.spec import ModelSpec
from penstock.server.carrying.check_output import describe_code, unreadable_module
from penstock.server.modules import find_module_file, module_names
from penstock.server.repository.check import CheckReport
from penstock.server.repository.findings import Finding, MistakesError
from penstock.server.settings import Settings

from .entries import BUILT_IN, Entries

_METHODS = ("predict", "train")


def check_entries(settings: Settings) -> CheckReport:
    """Check the models of a command line; blocks."""
    entries = Entries(settings)
    if wrong := entries.invalid_path():
        return CheckReport(findings=[wrong])
    try:
        entries.open()
    except MistakesError as error:
        return CheckReport(findings=list(error.findings))
    finally:
        entries.close()
    report = CheckReport()
    for target in entries.targets.values():
        spec = entries.spec(target)
        findings = [] if target == BUILT_IN else list(_mistakes(spec))
        report.findings += findings
        if not any(each.is_mistake for each in findings):
            report.specs.append(replace(spec, options={}))
            report.extra_lines[spec.name] = describe_code(spec, "module", spec.options["target"])
    return report


def _mistakes(spec: ModelSpec) -> Iterator[Finding]:
    """Find what would prevent a model from being opened, as far as its module's file shows."""
    module, _, attribute = spec.options["target"].partition(":")
    own = not spec.worker.interpreter and spec.worker.requirements is None
    try:
        path = find_module_file(module, [str(spec.path)], installed=own)
    except ModuleNotFoundError as error:
        text = f"model '{spec.name}': there is no module {error.name}"
        yield Finding(spec.path, text if own else f"{text} in this folder: it must be installed", is_mistake=own)
        return
    if path is None or path.suffix != ".py":
        return
    try:
        names = module_names(path)
    except (OSError, SyntaxError, ValueError) as error:
        yield unreadable_module(path, error)
        return
    first = attribute.partition(".")[0]
    if names & {"*", "__getattr__"}:
        return
    if first and first not in names:
        yield Finding(path, f"has no {first}")
    if not attribute and not names & set(_METHODS):
        yield Finding(path, f"has neither {' nor '.join(_METHODS)}: both return 501", is_mistake=False)
