"""Stream: a request that has any number of answers, taken one by one. Used by `server/` and by ensembles."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.backends.errors import Code, InferError

from .caching.cache import array_bytes

if TYPE_CHECKING:
    from .model import Model
    from .request import InferRequest, Submitter

MAX_UNREAD_BYTES = 256 << 20
"""The most that may wait for a client that does not take its answers; beyond it the request fails."""
MAX_MODEL_UNREAD_BYTES = 2 << 30
"""The same for all requests of a model together. Beyond it, the requests with the most waiting fail and their answers
are dropped; a client that takes its answers as they come has next to nothing waiting and is unaffected."""
_HEADROOM_DIVISOR = 8
"""When that limit is exceeded, usage is brought below it by one part in this many, which makes the pass over all
requests worth its cost."""
ANSWER_OVERHEAD_BYTES = 704
"""What an answer takes in addition to its arrays: a million answers of four bytes take at most 800 MB."""
MAX_TAKEN_PER_TURN = 16
"""After this many answers that were ready without waiting, the event loop gets a turn: encoding and sending one takes
40 to 60 us, and a model may produce thousands faster than they are taken."""
NOT_SINGLE_MESSAGE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
"""Source: Triton server, http_server.cc. Only `generate` asks a decoupled model for a single answer."""


class StreamedAnswer(NamedTuple):
    """One answer: its outputs by name, or an error. More may follow unless it is `final`.

    `parameters` are the model's own. `mismatch` says how an output deviates from the Signature, "" if none does.
    Units: `infer_ns` since the previous answer, or since the request was taken up.
    """

    outputs: Mapping[str, Any]
    error: InferError | None = None
    final: bool = False
    parameters: Mapping[str, Any] | None = None
    infer_ns: int = 0
    mismatch: str = ""


Resume = Callable[[], None]
Backpressure = Callable[[Resume], None]
"""Takes a callback to call once there is room for more answers."""


class AnswerSink(Protocol):
    """Receives the answers of one request as they come."""

    def send(self, answer: StreamedAnswer) -> Backpressure | None:
        """Take an answer. Returns: what to wait for before sending the next; None for nothing. Not waiting is allowed.

        Raises: InferError, which ends the request.
        """


class AnswerStream:
    """The answers of one request that were not taken yet; also the sink of the request.

    Whoever runs the request calls `send` for each answer and `deliver` at the end. `closed`: nobody takes answers any
    more, so those that still come are dropped, since a model may go on for as long as it likes. If `model` is given,
    waiting answers count toward its limit, and this stream is in its `streams` until it is left. Threads: the event
    loop's.
    """

    def __init__(self, model: Model | None = None) -> None:
        self.closed = False
        self._model = model
        self._unread: deque[tuple[StreamedAnswer, int]] = deque()
        self.nbytes = self._taken = 0
        self._changed = asyncio.Event()
        self._error: InferError | None = None
        self._dropped = False
        self.ended = False
        if model is not None:
            model.streams.add(self)

    def send(self, answer: StreamedAnswer) -> None:
        """Queue an answer. Raises: InferError (OVERLOADED) if too much is already waiting."""
        if self.closed:
            return
        if self._dropped or self.nbytes > MAX_UNREAD_BYTES:
            raise _unread_error()
        nbytes = answer_bytes(answer)
        self._add_bytes(nbytes)
        self._unread.append((answer, nbytes))
        self._changed.set()
        if self._model is not None and self._model.unread_bytes > MAX_MODEL_UNREAD_BYTES:
            _drop_largest(self._model, self if len(self._unread) == 1 else None)
            if self._dropped:
                raise _unread_error()

    def close(self) -> None:
        """Discard the answers that wait and those still to come."""
        self.closed = True
        self._discard_unread()
        if self._model is not None:
            self._model.streams.discard(self)

    def drop(self) -> None:
        """Discard the answers that wait because there is no room for them; the request fails."""
        self._dropped = True
        self._discard_unread()
        self._changed.set()

    def _discard_unread(self) -> None:
        self._unread.clear()
        self._add_bytes(-self.nbytes)

    def _add_bytes(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._model is not None:
            self._model.unread_bytes += nbytes

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Take the end of the request."""
        self._error = requests[0].error
        self.ended = True
        self._changed.set()

    @property
    def has_next(self) -> bool:
        """Whether `next` can return an answer without waiting and without yielding to the event loop."""
        return bool(self._unread) and (self._taken + 1) % MAX_TAKEN_PER_TURN != 0

    async def next(self) -> StreamedAnswer | None:
        """Return the next answer, None after the last. Raises: InferError, after the answers that preceded it."""
        self._taken += 1
        if self._taken % MAX_TAKEN_PER_TURN == 0:
            await asyncio.sleep(0)
        while not self._unread:
            if self._dropped:
                raise _unread_error()
            if self.ended:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        answer, nbytes = self._unread.popleft()
        self._add_bytes(-nbytes)
        return answer


def _unread_error() -> InferError:
    return InferError(Code.OVERLOADED, "the answers of a request wait for a client that does not read them")


def _drop_largest(model: Model, exempt: AnswerStream | None) -> None:
    """Drop what waits for the requests with the most waiting, except `exempt`, for which nothing waited before."""
    streams: list[AnswerStream] = [each for each in model.streams if each.nbytes and each is not exempt]
    for each in sorted(streams, key=attrgetter("nbytes"), reverse=True):
        if model.unread_bytes <= MAX_MODEL_UNREAD_BYTES - MAX_MODEL_UNREAD_BYTES // _HEADROOM_DIVISOR:
            break
        each.drop()


def answer_bytes(answer: StreamedAnswer) -> int:
    """Count the bytes of an answer, including its strings and its own overhead."""
    return ANSWER_OVERHEAD_BYTES + sum(map(array_bytes, answer.outputs.values()))


@contextmanager
def open_stream(engine: Submitter, request: InferRequest) -> Iterator[AnswerStream]:
    """Submit a request and yield the stream of its answers; leaving early cancels it. Raises: InferError."""
    answers = AnswerStream(request.model)
    request.answer_sink = answers
    request.sink = answers
    try:
        engine.submit(request)
    except BaseException:
        answers.close()
        raise
    try:
        yield answers
    finally:
        answers.close()
        if not answers.ended:
            engine.cancel(request)
