"""PendingStatistics: what a front end's hooks count for a Model, until it is sent to the engine, which has the totals.

Created by `model_table.py`; `engine_service.py` calls `add_statistics`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.batching.answer_statistics import AnswerStatistics
from penstock.batching.model import Model
from penstock.batching.statistics import FAILURE_REASONS, HOOKS, ModelStatistics


class PendingStatistics(ModelStatistics):
    """Keeps counts until `flush`; `on_change` is called when the first is added.

    Threads: the event loop's.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._pending: list[list[Any]] = []
        self._answers: AnswerStatistics | None = None
        super().__init__()

    @property
    def answers(self) -> AnswerStatistics | None:
        """The answers of a model whose requests may have several."""
        return self._answers

    @answers.setter
    def answers(self, answers: AnswerStatistics | None) -> None:
        self._answers = answers
        if answers is not None:
            answers.forward = self._record_answer
            self._add(["several"])

    def record_failure(self, reason: str, start_ns: int, end_ns: int) -> None:
        """Record a request that was rejected, cancelled or failed here."""
        self._add(["failure", reason, start_ns, end_ns])

    def record_first_response(self, ns: int) -> None:
        """Record the first answer of a request that has several."""
        self._add(["first", ns])

    def record_hindered(self, *, hindered: bool) -> None:
        """Record that hooks here let no request through, or let them through again."""
        self._add(["hindered", hindered])

    def record_hook(self, hook: str, ns: int) -> None:
        """Record one call of a hook."""
        self._add(["hook", hook, ns])

    def _record_answer(self, position: int, parts: Mapping[str, int]) -> None:
        self._add(["answer", position, dict(parts)])

    def _add(self, entry: list[Any]) -> None:
        self._pending.append(entry)
        if len(self._pending) == 1:
            self._on_change()

    @property
    def has_pending(self) -> bool:
        """Whether there are counts to send."""
        return bool(self._pending)

    def flush(self, events: Mapping[str, int]) -> bytes:
        """Return the counts added since, and the model's own `events`, as the body of a STATISTICS."""
        entries, self._pending = self._pending, []
        entries += [["event", event, times] for event, times in events.items()]
        return json.dumps(entries).encode()


def add_statistics(model: Model, body: bytes, front_end: object) -> None:
    """Add the counts of a front end. Raises: ValueError, TypeError, LookupError."""
    statistics = model.statistics
    for kind, *values in json.loads(body):
        if kind == "hook":
            statistics.record_hook(HOOKS[HOOKS.index(values[0])], int(values[1]))
        elif kind == "failure":
            statistics.record_failure(FAILURE_REASONS[FAILURE_REASONS.index(values[0])], int(values[1]), int(values[2]))
        elif kind == "event":
            model.count_event(str(values[0]), int(values[1]))
        elif kind == "hindered":
            model.set_blocked(front_end, blocked=bool(values[0]))
        elif kind == "first":
            statistics.record_first_response(int(values[0]))
        else:
            if statistics.answers is None:
                statistics.answers = AnswerStatistics()
            if kind == "answer":
                statistics.answers.add(int(values[0]), {str(member): int(ns) for member, ns in values[1].items()})
