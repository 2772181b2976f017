"""seldon_core.Storage finds or copies the files of a component's model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from seldon_core import Storage
from seldon_core.storage import Storage as Same


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "deeper").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"a")
    (folder / "deeper" / "b.bin").write_bytes(b"b")
    (folder / ".hidden").write_bytes(b"h")
    return folder


def _content(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.bin")} | {
        path.relative_to(root).as_posix(): path.read_bytes() for path in (root / "deeper").glob("*.bin")
    }


def test_storage_can_be_imported_from_the_root_package() -> None:
    assert Same is Storage


def test_a_local_path_is_returned_without_copying(model: Path) -> None:
    assert Storage.download(str(model)) == str(model)
    assert Storage.download(f"file://{model}") == str(model)


def test_a_local_folder_is_linked_into_the_output_folder(model: Path, tmp_path: Path) -> None:
    out = Storage.download(f"file://{model}", str(tmp_path / "out" / "here"))

    assert out == str(tmp_path / "out" / "here")
    assert sorted(path.name for path in Path(out).iterdir()) == ["a.bin", "deeper"]
    assert all(path.is_symlink() for path in Path(out).iterdir())
    assert _content(out) == {"a.bin": b"a", "deeper/b.bin": b"b"}


def test_a_relative_path_is_linked_into_an_output_folder_elsewhere(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)

    assert _content(Storage.download("model", str(model.parent / "out")))["a.bin"] == b"a"


def test_a_file_is_linked_under_its_own_name(model: Path, tmp_path: Path) -> None:
    out = Storage.download(str(model / "a.bin"), str(tmp_path / "out"))

    assert [path.name for path in Path(out).iterdir()] == ["a.bin"]


def test_a_local_path_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"Local path file:///no/where does not exist\."):
        Storage.download("file:///no/where")


def test_a_path_that_is_neither_local_nor_a_url_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="Cannot recognize storage type for nowhere"):
        Storage.download("nowhere")


def test_a_remote_folder_or_file_is_copied(model: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(model), "/bucket/model", recursive=True)
    try:
        out = Storage.download("memory://bucket/model", str(tmp_path / "out"))
        found = _content(out)
        assert _content(Storage.download("memory://bucket/model/")) == found == {"a.bin": b"a", "deeper/b.bin": b"b"}
        one = Storage.download("memory://bucket/model/a.bin", str(tmp_path / "one"))
        assert _content(one) == {"a.bin": b"a"}
    finally:
        memory.rm("/bucket", recursive=True)


def test_without_fsspec_the_error_suggests_installing_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)

    with pytest.raises(RuntimeError, match="pip install fsspec"):
        Storage.download("s3://bucket/model")
