"""The gRPC channels of `seldon_client.py`, over TLS if credentials are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc


def open_channel(words: dict[str, Any], endpoint: str, secure: bool) -> Any:
    """Open a channel. Only one to a gateway can be secure. Raises: OSError for unreadable PEM files."""
    options = [
        (f"grpc.max_{way}_message_length", words[f"grpc_max_{way}_message_length"]) for way in ("send", "receive")
    ]
    said = words["channel_credentials"]
    if said is None or not secure:
        return grpc.insecure_channel(endpoint, options)
    if not said.verify:
        options.append(("grpc.ssl_target_name_override", endpoint.partition(":")[0]))
    credentials = _credentials(said, words["ssl"])
    call = words["call_credentials"]
    if call is not None:

        def with_token(context: Any, callback: Any) -> None:
            callback((("x-auth-token", call.token),), None)

        credentials = grpc.composite_channel_credentials(credentials, grpc.metadata_call_credentials(with_token))
    return grpc.secure_channel(endpoint, credentials, options)


def _credentials(said: Any, ssl: bool | None) -> Any:
    root = said.root_certificates_file and Path(said.root_certificates_file).read_bytes()
    if root and said.private_key_file and said.certificate_chain_file:
        chain = Path(said.certificate_chain_file).read_bytes()
        return grpc.ssl_channel_credentials(root, Path(said.private_key_file).read_bytes(), chain)
    if not root and ssl is False:
        return grpc.local_channel_credentials()
    return grpc.ssl_channel_credentials(root or None)
