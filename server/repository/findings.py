"""Findings: mistakes and warnings about what is on disk, each with its location."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

logger = logging.getLogger("penstock.repository")

DUPLICATE = "model appears in two or more repositories"
"""The mistake at each location of a duplicate name. Source: Triton core, model_repository_manager.cc."""
NO_VERSION = "at least one version must be available under the version policy of model"
"""The mistake of a model without versions; its name follows. Source: Triton core, model_lifecycle.cc."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake or warning about one file or folder.

    `line` is 0 if unknown. A mistake (`is_mistake`) prevents `version` of `model` from being served, or all versions if
    `version` is 0; other findings are warnings. `unusable_path`: a given PATH is not a repository.
    """

    path: Path
    message: str
    line: int = 0
    is_mistake: bool = True
    model: str = ""
    version: int = 0
    unusable_path: bool = False

    def __str__(self) -> str:
        """`path:line: message`, as compilers print it."""
        location = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{location}: {'' if self.is_mistake else 'warning: '}{self.message}"

    def with_model(self, model: str) -> Finding:
        """Return the same finding with the model it concerns."""
        return replace(self, model=model)


class MistakeError(Exception):
    """Carries the Finding that stopped the reading of a file."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class MistakesError(Exception):
    """Carries the Findings that prevent anything from being served, one line of text each."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = tuple(findings)


def read_text(path: Path, errors: str = "strict") -> str:
    """Read a configuration file, with or without the byte order mark that some editors and PowerShell write.

    `errors`: how to treat bytes that are not UTF-8, as for `open`. Raises: MistakeError if the file cannot be read, or
    if such bytes are errors.
    """
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except OSError as error:
        raise MistakeError(Finding(path, f"cannot be read: {error.strerror}")) from error
    except UnicodeDecodeError as error:
        raise MistakeError(Finding(path, f"is not UTF-8 (byte {error.start})")) from error


def resolve_inside(folder: Path, name: str) -> Path | None:
    """Resolve a file named by a configuration. None if it lies outside the model's folder or the name is impossible."""
    if "\0" in name:
        return None
    path = (folder / name).resolve()
    return path if path.is_relative_to(folder.resolve()) else None


def path_exists(path: Path) -> bool:
    """Return whether a file or folder named by a configuration exists. A name that is too long does not."""
    try:
        return path.exists()
    except OSError:
        return False


def log_findings(findings: Iterable[Finding]) -> None:
    """Log the findings."""
    for finding in findings:
        extra = {"model": finding.model, "version": str(finding.version or "")}
        extra = {name: value for name, value in extra.items() if value}
        logger.log(logging.ERROR if finding.is_mistake else logging.WARNING, "%s", finding, extra=extra)
