"""Stream: a request that has any number of answers, taken one by one. Called by the Engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.backends.errors import Code, InferError

if TYPE_CHECKING:
    from .request import InferRequest, Submits

MOST_BYTES = 256 << 20
"""What may wait for a client that does not take its answers; its request fails then."""
TAKEN_AT_ONCE = 16
"""After so many answers that were there already the event loop has its turn: to encode and send one takes 40 to
60 us, and a model may give thousands faster than they are taken."""
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
"""Source: Triton server, http_server.cc. Nobody else asks a decoupled model for one answer."""


class Told(NamedTuple):
    """One answer: its outputs by name, or why it failed; more may come unless it is `final`.

    `parameters` are the model's own. `wrong` is in what an output is not as the Signature says, "" for nothing.
    Units: `infer_ns` since the answer before it, or since the request was taken up.
    """

    outputs: Mapping[str, Any]
    error: InferError | None = None
    final: bool = False
    parameters: Mapping[str, Any] | None = None
    infer_ns: int = 0
    wrong: str = ""


GoOn = Callable[[], None]
Room = Callable[[GoOn], None]
"""To be called with what is to be called when there is room for more answers."""


class Tells(Protocol):
    """Where the answers of one request go, as they come."""

    def tell(self, told: Told) -> Room | None:
        """Take an answer. Returns: what to wait for before the next, None: nothing. It is taken if it comes before.

        Raises: InferError, which ends the request.
        """


class Answers:
    """The answers of one request that have come and were not taken; the sink of the request, too.

    `tell` is called by whoever runs it, `deliver` when it has ended. Threads: the event loop's.
    """

    def __init__(self) -> None:
        self._waiting: deque[Told] = deque()
        self._nbytes = self._taken = 0
        self._changed = asyncio.Event()
        self._error: InferError | None = None
        self.ended = False

    def tell(self, told: Told) -> None:
        """Put an answer in line. Raises: InferError (OVERLOADED) where too much waits already."""
        if self._nbytes > MOST_BYTES:
            raise InferError(Code.OVERLOADED, "the answers of a request wait for a client that does not read them")
        self._nbytes += size_of(told)
        self._waiting.append(told)
        self._changed.set()

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Take the request's end."""
        self._error = requests[0].error
        self.ended = True
        self._changed.set()

    async def next(self) -> Told | None:
        """Give the next answer, None after the last. Raises: InferError, when those before it have been given."""
        self._taken += 1
        if self._taken % TAKEN_AT_ONCE == 0:
            await asyncio.sleep(0)
        while not self._waiting:
            if self.ended:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        told = self._waiting.popleft()
        self._nbytes -= size_of(told)
        return told


def size_of(told: Told) -> int:
    """Count an answer's bytes; of strings, their number."""
    return sum(array.nbytes for array in told.outputs.values())


async def stream(engine: Submits, request: InferRequest) -> AsyncGenerator[Told, None]:
    """Submit a request and give its answers as they come; to be closed by who does not take all. Raises: InferError."""
    answers = Answers()
    request.answers = answers
    request.sink = answers
    engine.submit(request)
    try:
        while (told := await answers.next()) is not None:
            yield told
    finally:
        if not answers.ended:
            engine.cancel(request)
