"""Credentials from TRITON_CLOUD_CREDENTIAL_PATH and Triton's Azure variables, as passed to the stores' packages."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.repository.address import Address
from penstock.server.repository.credentials import CredentialError, find_credentials, longest_prefix, with_credentials

NAMES = ["", "s3://", "s3://b", "s3://bu", "s3://bu/models", "s3://c", "s3://bu/models/deep"]


def environ(folder: Path, content: Any, **more: str) -> dict[str, str]:
    """An environment that names a file with this content."""
    file = folder / "cloud.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return {"TRITON_CLOUD_CREDENTIAL_PATH": str(file), **more}


def complete(url: str, variables: dict[str, str]) -> Address:
    address = Address.parse(url)
    return with_credentials(address, find_credentials(address, variables))


@pytest.fixture
def identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for azure.identity.aio: each credential is its constructor's arguments."""
    aio = SimpleNamespace(
        DefaultAzureCredential=lambda: "default", ManagedIdentityCredential=lambda client_id: ("managed", client_id)
    )
    monkeypatch.setitem(sys.modules, "azure", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "azure.identity", SimpleNamespace(aio=aio))


class TestChoice:
    @given(
        st.lists(st.sampled_from(NAMES), unique=True), st.sampled_from(["s3://bucket", "s3://bu/models/m", "s3://x"])
    )
    def test_the_entry_with_the_longest_prefix_of_the_url_is_used(self, names: list[str], url: str) -> None:
        chosen = longest_prefix(dict.fromkeys(names), url)

        fitting = [name for name in names if url[: len(name)] == name]
        assert (chosen is None) == (not fitting)
        assert chosen is None or (chosen in fitting and all(len(name) <= len(chosen) for name in fitting))

    def test_each_bucket_gets_the_keys_of_its_entry(self, tmp_path: Path) -> None:
        entries = {name: {"key_id": f"key of {name}", "secret_key": "hush"} for name in ("", "s3://two")}
        variables = environ(tmp_path, {"s3": entries})

        assert complete("s3://one/models", variables).options["key"] == "key of "
        assert complete("s3://two/models", variables).options["key"] == "key of s3://two"
        assert complete("s3://two-more/models", variables).options["key"] == "key of s3://two"

    def test_the_endpoint_of_a_url_is_part_of_the_prefix(self, tmp_path: Path) -> None:
        variables = environ(
            tmp_path, {"s3": {"s3://https://host:443/b": {"key_id": "k", "secret_key": "s", "region": "r"}}}
        )

        options = complete("s3://https://host:443/b/models", variables).options
        assert options["client_kwargs"] == {"endpoint_url": "https://host:443", "region_name": "r"}
        with pytest.raises(CredentialError, match='s3: has no entry that is a prefix of this URL, and none named ""'):
            complete("s3://b/models", variables)

    def test_without_a_credential_file_no_options_are_passed(self) -> None:
        for url in ("s3://b/m", "gs://b/m", "https://h/m", "abfs://c/m"):
            assert complete(url, {"TRITON_CLOUD_CREDENTIAL_PATH": ""}).options == {}

    def test_stores_outside_the_clouds_ignore_the_credential_file(self, tmp_path: Path) -> None:
        assert complete("https://h/m", environ(tmp_path, "no json")).options == {}


class TestS3:
    def of(self, tmp_path: Path, **entry: Any) -> Any:
        return complete("s3://b/m", environ(tmp_path, {"s3": {"": entry}})).options

    def test_a_pair_of_keys_takes_precedence_over_a_profile(self, tmp_path: Path) -> None:
        options = self.of(tmp_path, key_id="k", secret_key="s", session_token="t", region="eu-west-1", profile="p")

        pair = {"key": "k", "secret": "s", "token": "t", "anon": False}
        assert options == {**pair, "client_kwargs": {"region_name": "eu-west-1"}}

    def test_the_session_token_of_the_environment_is_not_used_with_configured_keys(self, tmp_path: Path) -> None:
        options = self.of(tmp_path, key_id="k", secret_key="s", session_token="", region="", profile="")

        assert options == {"key": "k", "secret": "s", "token": None, "anon": False}

    def test_a_profile_takes_precedence_over_keys_of_the_environment(self, tmp_path: Path) -> None:
        options = self.of(tmp_path, profile="p")

        assert options == {"profile": "p", "key": None, "secret": None, "token": None, "anon": False}

    def test_an_empty_entry_passes_no_options(self, tmp_path: Path) -> None:
        assert self.of(tmp_path, key_id="", secret_key=None) == {}


