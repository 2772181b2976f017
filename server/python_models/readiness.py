"""ModelReadiness: whether the model in a worker reports itself ready. Used by PythonModelHost.

Source: python_backend, `is_ready` in README.md: the time limit, and the sharing of an answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .messages import ASK_READY

if TYPE_CHECKING:
    from penstock.server.workers.worker import Worker

WITHIN_S = 5.0
"""A model that takes longer to answer is not ready."""


class ModelReadiness:
    """The pending question, if any; later callers share its answer. Threads: the event loop's.

    `asked`: the model defines `is_ready`. Otherwise it is ready while it has a worker.
    """

    def __init__(self) -> None:
        self.asked = False
        self._answer: asyncio.Future[bool] | None = None

    async def ask(self, worker: Worker | None) -> bool:
        """Ask the model in a worker. A question that is not answered in time stays pending."""
        if worker is None or not self.asked:
            return worker is not None
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            worker.send_message(ASK_READY, 0)
        answer = self._answer
        await asyncio.wait((answer,), timeout=WITHIN_S)
        return answer.done() and answer.result()

    def answer(self, *, ready: bool) -> None:
        """Handle the answer; False for a worker that has ended."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.set_result(ready)
