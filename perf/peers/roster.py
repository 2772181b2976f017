"""The roster: all peers, Penstock first."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import bentoml, kserve, litserve, mlserver, mosec, penstock, pytriton, ray_serve
from .peer import Peer

OURS = penstock.PEER
PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        module.PEER.name: module.PEER
        for module in (penstock, pytriton, mlserver, kserve, mosec, litserve, bentoml, ray_serve)
    }
)
RUNTIME = "onnxruntime"
"""Runs the models in all peers, pinned to the version that Penstock uses here."""
