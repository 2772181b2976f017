"""Repositories in cloud stores, with keys from the file that TRITON_CLOUD_CREDENTIAL_PATH names."""

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
from penstock.server.cortex.remote_model import RemoteModel
from penstock.server.repository.depot import Depot
from penstock.server.repository.mirrors import Mirrors
from penstock.server.repository.remote import Remote, RemoteError
from penstock.server.seldon.importable.seldon_core.storage import Storage
from tests.server.repository.stores import ClientAuthenticationError, Guarded, guarded

ONE, TWO = "s3://one/models", "s3://two/models"


@pytest.fixture
def bucket() -> Iterator[type[Guarded]]:
    """Two buckets with a model and a key each."""
    with guarded() as storage:
        store = storage(key="first")
        for name in ("one", "two"):
            store.pipe_file(f"s3://{name}/models/{name}/config.pbtxt", name.encode())
        storage.keys.update(one="k1", two="k2")
        yield storage


class Keys:
    """The credential file of the test."""

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
    new_remote = Remote(ONE)
    new_remote.open()
    yield new_remote
    new_remote.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class TestKeys:
    def test_each_repository_is_opened_with_its_own_key(self, bucket: type[Guarded], keys: Keys) -> None:
        keys.say(one="k1", two="k2")
        mirrors = Mirrors.from_paths([ONE, TWO])
        mirrors.open()
        try:
            assert mirrors.refresh_all() == ({}, [])
            assert mirrors.names() == ["one", "two"]
        finally:
            mirrors.close()

    def test_a_repository_does_not_open_with_the_key_of_another_bucket(self, bucket: type[Guarded], keys: Keys) -> None:
        keys.say(one="k2")
        with pytest.raises(RemoteError, match=rf"^{ONE}: permission denied: Access Denied$"):
            Remote(ONE).open()

    def test_a_client_with_a_key_is_not_shared_through_the_cache_of_fsspec(
        self, bucket: type[Guarded], keys: Keys, remote: Remote
    ) -> None:
        assert bucket.opened_options[-1] == {"key": "k1", "secret": "hunter2", "token": None, "anon": False}
        assert fsspec.filesystem("s3", **bucket.opened_options[-1]) is not remote._depot.filesystem

    def test_an_error_of_the_store_does_not_reveal_the_keys(self, bucket: type[Guarded], remote: Remote) -> None:
        bucket.fails["/one/models"] = RuntimeError("bad signature of hunter2")
        with pytest.raises(RemoteError, match=rf"^{ONE}: RuntimeError: bad signature of \*\*\*$"):
            remote.names()


