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
from .credentials import MOUNTS, CredentialError, Credentials, credentialed, credentials_of

logger = logging.getLogger("penstock.repository")
T = TypeVar("T")


_NONE_HAD = {"NoCredentialsError": "", "ClientAuthenticationError": "DefaultAzureCredential failed to retrieve a token"}
"""The exceptions that s3fs and adlfs raise if no credentials are found, and the text they contain."""


class Depot:
    """One URL: its Address and, once connected, the client (`files`) and the path to pass to it (`top`).

    Threads: any. Blocks.
    """

    def __init__(self, url: str) -> None:
        self.address = Address.of(url)
        self.files: Any = None
        self.top = ""
        self._asked = self.address
        self._credentials: Credentials | None = None
        self._unread = ""

    def reach(self) -> None:
        """Create the client with the current credentials, or keep it if they are unchanged.

        Raises: CredentialError; ImportError if fsspec or its package for such URLs is not installed; what that package
        raises.
        """
        from fsspec.core import url_to_fs

        credentials = credentials_of(self._asked)
        if credentials == self._credentials:
            return
        if credentials.unknown:
            logger.warning("%s: ignoring unknown keys: %s", self._asked, "; ".join(credentials.unknown))
        self.address = credentialed(self._asked, credentials)
        # fsspec's instance cache would keep a client after its credentials have been withdrawn
        own = {"skip_instance_cache": True} if credentials.filed else {}
        self.files, top = url_to_fs(self.address.url, **self.address.options, **own)
        self.top = str(top).rstrip("/")
        self._credentials = credentials

    def asked(self, ask: Callable[[], T]) -> T:
        """Call the store. If it finds no credentials, call again anonymously, as Triton does."""
        try:
            return ask()
        except Exception as error:
            if not self._be_nobody(error):
                raise
        return ask()

    def _be_nobody(self, error: Exception) -> bool:
        text = _NONE_HAD.get(type(error).__name__)
        if text is None or text not in str(error) or "credential" in self.address.options:
            return False
        from fsspec.core import url_to_fs

        logger.warning("%s: no credentials found, using anonymous access", self.address)
        self.files, _ = url_to_fs(self.address.url, **{**self.address.options, "anon": True})
        return True

    def renew(self) -> None:
        """Connect again, since the credentials file may have been rewritten. If it cannot be read, nothing changes.

        Raises: what a new client raises; if there is no client yet, what `reach` raises.
        """
        try:
            self.reach()
        except CredentialError as error:
            if self.files is None:
                raise
            if str(error) != self._unread:
                logger.warning("%s: %s; the previous credentials stay in use", self.address, error)
            self._unread = str(error)
        else:
            self._unread = ""


def home_of(url: str) -> tuple[Path, str]:
    """Make a private folder for copies, where Triton's variable for such stores says, or else under TMPDIR.

    Returns: the folder, and why it is not where the variable says.
    """
    name = MOUNTS.get(url.partition("://")[0], "")
    wanted, lacking = os.environ.get(name), ""
    if wanted:
        try:
            return Path(tempfile.mkdtemp(prefix="penstock-", dir=wanted)), ""
        except OSError as error:
            lacking = f"{name}: {wanted}: {error.strerror}"
    return Path(tempfile.mkdtemp(prefix="penstock-")), lacking
