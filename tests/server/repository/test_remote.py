"""Remote over a store with injected failures."""

from __future__ import annotations

import builtins
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.repository.remote import INSTALL, Remote, RemoteError
from tests.server.repository.stores import URL, Store, put, registered

MODEL = {"a/config.pbtxt": "one", "a/1/model.onnx": "11", "a/2/model.onnx": "22", "a/2/weights/w.bin": "w"}


@pytest.fixture
def store() -> Iterator[type[Store]]:
    with registered() as new_store:
        yield new_store


@pytest.fixture
def remote(store: type[Store]) -> Iterator[Remote]:
    put(MODEL)
    new_remote = Remote(URL)
    new_remote.open()
    try:
        yield new_remote
    finally:
        new_remote.close()


def there(remote: Remote) -> dict[str, str]:
    """The files and empty folders of the local copy."""
    found = {}
    for place, folders, files in os.walk(remote.root):
        inner = Path(place).relative_to(remote.root)
        found.update({(inner / name).as_posix(): (Path(place) / name).read_text() for name in files})
        if not folders and not files and place != str(remote.root):
            found[f"{inner.as_posix()}/"] = ""
    return found


class TestCopying:
    def test_a_model_is_copied_with_all_its_files(self, remote: Remote) -> None:
        assert remote.refresh_all() == {}
        assert there(remote) == MODEL

    def test_files_of_a_model_are_fetched_in_parallel_when_the_client_is_async(
        self, remote: Remote, store: type[Store], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        meeting = threading.Barrier(len(MODEL))
        fetch = store.get_file

        def met(self: Store, *args: Any, **kwargs: Any) -> None:
            meeting.wait(30)
            fetch(self, *args, **kwargs)

        monkeypatch.setattr(store, "get_file", met)
        monkeypatch.setattr(store, "async_impl", True)

        assert remote.refresh_all() == {}
        assert there(remote) == MODEL

    def test_the_copy_is_readable_only_by_the_server(self, remote: Remote) -> None:
        assert remote.root.parent.stat().st_mode & 0o777 == 0o700
        assert remote.root.name == "models"

    def test_the_copy_is_removed_on_close(self, remote: Remote) -> None:
        remote.refresh_all()
        remote.close()

        assert not remote.root.parent.exists()

    def test_listing_the_names_copies_nothing(self, remote: Remote, store: type[Store]) -> None:
        put({"b/config.pbtxt": "", "junk/readme": "x"})

        assert remote.names() == ["a", "b"]
        assert store.fetched == []
        assert there(remote) == {}

    def test_refreshing_one_model_copies_only_its_files(self, remote: Remote) -> None:
        put({"b/1/model.onnx": "b"})
        remote.refresh("b")

        assert there(remote) == {"b/1/model.onnx": "b"}

    def test_a_folder_that_is_not_a_model_is_copied_as_an_empty_folder(
        self, remote: Remote, store: type[Store]
    ) -> None:
        put({"junk/huge.bin": "x", "top.txt": "x"})
        remote.refresh_all()

        assert there(remote) == {**MODEL, "junk/": ""}

    def test_hidden_files_and_caches_are_not_copied(self, remote: Remote) -> None:
        put({".git/1/model.onnx": "x", "a/.secret": "x", "a/__pycache__/x.pyc": "x"})
        remote.refresh_all()

        assert there(remote) == MODEL


class TestChanges:
    def test_unchanged_files_are_not_fetched_again(self, remote: Remote, store: type[Store]) -> None:
        remote.refresh_all()
        store.fetched.clear()
        put({"a/config.pbtxt": "two"})
        remote.refresh_all()

        assert store.fetched == ["/bucket/models/a/config.pbtxt"]
        assert there(remote) == {**MODEL, "a/config.pbtxt": "two"}

    @pytest.mark.parametrize("tells", [True, False])
    def test_a_file_rewritten_with_the_same_bytes_leaves_the_copy_unchanged(
        self, remote: Remote, store: type[Store], tells: bool
    ) -> None:
        store.tells = tells
        remote.refresh_all()
        before = (remote.root / "a/1/model.onnx").stat()
        put({"a/1/model.onnx": "11"})
        remote.refresh_all()
        after = (remote.root / "a/1/model.onnx").stat()

        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)

    def test_files_of_a_store_without_change_information_are_fetched_again(
        self, remote: Remote, store: type[Store]
    ) -> None:
        store.tells = False
        remote.refresh_all()
        put({"a/1/model.onnx": "xx"})
        remote.refresh_all()

        assert there(remote)["a/1/model.onnx"] == "xx"

    def test_a_version_or_model_deleted_from_the_store_is_removed_from_the_copy(self, remote: Remote) -> None:
        remote.refresh_all()
        Store().rm(f"{URL}/a/2", recursive=True)
        put({"b/1/model.onnx": "b"})
        remote.refresh_all()
        assert there(remote) == {"a/config.pbtxt": "one", "a/1/model.onnx": "11", "b/1/model.onnx": "b"}

        Store().rm(f"{URL}/a", recursive=True)
        remote.refresh("a")
        assert there(remote) == {"b/1/model.onnx": "b"}
        remote.refresh_all()
        assert sorted(place.name for place in remote.root.iterdir()) == ["b"]

    def test_a_folder_that_becomes_a_file_is_replaced_in_the_copy(self, remote: Remote) -> None:
        remote.refresh_all()
        Store().rm(f"{URL}/a/2", recursive=True)
        put({"a/2": "a file"})
        remote.refresh_all()
        assert there(remote)["a/2"] == "a file"

        Store().rm(f"{URL}/a/2")
        put({"a/2/model.onnx": "again"})
        remote.refresh_all()
        assert there(remote)["a/2/model.onnx"] == "again"


