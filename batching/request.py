"""InferRequest: one checked call on its way through the Engine, and the sink it goes to when it is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.device_array import HOST, DeviceArray
from penstock.backends.errors import InferError

if TYPE_CHECKING:
    from .caching.remembering import Miss
    from .ensembles.course import Passed
    from .model import Model
    from .sequences.under_way import UnderWay
    from .stream import AnswerSink

Key = tuple[tuple[int, ...] | None, ...]
"""What must be equal to share a batch: per input, in the Signature's order, its shape without rows; None if absent.
Names and datatypes are the model's own by then. Where sequences are pinned, one part more (places.pin)."""


Pin = tuple[int] | None
"""The last part of such a Key; None: there is none."""


class InSequence(NamedTuple):
    """What a request says of its sequence: which one (0 or "" for none), and whether it is its first or its last."""

    id: int | str
    start: bool = False
    end: bool = False


NO_SEQUENCE = InSequence(0)


class Terms(NamedTuple):
    """How a request wants to wait, and for whom it is made: members of InferRequest, for those who do not make one."""

    deadline_ns: int = 0
    priority: int = 0
    sequence: InSequence | None = None
    caller: InferRequest | None = None
    timeout_us: int = 0


NO_TERMS = Terms()


class Sink(Protocol):
    """Where finished requests go: one object per dialect and event loop."""

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Take requests that are done: each has `outputs` or `error`.

        Threads: called on the event loop. Must not raise.
        """


class Submits(Protocol):
    """What is asked of an engine by those who take answers one by one, or only one."""

    def submit(self, request: InferRequest) -> None: ...
    def cancel(self, request: InferRequest) -> None: ...


class SubmitsSoon(Submits, Protocol):
    """Likewise, where requests of one loop turn may come together (arrivals.py)."""

    def submit_soon(self, request: InferRequest) -> None: ...


class InferRequest:
    """One call: made by a dialect, checked, stamped, batched, and delivered to its sink exactly once.

    Shapes: `inputs` follow the Signature's order, None for an absent optional input; each has `rows` on axis 0 when
    the model is batched. `outputs`, once served, follow `wanted` (positions in the Signature's outputs).
    Units: stamps and times are monotonic nanoseconds; 0 is "none". `nbytes` is what it holds of the server's memory.
    `deadline_ns` is when it must have left the queue, or it expires; `target_ns` when it should be answered: it is
    refused at the door if it would not be, and served all the same if the prediction was wrong. `promised_ns` is that
    prediction. `parts` are the requests that a split one is made of.
    `priority`: 1 is the highest, 0 the model's default. `sequence` is what it says of its sequence, None for nothing.
    `miss` is what the response cache has noted of it, None if its answer is not to be remembered.
    `waiting` is True while it stands in a Lane, or behind its sequence, and nowhere else. `under_way` is its sequence,
    from when it is taken into the queue of a sequence model; others do not have it. `number` names it to the engine of
    another process, from when it has been sent there; likewise. `parameters`, the client's own, and `answers`, where
    several may come, are had by requests for models of user code, and not by all of them. `step` is had by the request
    of an ensemble's step, whose `context` is the Passage. `targets` is where outputs are wanted on a device, by
    position; only a request that wants any there has it, and its `outputs` are these then. `timeout_us` is what a
    request has said of its wait, whatever its model's policy has made of that; one that has said nothing does not have
    it. `caller` is had by one that user code makes for its own, to be traced with it. `traced` is the tracer's own, and
    had by requests of ensembles, and by those with callers, while something is traced. `arrived_ns` is had by requests
    for models with a latency target, which counts from then: they may have lain in a socket before they were accepted.
    Ownership: input arrays may be views of the request's body and are read until the batch has been gathered.
    `context` is the dialect's own and is never looked at here.
    """

    __slots__ = (
        "answers", "arrived_ns", "caller", "context", "deadline_ns", "error", "id", "inputs", "key", "miss", "model",
        "nbytes", "number", "outputs", "parameters", "parts", "priority", "promised_ns", "queue_ns", "rows", "sequence",
        "sink", "start_ns", "step", "target_ns", "targets", "timeout_us", "traced", "under_way", "waiting", "wanted",
    )  # fmt: skip

    under_way: UnderWay
    number: int
    parameters: Mapping[str, Any]
    answers: AnswerSink
    step: Passed
    caller: InferRequest
    targets: Mapping[int, DeviceArray]
    timeout_us: int
    traced: Any
    arrived_ns: int

    def __init__(
        self, model: Model, inputs: list[Array | None], rows: int, key: Key, wanted: tuple[int, ...], sink: Sink
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.rows = rows
        self.key = key
        self.wanted = wanted
        self.sink = sink
        self.id = ""
        self.deadline_ns = 0
        self.target_ns = 0
        self.promised_ns = 0
        self.parts: list[InferRequest] | None = None
        self.priority = 0
        self.sequence: InSequence | None = None
        self.miss: Miss | None = None
        self.start_ns = 0
        self.queue_ns = 0
        self.nbytes = 0
        self.outputs: list[Any] | None = None
        self.error: InferError | None = None
        self.waiting = False
        self.context: Any = None


def bytes_of(inputs: Iterable[Array | DeviceArray | None]) -> int:
    """Count the bytes of a request's inputs, those of their strings included, and not what lies on a device.

    What is still to be read from a client's memory counts: it takes as much when it has been gathered.
    """
    nbytes = 0
    for array in inputs:
        if isinstance(array, np.ndarray):
            nbytes += array.nbytes
            if array.dtype.hasobject:
                nbytes += sum(map(len, array.ravel().tolist()))
        elif isinstance(array, DeviceArray) and array.device == HOST:
            nbytes += array.nbytes
    return nbytes
