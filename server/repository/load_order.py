"""Order: the order in which models are loaded. An ensemble needs the models of its steps. Used by ModelControl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def sort_by_dependency(needs: Mapping[str, Iterable[str]]) -> tuple[list[str], dict[str, str]]:
    """Sort names so that each comes after those that it needs, as far as they are among the names.

    Returns: the order, and an error text for each name that depends on itself. Source of the text: Triton core,
    CircularDependencyCheck.
    """
    order: list[str] = []
    remaining = {name: {other for other in others if other in needs} for name, others in needs.items()}
    while ready := [name for name, others in remaining.items() if others.isdisjoint(remaining)]:
        order += ready
        for name in ready:
            del remaining[name]
    cycles = {name: text for name in remaining if (text := _describe_cycle(name, needs))}
    # the rest need a model of a cycle, and fail because it is not available
    return order + list(remaining), cycles


def _describe_cycle(name: str, needs: Mapping[str, Iterable[str]]) -> str:
    """Describe the cycle by which a name needs itself; "" if there is none."""
    seen, to_visit = set[str](), [name]
    while to_visit:
        current = to_visit.pop()
        for other in sorted(needs.get(current, ())):
            if other == name:
                return f"circular dependency between ensembles: {name} -> ... -> {current} -> {name}"
            if other not in seen:
                seen.add(other)
                to_visit.append(other)
    return ""
