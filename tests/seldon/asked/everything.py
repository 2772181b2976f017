"""All groups of requests."""

from __future__ import annotations

from . import described, metered, payloads, raw, results, seeds, surface, wiring

GROUPS = [
    group for module in (payloads, surface, results, metered, wiring, raw, described, seeds) for group in module.GROUPS
]
