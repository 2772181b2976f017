"""Depot: the contents of one URL, through fsspec's client with the URL's credentials. fsspec is imported here.

Used by remote.py, and wherever else the contents of a URL are read.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .address import Address
from .credentials import MOUNT_VARIABLES, CredentialError, Credentials, find_credentials, with_credentials

logger = logging.getLogger("penstock.repository")
T = TypeVar("T")


_NO_CREDENTIALS = {
    "NoCredentialsError": "",
    "ClientAuthenticationError": "DefaultAzureCredential failed to retrieve a token",
}
"""The exceptions that s3fs and adlfs raise if no credentials are found, and the text they contain."""


class Depot:
    """One URL: its Address and, once connected, the client (`filesystem`) and the path to pass to it (`root_path`).

    Threads: any. Blocks.
    """

    def __init__(self, url: str) -> None:
        self.address = Address.parse(url)
        self.filesystem: Any = None
        self.root_path = ""
        self._base_address = self.address
        self._credentials: Credentials | None = None
        self._last_error = ""

    def connect(self) -> None:
        """Create the client with the current credentials, or keep it if they are unchanged.

        Raises: CredentialError; ImportError if fsspec or its package for such URLs is not installed; what that package
        raises.
        """
        from fsspec.core import url_to_fs

        credentials = find_credentials(self._base_address)
        if credentials == self._credentials:
            return
        if credentials.unknown_keys:
            logger.warning("%s: ignoring unknown keys: %s", self._base_address, "; ".join(credentials.unknown_keys))
        self.address = with_credentials(self._base_address, credentials)
        # fsspec's instance cache would keep a client after its credentials have been withdrawn
        extra = {"skip_instance_cache": True} if credentials.from_file else {}
        self.filesystem, top = url_to_fs(self.address.url, **self.address.options, **extra)
        self.root_path = str(top).rstrip("/")
        self._credentials = credentials

    def call(self, operation: Callable[[], T]) -> T:
        """Call the store. If it finds no credentials, call again anonymously, as Triton does."""
        try:
            return operation()
        except Exception as error:
            if not self._switch_to_anonymous(error):
                raise
        return operation()

    def _switch_to_anonymous(self, error: Exception) -> bool:
        text = _NO_CREDENTIALS.get(type(error).__name__)
        if text is None or text not in str(error) or "credential" in self.address.options:
            return False
        from fsspec.core import url_to_fs

        logger.warning("%s: no credentials found, using anonymous access", self.address)
        self.filesystem, _ = url_to_fs(self.address.url, **{**self.address.options, "anon": True})
        return True

    def reconnect(self) -> None:
        """Connect again, since the credentials file may have been rewritten. If it cannot be read, nothing changes.

        Raises: what a new client raises; if there is no client yet, what `connect` raises.
        """
        try:
            self.connect()
        except CredentialError as error:
            if self.filesystem is None:
                raise
            if str(error) != self._last_error:
                logger.warning("%s: %s; the previous credentials stay in use", self.address, error)
            self._last_error = str(error)
        else:
            self._last_error = ""


def make_copy_folder(url: str) -> tuple[Path, str]:
    """Make a private folder for copies, where Triton's variable for such stores says, or else under TMPDIR.

    Returns: the folder, and why it is not where the variable says.
    """
    name = MOUNT_VARIABLES.get(url.partition("://")[0], "")
    parent, problem = os.environ.get(name), ""
    if parent:
        try:
            return Path(tempfile.mkdtemp(prefix="penstock-", dir=parent)), ""
        except OSError as error:
            problem = f"{name}: {parent}: {error.strerror}"
    return Path(tempfile.mkdtemp(prefix="penstock-")), problem
