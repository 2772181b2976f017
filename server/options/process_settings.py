"""ProcessSettings: the part of the settings that is about processes: how they end, front ends, workers, tests' faults.

Settings has it. Read by the composition roots and the supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setting import setting


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ProcessSettings:
    """Which processes serve."""

    http_workers: int = setting(
        0, "Processes", "So many processes take requests over HTTP and gRPC, run hooks, and share one engine process; "
        "0: one process does everything. See docs/processes.md.", unit="count", bounds=(0, 256),
    )  # fmt: skip
    reuse_http_port: bool = setting(
        False, "Processes", "Let other servers of the same user that say so listen on the HTTP port, too "
        "(SO_REUSEPORT). The kernel shares out connections, whatever the servers serve; the port is listened on once "
        "all models are loaded.",
    )  # fmt: skip
    reuse_grpc_port: bool = setting(False, "Processes", "The same for the gRPC port.")
    write_memory_bytes: int = setting(
        4 << 30, "Processes", "Most that a process keeps, over HTTP and gRPC and all connections together, of "
        "answers that clients do not take. Beyond it those are dropped of which most has waited for longest: a "
        "connection over HTTP, a call over gRPC (RESOURCE_EXHAUSTED). Answers that wait to be compressed count, too, "
        "and go as they are.", unit="bytes", bounds=(1 << 16, 2**50),
    )  # fmt: skip
    environments: str = setting(
        "", "Processes", "Folder in which the Python environments of workers are kept; empty: penstock/environments in "
        "the user's cache folder.", unit="path",
    )  # fmt: skip
    offline: bool = setting(
        False, "Processes", "Fetch nothing for the environments of workers: one that is not kept already is a mistake."
    )
    chaos: tuple[str, ...] = setting(
        (), "Processes", "`FAULT=RATE`: faults to make, for tests, so many a second: kill-worker, stop-worker, "
        "kill-front, stop-front, kill-engine, stop-engine; or so many of all requests: fail, slow (`slow=0.1:50`: each "
        "tenth by 50 ms). `seed=N` makes it another run of chance. Repeatable. Needs --allow-chaos.", unit="RULE",
    )  # fmt: skip
    allow_chaos: bool = setting(False, "Processes", "Allow --chaos. Never on a server that is not being tested.")

    exit_timeout_secs: float = setting(
        30.0, "Stopping", "How long accepted requests may take to finish after SIGTERM or SIGINT. What is left then "
        "is dropped and the exit status is 1.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
    drain_delay_secs: float = setting(
        0.0, "Stopping", "How long to go on serving who connects once ready is false, for a load balancer to notice.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