NAMES = ["a/config.pbtxt", "a/1/model.onnx", "a/1/x/y", "a/1/x", "a/2/model.onnx", "b/1/model.onnx", "b/1", "b/x/y"]
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(["", "one", "two"]), st.booleans()), max_size=12)


@pytest.mark.slow
@settings(max_examples=50)
@given(STEPS)
def test_the_copy_matches_the_store_after_any_changes(steps: list[tuple[str, str, bool]]) -> None:
    with registered():
        put({"c/1/model.onnx": "c"})
        remote = Remote(URL)
        try:
            remote.open()
            held = {"c/1/model.onnx": "c"}
            for name, text, look in steps:
                # a file store cannot have a file and a folder of the same name
                for other in [
                    each for each in held if f"{each}/".startswith(f"{name}/") or f"{name}/".startswith(f"{each}/")
                ]:
                    del held[other]
                    Store().rm(f"{URL}/{other}")
                if text:
                    held[name] = text
                    put({name: text})
                if look:
                    remote.refresh_all()
            remote.refresh_all()
            assert remote.refresh_all() == {}

            models = {name.partition("/")[0] for name in held if re.match(r"./([12]/|config)", name)}
            expected = {name: text for name, text in held.items() if name[0] in models}
            assert {name: text for name, text in there(remote).items() if not name.endswith("/")} == expected
            assert remote.names() == sorted(models)
        finally:
            remote.close()


