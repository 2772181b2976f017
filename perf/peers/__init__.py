"""Peers: other servers, each installed in its own environment, under the same load as Penstock."""
