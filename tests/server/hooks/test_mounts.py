# ruff: noqa: PTH102, PTH103, PTH104, PTH105, PTH106, PTH108, PTH110, PTH116, PTH123, PTH202, PTH207, PTH208, PTH211, SIM115, UP020
from __future__ import annotations

import bz2
import glob
import importlib.util
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.hooks.mounts import Redirect, install
from tests.server.hooks.stage import Act, Stage

KEY = "/mnt/a-project-that-is-not-there"
CAT = str(shutil.which("cat"))


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "real"
    (folder / "sub").mkdir(parents=True)
    (folder / "text.txt").write_text("one\ntwo\n")
    (folder / "sub" / "value.json").write_text("[1, 2]")
    before = (os.stat, os.open, open, list(sys.path_hooks), set(os.supports_fd))
    mounts = install({KEY: str(folder)})
    yield folder
    mounts.close()
    assert (os.stat, os.open, open, list(sys.path_hooks), set(os.supports_fd)) == before
    with pytest.raises(FileNotFoundError):
        open(f"{KEY}/text.txt").close()


def list_folder(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


READS: dict[str, Callable[[str], Any]] = {
    "open": lambda at: open(f"{at}/text.txt").read(),
    "open, by its keyword": lambda at: open(file=f"{at}/text.txt").read(),
    "open, bytes": lambda at: open(f"{at}/text.txt".encode()).read(),
    "open, a Path": lambda at: open(Path(at) / "text.txt").read(),
    "open, spelled oddly": lambda at: open(f"/{at}/./sub//../text.txt").read(),
    "io.open": lambda at: io.open(f"{at}/text.txt").read(),
    "os.open": lambda at: os.read(os.open(f"{at}/text.txt", os.O_RDONLY), 100),
    "os.open below a descriptor": lambda at: os.read(os.open("text.txt", 0, dir_fd=os.open(at, os.O_RDONLY)), 100),
    "os.stat": lambda at: os.stat(f"{at}/text.txt").st_size,
    "os.lstat": lambda at: os.lstat(path=f"{at}/text.txt").st_size,
    "os.stat of a descriptor": lambda at: os.stat(os.open(f"{at}/text.txt", os.O_RDONLY)).st_size,
    "os.access": lambda at: os.access(f"{at}/text.txt", os.R_OK),
    "os.listdir": lambda at: sorted(os.listdir(at)),
    "os.scandir": lambda at: sorted(entry.name for entry in os.scandir(at)),
    "os.scandir, what an entry is": lambda at: sorted(
        (entry.path[len(at) :], entry.is_dir(), entry.stat().st_size) for entry in os.scandir(at)
    ),
    "os.scandir, entries as paths": lambda at: sorted(os.fspath(entry)[len(at) :] for entry in os.scandir(Path(at))),
    "os.scandir, bytes": lambda at: sorted(entry.path[len(at) :] for entry in os.scandir(at.encode())),
    "os.scandir, closed": lambda at: [open(entry).read() for entry in list_folder(at) if entry.is_file()],
    "os.walk": lambda at: [(folder[len(at) :], sorted(files)) for folder, _, files in os.walk(at)],
    "os.walk, from below": lambda at: [folder[len(at) :] for folder, _, _ in os.walk(at, topdown=False)],
    "os.fwalk": lambda at: [sorted(files) for _, _, files, _ in os.fwalk(at)],
    "os.path": lambda at: [
        check(f"{at}/{name}") for check in (os.path.exists, os.path.isfile, os.path.isdir, os.path.islink)
        for name in ("text.txt", "sub", "none")
    ],
    "os.path.getsize": lambda at: os.path.getsize(f"{at}/text.txt"),
    "pathlib": lambda at: [Path(at, "text.txt").read_text(), Path(at).is_dir(), Path(at, "none").exists()],
    "pathlib, what is in it": lambda at: sorted(str(path)[len(at) :] for path in Path(at).iterdir()),
    "pathlib.glob": lambda at: sorted(str(path)[len(at) :] for path in Path(at).rglob("*.*")),
    "pathlib.glob, one by its name": lambda at: [str(path)[len(at) :] for path in Path(at).glob("*/value.json")],
    "glob": lambda at: sorted(path[len(at) :] for path in glob.glob(f"{at}/**/*.*", recursive=True)),
    "json": lambda at: json.load(open(f"{at}/sub/value.json")),
    "numpy.fromfile": lambda at: np.fromfile(f"{at}/text.txt", np.uint8).tolist(),
    "numpy.genfromtxt": lambda at: np.genfromtxt(f"{at}/sub/value.json", delimiter="!", dtype=str).tolist(),
    "a program's folder": lambda at: subprocess.check_output(["ls"], cwd=at),
    "a program's arguments": lambda at: subprocess.check_output(["cat", f"{at}/text.txt"]),
    "arguments of a program that is named by its path": lambda at: subprocess.check_output([CAT, f"{at}/text.txt"]),
    "arguments of a program that inherits all": lambda at: subprocess.check_output(
        [CAT, f"{at}/text.txt"], close_fds=False
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", READS)
def test_reads_below_a_mount_return_the_contents_of_the_real_folder(real: Path, way: str) -> None:
    assert READS[way](KEY) == READS[way](str(real))


def test_writes_below_a_mount_change_the_real_folder(real: Path) -> None:
    os.makedirs(f"{KEY}/new/deep")
    os.mkdir(Path(KEY, "made"))
    Path(KEY, "new", "path.txt").write_text("path")
    with open(f"{KEY}/new/open.txt", "w") as file:
        file.write("open")
    np.save(f"{KEY}/new/array.npy", np.arange(3))
    with open(f"{KEY}/new/it.pickle", "wb") as file:
        pickle.dump({"a": 1}, file)
    os.rename(f"{KEY}/new/open.txt", f"{KEY}/new/renamed.txt")
    os.replace(src=f"{KEY}/new/path.txt", dst=f"{KEY}/new/replaced.txt")
    shutil.copy(f"{KEY}/new/renamed.txt", f"{KEY}/new/copied.txt")
    shutil.copytree(f"{KEY}/new", f"{KEY}/twice")
    shutil.move(f"{KEY}/new/copied.txt", real / "moved.txt")
    os.symlink(f"{KEY}/new/array.npy", f"{KEY}/link.npy")
    os.utime(f"{KEY}/text.txt", (1, 2))
    os.rmdir(f"{KEY}/made")
    os.unlink(f"{KEY}/sub/value.json")
    shutil.rmtree(f"{KEY}/sub")

    assert sorted(os.listdir(real)) == ["link.npy", "moved.txt", "new", "text.txt", "twice"]
    assert sorted(os.listdir(real / "new")) == ["array.npy", "deep", "it.pickle", "renamed.txt", "replaced.txt"]
    assert sorted(os.listdir(real / "twice")) == [
        "array.npy", "copied.txt", "deep", "it.pickle", "renamed.txt", "replaced.txt",
    ]  # fmt: skip
    assert np.load(f"{KEY}/link.npy").tolist() == [0, 1, 2]
    assert os.stat(real / "text.txt").st_mtime == 2


@pytest.mark.parametrize(
    "write",
    [
        lambda path: zipfile.ZipFile(path, "w").close(),
        lambda path: tarfile.open(path, "w").close(),
        lambda path: bz2.open(path, "w").close(),
    ],
)  # fmt: skip
def test_modules_that_imported_open_before_the_mount_are_redirected(real: Path, write: Callable[[str], None]) -> None:
    write(f"{KEY}/archive")

    assert (real / "archive").exists()


def test_modules_below_a_mount_can_be_imported(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (real / "module_below_a_mount.py").write_text("x = 3\n")
    (real / "sub" / "by_its_path.py").write_text("y = 4\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [*sys.path, KEY])

    module = importlib.import_module("module_below_a_mount")
    spec = importlib.util.spec_from_file_location("by_its_path", f"{KEY}/sub/by_its_path.py")
    assert spec is not None
    assert spec.loader is not None
    by_its_path = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by_its_path)

    assert (module.x, by_its_path.y) == (3, 4)
    del sys.modules["module_below_a_mount"]


def test_paths_outside_a_mount_are_not_redirected(real: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("other")

    assert (tmp_path / "other.txt").read_text() == "other"
    assert not os.path.exists(f"{KEY}s/text.txt")
    assert not os.path.exists(f"{KEY}/../text.txt")
    with pytest.raises(FileNotFoundError):
        os.stat(f"{KEY}/none")


def test_a_mount_that_already_leads_to_its_folder_patches_nothing(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "key").symlink_to(tmp_path / "real")
    before = os.stat

    mounts = install({str(tmp_path / "key"): str(tmp_path / "real")})

    assert os.stat is before
    mounts.close()


@pytest.mark.parametrize("key", ["mnt", "/", "//", "/mnt/.."])
def test_a_mount_that_is_not_below_the_root_is_rejected(key: str) -> None:
    with pytest.raises(ValueError, match="expected an absolute path below the root"):
        install({key: "/tmp"})


_PARTS = st.lists(st.sampled_from(["mnt", "project", "projects", "a", "..", ".", "", "\udc80"]), max_size=6)


@given(_PARTS)
def test_a_path_is_redirected_if_and_only_if_it_is_below_a_mount(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    absolute = "/" + os.path.normpath(path).lstrip("/")
    lead = Redirect({"/mnt/project": "/real", "/mnt/project/a": "/deeper"})
    below = absolute == "/mnt/project" or absolute.startswith("/mnt/project/")

    assert (lead(path) != path) == below
    assert lead(os.fsencode(path)) == os.fsencode(lead(path))
    assert lead("." + path) == "." + path
    if absolute.startswith("/mnt/project/a/"):
        assert lead(path) == absolute.replace("/mnt/project/a", "/deeper", 1)


MOUNTED = """
import os, sys
sys.path.append("/mnt/project")
found = open("/mnt/project/found.txt").read(), open("found.txt").read(), sorted(os.listdir("/mnt/project/sub"))
import importlib
x = importlib.import_module("sub.by_name").x
def post_inference(prediction, metadata):
    return [*found, x, open("/mnt/project/sub/by_name.py").read(), os.path.exists("/mnt/project/none")]
"""


@pytest.mark.slow
@pytest.mark.parametrize("namespace", [True, False])
def test_a_handler_in_a_worker_finds_its_project_below_the_mount(act: Act, tmp_path: Path, namespace: bool) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "by_name.py").write_text("x = 3\n")
    (tmp_path / "found.txt").write_text("found")
    # a mount that cannot be made keeps the system's own way from being taken
    mounts = {"/mnt/project": str(tmp_path)} | ({} if namespace else {"/mnt/none": str(tmp_path / "none")})

    async def scene(stage: Stage) -> None:
        hooks = await stage.load(MOUNTED, workers=1, roots=(tmp_path,), mounts=mounts)

        answer = await hooks.predict([[1.0, 2.0, 3.0, 4.0]])
        assert json.loads(answer) == ["found", "found", ["by_name.py"], 3, "x = 3\n", False]

    act(scene)
