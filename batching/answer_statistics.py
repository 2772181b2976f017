"""AnswerStatistics: the answers of a model that gives several per request, counted by position.

Written by whatever hands them out, on the event loop; read by the statistics endpoints.
Source: Triton core, infer_stats.cc (ResponseStats), as TRITONBACKEND_ModelInstanceReportResponseStatistics fills it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

MAX_POSITIONS = 256
"""How many answers of a request are counted; a generator may give any number, and later ones are ignored."""
MEMBERS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


class AnswerStatistics:
    """Counts and durations by position, 0 for a request's first answer. Invariant: at most MAX_POSITIONS of them.

    If `forward` is set, it receives each position and its durations by member, and nothing is kept here.
    Units: nanoseconds; `infer_ns` is the time to compute an answer, `output_ns` the time to convert it to tensors.
    Threads: the event loop's only.
    """

    def __init__(self) -> None:
        self._by_position: list[dict[str, list[int]]] = []
        self.forward: Callable[[int, Mapping[str, int]], None] | None = None

    def record(self, position: int, infer_ns: int, output_ns: int, *, failed: bool = False) -> None:
        """Count an answer."""
        if position < MAX_POSITIONS:
            member = "fail" if failed else "success"
            self.add(position, {"compute_infer": infer_ns, "compute_output": output_ns, member: infer_ns + output_ns})

    def record_empty(self, position: int, infer_ns: int) -> None:
        """Count a request that ended where another answer might have come."""
        self.add(position, {"compute_infer": infer_ns, "empty_response": infer_ns})

    def record_cancelled(self, position: int, ns: int) -> None:
        """Count the answer that was awaited or being sent when the client went away."""
        self.add(position, {"cancel": ns})

    def snapshot(self) -> dict[str, dict[str, dict[str, int]]]:
        """Read everything recorded so far, by position and member, as the protocols report it."""
        return {
            str(position): {member: {"count": count, "ns": ns} for member, (count, ns) in members.items()}
            for position, members in enumerate(self._by_position)
        }

    def add(self, position: int, parts: Mapping[str, int]) -> None:
        """Count one of each of `parts`, with its duration."""
        if position >= MAX_POSITIONS:
            return
        if self.forward is not None:
            self.forward(position, parts)
            return
        while len(self._by_position) <= position:
            self._by_position.append({member: [0, 0] for member in MEMBERS})
        counted = self._by_position[position]
        for member, ns in parts.items():
            entry = counted[member]
            entry[0] += 1
            if ns > 0:
                entry[1] += ns
