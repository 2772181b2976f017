"""Address: where a remote repository is, in fsspec's form and in a form that is safe to print.

Used by the modules that open remote repositories. credentials.py adds what the URL does not contain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
# the user may not have percent-encoded a "/" in the password; a colon followed by a port starts no password
_ACCOUNT = re.compile(r"(?s)://([^/@]*@|[^/:]*:(?!\d+/).*@)")
_ACCOUNT_IN_TEXT = re.compile(r"://([^/\s@]*@|[^/:\s]*:(?!\d+/)\S*@)")
_SECRET_PARAMETER = re.compile(
    r"(?i)((?:x-amz-|x-goog-)?(?:signature|credential|security-token)|sig|token|access_token|awsaccesskeyid|"
    r"googleaccessid|(?:account_|secret_|api_?)?key|secret|password)=[^&\s'\"]+"
)
# Source: Triton core, filesystem/implementations/s3.h and as.h
_S3_ENDPOINT = re.compile(r"s3://(?:(https?)://)?([^/:@]+)(?::(\d+))?/+(.+)")
_AZURE = re.compile(r"as://([^/]+)/+(.+)")


def is_remote(path: str) -> bool:
    """Return whether `path` is a URL instead of a path on this machine."""
    return _REMOTE.match(path) is not None


@dataclass(frozen=True, slots=True)
class Address:
    """A remote location, as a user gave it (`original`). Invariant: its `str` and `repr` hold no credentials."""

    url: str = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    redacted: str
    secrets: tuple[str, ...] = field(repr=False, default=())
    original: str = field(repr=False, default="")

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse a URL given by a user, including Triton's forms for S3 and Azure.

        `s3://HOST:PORT/BUCKET/PATH` and `s3://https://HOST:PORT/BUCKET/PATH` name the endpoint, and
        `as://ACCOUNT/CONTAINER/PATH` names the account.
        """
        url, options = text, dict[str, Any]()
        if (match := _S3_ENDPOINT.fullmatch(text)) and (match[1] or match[3]):
            port = f":{match[3]}" if match[3] else ""
            url = f"s3://{_collapse_slashes(match[4])}"
            options["client_kwargs"] = {"endpoint_url": f"{match[1] or 'http'}://{match[2]}{port}"}
        elif match := _AZURE.fullmatch(text):
            url, options["account_name"] = f"abfs://{_collapse_slashes(match[2])}", match[1].partition(".")[0]
        secrets = {*_secrets_in(text), *_secrets_in(url)} - {""}
        redacted = _ACCOUNT.sub("://", text)
        if url.startswith("http"):
            redacted = redacted.partition("?")[0]
        redacted = _SECRET_PARAMETER.sub(r"\1=***", redacted)
        return cls(url, options, redacted.rstrip("/"), tuple(sorted(secrets, key=len, reverse=True)), text)

    def __str__(self) -> str:
        return self.redacted

    def redact(self, text: str) -> str:
        """Remove credentials from a text, which may come from any library."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return _SECRET_PARAMETER.sub(r"\1=***", _ACCOUNT_IN_TEXT.sub("://", text))


def _collapse_slashes(path: str) -> str:
    return re.sub(r"/+", "/", path).rstrip("/")


def _secrets_in(url: str) -> set[str]:
    """Return the account, password and query of a URL, both as written and unquoted."""
    match = _ACCOUNT.search(url)
    account = match[1].removesuffix("@") if match else ""
    password = account.partition(":")[2]
    try:
        query = urlsplit(url).query
    except ValueError:
        query = ""
    return {secret for text in (account, password, query) if text for secret in (text, unquote(text))}
