"""Output of `penstock check` that the dialects with carried calls share. Called by the dialects' check.py."""

from __future__ import annotations

from pathlib import Path

from penstock.batching.spec import ModelSpec
from penstock.server.repository.findings import Finding


def unreadable_module(path: Path, error: OSError | SyntaxError | ValueError) -> Finding:
    """Return a Finding that says why a module could not be parsed."""
    if isinstance(error, SyntaxError):
        return Finding(path, error.msg, error.lineno or 0)
    return Finding(path, f"cannot be read: {error}")


def describe_code(spec: ModelSpec, title: str, code: str) -> list[str]:
    """Describe what a ModelSpec does not show: which code runs, and on which Python if that is not the server's."""
    worker = spec.worker
    lines = [f"  {title:<11}{code}"]
    if worker.interpreter or worker.requirements is not None:
        environment = f", environment: {worker.requirements}" if worker.requirements is not None else ""
        lines.append(f"  worker     Python: {worker.interpreter or 'that of the server'}{environment}")
    return lines
