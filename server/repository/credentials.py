"""Credentials: what the file that TRITON_CLOUD_CREDENTIAL_PATH names says of a store, or Triton's other variables.

Called by who opens the store at an Address. What is said nowhere is looked up by the store's package.
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
"""What names the folder in which copies are made, by the scheme of a URL."""
_KEYS: Mapping[str, tuple[str, ...]] = {
    "s3": ("secret_key", "key_id", "region", "session_token", "profile"),
    "as": ("account_str", "auth_type", "account_key", "client_id"),
    "gs": (),
}
"""What an entry of each section may say; of `gs` it is the path of Google's file, and no object."""
_AZURE_NAMES = {
    "account_str": "AZURE_STORAGE_ACCOUNT", "auth_type": "AZURE_STORAGE_AUTH_TYPE",
    "account_key": "AZURE_STORAGE_KEY", "client_id": "AZURE_STORAGE_CLIENT_ID",
}  # fmt: skip
_SECRETS = ("secret_key", "session_token", "account_key")
_PATH, _CONTENT = "path", "content"
"""Of Google's file; of its content a digest, so that one written anew at the same path is seen."""
_GOOGLE_TYPES = ("service_account", "authorized_user")
"""Source: Triton takes no others, nor does gcsfs."""
_AUTH_TYPES = ("", "key", "managed_identity", "default")


class CredentialError(Exception):
    """Why credentials cannot be had. Its text has the places of mistakes, and nothing that is secret."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What is said of one store. `filed`: by the file; `unknown`: names in its entry that mean nothing."""

    said: Mapping[str, str] = field(repr=False, default_factory=dict)
    filed: bool = False
    unknown: tuple[str, ...] = ()


def credentials_of(address: Address, environ: Mapping[str, str] = os.environ) -> Credentials:
    """Look up what is said of a store: in the file, if one is named, and then nowhere else. Raises: CredentialError."""
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
    """Give the Address with the options that the store's package takes these credentials by."""
    said = credentials.said
    if not said:
        return address
    options = _OPTIONS[address.given.partition("://")[0]](address.options, credentials)
    secrets = {*address.secrets, *(said.get(key, "") for key in _SECRETS)} - {""}
    return replace(address, options=options, secrets=tuple(sorted(secrets, key=len, reverse=True)))


# -- the file ------------------------------------------------------------------------------------------------------


def _section(file: Path, scheme: str) -> dict[str, Any]:
    """Give the entries for URLs of a scheme, by what those begin with."""
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
    """Say what is wrong with an entry, without a word of it."""
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
    """Name an entry. A URL in its name may have a password, as any may."""
    return f"{scheme}, {json.dumps(Address.of(name).shown)}"


def _unknown_type() -> str:
    return f"must be {', '.join(_AUTH_TYPES[1:-1])} or {_AUTH_TYPES[-1]}"


def _filed(file: Path, scheme: str, url: str) -> Credentials:
    """Take the entry with the longest name that the URL begins with."""
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
    """Give what is in Google's file; None where it is none. The key itself, put there for its path, is none."""
    try:
        content = Path(path).read_bytes()
        said = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(said, dict) and said.get("type") in _GOOGLE_TYPES else None


def longest(names: Mapping[str, Any], url: str) -> str | None:
    """Choose the longest of the names that a URL begins with; None if none does."""
    return max((name for name in names if url.startswith(name)), key=len, default=None)


# -- what the packages take ----------------------------------------------------------------------------------------


def _s3(options: Mapping[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Take a pair of keys, or else a profile, or else what the package finds.

    None keeps from it what the environment has; otherwise a token of there would go with the keys of here.
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
    """Take a file, or else what the package finds: the attached service account, and in the end nobody's."""
    path = credentials.said[_PATH]
    return {**options, "token": path} if path else dict(options)


def _azure(options: Mapping[str, Any], credentials: Credentials) -> dict[str, Any]:
    """Take an identity, or else a key. Without either a file means nobody's, and else the package finds one."""
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
