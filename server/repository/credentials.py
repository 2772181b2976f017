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

FILE = "TRITON_CLOUD_CREDENTIAL_PATH"
MOUNTS = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY", "gs": "TRITON_GCS_MOUNT_DIRECTORY", "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}  # fmt: skip
"""The variables that name the folder for local copies, by URL scheme."""
_KEYS: Mapping[str, tuple[str, ...]] = {
    "s3": ("secret_key", "key_id", "region", "session_token", "profile"),
    "as": ("account_str", "auth_type", "account_key", "client_id"),
    "gs": (),
}
"""The keys allowed in an entry of each section. An entry of `gs` is the path of Google's file, not an object."""
_AZURE_NAMES = {
    "account_str": "AZURE_STORAGE_ACCOUNT", "auth_type": "AZURE_STORAGE_AUTH_TYPE",
    "account_key": "AZURE_STORAGE_KEY", "client_id": "AZURE_STORAGE_CLIENT_ID",
}  # fmt: skip
_SECRETS = ("secret_key", "session_token", "account_key")
_PATH, _CONTENT = "path", "content"
"""Of Google's file. The content is kept as a digest, so that a file rewritten at the same path is noticed."""
_GOOGLE_TYPES = ("service_account", "authorized_user")
"""Source: Triton accepts no other types, nor does gcsfs."""
_AUTH_TYPES = ("", "key", "managed_identity", "default")


class CredentialError(Exception):
    """Credentials are not usable. The text names the locations of the mistakes and holds no secrets."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of one store. `filed`: from the file. `unknown`: unrecognized names in its entry."""

    said: Mapping[str, str] = field(repr=False, default_factory=dict)
    filed: bool = False
    unknown: tuple[str, ...] = ()


def credentials_of(address: Address, environ: Mapping[str, str] = os.environ) -> Credentials:
    """Return the credentials of a store, only from the file if one is named. Raises: CredentialError."""
    scheme = address.given.partition("://")[0]
    file = environ.get(FILE)
    if scheme not in _KEYS or (not file and scheme != "as"):
        return Credentials()
    if file:
        return _filed(Path(file), scheme, address.given)
    said = {key: environ.get(name, "") for key, name in _AZURE_NAMES.items()}
    if said["auth_type"] not in _AUTH_TYPES:
        raise CredentialError(f"{_AZURE_NAMES['auth_type']}: {_unknown_type()}")
    return Credentials(said)


def credentialed(address: Address, credentials: Credentials) -> Address:
    """Return the Address with the options by which the store's package takes these credentials."""
    said = credentials.said
    if not said:
        return address
    options = _OPTIONS[address.given.partition("://")[0]](address.options, credentials)
    secrets = {*address.secrets, *(said.get(key, "") for key in _SECRETS)} - {""}
    return replace(address, options=options, secrets=tuple(sorted(secrets, key=len, reverse=True)))


# -- the file ------------------------------------------------------------------------------------------------------


def _section(file: Path, scheme: str) -> dict[str, Any]:
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
    if found := [text for name, entry in section.items() for text in _mistakes(scheme, name, entry)]:
        raise CredentialError("\n".join(f"{file}: {text}" for text in found))
    return section


def _mistakes(scheme: str, name: str, entry: Any) -> list[str]:
    """Describe the mistakes in an entry without quoting from it."""
    place = _place(scheme, name)
    if scheme == "gs":
        return [] if isinstance(entry, str) else [f"{place}: must be a string, the path of a Google credentials file"]
    if not isinstance(entry, dict):
        return [f"{place}: must be an object with {', '.join(_KEYS[scheme])}"]
    found = [f"{place}, {key}: must be a string" for key in _KEYS[scheme] if not isinstance(entry.get(key) or "", str)]
    if not found and (entry.get("auth_type") or "") not in _AUTH_TYPES and scheme == "as":
        found.append(f"{place}, auth_type: {_unknown_type()}")
    if not found and scheme == "s3" and bool(entry.get("key_id")) != bool(entry.get("secret_key")):
        found.append(f"{place}: key_id and secret_key must be set together")
    return found


def _place(scheme: str, name: str) -> str:
    """Name an entry. The URL in its name may contain a password, as any URL may."""
    return f"{scheme}, {json.dumps(Address.of(name).shown)}"


def _unknown_type() -> str:
    return f"must be {', '.join(_AUTH_TYPES[1:-1])} or {_AUTH_TYPES[-1]}"


def _filed(file: Path, scheme: str, url: str) -> Credentials:
    """Return the entry with the longest name that is a prefix of the URL."""
    section = _section(file, scheme)
    name = longest(section, url)
    if name is None:
        raise CredentialError(f'{file}: {scheme}: has no entry that is a prefix of this URL, and none named ""')
    entry = section[name]
    if scheme == "gs":
        content = _googles(entry) if entry else b""
        if content is None:
            text = "must be empty or the path of a Google credentials file of a service account or a user"
            raise CredentialError(f"{file}: {_place(scheme, name)}: {text}")
        return Credentials({_PATH: entry, _CONTENT: hashlib.sha256(content).hexdigest()}, filed=True)
    said = {key: entry.get(key) or "" for key in _KEYS[scheme]}
    unknown = tuple(f"{_place(scheme, name)}, {key}" for key in entry if key not in said)
    return Credentials(said, filed=True, unknown=unknown)


def _googles(path: str) -> bytes | None:
    """Return the content of Google's file, or None if it is not one, for example if the path is the key itself."""
    try:
        content = Path(path).read_bytes()
        said = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(said, dict) and said.get("type") in _GOOGLE_TYPES else None


def longest(names: Mapping[str, Any], url: str) -> str | None:
    """Return the longest of the names that is a prefix of the URL, or None."""
    return max((name for name in names if url.startswith(name)), key=len, default=None)


# -- what the packages take ----------------------------------------------------------------------------------------


def _s3(options: Mapping[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Use the key pair, or else the profile, or else what the package finds.

    None stops the package from reading the environment, whose token would otherwise be combined with these keys.
    """
    said, made = credentials.said, dict(options)
    if said["key_id"]:
        made |= {"key": said["key_id"], "secret": said["secret_key"], "token": said["session_token"] or None}
        made["anon"] = False
    elif said["profile"]:
        made |= {"profile": said["profile"], "key": None, "secret": None, "token": None, "anon": False}
    if said["region"]:
        made["client_kwargs"] = {**made.get("client_kwargs", {}), "region_name": said["region"]}
    return made


def _gs(options: Mapping[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Use the file, or else what the package finds: the attached service account, and finally anonymous access."""
    path = credentials.said[_PATH]
    return {**options, "token": path} if path else dict(options)


def _azure(options: Mapping[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Use the identity, or else the key. With neither, a file means anonymous; without a file the package searches."""
    said, made = credentials.said, dict(options)
    made["account_name"] = said["account_str"] or made.get("account_name")
    if said["auth_type"] in {"managed_identity", "default"}:
        from azure.identity import aio

        if said["auth_type"] == "default":
            made["credential"] = aio.DefaultAzureCredential()
        else:
            made["credential"] = aio.ManagedIdentityCredential(client_id=said["client_id"] or None)
    elif said["account_key"]:
        made["account_key"] = said["account_key"]
    elif credentials.filed:
        made["anon"] = True
    return made


_OPTIONS: Mapping[str, Callable[[Mapping[str, Any], Credentials], dict[str, Any]]] = {
    "s3": _s3, "gs": _gs, "as": _azure,
}  # fmt: skip
