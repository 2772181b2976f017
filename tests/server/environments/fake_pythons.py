"""Fixtures for the tests of environments: wheels made by hand, and a fake Python that records its arguments."""

from __future__ import annotations

import hashlib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

_FAKE = """#!/bin/sh
echo "$*" >> {log}
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") {pip} ;;
  *) printf '[[3, {minor}, 7], "a build", "a platform", "{prefix}", %s]' "$(cat {missing})" ;;
esac
"""


class FakePython:
    """A fake Python in a few lines of shell that records the arguments of each run in `recorded_calls`.

    `pip` is the script that it runs as pip, and `missing` the file of the modules it lacks, as JSON.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._log = folder / "recorded_calls"
        self.missing = folder / "missing"
        self.path = folder / "python"
        self.write()

    def write(
        self, *, pip: str = "echo Collecting tiny", missing: str = "{}", prefix: str = "/somewhere", minor: int = 11
    ) -> None:
        self.missing.write_text(missing)
        self.path.write_text(_FAKE.format(log=self._log, pip=pip, missing=self.missing, prefix=prefix, minor=minor))
        self.path.chmod(0o755)

    @property
    def recorded_calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def runs(self, words: str) -> int:
        return sum(line.startswith(words) for line in self.recorded_calls)


def write_wheel(folder: Path, name: str, version: str, code: str) -> Path:
    """Make a wheel of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{about}/RECORD"))
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def repack(folder: Path, name: str) -> Path:
    """Make a wheel from an installed package."""
    folder.mkdir(parents=True, exist_ok=True)
    found = distribution(name)
    inside = [file for file in found.files or () if ".." not in file.parts and file.suffix != ".pyc"]
    about = next(file.parts[0] for file in inside if file.parts[0].endswith(".dist-info"))
    files = [file for file in inside if file.name not in {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}]
    tags = [line.split()[1] for line in (found.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")]
    wheel = folder / f"{about.removesuffix('.dist-info')}-{tags[0]}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in files:
            archive.write(str(file.locate()), str(file))
        archive.writestr(f"{about}/RECORD", "".join(f"{file},,\n" for file in (*files, f"{about}/RECORD")))
    return wheel


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
