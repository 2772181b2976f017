"""Messages: what a server and a worker with a Seldon component say to each other, beside workers/kinds.py.

The service is `penstock.server.seldon.inside.service`. Its settings: {"component": "Name" or "package.module.Class",
"folder": where it works, "parameters": the JSON text of its parameters, "strict": bool, "custom_service": whether it is
to run that; and what else the component's ModelSpec has for options}. It answers being opened with a
ComponentDescription.

Both ways, a call travels as it came: the server reads no JSON and no protobuf, but for --batching.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.server.carrying.messages import CALL

__all__ = ["CALL"]
"""Of it: two bytes, an Endpoint and a PayloadKind, then the payload. Answered: ANSWER, metrics, header lines, body."""
ROWS = 33
"""Call. Requests that share a batch, which the server has decoded: `rows.py` and `batching.py` say how."""
TENSORS = 34
"""Call. Requests of the v2 protocol: `rows.py` and `tensors.py` say how."""
TOGETHER, APART, NEVER = range(3)
"""How the answers to ROWS and TENSORS begin: the requests have run together; they are to run apart; and so is whatever
comes later, as the component says more of each call than can be told apart."""

ANSWER = struct.Struct("<HHI")
"""Status (HTTP's, or gRPC's for PayloadKind.PROTO), and the lengths of what stands before the body, metrics first:
header lines, of which the first is the value of content-type alone, none for JSON; and metrics, JSON: [[key, type,
value, tags or null]], none for none. The body of a gRPC status other than OK is its text."""
_HEAD = ANSWER.size


def read_answer(reply: bytes) -> tuple[int, bytes, bytes, bytes]:
    """Take the answer to a CALL apart. Returns: its status, metrics, header lines, and body."""
    status, lines, metrics = ANSWER.unpack_from(reply)
    if not lines and not metrics:
        return status, b"", b"", reply[_HEAD:]
    after = _HEAD + metrics
    return status, reply[_HEAD:after], reply[after : after + lines], reply[after + lines :]


class Endpoint(enum.IntEnum):
    """What is asked of a component. Its `label` is what the original's metrics call it."""

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
    """What the payload of a CALL is."""

    JSON = 0
    """The body of a request whose content type is JSON and which has no query."""
    HTTP = 1
    """A line of JSON, {"method": str, "type": its Content-Type, "query": str}, and after it the body. It has "path"
    and "headers", pairs, too, where the ComponentDescription `looks`."""
    PROTO = 2
    """The message of the RPC: SeldonMessage, SeldonMessageList for AGGREGATE, Feedback for FEEDBACK."""


@dataclass(frozen=True, slots=True)
class ComponentDescription:
    """What a worker says of its component.

    `metadata` is what `/metadata` answers, None where it is not valid, and `page` the same as it is written. `health`
    is what `/health/status` always answers, as it is; "" where the component is to be asked. `batches`: calls of
    `predict` may share one (docs/seldon.md has the rules); `takes_meta`: unless a request has `meta`. `looks`: its
    methods may look at Flask's request.
    """

    metadata: dict[str, Any] | None = field(default_factory=dict)
    health: str = ""
    batches: bool = False
    takes_meta: bool = False
    page: str = ""
    looks: bool = False

    def write(self) -> bytes:
        """Write it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, body: bytes) -> ComponentDescription:
        """Read what `write` has written."""
        return cls(**json.loads(body))
