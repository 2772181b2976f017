"""All that is asked."""

from __future__ import annotations

from . import argument_locations, basics, field_types, results, seeds, trainings, urls

GROUPS = [
    group
    for module in (basics, urls, field_types, argument_locations, results, trainings, seeds)
    for group in module.GROUPS
]
