"""Order: what to run in a worker process. Created by the owners of user code; read by `worker.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import WorkerSpec

Interpreters = Callable[[WorkerSpec, str], str]
"""Returns the Python for a WorkerSpec and a label. Blocks, for minutes if an environment must be built."""
STARTED = "workers_started"
ENDED = "workers_ended_"
END_REASONS = ("exit", "signal", "time", "memory", "stopped", "silent", "open", "killed")
"""Why a worker ended: exited, signal, over a limit, stopped or unresponsive, failed to open, or killed on request."""


@dataclass(frozen=True, slots=True)
class Order:
    """One kind of worker.

    `service` is the module to open, with the JSON `settings` (service.py defines its interface). `label` names the
    worker in errors ("the hooks of model 'iris'"); `log_fields` is added to its log records. `interpreter` is the
    Python that runs it and has the packages that `service` needs; "" for the server's own. `folder` is its working
    directory; None for the server's. `path` is prepended to its sys.path, and `environment` is added to the server's
    variables. `mounts` are folders to mount at other paths, if the system allows it (child.py). Output lines that
    contain one of `harmless_lines` are logged at DEBUG, others at INFO, or, if `always_logged`, at the lowest level
    that the server logs. `on_event` is called with STARTED, and with ENDED plus one of END_REASONS when the worker ends
    without being stopped: Model.count. `on_line` is called with each line of output and must not raise.
    Units: `memory_bytes` resident, 0 for no limit; `open_limit_s`, seconds for opening.
    """

    service: str
    settings: Mapping[str, Any]
    label: str
    log_fields: Mapping[str, str] = field(default_factory=dict)
    interpreter: str = ""
    folder: Path | None = None
    path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    harmless_lines: tuple[str, ...] = ()
    always_logged: bool = False
    memory_bytes: int = 0
    open_limit_s: float = 300.0
    on_event: Callable[[str], None] = field(default=lambda _: None, compare=False, repr=False)
    on_line: Callable[[str], None] = field(default=lambda _: None, compare=False, repr=False)


class NotStartedError(Exception):
    """The worker is gone and the call had not begun: it may be sent to another worker."""


class WorkerLost(InferError):  # noqa: N818 - a condition, as OutOfMemory is
    """The worker ended, or was ended, while the call ran."""

    def __init__(self, message: str, code: Code = Code.NOT_READY) -> None:
        super().__init__(code, message)
