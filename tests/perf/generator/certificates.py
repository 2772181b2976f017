"""Certificates to test with, made by openssl: one that signs itself, for localhost, its key, and both as DER."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """Files. `other_keys`: keys in DER of the older kinds, named for them."""

    folder: Path
    other_keys: tuple[Path, ...]

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    def of_type(self, kind: str) -> tuple[Path, Path]:
        """Give certificate and key as PEM or DER."""
        ending = kind.lower()
        return self.folder / f"certificate.{ending}", self.folder / f"key.{ending}"


def make_certificates(folder: Path) -> Certificates:
    """Make them in a folder."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        *("-keyout", "key.pem", "-out", "certificate.pem"),
    )
    openssl("x509", "-in", "certificate.pem", "-outform", "DER", "-out", "certificate.der")
    openssl("pkcs8", "-topk8", "-nocrypt", "-in", "key.pem", "-outform", "DER", "-out", "key.der")
    openssl("ec", "-in", "key.pem", "-outform", "DER", "-out", "ec.der")
    openssl("genrsa", "-traditional", "-out", "rsa.pem", "1024")
    openssl("rsa", "-traditional", "-in", "rsa.pem", "-outform", "DER", "-out", "rsa.der")
    return Certificates(folder, (folder / "ec.der", folder / "rsa.der"))
