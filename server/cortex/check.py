"""`penstock check --dialect cortex`: reports what projects would serve, and all mistakes. Called by cli.py."""

from __future__ import annotations

from penstock.backends.loading import LOADERS
from penstock.batching.spec import HookSpec
from penstock.server.environments.environments import Environments
from penstock.server.isolated.loader import with_isolated
from penstock.server.repository.check import CheckReport, check_entries
from penstock.server.repository.findings import Finding
from penstock.server.repository.mirrors import make_defaults
from penstock.server.settings import Settings

from .api import Api
from .entries import finding
from .environment import needs_of
from .repository import Projects


def check_projects(settings: Settings, *, invariance: bool = False) -> CheckReport:
    """Read the projects, and load each model once to complete its configuration. Handlers are parsed, not run.

    A project with a mistake in its cortex.yaml would not be served at all.
    """
    projects = Projects(settings.model_repository, settings.s3_root)
    mistakes: list[Finding] = []
    repository = projects.repository(make_defaults(settings), mistakes.extend)
    if problem := projects.invalid_path():
        return CheckReport(findings=[problem])
    try:
        entries, findings, _ = repository.scan()
        loaders = with_isolated(LOADERS, Environments.from_settings(settings).interpreter)
        report = check_entries(entries, [*mistakes, *findings], loaders, invariance=invariance)
    finally:
        projects.close()
    report.findings = [_relocate(found, repository.apis.get(found.model)) for found in report.findings]
    hooks = {entry.name: spec.hooks for entry in entries for spec in entry.specs}
    report.extra_lines = {name: _describe(api, hooks.get(name)) for name, api in repository.apis.items()}
    return report


def _relocate(found: Finding, api: Api | None) -> Finding:
    """Move a finding that a model cannot be loaded to the place where the project names the model."""
    if api is None or not found.version:
        return found
    keys = ("signature_key", "tf_signature_key") if "signature" in found.message else ()
    return finding(api, next((key for key in keys if key in api.lines), "model"), found.message)


def _describe(api: Api, hooks: HookSpec | None) -> list[str]:
    """Describe what an API's ModelSpec does not show."""
    lines = []
    if hooks is not None and hooks.workers:
        reasons = needs_of(api.project, hooks.path, hooks.roots).reasons
        lines += [f"  {'' if number else 'because':<11}{reason}" for number, reason in enumerate(reasons)]
    lines += [f"  endpoint   POST {api.endpoint}", f"  project    {api.project}, as of Cortex {api.generation}"]
    if api.tracker is not None:
        key_text = f" of {api.tracker.key!r}" if api.tracker.key else ""
        lines.append(f"  tracker    {api.tracker.model_type}{key_text}")
    return lines
