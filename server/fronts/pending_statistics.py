"""PendingStatistics: what a front end's hooks count for a Model, until it is sent to the engine, which has the totals.

Created by `placing.py`; `engine_service.py` calls `count`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.batching.answer_statistics import AnswerStatistics
from penstock.batching.model import Model
from penstock.batching.statistics import FAILURE_REASONS, HOOKS, ModelStatistics


class PendingStatistics(ModelStatistics):
    """Keeps counts until they are `taken`; `changed` is called when the first is added.

    Threads: the event loop's.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._waiting: list[list[Any]] = []
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
            answers.forward = self._answered
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

    def _answered(self, position: int, parts: Mapping[str, int]) -> None:
        self._add(["answer", position, dict(parts)])

    def _add(self, said: list[Any]) -> None:
        self._waiting.append(said)
        if len(self._waiting) == 1:
            self._changed()

    @property
    def waiting(self) -> bool:
        """Whether there are counts to send."""
        return bool(self._waiting)

    def taken(self, events: Mapping[str, int]) -> bytes:
        """Return the counts added since, and the model's own `events`, as the body of a COUNTED."""
        waiting, self._waiting = self._waiting, []
        waiting += [["event", event, times] for event, times in events.items()]
        return json.dumps(waiting).encode()


def count(model: Model, body: bytes, who: Any) -> None:
    """Add the counts of a front end, `who`. Raises: ValueError, TypeError, LookupError."""
    statistics = model.statistics
    for kind, *said in json.loads(body):
        if kind == "hook":
            statistics.record_hook(HOOKS[HOOKS.index(said[0])], int(said[1]))
        elif kind == "failure":
            statistics.record_failure(FAILURE_REASONS[FAILURE_REASONS.index(said[0])], int(said[1]), int(said[2]))
        elif kind == "event":
            model.count_event(str(said[0]), int(said[1]))
        elif kind == "hindered":
            model.set_blocked(who, blocked=bool(said[0]))
        elif kind == "first":
            statistics.record_first_response(int(said[0]))
        else:
            if statistics.answers is None:
                statistics.answers = AnswerStatistics()
            if kind == "answer":
                statistics.answers.add(int(said[0]), {str(member): int(ns) for member, ns in said[1].items()})
