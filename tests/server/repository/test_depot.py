"""Repositories in stores whose keys are in the file that TRITON_CLOUD_CREDENTIAL_PATH names."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from penstock.server import cli
from penstock.server.cortex.stored_model import StoredModel
from penstock.server.repository.depot import Depot
from penstock.server.repository.mirrors import Mirrors
from penstock.server.repository.remote import Remote, RemoteError
from penstock.server.seldon.importable.seldon_core.storage import Storage
from tests.server.repository.stores import ClientAuthenticationError, Guarded, guarded

ONE, TWO = "s3://one/models", "s3://two/models"


@pytest.fixture
def bucket() -> Iterator[type[Guarded]]:
    """Two buckets with a model and a key each."""
    with guarded() as made:
        store = made(key="first")
        for name in ("one", "two"):
            store.pipe_file(f"s3://{name}/models/{name}/config.pbtxt", name.encode())
        made.keys.update(one="k1", two="k2")
        yield made


class Keys:
    """The file, and what it says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def say(self, **keys: str) -> None:
        """Write the key of each bucket."""
        entries = {f"s3://{name}": {"key_id": key, "secret_key": "hunter2"} for name, key in keys.items()}
        self.path.write_text(json.dumps({"s3": entries}))


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", str(tmp_path / "cloud.json"))
    return Keys(tmp_path / "cloud.json")


@pytest.fixture
def remote(bucket: type[Guarded], keys: Keys) -> Iterator[Remote]:
    """The first bucket, opened with its key."""
    keys.say(one="k1")
    made = Remote(ONE)
    made.open()
    yield made
    made.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class TestKeys:
    def test_each_repository_is_opened_with_its_own(self, bucket: type[Guarded], keys: Keys) -> None:
        keys.say(one="k1", two="k2")
        mirrors = Mirrors.from_paths([ONE, TWO])
        mirrors.open()
        try:
            assert mirrors.refresh_all() == ({}, [])
            assert mirrors.names() == ["one", "two"]
        finally:
            mirrors.close()

    def test_the_key_of_another_opens_nothing(self, bucket: type[Guarded], keys: Keys) -> None:
        keys.say(one="k2")
        with pytest.raises(RemoteError, match=rf"^{ONE}: permission denied: Access Denied$"):
            Remote(ONE).open()

    def test_no_client_is_kept_for_others_with_a_key(self, bucket: type[Guarded], keys: Keys, remote: Remote) -> None:
        assert bucket.made[-1] == {"key": "k1", "secret": "hunter2", "token": None, "anon": False}
        assert fsspec.filesystem("s3", **bucket.made[-1]) is not remote._depot.filesystem

    def test_an_error_of_the_store_does_not_tell_them(self, bucket: type[Guarded], remote: Remote) -> None:
        bucket.fails["/one/models"] = RuntimeError("bad signature of hunter2")
        with pytest.raises(RemoteError, match=rf"^{ONE}: RuntimeError: bad signature of \*\*\*$"):
            remote.names()


