"""Findings: mistakes and warnings about what is on disk, each with its place."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

logger = logging.getLogger("penstock.repository")

TWICE = "model appears in two or more repositories"
"""What is said of each place of a name that is there twice. Source: Triton core, model_repository_manager.cc."""
NO_VERSION = "at least one version must be available under the version policy of model"
"""What is said of a model without versions, before its name. Source: Triton core, model_lifecycle.cc."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to say about one file or folder.

    `line` 0 where there is none to give. A `mistake` keeps something from being served: `version` of `model`, or all
    of it when `version` is 0; the rest are warnings. `whole`: a PATH that was given is no repository.
    """

    path: Path
    message: str
    line: int = 0
    mistake: bool = True
    model: str = ""
    version: int = 0
    whole: bool = False

    def __str__(self) -> str:
        """`path:line: message`, as compilers do."""
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{place}: {'' if self.mistake else 'warning: '}{self.message}"

    def about(self, model: str) -> Finding:
        """Give the same finding with the model it concerns."""
        return replace(self, model=model)


class MistakeError(Exception):
    """Carries the Finding that ends the reading of a file."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class MistakesError(Exception):
    """Carries the Findings for which nothing at all is served; a line of text for each."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = tuple(findings)


def read_text(path: Path, errors: str = "strict") -> str:
    """Read a configuration file, with or without a byte order mark, as some editors and PowerShell write one.

    `errors`: what becomes of bytes that are not UTF-8, as `open` has it. Raises: MistakeError when it cannot be read,
    or such bytes are errors.
    """
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except OSError as error:
        raise MistakeError(Finding(path, f"cannot be read: {error.strerror}")) from error
    except UnicodeDecodeError as error:
        raise MistakeError(Finding(path, f"is not UTF-8 (byte {error.start})")) from error


def inside(folder: Path, name: str) -> Path | None:
    """Resolve a file named by a configuration; None if it lies outside the model's folder, or can be nowhere."""
    if "\0" in name:
        return None
    path = (folder / name).resolve()
    return path if path.is_relative_to(folder.resolve()) else None


def is_there(path: Path) -> bool:
    """Tell whether there is a file or folder that a configuration names; no file has a name that is too long."""
    try:
        return path.exists()
    except OSError:
        return False


def log_all(findings: Iterable[Finding]) -> None:
    """Write findings to the log."""
    for finding in findings:
        about = {"model": finding.model, "version": str(finding.version or "")}
        about = {name: said for name, said in about.items() if said}
        logger.log(logging.ERROR if finding.mistake else logging.WARNING, "%s", finding, extra=about)
