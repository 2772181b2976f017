"""Tls: the TLS context of the gRPC port. Called by the composition root."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.server.options.grpc_settings import GrpcSettings


class TlsError(Exception):
    """Certificates that cannot be used; the message is for the operator."""


def context_for(settings: GrpcSettings) -> ssl.SSLContext | None:
    """Return the TLS context for the settings, None for plain TCP.

    Raises: TlsError.
    """
    if not settings.grpc_use_ssl and not settings.grpc_use_ssl_mutual:
        return None
    if not settings.grpc_server_cert or not settings.grpc_server_key:
        raise TlsError("--grpc-use-ssl requires --grpc-server-cert and --grpc-server-key")
    if settings.grpc_use_ssl_mutual and not settings.grpc_root_cert:
        raise TlsError("--grpc-use-ssl-mutual requires --grpc-root-cert")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # RFC 9113 9.2: TLS 1.2 or later, no compression; a client that does not offer h2 is rejected at its preface
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(settings.grpc_server_cert, settings.grpc_server_key, _no_passphrase)
        if settings.grpc_use_ssl_mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(settings.grpc_root_cert)
    except (OSError, ssl.SSLError) as error:
        files = f"{settings.grpc_server_cert}, {settings.grpc_server_key}, {settings.grpc_root_cert}".rstrip(", ")
        raise TlsError(f"cannot use the certificates of the gRPC port ({files}): {error.strerror or error}") from error
    return context


def _no_passphrase() -> str:
    """Replace OpenSSL's passphrase prompt, at which a server would wait on whatever terminal it has."""
    raise OSError("the key has a passphrase: remove it with `openssl pkey`")
