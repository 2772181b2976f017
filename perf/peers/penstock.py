"""Penstock itself, from this environment, with default settings."""

from __future__ import annotations

from .peer import Peer
from .wires import V2_BINARY, V2_GRPC, V2_JSON

PEER = Peer(
    name="penstock",
    package="penstock",
    requirements=(),
    command=(
        "{python}", "-m", "penstock.server.cli", "serve", "{repository}",
        "--http-port", "{http}", "--grpc-port", "{grpc}", "--metrics-port", "{metrics}",
    ),
    ready="/v2/models/{model}/ready",
    wires=(V2_JSON, V2_BINARY, V2_GRPC),
    configuration="Default settings except for the ports; the models have no config.pbtxt.",
)  # fmt: skip
