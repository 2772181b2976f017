"""Credentials: how to access a store, from the file TRITON_CLOUD_CREDENTIAL_PATH or Triton's other variables.

Used by what opens the store at an Address. Credentials configured nowhere are looked up by the store's package.
Source: Triton core, filesystem/api.cc, and implementations/s3.h, gcs.h and as.h.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .address import Address
from .findings import MistakeError, read_text

FILE_VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"
MOUNT_VARIABLES = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY", "gs": "TRITON_GCS_MOUNT_DIRECTORY", "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}  # fmt: skip
"""The variables that name the folder for local copies, by URL scheme."""
_ENTRY_KEYS: Mapping[str, tuple[str, ...]] = {
    "s3": ("secret_key", "key_id", "region", "session_token", "profile"),
    "as": ("account_str", "auth_type", "account_key", "client_id"),
    "gs": (),
}
"""The keys allowed in an entry of each section. An entry of `gs` is the path of Google's file, not an object."""
_AZURE_VARIABLES = {
    "account_str": "AZURE_STORAGE_ACCOUNT", "auth_type": "AZURE_STORAGE_AUTH_TYPE",
    "account_key": "AZURE_STORAGE_KEY", "client_id": "AZURE_STORAGE_CLIENT_ID",
}  # fmt: skip
_SECRET_KEYS = ("secret_key", "session_token", "account_key")
_PATH, _CONTENT = "path", "content"
"""Of Google's file. The content is kept as a digest, so that a file rewritten at the same path is noticed."""
_GOOGLE_TYPES = ("service_account", "authorized_user")
"""Source: Triton accepts no other types, nor does gcsfs."""
_AUTH_TYPES = ("", "key", "managed_identity", "default")


class CredentialError(Exception):
    """Credentials are not usable. The text names the locations of the mistakes and holds no secrets."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of one store. `from_file`: from the file. `unknown_keys`: unrecognized names in its entry."""

    values: Mapping[str, str] = field(repr=False, default_factory=dict)
    from_file: bool = False
    unknown_keys: tuple[str, ...] = ()


def find_credentials(address: Address, environ: Mapping[str, str] = os.environ) -> Credentials:
    """Return the credentials of a store, only from the file if one is named. Raises: CredentialError."""
    scheme = address.original.partition("://")[0]
    file = environ.get(FILE_VARIABLE)
    if scheme not in _ENTRY_KEYS or (not file and scheme != "as"):
        return Credentials()
    if file:
        return _from_file(Path(file), scheme, address.original)
    values = {key: environ.get(name, "") for key, name in _AZURE_VARIABLES.items()}
    if values["auth_type"] not in _AUTH_TYPES:
        raise CredentialError(f"{_AZURE_VARIABLES['auth_type']}: {_auth_type_expected()}")
    return Credentials(values)


def with_credentials(address: Address, credentials: Credentials) -> Address:
    """Return the Address with the options by which the store's package takes these credentials."""
    values = credentials.values
    if not values:
        return address
    options = _OPTIONS_BY_SCHEME[address.original.partition("://")[0]](address.options, credentials)
    secrets = {*address.secrets, *(values.get(key, "") for key in _SECRET_KEYS)} - {""}
    return replace(address, options=options, secrets=tuple(sorted(secrets, key=len, reverse=True)))


# -- the file ------------------------------------------------------------------------------------------------------


def _read_section(file: Path, scheme: str) -> dict[str, Any]:
    """Return the entries for URLs of a scheme, by URL prefix."""
    try:
        content = json.loads(read_text(file))
    except MistakeError as error:
        raise CredentialError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise CredentialError(f"{file}: not valid JSON: {error}") from None
    section = content.get(scheme, {}) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        raise CredentialError(f"{file}: {scheme if isinstance(content, dict) else 'it'} must be an object")
    if mistakes := [text for name, entry in section.items() for text in _entry_mistakes(scheme, name, entry)]:
        raise CredentialError("\n".join(f"{file}: {text}" for text in mistakes))
    return section


