"""ModelReadiness: whether the model in a worker reports itself ready. Used by PythonModelHost.

Source: python_backend, `is_ready` in README.md: the time limit, and the sharing of an answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .messages import CHECK_READY

if TYPE_CHECKING:
    from penstock.server.workers.worker import Worker

ANSWER_LIMIT_S = 5.0
"""A model that takes longer to answer is not ready."""


class ModelReadiness:
    """The pending question, if any; later callers share its answer. Threads: the event loop's.

    `has_is_ready`: the model defines `is_ready`. Otherwise it is ready while it has a worker.
    """

    def __init__(self) -> None:
        self.has_is_ready = False
        self._pending_answer: asyncio.Future[bool] | None = None

    async def check(self, worker: Worker | None) -> bool:
        """Ask the model in a worker. A question that is not answered in time stays pending."""
        if worker is None or not self.has_is_ready:
            return worker is not None
        if self._pending_answer is None:
            self._pending_answer = asyncio.get_running_loop().create_future()
            worker.send_message(CHECK_READY, 0)
        answer = self._pending_answer
        await asyncio.wait((answer,), timeout=ANSWER_LIMIT_S)
        return answer.done() and answer.result()

    def answer(self, *, ready: bool) -> None:
        """Handle the answer; False for a worker that has ended."""
        answer, self._pending_answer = self._pending_answer, None
        if answer is not None:
            answer.set_result(ready)
