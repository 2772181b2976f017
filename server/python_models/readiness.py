"""ModelReadiness: whether the model in a worker says itself that it is ready. Held by PythonModelHost.

Source: python_backend, `is_ready` in README.md: how long is waited, and who shares an answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .messages import ASK_READY

if TYPE_CHECKING:
    from penstock.server.workers.worker import Worker

WITHIN_S = 5.0
"""A model that takes longer to say so is not ready."""


class ModelReadiness:
    """The question that is under way, if any: who asks meanwhile gets its answer. Threads: the event loop's.

    `asked`: the model has a say. Otherwise it is ready while it has a worker.
    """

    def __init__(self) -> None:
        self.asked = False
        self._answer: asyncio.Future[bool] | None = None

    async def ask(self, worker: Worker | None) -> bool:
        """Ask the model in a worker; one that does not answer in time goes on with it."""
        if worker is None or not self.asked:
            return worker is not None
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            worker.tell(ASK_READY, 0)
        answer = self._answer
        await asyncio.wait((answer,), timeout=WITHIN_S)
        return answer.done() and answer.result()

    def answer(self, *, ready: bool) -> None:
        """Take the answer; none comes of a worker that has ended."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.set_result(ready)
