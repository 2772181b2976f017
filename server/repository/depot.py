"""Depot: what is at one URL, by fsspec's client for it, which has the credentials of the URL. fsspec is imported here.

Used by remote.py, and wherever else something at a URL is read.
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
"""What s3fs and adlfs raise where nothing has credentials, and what is in its text."""


class Depot:
    """One URL, its Address, and, once it has been reached, the client (`files`) and the place to give it (`top`).

    Threads: any; it blocks.
    """

    def __init__(self, url: str) -> None:
        self.address = Address.of(url)
        self.files: Any = None
        self.top = ""
        self._asked = self.address
        self._credentials: Credentials | None = None
        self._unread = ""

    def reach(self) -> None:
        """Take the client with the credentials that are said now; where they are as before, so is the client.

        Raises: CredentialError; ImportError, where fsspec or its part for such URLs is not installed; what that raises.
        """
        from fsspec.core import url_to_fs

        credentials = credentials_of(self._asked)
        if credentials == self._credentials:
            return
        if credentials.unknown:
            logger.warning("%s: ignoring unknown keys: %s", self._asked, "; ".join(credentials.unknown))
        self.address = credentialed(self._asked, credentials)
        # a client that fsspec keeps for others would be kept when its credentials are no more
        own = {"skip_instance_cache": True} if credentials.filed else {}
        self.files, top = url_to_fs(self.address.url, **self.address.options, **own)
        self.top = str(top).rstrip("/")
        self._credentials = credentials

    def asked(self, ask: Callable[[], T]) -> T:
        """Ask the store something; where it says that no credentials are had, again as nobody, as Triton does."""
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
        """Reach it again, as a file of credentials may have been written anew; if it cannot be read, nothing changes.

        Raises: what a new client does; where there is none yet, what `reach` does.
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
    """Make a private folder for copies, where Triton's variable for such stores says, or else where TMPDIR does.

    Returns: that, and why it is not where the variable says.
    """
    name = MOUNTS.get(url.partition("://")[0], "")
    wanted, lacking = os.environ.get(name), ""
    if wanted:
        try:
            return Path(tempfile.mkdtemp(prefix="penstock-", dir=wanted)), ""
        except OSError as error:
            lacking = f"{name}: {wanted}: {error.strerror}"
    return Path(tempfile.mkdtemp(prefix="penstock-")), lacking