class TestGoogle:
    def test_the_entry_is_the_path_of_a_google_credentials_file(self, tmp_path: Path) -> None:
        file = tmp_path / "google.json"
        file.write_text('{"type": "authorized_user"}')
        variables = environ(tmp_path, {"gs": {"": "", "gs://private": str(file)}})

        assert complete("gs://private/m", variables).options == {"token": str(file)}
        assert complete("gs://public/m", variables).options == {}

    @pytest.mark.parametrize("entry", ["none.json", '{"private_key": "hunter2"}' * 200, "hunter2\0", "other", "deep"])
    def test_an_invalid_google_entry_is_rejected_without_revealing_its_content(
        self, tmp_path: Path, entry: str
    ) -> None:
        (tmp_path / "other").write_text('{"type": "external_account", "secret": "hunter2"}')
        (tmp_path / "deep").write_text("[" * 100_000)
        with pytest.raises(
            CredentialError, match=r'cloud\.json: gs, "": must be empty or the path of a Google credentials file'
        ) as caught:
            complete("gs://b/m", environ(tmp_path, {"gs": {"": f"{tmp_path}/{entry}" if len(entry) < 6 else entry}}))
        assert "hunter2" not in str(caught.value)


@pytest.mark.usefixtures("identities")
class TestAzure:
    URL = "as://acct.blob.core.windows.net/c/m"

    @pytest.mark.parametrize(
        ("entry", "options"),
        [
            ({"account_str": "", "account_key": "k"}, {"account_name": "acct", "account_key": "k"}),
            ({"account_str": "other", "account_key": "k"}, {"account_name": "other", "account_key": "k"}),
            ({"account_str": "", "account_key": ""}, {"account_name": "acct", "anon": True}),
            ({"auth_type": "key"}, {"account_name": "acct", "anon": True}),
            ({"auth_type": "default", "account_key": "k"}, {"account_name": "acct", "credential": "default"}),
            ({"auth_type": "managed_identity"}, {"account_name": "acct", "credential": ("managed", None)}),
            (
                {"auth_type": "managed_identity", "client_id": "id"},
                {"account_name": "acct", "credential": ("managed", "id")},
            ),
        ],
    )
    def test_each_azure_entry_becomes_its_options(
        self, tmp_path: Path, entry: dict[str, str], options: dict[str, Any]
    ) -> None:
        assert complete(self.URL, environ(tmp_path, {"as": {"": entry}}, AZURE_STORAGE_KEY="no")).options == options

    @pytest.mark.parametrize(
        ("variables", "options"),
        [
            ({}, {"account_name": "acct"}),
            ({"AZURE_STORAGE_KEY": "k"}, {"account_name": "acct", "account_key": "k"}),
            (
                {"AZURE_STORAGE_KEY": "k", "AZURE_STORAGE_ACCOUNT": "other"},
                {"account_name": "other", "account_key": "k"},
            ),
            ({"AZURE_STORAGE_AUTH_TYPE": "default"}, {"account_name": "acct", "credential": "default"}),
            (
                {"AZURE_STORAGE_AUTH_TYPE": "managed_identity", "AZURE_STORAGE_CLIENT_ID": "id"},
                {"account_name": "acct", "credential": ("managed", "id")},
            ),
        ],
    )
    def test_azure_variables_become_options_without_a_credential_file(
        self, variables: dict[str, str], options: dict[str, Any]
    ) -> None:
        assert complete(self.URL, variables).options == options

    def test_an_azure_auth_type_variable_with_an_unknown_value_is_an_error(self) -> None:
        with pytest.raises(CredentialError) as caught:
            complete(self.URL, {"AZURE_STORAGE_AUTH_TYPE": "magic"})
        assert str(caught.value) == "AZURE_STORAGE_AUTH_TYPE: must be key, managed_identity or default"

    def test_an_incomplete_azure_url_is_left_unchanged(self, tmp_path: Path) -> None:
        assert complete("as://acct", environ(tmp_path, {"as": {"": {}}})).url == "as://acct"


