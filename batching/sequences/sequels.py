"""Sequels: requests of a sequence reach an ensemble's sequence models in the order in which they came to it.

The steps before these may overtake each other, since a model may have several Instances. Used by ensembles.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batching.ensembles.course import Links, Passed
    from penstock.batching.ensembles.passage import Passage
    from penstock.batching.model import Model


class Sequels:
    """The requests of one ensemble that have yet to reach a sequence model, for each sequence in order.

    Invariants: a request is in the line of its sequence with the sequence models that it has yet to reach; a step is
    kept back while an earlier request in the line has yet to reach the same model. Threads: the event loop's.
    """

    def __init__(self) -> None:
        self._lines: dict[int | str, dict[Passage, set[Model]]] = {}
        self._kept: dict[Passage, list[Passed]] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def enter(self, passage: Passage) -> None:
        """Add a request if it belongs to a sequence and any of its steps is a sequence model's."""
        said, links = passage.parent.sequence, passage.links
        models = {step.model for step in passage.course.steps if _remembers(step.model, links)}
        if models and said is not None:
            self._lines.setdefault(said.id, {})[passage] = models

    def keeps(self, passage: Passage, step: Passed) -> bool:
        """Whether a step is kept back for now."""
        line = self._line(passage)
        if passage not in line or step.model not in line[passage]:
            return False
        for before, models in line.items():
            if before is passage:
                break
            if step.model in models:
                self._kept.setdefault(passage, []).append(step)
                return True
        return False

    def passed(self, passage: Passage, model: Model) -> list[Passage]:
        """Record that a request has reached a model. Returns: the requests that were kept from it and may continue."""
        line = self._line(passage)
        models = line.get(passage, set())
        if model not in models:
            return []
        models.remove(model)
        if not models:
            self._drop(passage, line)
        return self._freed(line, {model})

    def leave(self, passage: Passage) -> list[Passage]:
        """Forget a request that has ended. Returns: the requests that were kept back for it and may continue."""
        line = self._line(passage)
        models = line.get(passage)
        if models is None:
            return []
        self._drop(passage, line)
        return self._freed(line, models)

    def _line(self, passage: Passage) -> dict[Passage, set[Model]]:
        said = passage.parent.sequence
        return {} if said is None else self._lines.get(said.id, {})

    def _drop(self, passage: Passage, line: dict[Passage, set[Model]]) -> None:
        self._kept.pop(passage, None)
        del line[passage]
        if not line and passage.parent.sequence is not None:
            del self._lines[passage.parent.sequence.id]

    def _freed(self, line: dict[Passage, set[Model]], models: set[Model]) -> list[Passage]:
        """Release the steps kept from these models, up to the next request that has yet to reach each."""
        freed: list[Passage] = []
        for passage, to_come in line.items() if self._kept else ():
            kept = self._kept.get(passage, [])
            ready = [step for step in kept if step.model in models]
            if ready:
                self._kept[passage] = [step for step in kept if step.model not in models]
                passage.ready += ready
                freed.append(passage)
            models = models - to_come
            if not models:
                break
        return freed


def _remembers(model: Model, links: Links) -> bool:
    nested = links.nested.get(model)
    if nested is None:
        return model.spec.sequence is not None
    return any(_remembers(each, nested) for each in nested.models)
