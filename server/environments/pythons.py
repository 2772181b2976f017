"""Python: describes an interpreter, and checks whether a worker can run on it. Used by `environments.py`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.backends.errors import Code, InferError

MIN_PYTHON = (3, 11)
"""The oldest Python for code in a worker unless specified otherwise: the same as for the server."""
INSPECT_TIMEOUT_S = 120.0
"""Importing numpy from a cold network disk is slow."""
_SCRIPT = """
import json, sys, sysconfig
missing = {}
for name in sys.argv[1:]:
    try:
        __import__(name)
    except BaseException as error:
        missing[name] = "%s: %s" % (type(error).__name__, error)
said = [list(sys.version_info[:3]), sys.version, sysconfig.get_platform(), sys.base_prefix, missing]
sys.stdout.write("\\n" + json.dumps(said))
"""


@dataclass(frozen=True, slots=True)
class Python:
    """One interpreter. `prefix` is its installation; for a venv, that of its base Python.

    `missing` maps those of the requested packages that cannot be imported to the error.
    """

    path: str
    version: tuple[int, int, int]
    build: str
    platform: str
    prefix: str
    missing: Mapping[str, str]

    @classmethod
    def current(cls) -> Python:
        """Return the server's own, which has everything needed."""
        version = (sys.version_info.major, sys.version_info.minor, sys.version_info.micro)
        return cls(sys.executable, version, sys.version, sysconfig.get_platform(), sys.base_prefix, {})

    @property
    def version_text(self) -> str:
        """Its version in dotted form."""
        return ".".join(map(str, self.version))


def inspect_python(
    path: str,
    modules: Sequence[str],
    environment: Mapping[str, str],
    label: str,
    min_version: tuple[int, int] = MIN_PYTHON,
) -> Python:
    """Run an interpreter to describe itself and import the needed packages.

    Raises: InferError (INVALID) if it does not run, or is too old. Threads: blocks until it has answered.
    """
    executable = shutil.which(path)
    if executable is None:
        problem = "is not an executable program" if Path(path).exists() else "no such file"
        raise InferError(Code.INVALID, f"{label}: interpreter {path}: {problem}")
    executable = str(Path(executable).absolute())  # it runs in other folders
    command = [executable, "-c", _SCRIPT, *modules]
    try:
        completed = subprocess.run(  # noqa: S603 - the user's own Python
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=INSPECT_TIMEOUT_S, check=False, cwd="/", env={**os.environ, **environment},
        )  # fmt: skip
        version, build, platform, prefix, missing = json.loads(completed.stdout.rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        text = f"{label}: interpreter {path}: did not answer within {INSPECT_TIMEOUT_S:g} s"
        raise InferError(Code.INVALID, text) from None
    except OSError as error:
        raise InferError(Code.INVALID, f"{label}: interpreter {path}: {error.strerror}") from error
    except ValueError:
        output = (completed.stderr.strip() or completed.stdout.strip()).splitlines()
        text = f"exit status {completed.returncode}{': ' + output[-1] if output else ''}"
        raise InferError(Code.INVALID, f"{label}: interpreter {path} does not run as Python: {text}") from None
    python = Python(executable, tuple(version), build, platform, prefix, missing)
    if python.version < min_version:
        required = ".".join(map(str, min_version))
        raise InferError(
            Code.INVALID,
            f"{label}: interpreter {path} is Python {python.version_text}; workers need {required} or newer",
        )
    return python
