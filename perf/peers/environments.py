"""Environments: one for each peer, installed from pip's configured package index, and reused."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .peer import Peer

DEFAULT_FOLDER = Path(".peers")
_STAMP = "installed.json"
_STEPS = ("Collecting", "Downloading", "Building", "Installing")
_MAX_PROGRESS_CHARACTERS = 100


class InstallError(Exception):
    """A peer cannot be installed. The text is the reason, on one line."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a peer's packages are. `versions`: of all of them, by name."""

    python: Path
    versions: dict[str, str]


def requirements(peer: Peer, runtime: str) -> tuple[str, ...]:
    """Return the contents of a peer's environment, with the runtime pinned to the local version, the same for all."""
    if not peer.requirements:
        return ()
    return (*peer.requirements, f"{runtime}=={importlib.metadata.version(runtime)}")


def is_current(folder: Path, required_packages: tuple[str, ...]) -> bool:
    """Return whether an environment has what is wanted, for this Python."""
    try:
        return bool(json.loads((folder / _STAMP).read_text("utf-8")) == _stamp(required_packages))
    except (OSError, ValueError):
        return False


def _stamp(required_packages: tuple[str, ...]) -> dict[str, object]:
    return {"requirements": list(required_packages), "python": platform.python_version(), "base": sys.base_prefix}


def provide(
    peer: Peer, required_packages: tuple[str, ...], root: Path, report_progress: Callable[[str], None]
) -> Environment:
    """Return a peer's environment, installing it if it is missing or outdated. Raises: InstallError."""
    if not required_packages:
        python = Path(sys.executable)
    else:
        folder = root.resolve() / peer.name
        python = folder / "bin" / "python"
        if not is_current(folder, required_packages):
            root.mkdir(parents=True, exist_ok=True)
            (root / ".gitignore").write_text("*\n", "ascii")
            _install(folder, required_packages, report_progress)
    return Environment(python, _versions(python))


def _install(folder: Path, required_packages: tuple[str, ...], report_progress: Callable[[str], None]) -> None:
    report_progress(f"installing {', '.join(required_packages)}")
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], report_progress)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    _run([*pip, "--progress-bar", "off", *required_packages], report_progress)
    (folder / _STAMP).write_text(json.dumps(_stamp(required_packages)), "utf-8")


def _run(command: list[str], report_progress: Callable[[str], None]) -> None:
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
            try:
                output = _read_output(child, report_progress)
            except BaseException:
                child.kill()
                raise
    except OSError as error:
        raise InstallError(str(error)) from error
    if child.returncode:
        raise InstallError(failure_reason(output))


def _read_output(child: subprocess.Popen[str], report_progress: Callable[[str], None]) -> list[str]:
    output = []
    for line in child.stdout or ():
        output.append(line.strip())
        if output[-1].startswith(_STEPS):
            report_progress(output[-1][:_MAX_PROGRESS_CHARACTERS])
    return output


def failure_reason(output: list[str]) -> str:
    """Return the line of pip's output that says what went wrong."""
    errors = [line for line in output if line.lower().startswith("error")]
    reason_line = errors[-1] if errors else next((line for line in reversed(output) if line), "it said nothing")
    return reason_line.removeprefix("ERROR:").strip()


def _versions(python: Path) -> dict[str, str]:
    program = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({each.metadata['Name'].lower(): each.version for each in m.distributions()}))"
    )
    completed = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=False)
    if completed.returncode:
        raise InstallError(f"{python} does not run: {failure_reason(completed.stderr.splitlines())}")
    versions: dict[str, str] = json.loads(completed.stdout)
    return versions