class TestMistakes:
    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ("{", "not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
            ("[" * 100_000, "not valid JSON: "),
            ([], "it must be an object"),
            ({"s3": []}, "s3 must be an object"),
            (
                {"s3": {"key_id": "k"}},
                's3, "key_id": must be an object with secret_key, key_id, region, session_token, profile',
            ),
            ({"s3": {"": {"key_id": 7, "secret_key": "s"}}}, 's3, "", key_id: must be a string'),
            ({"s3": {"": {}, "s3://b": {"key_id": "k"}}}, 's3, "s3://b": key_id and secret_key must be set together'),
            ({}, 's3: has no entry that is a prefix of this URL, and none named ""'),
            ({"gs": {"": "x"}}, "s3: has no entry that is a prefix of this URL"),
        ],
    )
    def test_a_mistake_in_the_file_is_reported_with_its_key(self, tmp_path: Path, content: Any, text: str) -> None:
        with pytest.raises(CredentialError) as caught:
            complete("s3://b/m", environ(tmp_path, content))
        assert str(caught.value).startswith(f"{tmp_path / 'cloud.json'}: {text}")

    def test_all_mistakes_of_a_section_are_reported_one_per_line(self, tmp_path: Path) -> None:
        with pytest.raises(CredentialError) as caught:
            complete("s3://b/m", environ(tmp_path, {"s3": {"": {"region": []}, "s3://x": {"region": 1, "profile": 2}}}))
        assert len(str(caught.value).splitlines()) == 2

    def test_mistakes_in_sections_of_other_stores_are_ignored(self, tmp_path: Path) -> None:
        assert complete("s3://b/m", environ(tmp_path, {"s3": {"": {}}, "as": 7, "gs": {"": 7}})).options == {}

    @pytest.mark.parametrize("name", ["nowhere.json", "."])
    def test_an_unreadable_credential_file_is_an_error(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(CredentialError, match=f"^{tmp_path / name}: cannot be read: "):
            complete("s3://b/m", {"TRITON_CLOUD_CREDENTIAL_PATH": str(tmp_path / name)})

    def test_unknown_keys_of_an_entry_are_collected(self, tmp_path: Path) -> None:
        found = find_credentials(
            Address.parse("s3://b/m"), environ(tmp_path, {"s3": {"s3://b": {"access_key": "hunter2"}}})
        )

        assert found.unknown_keys == ('s3, "s3://b", access_key',)


def test_the_repr_of_credentials_has_no_secret(tmp_path: Path) -> None:
    keys = {"key_id": "k", "secret_key": "hunter2", "session_token": "hunter3"}
    address = Address.parse("s3://b/m")
    credentials = find_credentials(address, environ(tmp_path, {"s3": {"": keys}}))

    assert "hunter" not in f"{credentials!r} {with_credentials(address, credentials)!r}"
    assert with_credentials(address, credentials).redact("hunter2, hunter3") == "***, ***"


SECRETS = st.recursive(
    st.one_of(st.just("hunter2"), st.none(), st.integers(), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(["", "secret_key", "key_id", "account_key", "auth_type", "profile"]), inner),
    ),
)


@given(SECRETS, st.sampled_from(["s3", "gs", "as"]))
def test_no_error_or_repr_reveals_a_secret_of_the_file(content: Any, scheme: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        variables = environ(Path(folder), {scheme: content})
        address = Address.parse(f"{scheme}://b/m")
        try:
            credentials = find_credentials(address, variables)
        except CredentialError as error:
            assert "hunter2" not in str(error)  # noqa: PT017 - some of these files have no mistake
            return
    assert "hunter2" not in repr(credentials)
    done = with_credentials(address, credentials)
    assert "hunter2" not in f"{done!r} {done}"
    if {"hunter2"} & {credentials.values.get(key) for key in ("secret_key", "session_token", "account_key")}:
        assert done.redact("denied to hunter2") == "denied to ***"
