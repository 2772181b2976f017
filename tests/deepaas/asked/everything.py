"""All that is asked."""

from __future__ import annotations

from . import basics, kinds, placed, results, seeds, surfaces, trained

GROUPS = [group for module in (basics, surfaces, kinds, placed, results, trained, seeds) for group in module.GROUPS]
