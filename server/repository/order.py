"""Order: the order in which models are loaded. An ensemble needs the models of its steps. Used by ModelControl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def put_in_order(needs: Mapping[str, Iterable[str]]) -> tuple[list[str], dict[str, str]]:
    """Sort names so that each comes after those that it needs, as far as they are among the names.

    Returns: the order, and an error text for each name that depends on itself. Source of the text: Triton core,
    CircularDependencyCheck.
    """
    order: list[str] = []
    left = {name: {other for other in others if other in needs} for name, others in needs.items()}
    while ready := [name for name, others in left.items() if others.isdisjoint(left)]:
        order += ready
        for name in ready:
            del left[name]
    circles = {name: text for name in left if (text := _circle(name, needs))}
    # the rest need a model of a cycle, and fail because it is not available
    return order + list(left), circles


def _circle(name: str, needs: Mapping[str, Iterable[str]]) -> str:
    """Describe the cycle by which a name needs itself; "" if there is none."""
    seen, look = set[str](), [name]
    while look:
        before = look.pop()
        for other in sorted(needs.get(before, ())):
            if other == name:
                return f"circular dependency between ensembles: {name} -> ... -> {before} -> {name}"
            if other not in seen:
                seen.add(other)
                look.append(other)
    return ""