class TestFailures:
    @pytest.mark.parametrize("concurrent", [False, True])
    def test_a_failed_fetch_leaves_the_copy_of_the_model_unchanged(
        self, remote: Remote, store: type[Store], monkeypatch: pytest.MonkeyPatch, concurrent: bool
    ) -> None:
        monkeypatch.setattr(store, "async_impl", concurrent)
        remote.refresh_all()
        put({"a/config.pbtxt": "new", "a/1/model.onnx": "new", "b/1/model.onnx": "b"})
        store.fails["/bucket/models/a/1/model.onnx"] = ConnectionResetError("peer")

        assert remote.refresh_all() == {"a": f"{URL}/a: ConnectionResetError: peer"}
        assert there(remote) == {**MODEL, "b/1/model.onnx": "b"}
        assert [place.name for place in remote.root.parent.iterdir()] == ["models"]

        store.fails.clear()
        assert remote.refresh_all() == {}
        assert there(remote)["a/config.pbtxt"] == "new"

    def test_a_model_that_cannot_be_listed_is_kept_in_the_copy(self, remote: Remote, store: type[Store]) -> None:
        remote.refresh_all()
        store.fails["/bucket/models/a/2"] = OSError("throttled")

        assert remote.refresh_all() == {"a": f"{URL}/a: OSError: throttled"}
        assert there(remote) == MODEL

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (FileNotFoundError("bucket"), "no such file or folder"),
            (PermissionError("Access Denied"), "permission denied: Access Denied"),
            (TimeoutError(), "timed out"),
            (RuntimeError("all\nof it"), "RuntimeError: all of it"),
        ],
    )
    def test_a_repository_that_cannot_be_listed_is_an_error_and_keeps_the_copy(
        self, remote: Remote, store: type[Store], error: Exception, reason: str
    ) -> None:
        remote.refresh_all()
        store.fails["/bucket/models"] = error

        with pytest.raises(RemoteError) as caught:
            remote.refresh_all()
        assert str(caught.value) == f"{URL}: {reason}"
        assert there(remote) == MODEL

    def test_a_truncated_file_is_an_error(
        self, remote: Remote, store: type[Store], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def short(self: Any, rpath: str, lpath: str, **kwargs: Any) -> None:
            Path(lpath).write_bytes(b"")

        monkeypatch.setattr(store, "get_file", short)
        with pytest.raises(RemoteError, match=r"a/config.pbtxt: 0 of 3 bytes were received"):
            remote.refresh("a")

    def test_reasons_of_failures_have_no_credentials(self, store: type[Store]) -> None:
        put(MODEL)
        remote = Remote("teststore://bob:hunter2@bucket/models")
        store.fails["/bucket/models/a"] = RuntimeError("teststore://bob:hunter2@bucket: bob, hunter2 is no password")
        try:
            remote.open()
            reasons = remote.refresh_all()
        finally:
            remote.close()

        text = "teststore://bucket/models/a: RuntimeError: teststore://bucket: bob, *** is no password"
        assert reasons == {"a": text}

    def test_an_error_does_not_show_its_cause(self, remote: Remote, store: type[Store]) -> None:
        store.fails["/bucket/models"] = RuntimeError("hunter2")
        with pytest.raises(RemoteError) as caught:
            remote.names()
        assert caught.value.__suppress_context__

    def test_closing_stops_a_copy_in_progress(
        self, remote: Remote, store: type[Store], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, ended = threading.Event(), threading.Event()

        def slow(self: Any, rpath: str, lpath: str, callback: Any, **kwargs: Any) -> None:
            begun.set()
            assert ended.wait(10)
            callback.relative_update(1)

        monkeypatch.setattr(store, "get_file", slow)
        failed: list[str] = []

        def copy() -> None:
            with pytest.raises(RemoteError) as caught:
                remote.refresh("a")
            failed.append(str(caught.value))

        thread = threading.Thread(target=copy)
        thread.start()
        assert begun.wait(10)
        remote.close()
        ended.set()
        thread.join(10)

        assert failed == [f"{URL}: the server is stopping"]
        assert not remote.root.parent.exists()


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "/etc/passwd", "/bucket/models/../../x", "/bucket/models/a/..", "/bucket/models/a/x/y",
            "/bucket/models/a/?C=N;O=D", "/bucket/other/x", "/bucket/models/a/b\\c", "/bucket/models/a/x\ny",
        ],
    )  # fmt: skip
    def test_a_file_name_that_leads_outside_the_model_is_skipped_and_logged_once(
        self, remote: Remote, store: type[Store], name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        store.strange["/bucket/models/a"] = [name]
        remote.refresh_all()
        remote.refresh_all()

        assert there(remote) == MODEL
        assert [record.getMessage().count("not a valid file name") for record in caplog.records].count(1) == 1


class TestOpening:
    def test_a_url_that_does_not_exist_is_an_error(self, store: type[Store]) -> None:
        with pytest.raises(RemoteError, match=rf"^{URL}: no such file or folder$"):
            Remote(URL).open()

    def test_a_url_of_the_folder_of_one_model_is_an_error(self, store: type[Store]) -> None:
        put(MODEL)
        with pytest.raises(RemoteError, match="is the folder of one model; pass the folder that contains it"):
            Remote(f"{URL}/a").open()

    def test_a_url_of_a_file_is_an_error(self, store: type[Store]) -> None:
        put(MODEL)
        with pytest.raises(RemoteError, match="is not a folder"):
            Remote(f"{URL}/a/1/model.onnx").open()

    def test_a_url_signed_for_one_file_is_an_error(self) -> None:
        with pytest.raises(RemoteError, match=r"^https://h/m: a URL with a query names one file"):
            Remote("https://h/m?sig=hunter2").open()

    def test_an_unknown_url_scheme_is_an_error(self) -> None:
        with pytest.raises(RemoteError, match=r"^nope://x: ValueError: Protocol not known: nope"):
            Remote("nope://x").open()

    def test_a_missing_package_for_a_scheme_is_in_the_error_of_fsspec(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "libarchive", None)  # it may be installed
        with pytest.raises(RemoteError, match=r"^libarchive://x: LibArchive requires to be installed$"):
            Remote("libarchive://x").open()

    def test_without_fsspec_the_error_has_the_install_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def missing(name: str, *rest: Any) -> Any:
            if name.startswith("fsspec"):
                raise ModuleNotFoundError(f"No module named '{name}'", name=name)
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", missing)
        with pytest.raises(RemoteError) as caught:
            Remote("s3://bucket/models").open()
        assert str(caught.value) == f"s3://bucket/models: remote repositories require fsspec: {INSTALL}"


def test_a_file_url_is_copied_and_refreshed(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_text("x")
    remote = Remote(f"file://{tmp_path}")
    try:
        remote.open()
        assert remote.refresh_all() == {}
        assert there(remote) == {"m/1/model.onnx": "x"}
        (tmp_path / "m" / "1" / "model.onnx").write_text("y")
        os.utime(tmp_path / "m" / "1" / "model.onnx", ns=(1, 1))
        remote.refresh("m")
        assert there(remote) == {"m/1/model.onnx": "y"}
    finally:
        remote.close()
