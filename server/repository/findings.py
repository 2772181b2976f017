"""Findings: mistakes and warnings about what is on disk, each with its location."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

logger = logging.getLogger("penstock.repository")

TWICE = "model appears in two or more repositories"
"""The mistake at each location of a duplicate name. Source: Triton core, model_repository_manager.cc."""
NO_VERSION = "at least one version must be available under the version policy of model"
"""The mistake of a model without versions; its name follows. Source: Triton core, model_lifecycle.cc."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake or warning about one file or folder.

    `line` is 0 if unknown. A `mistake` prevents `version` of `model` from being served, or all versions if `version` is
    0; other findings are warnings. `whole`: a given PATH is not a repository.
    """

    path: Path
    message: str
    line: int = 0
    mistake: bool = True
    model: str = ""
    version: int = 0
    whole: bool = False

    def __str__(self) -> str:
        """`path:line: message`, as compilers print it."""
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{place}: {'' if self.mistake else 'warning: '}{self.message}"

    def about(self, model: str) -> Finding:
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


def inside(folder: Path, name: str) -> Path | None:
    """Resolve a file named by a configuration. None if it lies outside the model's folder or the name is impossible."""
    if "\0" in name:
        return None
    path = (folder / name).resolve()
    return path if path.is_relative_to(folder.resolve()) else None


def is_there(path: Path) -> bool:
    """Return whether a file or folder named by a configuration exists. A name that is too long does not."""
    try:
        return path.exists()
    except OSError:
        return False


def log_all(findings: Iterable[Finding]) -> None:
    """Log the findings."""
    for finding in findings:
        about = {"model": finding.model, "version": str(finding.version or "")}
        about = {name: said for name, said in about.items() if said}
        logger.log(logging.ERROR if finding.mistake else logging.WARNING, "%s", finding, extra=about)
