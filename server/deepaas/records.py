"""Records: what there is to know of a training, for clients and as it is kept. Made by trainings.py, kept by store.py.

Source: deepaas 2.6.0, api/v2/train.py: the fields, and their order.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any


class TrainingStatus(enum.StrEnum):
    """How a training stands. One that waits for its turn runs, as the original had it."""

    RUNNING = "running"
    DONE = "done"
    ERROR = "error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """A training. `shown` is JSON, an object: date, args, uuid, status, and message or result.

    `elapsed_s`: how long it took, 0 as long as it runs. `log`: the last lines of its output.
    """

    uuid: str
    model: str
    status: TrainingStatus
    shown: str
    elapsed_s: float = 0.0
    log: str = ""


def written(when: datetime) -> str:
    """Write a date as the original's clients read it."""
    return when.isoformat(" ", "microseconds")


def begun(uuid: str, date: datetime, args: Any) -> str:
    """Write what is shown of a training that has just been asked for."""
    return json.dumps({"date": written(date), "args": args, "uuid": uuid, "status": TrainingStatus.RUNNING})


def ended(shown: str, status: TrainingStatus, **more: Any) -> str:
    """Write what is shown of it at its end."""
    return json.dumps({**json.loads(shown), "status": status, **more})


def trained(shown: str, reply: bytes, began: datetime, finished: datetime) -> tuple[TrainingStatus, str]:
    """Write what is shown of one whose trainer has answered (messages.py, TRAIN). Returns: how it stands, and that."""
    said = json.loads(reply)
    if "error" in said:
        return TrainingStatus.ERROR, ended(shown, TrainingStatus.ERROR, message=said["error"])
    took = max(finished - began, timedelta())  # clocks are set back
    result = {"output": said.get("output"), "finish_date": written(finished), "duration": str(took)}
    return TrainingStatus.DONE, ended(shown, TrainingStatus.DONE, result=result)
