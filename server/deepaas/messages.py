"""Messages between a server and the workers of a DEEPaaS model, in addition to workers/kinds.py.

The service is `penstock.server.deepaas.inside.service`. Its settings: {"model": the name, "target": "module" or
"module:attr", "role": a WorkerRole, "warm": bool, "accept_header": bool, "show_errors": bool}. A model has one worker
of the role DESK, workers that PREDICT, and a worker for each training, which ends with it. Each answers being opened
with a ModelDescription, which only the Desk fills in.

A request travels unread: a line of JSON, {"method", "query", "headers": [[name, value], ...]}, and the body. Header
names are in lower case, a repeated field has several entries, and bytes are decoded as Latin-1. The server reads
neither arguments nor files.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field
from typing import Any

JSON = b"application/json; charset=utf-8"
TEXT = b"text/plain; charset=utf-8"
TROUBLE = b"500 Internal Server Error\n\nServer got itself in trouble"
"""aiohttp's answer if the code it calls fails."""
METADATA = 33
"""Call to the Desk, with a model's link to itself: the current result of get_metadata(), merged with the defaults.
Answered like CALL."""
CHECK = 34
"""Call to the Desk, with a request for a training: its arguments in the form that a training shows, in an answer of
status 200; or the answer to wrong arguments."""
TRAIN = 35
"""Call to a Trainer, with a request for a training. Its answer, when that has ended, is JSON: {"output": the result} or
{"error": the text of the exception}."""
PROGRESS = 64
"""Notification from a Trainer that the training starts, after warm-up. No body."""


class WorkerRole(enum.StrEnum):
    """The purpose of a worker."""

    DESK = "desk"
    PREDICT = "predict"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The Desk's description of a model. `predicts`, `trains`: whether it has that method.

    All values have the form of Swagger 2.0 (swagger.py).

    - `predict_args`, `train_args`: {"parameters": the parameter objects in the order of declaration, "definitions":
      those
      they refer to, by name, "produces": the content types of answers, if there is a choice}.
    - `schema`, of answers: {"name": that of its definition, "definitions"}, or nothing.
    """

    predicts: bool = True
    trains: bool = True
    predict_args: dict[str, Any] = field(default_factory=dict)
    train_args: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] = field(default_factory=dict)

    def write(self) -> bytes:
        """Encode it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, body: bytes) -> ModelDescription:
        """Decode what `write` encoded."""
        return cls(**json.loads(body)) if body else cls()
