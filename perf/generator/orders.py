"""Orders: what a process of the generator is told, and what it tells. All of it travels between processes.

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
ARRAYS = ("starts_ns", "ends_ns", "late_ns", "earlier", "earlier_ns")
"""A window's fields that travel as they lie in memory."""
INFER = "/inference.GRPCInferenceService/ModelInfer"
"""The RPC that asks for inference, by its path."""


@dataclass(frozen=True, slots=True)
class Tls:
    """How a connection is encrypted. `verify_*`: the peer's chain, the name it was issued to; `*_type`: PEM or DER."""

    roots: str = ""
    certificate: str = ""
    key: str = ""
    verify_peer: bool = True
    verify_host: bool = True
    certificate_type: str = "PEM"
    key_type: str = "PEM"


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """What every gRPC request of a run shares. `compression`: none, gzip or deflate."""

    method: str
    metadata: tuple[tuple[str, str], ...] = ()
    streaming: bool = False
    compression: str = "none"


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: over HTTP/1.1 where `grpc` is None. A `host` that begins with a slash is a socket's path.

    `v2`: over HTTP, whether an answer has to be one to v2's infer.
    """

    host: str
    port: int
    tls: Tls | None = None
    grpc: GrpcCall | None = None
    v2: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """How requests follow each other.

    Closed loop: `concurrency` requests are under way at any time. Open loop (`concurrency` 0): `rate_per_s` requests
    are due each second, evenly or, with `poisson`, independently of each other; or `intervals_us` apart, over and over.
    `sequences`: how many slots they are dealt to in turn, each with one under way at most, 0 for no sequences.
    `connections`: the most an open loop may have, 0 for its own rule. `requests`: how many are sent and then no more,
    0 for no end. All of it counts over all processes.
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
        """Whether requests come by a schedule, whatever becomes of those before them."""
        return not self.concurrency


@dataclass(frozen=True, slots=True)
class Part:
    """Which of how many processes this one is."""

    number: int = 0
    of: int = 1

    def share(self, total: int) -> int:
        """Give how many of `total` fall to it when they are dealt in turn."""
        return (total - self.number + self.of - 1) // self.of

    def slots(self, total: int) -> range:
        """Give those of the slots 0 to `total` that are its own: the same ones however many there are."""
        return range(self.number, total, self.of)


class Payloads(Protocol):
    """What is sent: made once, and told to every process.

    Over HTTP an item is a whole request, head and body; over gRPC a message behind its five bytes of length.
    """

    @property
    def rows(self) -> int:
        """Rows of each request: its client batch."""
        ...

    def stream(self, slot: int) -> Iterator[bytes]:
        """Give the endless requests of one slot: `slot` is one of those that are ever under way, and of all processes.

        Requests of one sequence come from one slot, in order, each after the answer to the one before it. Asked once
        for each slot; an open loop without sequences has one slot in each process.
        """
        ...

    def ending(self, slot: int) -> bytes | None:
        """Give the request that ends what a slot has begun and left; None: nothing. Its stream may go on later."""
        ...


@dataclass(slots=True)
class Window:
    """What one process, or all of them, saw end between two marks: one entry for each request that was answered well.

    `start_ns`: when it was due (open loop) or sent (closed loop); `end_ns`: when its answer had come, ascending in each
    process; `late_ns`: how much later than due it was sent, empty in a closed loop. `errors`: how many ended otherwise,
    by what was said; `lost`: why the load could not go on, empty while it does, and `lost_ns` since when.
    Streams: `responses`: how many answers came that had something in them, of all requests; `earlier`: of each request,
    how many came before its last, empty or not; `earlier_ns`: when, one request's after the other's.
    Open loop: `waited`: how many were sent late because no connection was free; `behind_ns`: how long the next one had
    been due at the mark.
    Units: `cpu_s` of the generator, `in_flight` requests at the mark.
    """

    begin_ns: int
    end_ns: int
    starts_ns: Times = field(default_factory=lambda: NO_TIMES)
    ends_ns: Times = field(default_factory=lambda: NO_TIMES)
    late_ns: Times = field(default_factory=lambda: NO_TIMES)
    errors: Counter[str] = field(default_factory=Counter)
    lost: str = ""
    cpu_s: float = 0.0
    in_flight: int = 0
    lost_ns: int = 0
    waited: int = 0
    behind_ns: int = 0
    responses: int = 0
    earlier: Times = field(default_factory=lambda: NO_TIMES)
    earlier_ns: Times = field(default_factory=lambda: NO_TIMES)

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def latencies_ns(self) -> Times:
        """Give how long each took, from when it was due or sent."""
        return self.ends_ns - self.starts_ns

    def joined(self, other: Window) -> Window:
        """Give both: of two processes at once, or of one window after the other."""
        return Window(
            begin_ns=min(self.begin_ns, other.begin_ns),
            end_ns=max(self.end_ns, other.end_ns),
            starts_ns=np.concatenate((self.starts_ns, other.starts_ns)),
            ends_ns=np.concatenate((self.ends_ns, other.ends_ns)),
            late_ns=np.concatenate((self.late_ns, other.late_ns)),
            errors=self.errors + other.errors,
            lost=self.lost or other.lost,
            cpu_s=self.cpu_s + other.cpu_s,
            in_flight=self.in_flight + other.in_flight,
            lost_ns=min(self.lost_ns or other.lost_ns, other.lost_ns or self.lost_ns),
            waited=self.waited + other.waited,
            behind_ns=max(self.behind_ns, other.behind_ns),
            responses=self.responses + other.responses,
            earlier=np.concatenate((self.earlier, other.earlier)),
            earlier_ns=np.concatenate((self.earlier_ns, other.earlier_ns)),
        )
