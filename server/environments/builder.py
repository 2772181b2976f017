"""EnvironmentBuilder: makes one environment, from an empty folder to a Python for workers. Used by environments.py."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import tarfile
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from penstock.backends.errors import Code, InferError

from .locks import FileLock
from .pythons import Python, inspect_python
from .recipe import Recipe

logger = logging.getLogger("penstock.environments")

MAX_OUTPUT_LINES = 400
MAX_REPORTED_LINES = 6
# Variables of the operator's shell that are not passed to pip: they would make it install or look elsewhere.
_REMOVED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON")
# Messages of pip, and the advice for each.
_ADVICE = {
    "No matching distribution found": "correct the name or the version, or specify where to find it (--find-links in "
    "the file, or pip's own settings: PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf)",
    "DO NOT MATCH THE HASHES": "the downloaded packages are not those that the file was written for: update the "
    "hashes if that is intended",
    "--require-hashes mode": "give every requirement of the file a version and a hash, or none of them",
    "conflicting dependencies": "the requirements contradict each other: loosen one of those named",
    "subprocess-exited-with-error": "building it failed: request a version that has a wheel for this Python, or "
    "install what its build needs",
    "Invalid requirement": "correct that line",
    "No space left on device": "free some space, or store environments elsewhere (--environments)",
}
_NOEXEC_MESSAGE = "failed to map segment from shared object"
"""The loader's message for a library on a file system mounted noexec, as Docker's tmpfs are."""
_NETWORK_ERRORS = ("Failed to establish a new connection", "Temporary failure in name resolution", "Connection refused",
              "Read timed out", "ConnectTimeoutError", "NewConnectionError", "ProxyError", "SSLError")  # fmt: skip


class EnvironmentBuilder:
    """Builds one environment in `folder`, whose FileLock is held. Child processes hold the lock too."""

    def __init__(
        self, folder: Path, recipe: Recipe, base: Python, label: str, lock: FileLock, stopping: threading.Event
    ) -> None:
        self._folder = folder
        self._recipe = recipe
        self._base = base
        self._label = label
        self._lock = lock
        self._stopping = stopping

    def build(self, modules: Sequence[str], min_version: tuple[int, int], *, offline: bool) -> str:
        """Build it, and verify that it has what a worker needs. Returns: its Python. Raises: InferError, OSError."""
        self._folder.mkdir()
        path = str(self._folder / "bin" / "python")
        if self._recipe.packed:
            self._unpack()
        else:
            self._run([self._base.path, "-m", "venv", str(self._folder)], "venv")
            for number, install in enumerate(self._recipe.installs):
                arguments = list(install.arguments)
                if install.text:
                    requirements = self._folder / f"requirements-{number}.txt"
                    requirements.write_text(install.text, "utf-8")
                    arguments += ["-r", str(requirements)]
                self._pip(path, arguments)
        missing = inspect_python(path, modules, {}, self._label, min_version).missing
        if missing and offline:
            text = f"{self._recipe.source} lacks {', '.join(missing)}, which workers need, and --offline forbids"
            raise InferError(Code.INVALID, f"{self._label}: {text} downloads: add them before packing it")
        if missing:
            self._pip(path, list(missing))
            missing = inspect_python(path, modules, {}, self._label, min_version).missing
        if missing:
            reasons = "; ".join(f"{name}: {why}" for name, why in missing.items())
            if _NOEXEC_MESSAGE in reasons:
                reasons += "; the folder of environments is mounted noexec: store them elsewhere (--environments)"
            raise InferError(Code.INVALID, f"{self._label}: in the environment of {self._recipe.source}: {reasons}")
        return path

    def _unpack(self) -> None:
        try:
            with tarfile.open(self._recipe.source) as archive:
                # nothing outside the folder; "data" would reject links and modes of Python's own; available from 3.11.4
                archive.extraction_filter = getattr(tarfile, "tar_filter", None)
                for member in archive:
                    if self._stopping.is_set():
                        raise InferError(Code.NOT_READY, "Server is stopping")
                    archive.extract(member, self._folder)
        except (tarfile.TarError, EOFError) as error:
            source = self._recipe.source
            text = f"{self._label}: {source} is not a packed environment: not a readable archive, or an incomplete one"
            raise InferError(Code.INVALID, text) from error
        if not (self._folder / "bin" / "python").exists():
            text = f"{self._label}: {self._recipe.source} has no bin/python: pack a whole environment (conda-pack)"
            raise InferError(Code.INVALID, text)
        script = self._folder / "bin" / "conda-unpack"
        if script.exists():  # it corrects files that contain the path where the environment was packed
            self._run([str(self._folder / "bin" / "python"), str(script)], "conda-unpack")

    def _pip(self, python: str, arguments: Sequence[str]) -> None:
        options = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
        self._run([python, "-m", "pip", "install", *options, *arguments], "pip")

    def _run(self, command: Sequence[str], name: str) -> None:
        """Run a program to its end, and log its output lines. Raises: InferError."""
        environ = {key: value for key, value in os.environ.items() if key not in _REMOVED_VARIABLES}
        lines: deque[str] = deque(maxlen=MAX_OUTPUT_LINES)
        with subprocess.Popen(  # noqa: S603 - pip, of the user's own Python
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", cwd=self._recipe.source.parent, pass_fds=(self._lock.fileno(),), start_new_session=True,
            env=environ | {"PYTHONUNBUFFERED": "1"},
        ) as process:  # fmt: skip
            finished = threading.Event()
            killer = threading.Thread(
                target=self._kill_on_stop, args=(process.pid, finished), name="ender", daemon=True
            )
            killer.start()
            try:
                for line in process.stdout or ():
                    if text := line.rstrip():
                        lines.append(text)
                        logger.info("%s: %s: %s", self._label, name, text)
                status = process.wait()
            finally:
                finished.set()
                killer.join()
        if self._stopping.is_set():
            raise InferError(Code.NOT_READY, "Server is stopping")
        if status:
            raise InferError(Code.INVALID, self._failure(name, status, lines))

    def _kill_on_stop(self, pid: int, finished: threading.Event) -> None:
        """Kill the running program and its children once the server stops."""
        while not finished.wait(0.1):
            if self._stopping.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                return

    def _failure(self, name: str, status: int, lines: Sequence[str]) -> str:
        """Describe what went wrong and what to do."""
        errors = [line for line in lines if "error" in line.lower()] or list(lines)
        if name == "venv" and any("ensurepip" in line for line in lines):
            advice = f"{self._base.path} has no venv with pip (Debian: apt-get install python3-venv)"
        elif any(pattern in line for line in lines for pattern in _NETWORK_ERRORS):
            advice = (
                "the package index cannot be reached: start once where it can, or use a stored environment (--offline)"
            )
        else:
            advice = next(
                (remedy for pattern, remedy in _ADVICE.items() if any(pattern in line for line in lines)), "see the log"
            )
        excerpt = " | ".join(line.strip() for line in errors[-MAX_REPORTED_LINES:])
        return (
            f"{self._label}: the environment of {self._recipe.source}: {name} ended with {status}: {excerpt}; {advice}"
        )
