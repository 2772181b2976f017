"""Stream: a request that has any number of answers, taken one by one. Called by the Engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.backends.errors import Code, InferError

from .caching.cache import size_of as array_bytes

if TYPE_CHECKING:
    from .model import Model
    from .request import InferRequest, Submits

MOST_BYTES = 256 << 20
"""What may wait for a client that does not take its answers; its request fails then."""
MOST_OF_ALL_BYTES = 2 << 30
"""The same of all requests of a model: those fail for whom most waits, and what waits is dropped. Who takes its answers
as they come has next to none there, and does not."""
_SPARED = 8
"""What is passed is brought down by one part in so many, so that a look at all of them is worth it."""
TOLD_BYTES = 704
"""What an answer takes beside its arrays: a million answers of four bytes take 800 MB at most."""
TAKEN_AT_ONCE = 16
"""After so many answers that were there already the event loop has its turn: to encode and send one takes 40 to
60 us, and a model may give thousands faster than they are taken."""
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
"""Source: Triton server, http_server.cc. Nobody else asks a decoupled model for one answer."""


class StreamedAnswer(NamedTuple):
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


class AnswerSink(Protocol):
    """Where the answers of one request go, as they come."""

    def tell(self, told: StreamedAnswer) -> Room | None:
        """Take an answer. Returns: what to wait for before the next, None: nothing. It is taken if it comes before.

        Raises: InferError, which ends the request.
        """


class AnswerStream:
    """The answers of one request that have come and were not taken; the sink of the request, too.

    `tell` is called by whoever runs it, `deliver` when it has ended. `left` says that nobody takes them any more: those
    that still come, since a model may go on for as long as it likes, are dropped. Where `model` is said, what waits
    counts as its, and this is in its `streams` until it is left. Threads: the event loop's.
    """

    def __init__(self, model: Model | None = None) -> None:
        self.left = False
        self._model = model
        self._waiting: deque[tuple[StreamedAnswer, int]] = deque()
        self.nbytes = self._taken = 0
        self._changed = asyncio.Event()
        self._error: InferError | None = None
        self._dropped = False
        self.ended = False
        if model is not None:
            model.streams.add(self)

    def tell(self, told: StreamedAnswer) -> None:
        """Put an answer in line. Raises: InferError (OVERLOADED) where too much waits already."""
        if self.left:
            return
        if self._dropped or self.nbytes > MOST_BYTES:
            raise _not_read()
        nbytes = size_of(told)
        self._count(nbytes)
        self._waiting.append((told, nbytes))
        self._changed.set()
        if self._model is not None and self._model.told_bytes > MOST_OF_ALL_BYTES:
            _make_room(self._model, self if len(self._waiting) == 1 else None)
            if self._dropped:
                raise _not_read()

    def leave(self) -> None:
        """Let go of what waits, and of what comes."""
        self.left = True
        self._clear()
        if self._model is not None:
            self._model.streams.discard(self)

    def drop(self) -> None:
        """Let go of what waits, as there is no room for it: the request has failed."""
        self._dropped = True
        self._clear()
        self._changed.set()

    def _clear(self) -> None:
        self._waiting.clear()
        self._count(-self.nbytes)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._model is not None:
            self._model.told_bytes += nbytes

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Take the request's end."""
        self._error = requests[0].error
        self.ended = True
        self._changed.set()

    @property
    def more(self) -> bool:
        """Whether `next` has one to give at once: it neither waits nor leaves the event loop its turn before."""
        return bool(self._waiting) and (self._taken + 1) % TAKEN_AT_ONCE != 0

    async def next(self) -> StreamedAnswer | None:
        """Give the next answer, None after the last. Raises: InferError, when those before it have been given."""
        self._taken += 1
        if self._taken % TAKEN_AT_ONCE == 0:
            await asyncio.sleep(0)
        while not self._waiting:
            if self._dropped:
                raise _not_read()
            if self.ended:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        told, nbytes = self._waiting.popleft()
        self._count(-nbytes)
        return told


def _not_read() -> InferError:
    return InferError(Code.OVERLOADED, "the answers of a request wait for a client that does not read them")


def _make_room(model: Model, spared: AnswerStream | None) -> None:
    """Drop what waits of the requests of which most does, but not of one for which nothing has waited before."""
    keeping: list[AnswerStream] = [each for each in model.streams if each.nbytes and each is not spared]
    for each in sorted(keeping, key=attrgetter("nbytes"), reverse=True):
        if model.told_bytes <= MOST_OF_ALL_BYTES - MOST_OF_ALL_BYTES // _SPARED:
            break
        each.drop()


def size_of(told: StreamedAnswer) -> int:
    """Count what an answer takes, its strings and itself included."""
    return TOLD_BYTES + sum(map(array_bytes, told.outputs.values()))


@contextmanager
def stream(engine: Submits, request: InferRequest) -> Iterator[AnswerStream]:
    """Submit a request, and give where its answers come; to leave before the last cancels it. Raises: InferError."""
    answers = AnswerStream(request.model)
    request.answers = answers
    request.sink = answers
    try:
        engine.submit(request)
    except BaseException:
        answers.leave()
        raise
    try:
        yield answers
    finally:
        answers.leave()
        if not answers.ended:
            engine.cancel(request)
