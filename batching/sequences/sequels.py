"""Sequels: requests of a sequence reach an ensemble's sequence models in the order in which they came to it.

The steps before these may overtake each other, since a model may have several Instances. Used by ensembles.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batching.ensembles.course import CourseStep, Links
    from penstock.batching.ensembles.passage import Passage
    from penstock.batching.model import Model


class Sequels:
    """The requests of one ensemble that have yet to reach a sequence model, for each sequence in order.

    Invariants: a request is in the line of its sequence with the sequence models that it has yet to reach; a step is
    kept back while an earlier request in the line has yet to reach the same model. Threads: the event loop's.
    """

    def __init__(self) -> None:
        self._queues: dict[int | str, dict[Passage, set[Model]]] = {}
        self._held_steps: dict[Passage, list[CourseStep]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, passage: Passage) -> None:
        """Add a request if it belongs to a sequence and any of its steps is a sequence model's."""
        in_sequence, links = passage.parent.sequence, passage.links
        models = {step.model for step in passage.course.steps if _has_sequences(step.model, links)}
        if models and in_sequence is not None:
            self._queues.setdefault(in_sequence.id, {})[passage] = models

    def hold_back(self, passage: Passage, step: CourseStep) -> bool:
        """Whether a step is kept back for now."""
        queue = self._queue_of(passage)
        if passage not in queue or step.model not in queue[passage]:
            return False
        for earlier, models in queue.items():
            if earlier is passage:
                break
            if step.model in models:
                self._held_steps.setdefault(passage, []).append(step)
                return True
        return False

    def record_reached(self, passage: Passage, model: Model) -> list[Passage]:
        """Record that a request has reached a model. Returns: the requests that were kept from it and may continue."""
        queue = self._queue_of(passage)
        models = queue.get(passage, set())
        if model not in models:
            return []
        models.remove(model)
        if not models:
            self._remove_from(passage, queue)
        return self._release_held(queue, {model})

    def remove(self, passage: Passage) -> list[Passage]:
        """Forget a request that has ended. Returns: the requests that were kept back for it and may continue."""
        queue = self._queue_of(passage)
        models = queue.get(passage)
        if models is None:
            return []
        self._remove_from(passage, queue)
        return self._release_held(queue, models)

    def _queue_of(self, passage: Passage) -> dict[Passage, set[Model]]:
        in_sequence = passage.parent.sequence
        return {} if in_sequence is None else self._queues.get(in_sequence.id, {})

    def _remove_from(self, passage: Passage, queue: dict[Passage, set[Model]]) -> None:
        self._held_steps.pop(passage, None)
        del queue[passage]
        if not queue and passage.parent.sequence is not None:
            del self._queues[passage.parent.sequence.id]

    def _release_held(self, queue: dict[Passage, set[Model]], models: set[Model]) -> list[Passage]:
        """Release the steps kept from these models, up to the next request that has yet to reach each."""
        released: list[Passage] = []
        for passage, pending_models in queue.items() if self._held_steps else ():
            held = self._held_steps.get(passage, [])
            ready = [step for step in held if step.model in models]
            if ready:
                self._held_steps[passage] = [step for step in held if step.model not in models]
                passage.ready += ready
                released.append(passage)
            models = models - pending_models
            if not models:
                break
        return released


def _has_sequences(model: Model, links: Links) -> bool:
    nested = links.nested.get(model)
    if nested is None:
        return model.spec.sequence is not None
    return any(_has_sequences(each, nested) for each in nested.models)
