"""ProcessSettings: the settings of processes: shutdown, front ends, worker environments, injected faults.

Settings inherits them. Read by the composition roots and the supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setting import setting


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ProcessSettings:
    """Which processes serve, and how they stop."""

    http_workers: int = setting(
        0, "Processes", "Number of front-end processes that accept HTTP and gRPC requests, run hooks and share one "
        "engine process; 0: a single process does everything. See docs/processes.md.", unit="count", bounds=(0, 256),
    )  # fmt: skip
    reuse_http_port: bool = setting(
        False, "Processes", "Share the HTTP port with other servers of the same user that also set this flag "
        "(SO_REUSEPORT). The kernel distributes connections regardless of what each server serves. The port is opened "
        "once all models are loaded.",
    )  # fmt: skip
    reuse_grpc_port: bool = setting(False, "Processes", "Like --reuse-http-port, for the gRPC port.")
    write_memory_bytes: int = setting(
        4 << 30, "Processes", "Maximum memory per process, over all HTTP and gRPC connections, for responses that "
        "clients have not read. Beyond it, the HTTP connections and gRPC calls (RESOURCE_EXHAUSTED) with the largest "
        "and longest-unread responses are dropped. Responses waiting for compression count too, and are then sent "
        "uncompressed.", unit="bytes", bounds=(1 << 16, 2**50),
    )  # fmt: skip
    environments: str = setting(
        "", "Processes", "Folder that stores the Python environments of workers. Default: penstock/environments in the "
        "user's cache directory.", unit="path",
    )  # fmt: skip
    offline: bool = setting(
        False, "Processes", "Do not download packages for worker environments: an environment that is not already "
        "stored is an error.",
    )  # fmt: skip
    chaos: tuple[str, ...] = setting(
        (), "Processes", "`FAULT=RATE`: faults to inject, for tests. Per second: kill-worker, stop-worker, kill-front, "
        "stop-front, kill-engine, stop-engine. As a fraction of requests: fail, slow (`slow=0.1:50`: every tenth by 50 "
        "ms). `seed=N` sets the random seed. Repeatable. Requires --allow-chaos.", unit="RULE",
    )  # fmt: skip
    allow_chaos: bool = setting(False, "Processes", "Allow --chaos. Never use this on a server that is not under test.")

    exit_timeout_secs: float = setting(
        30.0, "Stopping", "Maximum time for accepted requests to finish after SIGTERM or SIGINT. Any that remain are "
        "dropped and the exit status is 1.", unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
    drain_delay_secs: float = setting(
        0.0, "Stopping", "How long to keep accepting connections after readiness turns false, so that load balancers "
        "can notice.", unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
