"""Peers: other servers, each installed in an environment of its own, under the same load as Penstock."""
