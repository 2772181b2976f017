"""Uploaded files: stored for the duration of a call, with a full disk, and after killed workers."""

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
    """Have temporary files in a folder of their own, set by TMPDIR."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.syspath_prepend(IMPORTABLE)
    return tmp_path


def upload(content: bytes = b"content") -> Upload:
    """Make an upload."""
    return Upload("data", "f.txt", memoryview(content), "text/plain", {})


def full(*_: Any, **__: Any) -> Any:
    """Fail like a disk without room for a file."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_upload_is_a_complete_file_until_the_call_ends(folder: Path) -> None:
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


def test_uploads_in_a_list_are_stored_as_files(folder: Path) -> None:
    uploads, arguments = Uploads(), {"all": [upload(b"1"), "text", upload(b"")]}
    uploads.store(arguments)
    first, text, last = cast("Any", arguments["all"])
    assert [Path(first.filename).read_bytes(), text, Path(last.filename).read_bytes()] == [b"1", "text", b""]


def test_closing_a_worker_removes_its_upload_folder(folder: Path) -> None:
    uploads = Uploads()
    uploads.store({"data": upload()})
    uploads.close()
    assert list(folder.iterdir()) == []


def test_an_upload_moved_by_the_model_is_no_error(folder: Path) -> None:
    uploads, arguments = Uploads(), {"data": upload()}
    uploads.store(arguments)
    stored: Any = arguments["data"]
    Path(stored.filename).rename(folder / "kept")
    uploads.clear()
    assert (folder / "kept").read_bytes() == b"content"


def test_an_upload_folder_that_was_deleted_is_created_again(folder: Path) -> None:
    uploads = Uploads()
    for _ in range(2):
        uploads.store({"data": upload()})
        uploads.clear()
        (upload_folder,) = folder.iterdir()
        upload_folder.rmdir()


def test_a_full_disk_is_answered_with_507_and_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = Uploads()
    uploads.store({"data": upload()})
    uploads.clear()
    (own,) = folder.iterdir()
    real, paths = os.open, []

    def nearly_full(path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = real(path, flags, mode)
        if flags & os.O_CREAT:
            paths.append(path)
        if len(paths) != 2:
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


def test_a_disk_without_room_for_the_folder_rejects_the_upload(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = Uploads()
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(Refusal):
        uploads.store({"a": upload()})


def test_other_disk_errors_are_raised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(**_: Any) -> Any:
        raise PermissionError(errno.EACCES, "no")

    uploads = Uploads()
    monkeypatch.setattr(tempfile, "mkdtemp", forbidden)
    with pytest.raises(PermissionError):
        uploads.store({"a": upload()})


def test_the_folder_of_a_killed_worker_is_removed_and_that_of_a_live_one_is_kept(folder: Path) -> None:
    living = Uploads()
    living.store({"a": upload()})
    (own,) = folder.iterdir()
    left_folder = folder / (files._PREFIX + "left")
    left_folder.mkdir()
    (left_folder / "file").write_bytes(b"left")
    (folder / "other").mkdir()
    remove_stale_folders()
    assert sorted(folder.iterdir()) == sorted([own, folder / "other"])
    assert len(list(own.iterdir())) == 1


def test_no_folder_is_removed_if_file_locks_are_not_supported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_process_forked_by_user_code_removes_no_files(folder: Path) -> None:
    uploads, arguments = Uploads(), {"data": upload()}
    uploads.store(arguments)
    stored: Any = arguments["data"]
    child = os.fork()
    if child == 0:
        uploads.clear()
        os._exit(0)
    os.waitpid(child, 0)
    assert Path(stored.filename).exists()


def test_folders_of_other_users_are_not_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = folder / "deepaas-uploads-theirs"
    theirs.mkdir()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    remove_stale_folders()
    assert theirs.is_dir()
    monkeypatch.undo()
