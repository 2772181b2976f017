"""Messages: what a server and the workers of a DEEPaaS model say to each other, beside workers/kinds.py.

The service is `penstock.server.deepaas.inside.service`. Its settings: {"model": the name, "target": "module" or
"module:attr", "role": a WorkerRole, "warm": bool, "accept_header": bool, "show_errors": bool}. A model has one worker
of the role DESK, workers that PREDICT, and a worker for each training, which ends with it. Each answers being opened
with a ModelDescription, which only the desk fills in.

A request travels as it came: a line of JSON, {"method", "query", "headers": [[name, value], ...]}, and the body. Names
are in small letters, and a field that is repeated stands there repeatedly; bytes are read as Latin-1. The server reads
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
"""What aiohttp answers where what it calls has failed."""
METADATA = 33
"""Call of the desk with the link that a model has to itself: what get_metadata() gives now, merged with what is always
there; answered as CALL is."""
CHECK = 34
"""Call of the desk with a request for a training: its arguments, as a training shows them, in an answer of status 200;
or the answer to arguments that are wrong."""
TRAIN = 35
"""Call of a trainer with a request for a training. Answered, when it has ended, with JSON: {"output": what it gave} or
{"error": what it raised, in words}."""
PROGRESS = 64
"""Told by a trainer: that it begins the training, once it is warm. No body."""


class WorkerRole(enum.StrEnum):
    """What a worker is for."""

    DESK = "desk"
    PREDICT = "predict"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the desk says of a model. `predicts`, `trains`: whether it has that method.

    All as Swagger 2.0 has it (swagger.py). `predict_args`, `train_args`: {"parameters": its parameter objects, as they
    were declared, "definitions": those that they refer to, by name, "produces": the content types of answers, if there
    is a choice}. `schema`, of answers: {"name": that of its definition, "definitions"}, or nothing.
    """

    predicts: bool = True
    trains: bool = True
    predict_args: dict[str, Any] = field(default_factory=dict)
    train_args: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] = field(default_factory=dict)

    def write(self) -> bytes:
        """Write it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, body: bytes) -> ModelDescription:
        """Read what `write` has written."""
        return cls(**json.loads(body)) if body else cls()
