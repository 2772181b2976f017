"""Files that clients upload: stored for a call, with a disk that is full, and after workers that were killed."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.server.carrying.messages import read_answer
from penstock.server.deepaas.inside import files
from penstock.server.deepaas.inside.answers import Refusal
from penstock.server.deepaas.inside.files import Uploads, remove_stale_folders
from penstock.server.deepaas.inside.multipart import Upload
from penstock.server.deepaas.inside.service import IMPORTABLE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have temporary files in a folder of their own, as TMPDIR says."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.syspath_prepend(IMPORTABLE)
    return tmp_path


def upload(content: bytes = b"content") -> Upload:
    """Make an upload."""
    return Upload("data", "f.txt", memoryview(content), "text/plain", {})


def full(*_: Any, **__: Any) -> Any:
    """Be a disk without room for a file."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_upload_is_a_file_with_all_of_its_content_until_the_call_ends(folder: Path) -> None:
    content = os.urandom(300_000)
    uploads, arguments = Uploads(), {"data": upload(content), "other": 1}
    uploads.store(arguments)
    stored: Any = arguments["data"]
    assert (stored.name, stored.content_type, stored.original_filename) == ("data", "text/plain", "f.txt")
    assert Path(stored.filename).is_relative_to(folder)
    assert Path(stored.filename).read_bytes() == content
    assert type(stored).__name__ == "UploadedFile"
    assert arguments["other"] == 1
    uploads.clear()
    assert not Path(stored.filename).exists()


def test_uploads_in_a_list_are_files_too(folder: Path) -> None:
    uploads, arguments = Uploads(), {"all": [upload(b"1"), "text", upload(b"")]}
    uploads.store(arguments)
    first, text, last = cast("Any", arguments["all"])
    assert [Path(first.filename).read_bytes(), text, Path(last.filename).read_bytes()] == [b"1", "text", b""]


def test_nothing_is_left_of_a_worker_that_ends(folder: Path) -> None:
    uploads = Uploads()
    uploads.store({"data": upload()})
    uploads.close()
    assert list(folder.iterdir()) == []


def test_a_file_that_the_model_has_moved_is_no_trouble(folder: Path) -> None:
    uploads, arguments = Uploads(), {"data": upload()}
    uploads.store(arguments)
    stored: Any = arguments["data"]
    Path(stored.filename).rename(folder / "kept")
    uploads.clear()
    assert (folder / "kept").read_bytes() == b"content"


def test_a_folder_that_is_cleaned_away_is_made_again(folder: Path) -> None:
    uploads = Uploads()
    for _ in range(2):
        uploads.store({"data": upload()})
        uploads.clear()
        (made,) = folder.iterdir()
        made.rmdir()


def test_a_full_disk_is_said_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = Uploads()
    uploads.store({"data": upload()})
    uploads.clear()
    (own,) = folder.iterdir()
    real, made = os.open, []

    def nearly_full(path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = real(path, flags, mode)
        if flags & os.O_CREAT:
            made.append(path)
        if len(made) != 2:
            return descriptor
        os.close(descriptor)
        return real("/dev/full", os.O_WRONLY)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", nearly_full)
        with pytest.raises(Refusal) as refusal:
            uploads.store({"a": upload(), "b": upload()})
    assert read_answer(refusal.value.answer) == (507, b"text/plain; charset=utf-8", b"", b"507: Insufficient Storage")
    assert list(own.iterdir()) == []
    uploads.store({"c": upload()})
    assert len(list(own.iterdir())) == 1


def test_a_disk_without_room_for_a_folder_is_said_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = Uploads()
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(Refusal):
        uploads.store({"a": upload()})


def test_other_trouble_with_the_disk_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(**_: Any) -> Any:
        raise PermissionError(errno.EACCES, "no")

    uploads = Uploads()
    monkeypatch.setattr(tempfile, "mkdtemp", forbidden)
    with pytest.raises(PermissionError):
        uploads.store({"a": upload()})


def test_what_a_killed_worker_has_left_is_removed_and_what_another_has_is_not(folder: Path) -> None:
    living = Uploads()
    living.store({"a": upload()})
    (own,) = folder.iterdir()
    left = folder / (files._PREFIX + "left")
    left.mkdir()
    (left / "file").write_bytes(b"left")
    (folder / "other").mkdir()
    remove_stale_folders()
    assert sorted(folder.iterdir()) == sorted([own, folder / "other"])
    assert len(list(own.iterdir())) == 1


def test_where_there_are_no_locks_nothing_is_swept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    uploads = Uploads()
    uploads.store({"a": upload()})
    remove_stale_folders()
    (own,) = folder.iterdir()
    assert len(list(own.iterdir())) == 1
    uploads.close()
    assert list(folder.iterdir()) == []


def test_a_child_that_user_code_has_forked_removes_nothing(folder: Path) -> None:
    uploads, arguments = Uploads(), {"data": upload()}
    uploads.store(arguments)
    stored: Any = arguments["data"]
    child = os.fork()
    if child == 0:
        uploads.clear()
        os._exit(0)
    os.waitpid(child, 0)
    assert Path(stored.filename).exists()


def test_folders_of_other_users_are_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = folder / "deepaas-uploads-theirs"
    theirs.mkdir()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    remove_stale_folders()
    assert theirs.is_dir()
    monkeypatch.undo()
