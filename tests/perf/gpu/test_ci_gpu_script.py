"""`.ci/gpu keep` and `assemble`: what travelled in pieces is put together, or it is said what is missing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]


class Machine:
    """A bare machine with a checkout in `folder`, to which pieces travel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder / "place"
        (folder / ".ci").mkdir()
        shutil.copy(_ROOT / ".ci" / "gpu", folder / ".ci")
        shutil.copy(_ROOT / "pyproject.toml", folder)

    def run(self, word: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"GPU_CHECK_PLACE": str(self.place), "PYTHON": sys.executable}
        return subprocess.run(
            [self.folder / ".ci" / "gpu", word], env=environ, capture_output=True, text=True, check=False
        )

    def bring(self, number: int, **files: bytes) -> None:
        carried = self.folder / ".carry" / "gpu"
        shutil.rmtree(carried, ignore_errors=True)
        (carried / str(number)).mkdir(parents=True)
        for name, content in files.items():
            (carried / str(number) / name).write_bytes(content)
        assert self.run("keep").returncode == 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def packed() -> tuple[bytes, bytes]:
    """Give a module, packed, and its sum."""
    buffer, content = io.BytesIO(), b"NUMBER = 7\n"
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        member = tarfile.TarInfo("./carried.py")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest().encode() + b"  site.tar.xz\n"


def test_parts_uploaded_one_by_one_are_joined(machine: Machine) -> None:
    archive, total = packed()
    machine.bring(1, piece1=archive[:50], count=b"2\n", sum=total)
    machine.bring(2, piece2=archive[50:])
    ended = machine.run("assemble")
    site = machine.place / "site"
    (distribution,) = importlib.metadata.distributions(path=[str(site)])

    assert ended.returncode == 0, ended.stderr
    assert (site / "carried.py").read_text("utf-8") == "NUMBER = 7\n"
    assert (distribution.name, distribution.version) == ("penstock", importlib.metadata.version("penstock"))
    assert {point.name for point in distribution.entry_points} >= {"penstock", "perf", "plan"}


def test_a_missing_part_is_named(machine: Machine) -> None:
    archive, total = packed()
    machine.bring(1, piece1=archive[:50], count=b"2\n", sum=total)
    ended = machine.run("assemble")

    assert ended.returncode == 1
    assert ended.stderr == "piece 2 of 2 has not come\n"


def test_a_corrupted_part_is_detected(machine: Machine) -> None:
    archive, total = packed()
    machine.bring(1, piece1=archive[:-1], count=b"1\n", sum=total)

    assert machine.run("assemble").returncode != 0
    assert not list((machine.place / "site").iterdir())
