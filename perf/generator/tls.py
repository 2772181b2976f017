"""TLS as a client: makes a context from the Tls settings."""

from __future__ import annotations

import base64
import ssl
import tempfile
from pathlib import Path

from .orders import Tls

_SEQUENCE, _INTEGER, _OCTETS = 0x30, 0x02, 0x04
_KEY_LABELS = {_SEQUENCE: "PRIVATE KEY", _INTEGER: "RSA PRIVATE KEY", _OCTETS: "EC PRIVATE KEY"}
"""The kind of a DER key, by what follows its version: PKCS#8 (RFC 5958), PKCS#1 (RFC 8017), SEC 1 (RFC 5915)."""


def context(tls: Tls, *protocols: str) -> ssl.SSLContext:
    """Make a context that offers `protocols` by ALPN. Raises: OSError, ssl.SSLError if a file cannot be used.

    Without `verify_peer` nothing is verified: the library checks a name only together with its chain.
    """
    ssl_context = ssl.create_default_context(cafile=tls.roots or None)
    ssl_context.check_hostname = tls.verify_host and tls.verify_peer
    if not tls.verify_peer:
        ssl_context.verify_mode = ssl.CERT_NONE
    if tls.certificate:
        _identify(ssl_context, tls)
    if protocols:
        ssl_context.set_alpn_protocols(list(protocols))
    return ssl_context


def _identify(ssl_context: ssl.SSLContext, tls: Tls) -> None:
    with tempfile.TemporaryDirectory() as folder:  # readable by this user only
        certificate, key = Path(tls.certificate), Path(tls.key or tls.certificate)
        if tls.certificate_type.upper() == "DER":
            certificate = _written(folder, "certificate", ssl.DER_cert_to_PEM_cert(certificate.read_bytes()))
        if tls.key and tls.key_type.upper() == "DER":
            key = _written(folder, "key", pem_key(key.read_bytes()))
        ssl_context.load_cert_chain(certificate, key)


def _written(folder: str, name: str, text: str) -> Path:
    path = Path(folder, name)
    path.write_text(text, "ascii")
    return path


def pem_key(der: bytes) -> str:
    """Convert a private key to PEM. Raises: ssl.SSLError if it is not one."""
    offset = 2 + (der[1] & 0x7F if len(der) > 1 and der[1] & 0x80 else 0)  # after the length of the outer sequence
    label = _KEY_LABELS.get(der[offset + 3]) if len(der) > offset + 3 and der[0] == _SEQUENCE else None
    if label is None:
        raise ssl.SSLError("the file is no private key in DER")
    return f"-----BEGIN {label}-----\n{base64.encodebytes(der).decode('ascii')}-----END {label}-----\n"