def _entry_mistakes(scheme: str, name: str, entry: Any) -> list[str]:
    """Describe the mistakes in an entry without quoting from it."""
    name_shown = _entry_title(scheme, name)
    if scheme == "gs":
        return (
            [] if isinstance(entry, str) else [f"{name_shown}: must be a string, the path of a Google credentials file"]
        )
    if not isinstance(entry, dict):
        return [f"{name_shown}: must be an object with {', '.join(_ENTRY_KEYS[scheme])}"]
    mistakes = [
        f"{name_shown}, {key}: must be a string"
        for key in _ENTRY_KEYS[scheme]
        if not isinstance(entry.get(key) or "", str)
    ]
    if not mistakes and (entry.get("auth_type") or "") not in _AUTH_TYPES and scheme == "as":
        mistakes.append(f"{name_shown}, auth_type: {_auth_type_expected()}")
    if not mistakes and scheme == "s3" and bool(entry.get("key_id")) != bool(entry.get("secret_key")):
        mistakes.append(f"{name_shown}: key_id and secret_key must be set together")
    return mistakes


def _entry_title(scheme: str, name: str) -> str:
    """Name an entry. The URL in its name may contain a password, as any URL may."""
    return f"{scheme}, {json.dumps(Address.parse(name).redacted)}"


def _auth_type_expected() -> str:
    return f"must be {', '.join(_AUTH_TYPES[1:-1])} or {_AUTH_TYPES[-1]}"


def _from_file(file: Path, scheme: str, url: str) -> Credentials:
    """Return the entry with the longest name that is a prefix of the URL."""
    section = _read_section(file, scheme)
    name = longest_prefix(section, url)
    if name is None:
        raise CredentialError(f'{file}: {scheme}: has no entry that is a prefix of this URL, and none named ""')
    entry = section[name]
    if scheme == "gs":
        content = _read_google_file(entry) if entry else b""
        if content is None:
            text = "must be empty or the path of a Google credentials file of a service account or a user"
            raise CredentialError(f"{file}: {_entry_title(scheme, name)}: {text}")
        return Credentials({_PATH: entry, _CONTENT: hashlib.sha256(content).hexdigest()}, from_file=True)
    values = {key: entry.get(key) or "" for key in _ENTRY_KEYS[scheme]}
    unknown = tuple(f"{_entry_title(scheme, name)}, {key}" for key in entry if key not in values)
    return Credentials(values, from_file=True, unknown_keys=unknown)


def _read_google_file(path: str) -> bytes | None:
    """Return the content of Google's file, or None if it is not one, for example if the path is the key itself."""
    try:
        content = Path(path).read_bytes()
        parsed = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(parsed, dict) and parsed.get("type") in _GOOGLE_TYPES else None


def longest_prefix(names: Mapping[str, Any], url: str) -> str | None:
    """Return the longest of the names that is a prefix of the URL, or None."""
    return max((name for name in names if url.startswith(name)), key=len, default=None)


# -- what the packages take ----------------------------------------------------------------------------------------


def _s3_options(options: Mapping[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Use the key pair, or else the profile, or else what the package finds.

    None stops the package from reading the environment, whose token would otherwise be combined with these keys.
    """
    values, result = credentials.values, dict(options)
    if values["key_id"]:
        result |= {"key": values["key_id"], "secret": values["secret_key"], "token": values["session_token"] or None}
        result["anon"] = False
    elif values["profile"]:
        result |= {"profile": values["profile"], "key": None, "secret": None, "token": None, "anon": False}
    if values["region"]:
        result["client_kwargs"] = {**result.get("client_kwargs", {}), "region_name": values["region"]}
    return result


def _gs_options(options: Mapping[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Use the file, or else what the package finds: the attached service account, and finally anonymous access."""
    path = credentials.values[_PATH]
    return {**options, "token": path} if path else dict(options)


def _azure_options(options: Mapping[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Use the identity, or else the key. With neither, a file means anonymous; without a file the package searches."""
    values, result = credentials.values, dict(options)
    result["account_name"] = values["account_str"] or result.get("account_name")
    if values["auth_type"] in {"managed_identity", "default"}:
        from azure.identity import aio

        if values["auth_type"] == "default":
            result["credential"] = aio.DefaultAzureCredential()
        else:
            result["credential"] = aio.ManagedIdentityCredential(client_id=values["client_id"] or None)
    elif values["account_key"]:
        result["account_key"] = values["account_key"]
    elif credentials.from_file:
        result["anon"] = True
    return result


_OPTIONS_BY_SCHEME: Mapping[str, Callable[[Mapping[str, Any], Credentials], dict[str, Any]]] = {
    "s3": _s3_options, "gs": _gs_options, "as": _azure_options,
}  # fmt: skip