class TestChanges:
    def test_a_file_that_was_written_anew_counts_at_the_next_look(
        self, bucket: type[Guarded], keys: Keys, remote: Remote
    ) -> None:
        assert remote.refresh_all() == {}
        bucket.keys["one"] = "new"
        with pytest.raises(RemoteError, match="permission denied"):
            remote.refresh_all()

        keys.say(one="new")
        assert remote.refresh_all() == {}
        assert remote.names() == ["one"]

    def test_one_model_that_is_loaded_is_enough_of_a_look(
        self, bucket: type[Guarded], keys: Keys, remote: Remote
    ) -> None:
        bucket.keys["one"] = "new"
        keys.say(one="new")
        remote.refresh("one")

        assert (remote.root / "one" / "config.pbtxt").read_text() == "one"

    def test_the_client_is_kept_while_nothing_changes(self, bucket: type[Guarded], keys: Keys, remote: Remote) -> None:
        made = len(bucket.made)
        remote.refresh_all()
        remote.names()

        assert len(bucket.made) == made

    def test_a_file_that_cannot_be_read_changes_nothing_and_is_told_once(
        self, bucket: type[Guarded], keys: Keys, remote: Remote, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys.path.write_text("{")
        assert remote.refresh_all() == {}
        assert remote.refresh_all() == {}
        keys.path.unlink()
        assert remote.refresh_all() == {}

        first, second = warnings(caplog)
        assert first.startswith(f"{ONE}: {keys.path}: not valid JSON: ")
        assert first.endswith("; the previous credentials stay in use")
        assert second.startswith(f"{ONE}: {keys.path}: cannot be read: ")


class TestTelling:
    def test_a_mistake_in_the_file_stops_the_start(self, bucket: type[Guarded], keys: Keys) -> None:
        keys.say(two="k2")
        with pytest.raises(RemoteError) as caught:
            Mirrors.from_paths([ONE]).open()

        assert (
            str(caught.value) == f'{ONE}: {keys.path}: s3: has no entry that is a prefix of this URL, and none named ""'
        )

    def test_check_tells_it(self, bucket: type[Guarded], keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
        keys.path.write_text('{"s3": {"": {"key_id": "hunter2"}}}')

        assert cli.main(["check", ONE]) == 1
        text = f'penstock: {ONE}: {keys.path}: s3, "": key_id and secret_key must be set together\n'
        assert capsys.readouterr().err == text

    def test_a_name_that_means_nothing_is_told(
        self, bucket: type[Guarded], keys: Keys, caplog: pytest.LogCaptureFixture
    ) -> None:
        bucket.keys["one"] = None
        keys.path.write_text('{"s3": {"": {"access_key": "hunter2"}}}')
        Remote(ONE).open()

        assert f'{ONE}: ignoring unknown keys: s3, "", access_key' in warnings(caplog)


class TestNobody:
    """Source: the AWS SDK that Triton uses signs nothing where it finds no keys; and as.h."""

    NONE_HAD = ClientAuthenticationError("DefaultAzureCredential failed to retrieve a token from the included ones")

    def test_a_public_bucket_needs_no_credentials(
        self, bucket: type[Guarded], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.delenv("TRITON_CLOUD_CREDENTIAL_PATH", raising=False)
        bucket.keys["one"] = None
        remote = Remote(ONE)
        remote.open()
        try:
            assert remote.refresh_all() == {}
            assert remote.names() == ["one"]
        finally:
            remote.close()
        assert warnings(caplog) == [f"{ONE}: no credentials found, using anonymous access"]

    def test_nor_does_a_public_container(self, bucket: type[Guarded]) -> None:
        bucket.lacks = self.NONE_HAD
        bucket.keys["one"] = None
        remote = Remote("as://acct/one/models")
        remote.open()
        remote.close()

        assert bucket.made[-1] == {"account_name": "acct", "anon": True}

    @pytest.mark.parametrize("error", [NONE_HAD, ClientAuthenticationError("the key is wrong")])
    def test_one_whose_identity_was_asked_for_does(
        self, bucket: type[Guarded], monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        if error is self.NONE_HAD:
            aio = SimpleNamespace(DefaultAzureCredential=object)
            monkeypatch.setitem(sys.modules, "azure", SimpleNamespace())
            monkeypatch.setitem(sys.modules, "azure.identity", SimpleNamespace(aio=aio))
            monkeypatch.setenv("AZURE_STORAGE_AUTH_TYPE", "default")
        bucket.lacks = error
        bucket.keys["one"] = None
        with pytest.raises(RemoteError, match=f"ClientAuthenticationError: {error}$"):
            Remote("as://acct/one/models").open()

    def test_another_bucket_does(self, bucket: type[Guarded], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_CLOUD_CREDENTIAL_PATH", raising=False)
        with pytest.raises(RemoteError, match="permission denied: Access Denied"):
            Remote(ONE).open()


class TestPlaces:
    @pytest.mark.parametrize(("scheme", "cloud"), [("s3", "AWS"), ("gs", "GCS"), ("as", "AZURE")])
    def test_copies_are_made_where_tritons_variable_says(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, cloud: str
    ) -> None:
        monkeypatch.setenv(f"TRITON_{cloud}_MOUNT_DIRECTORY", str(tmp_path))
        remote = Remote(f"{scheme}://b/models")
        elsewhere = Remote("https://h/models")
        try:
            assert remote.root.parent.parent == tmp_path
            assert elsewhere.root.parent.parent != tmp_path
        finally:
            remote.close()
            elsewhere.close()
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_is_not_there_stops_the_start(
        self, bucket: type[Guarded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_AWS_MOUNT_DIRECTORY", str(tmp_path / "none"))
        with pytest.raises(RemoteError) as caught:
            Remote(ONE).open()

        assert str(caught.value) == f"{ONE}: TRITON_AWS_MOUNT_DIRECTORY: {tmp_path}/none: No such file or directory"


def test_azure_and_google_get_what_is_said_of_them(bucket: type[Guarded], keys: Keys, tmp_path: Path) -> None:
    google = tmp_path / "google.json"
    google.write_text('{"type": "service_account"}')
    keys.path.write_text(
        json.dumps({"gs": {"": str(google)}, "as": {"as://acct/c": {"account_str": "", "account_key": "hunter2"}}})
    )
    for url, options in (
        ("gs://one/models", {"token": str(google)}),
        ("as://acct/c/models", {"account_name": "acct", "account_key": "hunter2"}),
    ):
        with pytest.raises(RemoteError):  # that is no key of these buckets
            Remote(url).open()
        assert options in bucket.made


def test_googles_file_that_is_written_anew_where_it_was_is_another(
    bucket: type[Guarded], keys: Keys, tmp_path: Path
) -> None:
    google = tmp_path / "google.json"
    keys.path.write_text(json.dumps({"gs": {"": str(google)}}))
    depot = Depot("gs://one/models")
    for key in ("a", "a", "b"):
        google.write_text(json.dumps({"type": "service_account", "private_key": key}))
        depot.reconnect()

    assert bucket.made.count({"token": str(google)}) == 2


def test_what_cortex_and_seldon_read_is_read_as_nobody_too_where_nobody_has_a_key(
    bucket: type[Guarded], tmp_path: Path
) -> None:
    bucket.keys["one"] = None

    assert "one/config.pbtxt" in StoredModel(ONE).list_files()
    assert (Path(Storage.download(ONE, str(tmp_path))) / "one" / "config.pbtxt").read_text() == "one"
