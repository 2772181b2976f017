"""Order: what to run in a worker process. Made by whoever has user code to run; read by `worker.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.backends.errors import Code, InferError

STARTED = "workers_started"
ENDED = "workers_ended_"
REASONS = ("exit", "signal", "time", "memory", "stopped", "silent", "open", "killed")
"""Why a worker has ended: by itself, killed past a limit or because it did not go on, not opened, or because asked."""


@dataclass(frozen=True, slots=True)
class Order:
    """One kind of worker.

    `service` is the module that is opened in it, with `settings`, which are JSON (service.py says what it must have).
    `label` names it in errors ("the hooks of model 'iris'"), `about` goes with its log lines. `interpreter` is the
    Python that runs it, with what `service` needs; "": this. `folder` is where it works, None: where the server does.
    `path` comes first on its sys.path, `environment` beside the server's own variables. `mounts` are folders that it
    finds at other paths, where the system lets it have them so (child.py). Lines of its output that have one of `noise`
    in them are logged for debugging only; others as INFO, or, if they are `heard`, as the least that the server logs.
    `count` is told STARTED, and ENDED with the reason after it (one of REASONS) when the worker ends, unless it was
    stopped: Model.count. `line` is called with each line of its output; it must not raise.
    Units: `memory_bytes` resident, 0 for no limit; `open_limit_s` for opening, seconds.
    """

    service: str
    settings: Mapping[str, Any]
    label: str
    about: Mapping[str, str] = field(default_factory=dict)
    interpreter: str = ""
    folder: Path | None = None
    path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    noise: tuple[str, ...] = ()
    heard: bool = False
    memory_bytes: int = 0
    open_limit_s: float = 300.0
    count: Callable[[str], None] = field(default=lambda _: None, compare=False, repr=False)
    line: Callable[[str], None] = field(default=lambda _: None, compare=False, repr=False)


class NotBegunError(Exception):
    """The worker is gone, and the call had not begun there: another worker may take it."""


class WorkerLost(InferError):  # noqa: N818 - a condition, as OutOfMemory is
    """The worker has ended while the call ran there, or has been ended for it."""

    def __init__(self, message: str, code: Code = Code.NOT_READY) -> None:
        super().__init__(code, message)
