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
    """A training. `shown` is JSON, an object: date, args, uuid, status, and message or result.

    `elapsed_s` is its duration, 0 while it runs. `log` has the last lines of its output.
    """

    uuid: str
    model: str
    status: TrainingStatus
    shown: str
    elapsed_s: float = 0.0
    log: str = ""


def written(when: datetime) -> str:
    """Format a date as the original's clients expect it."""
    return when.isoformat(" ", "microseconds")


def begun(uuid: str, date: datetime, args: Any) -> str:
    """Return what is shown of a training that was just requested."""
    return json.dumps({"date": written(date), "args": args, "uuid": uuid, "status": TrainingStatus.RUNNING})


def ended(shown: str, status: TrainingStatus, **more: Any) -> str:
    """Return what is shown of it at its end."""
    return json.dumps({**json.loads(shown), "status": status, **more})


def trained(shown: str, reply: bytes, began: datetime, finished: datetime) -> tuple[TrainingStatus, str]:
    """Return the status of a training from its Trainer's answer (messages.py, TRAIN), and what is shown of it."""
    said = json.loads(reply)
    if "error" in said:
        return TrainingStatus.ERROR, ended(shown, TrainingStatus.ERROR, message=said["error"])
    took = max(finished - began, timedelta())  # clocks may be set back
    result = {"output": said.get("output"), "finish_date": written(finished), "duration": str(took)}
    return TrainingStatus.DONE, ended(shown, TrainingStatus.DONE, result=result)
