"""Storage: makes a model's files available locally. Source: seldon-core 1.17.1, which supports only local files."""

from __future__ import annotations

import logging
from pathlib import Path

_LOCAL_PREFIX = "file://"


class Storage:
    """A namespace for functions, as components call them."""

    @staticmethod
    def download(uri: str, out_dir: str | None = None) -> str:
        """Return a local path for the contents of an address. Raises: RuntimeError, or an exception of fsspec's.

        For a path or file://, this is the path itself, or `out_dir` with links to its contents if that is given. Any
        other address is copied by fsspec, if installed, to `out_dir` or a temporary folder.
        """
        local = uri.removeprefix(_LOCAL_PREFIX)
        if uri.startswith(_LOCAL_PREFIX) or Path(uri).exists():
            if not Path(local).exists():
                raise RuntimeError(f"Local path {uri} does not exist.")
            return local if out_dir is None else _linked(Path(local), Path(out_dir))
        return _copied(uri, out_dir)


def _linked(source: Path, out_dir: Path) -> str:
    """Link to a file, or to the contents of a folder except hidden files."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for each in sorted(source.glob("[!.]*")) if source.is_dir() else [source]:
        (out_dir / each.name).symlink_to(each.absolute())
    return str(out_dir)


def _copied(uri: str, out_dir: str | None) -> str:
    import tempfile

    from penstock.server.repository.address import is_remote
    from penstock.server.repository.credentials import CredentialError
    from penstock.server.repository.depot import Depot

    depot = Depot(uri)
    address = depot.address
    wanted = f"Cannot recognize storage type for {address}. Only {_LOCAL_PREFIX} is currently available as storage type"
    if not is_remote(uri):
        raise RuntimeError(f"{wanted}.")
    try:
        import fsspec  # noqa: F401 - if it is installed, it reports its own missing parts
    except ImportError:
        raise RuntimeError(f"{wanted}. For remote addresses: pip install fsspec") from None
    logging.getLogger(__name__).info("Copying contents of %s to local", address)
    try:
        depot.connect()
    except CredentialError as error:
        raise RuntimeError(f"{address}: {error}") from None
    target = out_dir or tempfile.mkdtemp()
    Path(target).mkdir(parents=True, exist_ok=True)

    def copy() -> None:
        # the contents of a folder, as for a local one; a file itself
        path = f"{depot.root_path}/" if depot.filesystem.isdir(depot.root_path) else depot.root_path
        depot.filesystem.get(path, target.rstrip("/") + "/", recursive=True)

    depot.call(copy)
    return target
