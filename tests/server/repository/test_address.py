from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.repository.address import Address, is_remote


@pytest.mark.parametrize("path", ["s3://bucket/models", "gs://b", "https://host/models", "as://a/c", "zip+x://f"])
def test_a_url_is_remote(path: str) -> None:
    assert is_remote(path)


@pytest.mark.parametrize("path", ["models", "/srv/models", "./s3:/x", "C:models", "://x", "1s://x"])
def test_a_path_is_not_remote(path: str) -> None:
    assert not is_remote(path)


class TestTritonUrls:
    """How URLs in Triton's own format are parsed."""

    @pytest.mark.parametrize(
        ("text", "url", "endpoint"),
        [
            ("s3://https://minio.local:9000/bucket/models", "s3://bucket/models", "https://minio.local:9000"),
            ("s3://http://10.0.0.1:9000//bucket///models/", "s3://bucket/models", "http://10.0.0.1:9000"),
            ("s3://localhost:9000/bucket", "s3://bucket", "http://localhost:9000"),
            ("s3://https://storage.example/bucket", "s3://bucket", "https://storage.example"),
        ],
    )
    def test_an_endpoint_in_an_s3_path_becomes_an_option(self, text: str, url: str, endpoint: str) -> None:
        address = Address.parse(text)

        assert address.url == url
        assert address.options == {"client_kwargs": {"endpoint_url": endpoint}}
        assert str(address) == text.rstrip("/")

    def test_a_plain_bucket_url_is_unchanged(self) -> None:
        assert (Address.parse("s3://bucket/a/b").url, Address.parse("s3://bucket/a/b").options) == (
            "s3://bucket/a/b",
            {},
        )

    def test_an_azure_path_names_the_account_and_the_container(self) -> None:
        address = Address.parse("as://acct.blob.core.windows.net/container/models")

        assert address.url == "abfs://container/models"
        assert address.options == {"account_name": "acct"}


class TestCredentials:
    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("sftp://bob:hunter2@host/models", "sftp://host/models"),
            ("sftp://bob:hun/ter2@host/models", "sftp://host/models"),
            ("https://hunter2@host/models", "https://host/models"),
            ("https://host/models?X-Amz-Signature=hunter2&e=1", "https://host/models"),
            ("as://account/container/models?se=1&sig=hunter2", "as://account/container/models?se=1&sig=***"),
            ("ftp://bob:hun%20ter2@host:21/models/", "ftp://host:21/models"),
            ("https://host:8443/a@b/models", "https://host:8443/a@b/models"),
        ],
    )
    def test_the_displayed_url_has_no_credentials(self, url: str, shown: str) -> None:
        address = Address.parse(url)

        assert str(address) == shown
        assert "hun" not in repr(address)

    @pytest.mark.parametrize(
        "text",
        [
            "cannot log in as bob with hunter2",
            "GET https://bob:hunter2@host/x failed",
            "https://elsewhere/x?sig=hunter2&se=3 is denied",
            "secret_key=hunter2",
        ],
    )
    def test_redacted_error_text_has_no_credentials(self, text: str) -> None:
        assert "hunter2" not in Address.parse("https://bob:hunter2@host/models").redact(text)

    def test_a_percent_encoded_password_is_also_redacted_when_decoded(self) -> None:
        cleaned = Address.parse("https://bob:hunter%202@host/x").redact("hunter 2, hunter%202")

        assert cleaned == "***, ***"

    @given(
        st.text(st.characters(codec="ascii", exclude_characters="@?#%[]"), min_size=6, max_size=12),
        st.sampled_from(["sftp", "https", "s3", "abfs"]),
    )
    def test_a_password_of_any_characters_is_never_displayed(self, password: str, scheme: str) -> None:
        address = Address.parse(f"{scheme}://user:Zz{password}@host/models")

        assert f"Zz{password}" not in str(address)
        assert f"Zz{password}" not in address.redact(f"refused {scheme}://user:Zz{password}@host: Zz{password}")
