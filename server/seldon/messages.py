"""Messages between a server and a worker with a Seldon component, in addition to workers/kinds.py.

The service is `penstock.server.seldon.inside.service`. Its settings: {"component": "Name" or "package.module.Class",
"folder": its working folder, "parameters": its parameters as JSON text, "strict": bool, "custom_service": whether to
run it; and the other options of the component's ModelSpec}. It answers being opened with a ComponentDescription.

A call travels unread in both directions: except for --batching, the server reads no JSON and no protobuf.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.server.carrying.messages import CALL

__all__ = ["CALL"]
"""Its body: two bytes, an Endpoint and a PayloadKind, then the payload. Its answer: ANSWER, metrics, header lines,
body."""
ROWS = 33
"""Call. Requests that share a batch, decoded by the server: see `rows.py` and `batching.py`."""
TENSORS = 34
"""Call. Requests of the v2 protocol: see `rows.py` and `tensors.py`."""
TOGETHER, APART, NEVER = range(3)
"""The first byte of the answers to ROWS and TENSORS: the requests have run together; they must run apart; or they and
all later ones must, since the component reports more for each call than can be told apart in a batch."""

ANSWER = struct.Struct("<HHI")
"""Status (HTTP's, or gRPC's for PayloadKind.PROTO), and the lengths of what precedes the body:

- header lines; the first is the bare value of content-type. None for JSON.
- metrics, which come first in the answer, as JSON: [[key, type, value, tags or null]]. None if there are none.

The body of a gRPC status other than OK is its text."""
_HEAD = ANSWER.size


def read_answer(reply: bytes) -> tuple[int, bytes, bytes, bytes]:
    """Split the answer to a CALL. Returns: its status, metrics, header lines, and body."""
    status, lines, metrics = ANSWER.unpack_from(reply)
    if not lines and not metrics:
        return status, b"", b"", reply[_HEAD:]
    after = _HEAD + metrics
    return status, reply[_HEAD:after], reply[after : after + lines], reply[after + lines :]


class Endpoint(enum.IntEnum):
    """A method of a component that a request calls. `label` is its name in the original's metrics."""

    PREDICT = 0
    FEEDBACK = 1
    TRANSFORM_INPUT = 2
    TRANSFORM_OUTPUT = 3
    ROUTE = 4
    AGGREGATE = 5
    HEALTH = 6

    @property
    def label(self) -> str:
        """The value of the label `method`."""
        return _LABELS[self]


_LABELS = ("predict", "feedback", "inputtransform", "outputtransform", "router", "aggregate", "health")


class PayloadKind(enum.IntEnum):
    """The form of a CALL's payload."""

    JSON = 0
    """The body of a request whose content type is JSON and which has no query."""
    HTTP = 1
    """A line of JSON, {"method": str, "type": its Content-Type, "query": str}, then the body. If the
    ComponentDescription `reads_request`, the line also has "path" and "headers", a list of pairs."""
    PROTO = 2
    """The message of the RPC: SeldonMessage, SeldonMessageList for AGGREGATE, Feedback for FEEDBACK."""


@dataclass(frozen=True, slots=True)
class ComponentDescription:
    """What a worker reports about its component.

    - `metadata` is the answer of `/metadata`, None if it is invalid; `page` is its encoded form.
    - `health` is the constant answer of `/health/status`, encoded; "" if the component must be called.
    - `batches`: calls of `predict` may share a batch (docs/seldon.md has the rules).
    - `takes_meta`: calls with `meta` may not.
    - `reads_request`: its methods may read Flask's request.
    """

    metadata: dict[str, Any] | None = field(default_factory=dict)
    health: str = ""
    batches: bool = False
    takes_meta: bool = False
    page: str = ""
    reads_request: bool = False

    def write(self) -> bytes:
        """Encode it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, body: bytes) -> ComponentDescription:
        """Decode what `write` encoded."""
        return cls(**json.loads(body))
