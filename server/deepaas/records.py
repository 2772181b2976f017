"""Records: the state of a training, as shown to clients and as stored. Made by trainings.py, stored by store.py.

Source: deepaas 2.6.0, api/v2/train.py: the fields, and their order.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any


class TrainingStatus(enum.StrEnum):
    """The status of a training. As in the original, one that waits for its turn is RUNNING."""

    RUNNING = "running"
    DONE = "done"
    ERROR = "error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """A training. `document` is JSON, an object: date, args, uuid, status, and message or result.

    `elapsed_s` is its duration, 0 while it runs. `log` has the last lines of its output.
    """

    uuid: str
    model: str
    status: TrainingStatus
    document: str
    elapsed_s: float = 0.0
    log: str = ""


def format_date(date: datetime) -> str:
    """Format a date as the original's clients expect it."""
    return date.isoformat(" ", "microseconds")


def started_json(uuid: str, date: datetime, args: Any) -> str:
    """Return the document of a training that was just requested."""
    return json.dumps({"date": format_date(date), "args": args, "uuid": uuid, "status": TrainingStatus.RUNNING})


def ended_json(document: str, status: TrainingStatus, **fields: Any) -> str:
    """Return its document at its end."""
    return json.dumps({**json.loads(document), "status": status, **fields})


def result_of(document: str, reply: bytes, started_at: datetime, finished: datetime) -> tuple[TrainingStatus, str]:
    """Return the status of a training from its Trainer's answer (messages.py, TRAIN), and its document."""
    answer = json.loads(reply)
    if "error" in answer:
        return TrainingStatus.ERROR, ended_json(document, TrainingStatus.ERROR, message=answer["error"])
    duration = max(finished - started_at, timedelta())  # clocks may be set back
    result = {"output": answer.get("output"), "finish_date": format_date(finished), "duration": str(duration)}
    return TrainingStatus.DONE, ended_json(document, TrainingStatus.DONE, result=result)
