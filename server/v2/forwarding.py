"""Forwarding: header fields of a call that become parameters of its request.

Made from --http-header-forward-pattern and --grpc-header-forward-pattern, one each. Called by their transports, and by
the settings to check the patterns, so it imports little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_EXACT = "(?-i)"
_GRPC_INTERNAL = frozenset((
    ":authority", "content-type", "te", "grpc-accept-encoding", "grpc-encoding", "grpc-internal-encoding-request",
    "grpc-timeout", "grpc-tags-bin", "grpc-trace-bin", "grpc-server-stats-bin",
))  # fmt: skip
"""What gRPC hides from a server's code, and thus from Triton. Source: its core, PublishToAppEncoder."""


class Forwarding:
    """One pattern, searched for in names, ignoring case; a name that contains a match is forwarded.

    The pattern comes from the operator, in Python's syntax, which covers nearly all of RE2's. A leading `(?-i)`,
    Triton's way to match case, is accepted.
    """

    def __init__(self, pattern: str) -> None:
        """Raise ValueError if the pattern is not a regular expression."""
        try:
            exact = pattern.startswith(_EXACT)
            self._pattern = re.compile(pattern.removeprefix(_EXACT), 0 if exact else re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None

    @classmethod
    def of(cls, pattern: str) -> Forwarding | None:
        """Return the Forwarding of a pattern, or None if it is empty. Raises: ValueError."""
        return cls(pattern) if pattern else None

    def from_header(self, header: Mapping[bytes, bytes]) -> dict[str, str]:
        """Return the parameters made from a header.

        Raises: InferError (INVALID) for a name that no parameter may have.
        """
        return self._select({name.decode("latin-1"): value.decode("latin-1") for name, value in header.items()})

    def from_metadata(self, metadata: Mapping[str, str]) -> dict[str, str]:
        """Return the parameters made from gRPC metadata. Raises: as `from_header`."""
        return self._select({name: value for name, value in metadata.items() if name not in _GRPC_INTERNAL})

    def _select(self, header: Mapping[str, str]) -> dict[str, str]:
        from .call_parameters import check_key  # imports numpy, which the command line must not wait for

        forwarded = {name: value for name, value in header.items() if self._pattern.search(name)}
        for name in forwarded:
            check_key(name)
        return forwarded
