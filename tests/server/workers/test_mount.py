"""A worker's own mounts, if the system permits them."""

# ruff: noqa: PTH208
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).parents[3] / "server" / "workers" / "child.py"
PROGRAM = """
import importlib.util, json, os, subprocess, sys
spec = importlib.util.spec_from_file_location("child", sys.argv[1])
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
mounts = json.loads(sys.argv[2])
before = os.getuid(), os.getgid(), os.listdir("/proc/self/task")
said = {"may": child.can_mount(mounts)}
if said["may"]:
    child.mount(mounts)
    said |= eval(sys.argv[3])
said["same"] = before == (os.getuid(), os.getgid(), os.listdir("/proc/self/task"))
print(json.dumps(said))
"""


def _mounted(mounts: dict[str, str], ask: str) -> dict[str, Any]:
    words = [sys.executable, "-I", "-c", PROGRAM, str(CHILD), json.dumps(mounts), ask]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    answer: dict[str, Any] = json.loads(ended.stdout)
    assert answer["same"]
    return answer


@pytest.fixture
def real(tmp_path: Path) -> Path:
    if not _mounted({str(tmp_path): "/usr"}, "{}")["may"]:
        pytest.skip("this system does not permit a process its own mounts")
    real = tmp_path / "real"
    real.mkdir()
    (real / "text.txt").write_text("text")
    return real


def test_a_folder_is_mounted_over_an_existing_folder(tmp_path: Path, real: Path) -> None:
    (tmp_path / "there").mkdir()
    ask = f"dict(cat=subprocess.check_output(['cat', '{tmp_path}/there/text.txt']).decode())"

    assert _mounted({f"{tmp_path}/there": str(real)}, ask)["cat"] == "text"
    assert os.listdir(tmp_path / "there") == []


def test_a_folder_is_mounted_at_a_new_path_beside_existing_files(tmp_path: Path, real: Path) -> None:
    above = tmp_path / "above"
    (above / "folder").mkdir(parents=True)
    (above / "folder" / "a").write_text("a")
    (above / "file").write_text("b")
    (above / "link").symlink_to("file")
    ask = (
        f"dict(read=open('{above}/new/deep/text.txt').read(), all=sorted(os.listdir('{above}')), "
        f"rest=[open('{above}/' + name).read() for name in ('folder/a', 'file', 'link')], "
        f"wrote=open('{above}/new/deep/made', 'w').write('c') and open('{above}/file', 'a').write('d'))"
    )

    answer = _mounted({f"{above}/new/deep": str(real)}, ask)

    assert (answer["read"], answer["rest"]) == ("text", ["a", "b", "b"])
    assert answer["all"] == ["file", "folder", "link", "new"]
    assert sorted(os.listdir(above)) == ["file", "folder", "link"]
    assert ((real / "made").read_text(), (above / "file").read_text()) == ("c", "bd")
    assert (real / "made").stat().st_uid == os.getuid()


def test_an_impossible_mount_is_reported_beforehand(tmp_path: Path) -> None:
    assert not _mounted({str(tmp_path): str(tmp_path / "none")}, "{}")["may"]


def test_a_mount_in_a_folder_with_too_many_entries_is_not_possible(tmp_path: Path, real: Path) -> None:
    for number in range(65):
        (tmp_path / f"{number}").touch()

    assert not _mounted({f"{tmp_path}/new": str(real)}, "{}")["may"]