class TestChanges:
    def test_a_rewritten_credential_file_applies_at_the_next_refresh(
        self, bucket: type[Guarded], keys: Keys, remote: Remote
    ) -> None:
        assert remote.refresh_all() == {}
        bucket.keys["one"] = "new"
        with pytest.raises(RemoteError, match="permission denied"):
            remote.refresh_all()

        keys.say(one="new")
        assert remote.refresh_all() == {}
        assert remote.names() == ["one"]

    def test_a_rewritten_credential_file_applies_when_one_model_is_refreshed(
        self, bucket: type[Guarded], keys: Keys, remote: Remote
    ) -> None:
        bucket.keys["one"] = "new"
        keys.say(one="new")
        remote.refresh("one")

        assert (remote.root / "one" / "config.pbtxt").read_text() == "one"

    def test_the_client_is_kept_while_the_credential_file_is_unchanged(
        self, bucket: type[Guarded], keys: Keys, remote: Remote
    ) -> None:
        count = len(bucket.opened_options)
        remote.refresh_all()
        remote.names()

        assert len(bucket.opened_options) == count

    def test_an_unreadable_credential_file_is_logged_once_and_keeps_the_credentials(
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


class TestReporting:
    def test_a_mistake_in_the_credential_file_prevents_startup(self, bucket: type[Guarded], keys: Keys) -> None:
        keys.say(two="k2")
        with pytest.raises(RemoteError) as caught:
            Mirrors.from_paths([ONE]).open()

        assert (
            str(caught.value) == f'{ONE}: {keys.path}: s3: has no entry that is a prefix of this URL, and none named ""'
        )

    def test_check_reports_a_mistake_in_the_credential_file(
        self, bucket: type[Guarded], keys: Keys, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keys.path.write_text('{"s3": {"": {"key_id": "hunter2"}}}')

        assert cli.main(["check", ONE]) == 1
        text = f'penstock: {ONE}: {keys.path}: s3, "": key_id and secret_key must be set together\n'
        assert capsys.readouterr().err == text

    def test_an_unknown_key_in_the_credential_file_is_logged(
        self, bucket: type[Guarded], keys: Keys, caplog: pytest.LogCaptureFixture
    ) -> None:
        bucket.keys["one"] = None
        keys.path.write_text('{"s3": {"": {"access_key": "hunter2"}}}')
        Remote(ONE).open()

        assert f'{ONE}: ignoring unknown keys: s3, "", access_key' in warnings(caplog)


class TestAnonymousAccess:
    """Source: Triton's AWS SDK sends unsigned requests when it finds no keys; and Triton's as.h."""

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

    def test_a_public_azure_container_needs_no_credentials(self, bucket: type[Guarded]) -> None:
        bucket.lacks = self.NONE_HAD
        bucket.keys["one"] = None
        remote = Remote("as://acct/one/models")
        remote.open()
        remote.close()

        assert bucket.opened_options[-1] == {"account_name": "acct", "anon": True}

    @pytest.mark.parametrize("error", [NONE_HAD, ClientAuthenticationError("the key is wrong")])
    def test_a_failure_of_a_configured_azure_identity_is_an_error(
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

    def test_a_private_bucket_without_credentials_is_an_error(
        self, bucket: type[Guarded], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TRITON_CLOUD_CREDENTIAL_PATH", raising=False)
        with pytest.raises(RemoteError, match="permission denied: Access Denied"):
            Remote(ONE).open()


class TestMountFolders:
    @pytest.mark.parametrize(("scheme", "cloud"), [("s3", "AWS"), ("gs", "GCS"), ("as", "AZURE")])
    def test_local_copies_are_made_in_the_folder_of_tritons_variable(
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

    def test_a_missing_mount_folder_prevents_startup(
        self, bucket: type[Guarded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_AWS_MOUNT_DIRECTORY", str(tmp_path / "none"))
        with pytest.raises(RemoteError) as caught:
            Remote(ONE).open()

        assert str(caught.value) == f"{ONE}: TRITON_AWS_MOUNT_DIRECTORY: {tmp_path}/none: No such file or directory"


def test_azure_and_google_clients_get_their_credentials(bucket: type[Guarded], keys: Keys, tmp_path: Path) -> None:
    google = tmp_path / "google.json"
    google.write_text('{"type": "service_account"}')
    keys.path.write_text(
        json.dumps({"gs": {"": str(google)}, "as": {"as://acct/c": {"account_str": "", "account_key": "hunter2"}}})
    )
    for url, options in (
        ("gs://one/models", {"token": str(google)}),
        ("as://acct/c/models", {"account_name": "acct", "account_key": "hunter2"}),
    ):
        with pytest.raises(RemoteError):  # the buckets do not accept this key
            Remote(url).open()
        assert options in bucket.opened_options


def test_a_google_file_rewritten_in_place_makes_a_new_client(bucket: type[Guarded], keys: Keys, tmp_path: Path) -> None:
    google = tmp_path / "google.json"
    keys.path.write_text(json.dumps({"gs": {"": str(google)}}))
    depot = Depot("gs://one/models")
    for key in ("a", "a", "b"):
        google.write_text(json.dumps({"type": "service_account", "private_key": key}))
        depot.reconnect()

    assert bucket.opened_options.count({"token": str(google)}) == 2


def test_cortex_and_seldon_models_are_read_anonymously_without_credentials(
    bucket: type[Guarded], tmp_path: Path
) -> None:
    bucket.keys["one"] = None

    assert "one/config.pbtxt" in RemoteModel(ONE).list_files()
    assert (Path(Storage.download(ONE, str(tmp_path))) / "one" / "config.pbtxt").read_text() == "one"
