"""Forwarding: header fields of a call that become parameters of its request.

Made of --http-header-forward-pattern and of --grpc-header-forward-pattern, one each; called by their transports, and by
the settings for the check of the patterns, so it imports little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_EXACT = "(?-i)"
_GRPC_S_OWN = frozenset((
    ":authority", "content-type", "te", "grpc-accept-encoding", "grpc-encoding", "grpc-internal-encoding-request",
    "grpc-timeout", "grpc-tags-bin", "grpc-trace-bin", "grpc-server-stats-bin",
))  # fmt: skip
"""What gRPC keeps from a server's code, and so from Triton. Source: its core, PublishToAppEncoder."""


class Forwarding:
    """One pattern. It is searched for in names, in any case; a name with a match in it is forwarded.

    The pattern is the operator's, in Python's syntax, of which RE2's is nearly a part; `(?-i)` before it, which is
    Triton's way to have it as it is written, is taken too.
    """

    def __init__(self, pattern: str) -> None:
        """Raise ValueError when the pattern is none."""
        try:
            exact = pattern.startswith(_EXACT)
            self._pattern = re.compile(pattern.removeprefix(_EXACT), 0 if exact else re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None

    @classmethod
    def of(cls, pattern: str) -> Forwarding | None:
        """Make one, or none of an empty pattern. Raises: ValueError."""
        return cls(pattern) if pattern else None

    def parameters(self, header: Mapping[bytes, bytes]) -> dict[str, str]:
        """Give the parameters that a header makes.

        Raises: InferError (INVALID) for a name that no parameter may have.
        """
        return self._found({name.decode("latin-1"): value.decode("latin-1") for name, value in header.items()})

    def parameters_of(self, metadata: Mapping[str, str]) -> dict[str, str]:
        """Give the parameters that gRPC metadata makes. Raises: as `parameters`."""
        return self._found({name: value for name, value in metadata.items() if name not in _GRPC_S_OWN})

    def _found(self, header: Mapping[str, str]) -> dict[str, str]:
        from .said import check_key  # numpy comes with it, for which the command line does not wait

        forwarded = {name: value for name, value in header.items() if self._pattern.search(name)}
        for name in forwarded:
            check_key(name)
        return forwarded
