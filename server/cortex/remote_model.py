"""RemoteModel: a model at a URL, as files that can be listed and copied. Called by models.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.server.repository.address import Address
from penstock.server.repository.credentials import CredentialError
from penstock.server.repository.depot import Depot
from penstock.server.repository.overrides import is_component
from penstock.server.repository.remote import INSTALL, RemoteError, error_reason, stamp_of


class RemoteModel:
    """The files at one URL. Threads: any; it blocks."""

    def __init__(self, url: str) -> None:
        self._depot = Depot(url)
        self._files: dict[str, Mapping[str, Any]] = {}

    def list_files(self) -> str:
        """List the files there now. Returns: a value that changes with them, "" if none. Raises: RemoteError."""
        with self._converted_errors():
            self._files = {}
            self._connect()
            top = self._depot.root_path
            for name, entry in self._depot.call(lambda: self._depot.filesystem.find(top, detail=True)).items():
                relative_path = str(name).strip("/").removeprefix(top.strip("/")).strip("/")
                if entry["type"] == "file" and _is_inside(relative_path):
                    self._files[relative_path] = entry
            return "\n".join(f"{name} {stamp_of(entry)}" for name, entry in sorted(self._files.items()))

    @property
    def names(self) -> list[str]:
        """The files' paths below the URL, "" for a file at the URL itself."""
        return list(self._files)

    def copy(self, names: Iterable[str], into: Path) -> None:
        """Copy some of them into a folder, by path; the one at the URL itself as `model`. Raises: RemoteError."""
        for name in names:
            target = into / (name or "model")
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._converted_errors():
                self._depot.filesystem.get_file(self._files[name]["name"], str(target))

    def _connect(self) -> None:
        try:
            self._depot.reconnect()
        except CredentialError as error:
            raise RemoteError(f"{self._address}: {error}") from None
        except ImportError as error:
            text = f"{self._address}: remote models require fsspec and its package for such URLs ({error}): {INSTALL}"
            if str(self._address).startswith("s3:"):
                text += " s3fs; or, if the files are on this machine, set --s3-root DIR"
            raise RemoteError(text) from None
        self._depot.filesystem.invalidate_cache()

    @property
    def _address(self) -> Address:
        return self._depot.address

    @contextlib.contextmanager
    def _converted_errors(self) -> Iterator[None]:
        """Convert any exception of the store's client to RemoteError, without the address's secrets."""
        try:
            yield
        except RemoteError:
            raise
        except FileNotFoundError:
            self._files = {}
            raise RemoteError(f"{self._address}: not found or insufficient permissions") from None
        except Exception as error:  # noqa: BLE001 - every store raises errors of its own
            raise RemoteError(f"{self._address}: {self._address.redact(error_reason(error))}") from None


def _is_inside(name: str) -> bool:
    """Return whether a store's name of a file is a path below the URL; "" is the URL itself."""
    return all(is_component(part) and part not in {".", ".."} for part in name.split("/") if name)
