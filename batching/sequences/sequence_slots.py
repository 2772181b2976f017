"""SequenceSlots: the rows at each Instance of a model that its sequences occupy. Owned by Sequences."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush


class SequenceSlots:
    """The free slots; the one with the lowest row is taken first. Pure.

    Each Instance has `rows` of them. `instances` are the numbers of the Instances where sequences may begin.
    """

    def __init__(self, rows: int, instances: int) -> None:
        self.rows = rows
        self.instances = frozenset(range(instances))
        self._paused: set[int] = set()
        self._next_unused, self._slot_count = 0, rows * instances
        self._free_slots: list[tuple[int, int]] = []

    @property
    def has_free(self) -> bool:
        """Whether any slot is free."""
        return bool(self._free_slots) or self._next_unused < self._slot_count

    def acquire(self) -> tuple[int, int] | None:
        """Take the lowest slot: its row and Instance; None if none is free. A paused Instance's if all are paused."""
        paused = self._paused & self.instances
        if 0 < len(paused) < len(self.instances):
            self._list_unused()
            found = min((slot for slot in self._free_slots if slot[1] not in paused), default=None)
            if found is not None:
                self._free_slots.remove(found)
            heapify(self._free_slots)
            return found
        if self._free_slots:
            return heappop(self._free_slots)
        if self._next_unused == self._slot_count:
            return None
        self._next_unused += 1
        return divmod(self._next_unused - 1, len(self.instances))

    def release(self, row: int, instance: int) -> bool:
        """Return a slot. Returns: False if it no longer exists."""
        if instance in self.instances:
            heappush(self._free_slots, (row, instance))
        return instance in self.instances

    def set_paused(self, instance: int, *, paused: bool) -> None:
        """Pause assigning slots at an Instance while others have some, or resume."""
        (self._paused.add if paused else self._paused.discard)(instance)

    def move(self, instances: Collection[int], occupied: Collection[tuple[int, int]]) -> None:
        """Move the slots to other Instances; `occupied` are those of sequences under way, wherever they are."""
        self.instances = frozenset(instances)
        self._next_unused = self._slot_count
        self._free_slots = sorted(
            {(row, instance) for instance in self.instances for row in range(self.rows)}.difference(occupied)
        )

    def _list_unused(self) -> None:
        self._free_slots += [
            divmod(number, len(self.instances)) for number in range(self._next_unused, self._slot_count)
        ]
        self._next_unused = self._slot_count


def pin(instance: int) -> tuple[int]:
    """Return the last part of a Key that only this Instance may run."""
    return (instance,)
