"""Order: which models come before which. An ensemble needs the models of its steps. Called by ModelControl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def put_in_order(needs: Mapping[str, Iterable[str]]) -> tuple[list[str], dict[str, str]]:
    """Put names in an order in which each comes after those that it needs, as far as they are among the names.

    Returns: the order, and for each name that needs itself in the end why it cannot be. Source of the text: Triton
    core, CircularDependencyCheck.
    """
    order: list[str] = []
    left = {name: {other for other in others if other in needs} for name, others in needs.items()}
    while ready := [name for name, others in left.items() if others.isdisjoint(left)]:
        order += ready
        for name in ready:
            del left[name]
    circles = {name: text for name in left if (text := _circle(name, needs))}
    # the others need one of a circle, and are told that it is not there
    return order + list(left), circles


def _circle(name: str, needs: Mapping[str, Iterable[str]]) -> str:
    """Say by which way a name needs itself; "" if it does not."""
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
