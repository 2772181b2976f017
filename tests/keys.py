"""Certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(folder: Path, name: str = "server") -> tuple[str, str]:
    """Make a self-signed certificate for 127.0.0.1, and its key."""
    key, file = folder / f"{name}.key", folder / f"{name}.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", file,
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(file), str(key)
