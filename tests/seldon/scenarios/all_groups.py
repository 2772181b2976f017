"""All groups of requests."""

from __future__ import annotations

from . import metadata, metrics, payloads, raw_methods, results, routing, seeds, urls

GROUPS = [
    group
    for module in (payloads, urls, results, metrics, routing, raw_methods, metadata, seeds)
    for group in module.GROUPS
]
