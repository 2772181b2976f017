"""InferRequest: one checked call on its way through the Engine, and the sink that receives it when done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.device_array import HOST, DeviceArray
from penstock.backends.errors import InferError

if TYPE_CHECKING:
    from .caching.model_cache import Miss
    from .ensembles.course import CourseStep
    from .model import Model
    from .sequences.active_sequence import ActiveSequence
    from .stream import AnswerSink

Key = tuple[tuple[int, ...] | None, ...]
"""What requests must have in common to share a batch: the shape of each input without rows, in the Signature's order;
None if the input is absent. Names and datatypes already match the model's. If sequences are pinned, a Pin follows
(sequence_slots.pin)."""


Pin = tuple[int] | None
"""The last part of such a Key; None if there is none."""


class InSequence(NamedTuple):
    """The sequence a request belongs to: its id (0 or "" for none), and whether the request is its first or last."""

    id: int | str
    start: bool = False
    end: bool = False


NO_SEQUENCE = InSequence(0)


class RequestOptions(NamedTuple):
    """Members of InferRequest to set without constructing one: how it waits, and on whose behalf it is made."""

    deadline_ns: int = 0
    priority: int = 0
    sequence: InSequence | None = None
    caller: InferRequest | None = None
    timeout_us: int = 0


DEFAULT_REQUEST_OPTIONS = RequestOptions()


class Sink(Protocol):
    """Receives finished requests; there is one per dialect and event loop."""

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Take finished requests; each has `outputs` or `error`.

        Threads: called on the event loop. Must not raise.
        """


class Submitter(Protocol):
    """The part of an engine used by code that takes answers one by one, or only one."""

    def submit(self, request: InferRequest) -> None: ...
    def cancel(self, request: InferRequest) -> None: ...


class SoonSubmitter(Submitter, Protocol):
    """A `Submitter` that can also queue the requests of one loop turn together (arrivals.py)."""

    def submit_soon(self, request: InferRequest) -> None: ...


class InferRequest:
    """One call: made by a dialect, checked, stamped, batched, and delivered to its sink exactly once.

    Shapes: `inputs` follow the Signature's order, None for an absent optional input; each has `rows` on axis 0 if the
    model is batched. `outputs`, once served, follow `output_positions` (positions in the Signature's outputs).
    Units: stamps and times are monotonic nanoseconds; 0 means none. `nbytes` is the server memory that it holds.
    Ownership: input arrays may be views of the request's body and are read until the batch has been gathered. `context`
    belongs to the dialect and is never read here.
    `deadline_ns` is when it must have left the queue, or it expires. `target_ns` is when it should be answered: it is
    rejected on arrival if predicted to miss it, and still served if the prediction was wrong. `promised_ns` is that
    prediction. `priority`: 1 is the highest, 0 the model's default. `sequence` is None if it belongs to none.
    `parts` are the requests that a split request was divided into. `miss` is the response cache's note, None if the
    answer is not to be cached. `waiting` is True only while it is in a Lane or queued behind its sequence.
    The attributes declared below exist only on some requests. Set once the request is queued or sent:
    `active_sequence`, its sequence, on requests of sequence models; `remote_id`, its id in another process's engine.
    For models of user code: `parameters`, the client's own, and `answer_sink`, if there may be several.
    `step`: on requests of an ensemble's step, whose `context` is the Passage. `output_targets`: the device arrays that
    outputs are written to, by position; they are then its `outputs`. `timeout_us`: the timeout that the request asked
    for, whatever the model's policy made of it. `caller`: the request on whose behalf user code made this one, for
    tracing. `traced`: the tracer's, on requests of ensembles and those with a caller while tracing is on. `arrived_ns`:
    on requests for models with a latency target, which counts from then; it is earlier than acceptance if they waited
    in a socket.
    """

    __slots__ = (
        "active_sequence",
        "answer_sink",
        "arrived_ns",
        "caller",
        "context",
        "deadline_ns",
        "enqueued_ns",
        "error",
        "id",
        "inputs",
        "key",
        "miss",
        "model",
        "nbytes",
        "output_positions",
        "output_targets",
        "outputs",
        "parameters",
        "parts",
        "priority",
        "promised_ns",
        "remote_id",
        "rows",
        "sequence",
        "sink",
        "start_ns",
        "step",
        "target_ns",
        "timeout_us",
        "traced",
        "waiting",
    )  # fmt: skip

    active_sequence: ActiveSequence
    remote_id: int
    parameters: Mapping[str, Any]
    answer_sink: AnswerSink
    step: CourseStep
    caller: InferRequest
    output_targets: Mapping[int, DeviceArray]
    timeout_us: int
    traced: Any
    arrived_ns: int

    def __init__(
        self,
        model: Model,
        inputs: list[Array | None],
        rows: int,
        key: Key,
        output_positions: tuple[int, ...],
        sink: Sink,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.rows = rows
        self.key = key
        self.output_positions = output_positions
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
        self.enqueued_ns = 0
        self.nbytes = 0
        self.outputs: list[Any] | None = None
        self.error: InferError | None = None
        self.waiting = False
        self.context: Any = None


def input_bytes(inputs: Iterable[Array | DeviceArray | None]) -> int:
    """Count the bytes of a request's inputs, including those of strings, excluding tensors in device memory.

    Data still to be read from a client's host memory counts: it takes as much once it has been gathered.
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
