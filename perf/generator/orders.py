"""Orders: the messages to and from the processes of the generator.

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

Times = np.ndarray[tuple[int], np.dtype[np.int64]]
NO_TIMES: Times = np.empty(0, np.int64)
ARRAYS = ("starts_ns", "ends_ns", "late_ns", "earlier_counts", "earlier_ns")
"""A window's fields that are sent as raw memory."""
INFER = "/inference.GRPCInferenceService/ModelInfer"
"""The path of the RPC for inference."""


@dataclass(frozen=True, slots=True)
class Tls:
    """How a connection is encrypted. `verify_*`: the peer's chain and the name it was issued to. `*_type`: PEM, DER."""

    roots: str = ""
    certificate: str = ""
    key: str = ""
    verify_peer: bool = True
    verify_host: bool = True
    certificate_type: str = "PEM"
    key_type: str = "PEM"


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """What all gRPC requests of a run share. `compression`: none, gzip or deflate."""

    method: str
    metadata: tuple[tuple[str, str], ...] = ()
    streaming: bool = False
    compression: str = "none"


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests are sent: over HTTP/1.1 if `grpc` is None. A `host` that begins with a slash is a socket's path.

    `v2`: over HTTP, whether only valid answers to v2's infer are good.
    """

    host: str
    port: int
    tls: Tls | None = None
    grpc: GrpcCall | None = None
    v2: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """How requests follow each other.

    Closed loop: `concurrency` requests are in flight at any time. Open loop (`concurrency` 0): `rate_per_s` requests
    are due each second, evenly or, with `poisson`, independently of each other; or `intervals_us` apart, repeatedly.
    `sequences`: the number of slots that requests are dealt to in turn, each with at most one in flight; 0: no
    sequences.
    `connections`: the most that an open loop may have; 0: its default. `requests`: the total to send; 0: unlimited. All
    numbers are over all processes.
    """

    concurrency: int = 0
    rate_per_s: float = 0.0
    poisson: bool = False
    intervals_us: tuple[float, ...] = ()
    sequences: int = 0
    connections: int = 0
    seed: int = 0
    requests: int = 0

    @property
    def open(self) -> bool:
        """Whether requests follow a schedule, regardless of answers."""
        return not self.concurrency


@dataclass(frozen=True, slots=True)
class Part:
    """The number of this process, and of how many."""

    number: int = 0
    of: int = 1

    def share(self, total: int) -> int:
        """Return this process's part of `total` when dealt in turn."""
        return (total - self.number + self.of - 1) // self.of

    def slots(self, total: int) -> range:
        """Return its own slots among 0 to `total`: the same ones for any total."""
        return range(self.number, total, self.of)


class Payloads(Protocol):
    """The payloads: prepared once, and sent to every process.

    Over HTTP an item is a whole request, head and body; over gRPC a message with its five-byte prefix.
    """

    @property
    def rows(self) -> int:
        """Rows of each request: its client batch."""
        ...

    def stream(self, slot: int) -> Iterator[bytes]:
        """Return the endless requests of one slot. `slot` is a number among all slots of all processes.

        Requests of one sequence come from one slot, in order, each after the answer to the previous one. Called once
        for each slot; an open loop without sequences has one slot in each process.
        """
        ...

    def ending(self, slot: int) -> bytes | None:
        """Return the request that ends what a slot has begun, or None. The slot's stream may continue later."""
        ...


@dataclass(slots=True)
class Window:
    """The requests that one process, or all, saw end between two marks, with one entry for each good answer.

    `start_ns`: when it was due (open loop) or sent (closed loop); `end_ns`: when its answer arrived, ascending in each
    process; `late_ns`: its lateness in sending, empty in a closed loop. `errors`: the number of other endings, by text;
    `failure`: why the load could not continue, empty while it does, and `failed_ns` since when. Streams: `responses`:
    the number of non-empty responses of all requests; `earlier_counts`: of each request, the number of responses before
    its last, empty or not; `earlier_ns`: their times, request by request. Open loop: `waited_for_connection`: how many
    were sent late because no connection was free; `behind_ns`: for how long the next one had been due at the mark.
    Units: `cpu_s` of the generator, `in_flight` requests at the mark.
    """

    begin_ns: int
    end_ns: int
    starts_ns: Times = field(default_factory=lambda: NO_TIMES)
    ends_ns: Times = field(default_factory=lambda: NO_TIMES)
    late_ns: Times = field(default_factory=lambda: NO_TIMES)
    errors: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    cpu_s: float = 0.0
    in_flight: int = 0
    failed_ns: int = 0
    waited_for_connection: int = 0
    behind_ns: int = 0
    responses: int = 0
    earlier_counts: Times = field(default_factory=lambda: NO_TIMES)
    earlier_ns: Times = field(default_factory=lambda: NO_TIMES)

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def latencies_ns(self) -> Times:
        """Return the time that each took, from when it was due or sent."""
        return self.ends_ns - self.starts_ns

    def merge(self, other: Window) -> Window:
        """Return both joined: of two processes in parallel, or of consecutive windows."""
        return Window(
            begin_ns=min(self.begin_ns, other.begin_ns),
            end_ns=max(self.end_ns, other.end_ns),
            starts_ns=np.concatenate((self.starts_ns, other.starts_ns)),
            ends_ns=np.concatenate((self.ends_ns, other.ends_ns)),
            late_ns=np.concatenate((self.late_ns, other.late_ns)),
            errors=self.errors + other.errors,
            failure=self.failure or other.failure,
            cpu_s=self.cpu_s + other.cpu_s,
            in_flight=self.in_flight + other.in_flight,
            failed_ns=min(self.failed_ns or other.failed_ns, other.failed_ns or self.failed_ns),
            waited_for_connection=self.waited_for_connection + other.waited_for_connection,
            behind_ns=max(self.behind_ns, other.behind_ns),
            responses=self.responses + other.responses,
            earlier_counts=np.concatenate((self.earlier_counts, other.earlier_counts)),
            earlier_ns=np.concatenate((self.earlier_ns, other.earlier_ns)),
        )
