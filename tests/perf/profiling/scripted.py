"""A fleet that answers from a script, and windows to put in it: no process, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from penstock.perf.generator.orders import Load, Window
from penstock.perf.profiling.options import Rule
from penstock.perf.reports.document import Client, Document, Level, Model, Offered, ServerSide

SECOND_NS = 1_000_000_000
QUICK = Rule(interval_ms=1)


def window(latencies_us: Sequence[float], begin_s: float = 0, **more: object) -> Window:
    """A window of a second in which requests of these latencies ended, evenly."""
    begin_ns = int(begin_s * SECOND_NS)
    count = len(latencies_us)
    ends = begin_ns + (np.arange(1, count + 1, dtype=np.int64) * SECOND_NS) // max(count, 1)
    new_window = Window(begin_ns, begin_ns + SECOND_NS, ends - (np.array(latencies_us) * 1e3).astype(np.int64), ends)
    for name, value in more.items():
        setattr(new_window, name, value)
    return new_window


class Scripted:
    """Gives its windows one by one, the last one for ever, `after` once halted; writes down what it was told."""

    def __init__(self, *windows: Window, after: Window | None = None) -> None:
        self._windows = list(windows)
        self._after = after
        self.orders: list[str | Load] = []

    def start_load(self, load: Load) -> None:
        self.orders.append(load)

    def take(self) -> Window:
        if self.orders and self.orders[-1] == "wait":
            return self._windows.pop(0) if len(self._windows) > 1 else self._windows[0]
        if self._after and self.orders[-1:] == ["halt"]:
            return self._after
        return Window(0, 0, errors=Counter())

    def count(self) -> int:
        return len(self._windows[0].ends_ns)

    def wait(self, seconds: float, requests: int = 0) -> bool:
        self.orders.append("wait")
        return True

    def halt(self) -> None:
        self.orders.append("halt")

    @property
    def waits(self) -> int:
        return self.orders.count("wait")


def level(value: float, per_s: float, mean_us: float = 100.5, **more: object) -> Level:
    """A stable level of `per_s` requests a second."""
    names = ("mean", "p50", "p75", "p90", "p95", "p97", "p99", "p99.9", "min", "max")
    latency = dict.fromkeys(names, mean_us) | {"std": 1.0}
    client = Client(300, 300, 3.0, per_s, per_s, latency, "", cpu_us_per_request=10.0, cores=0.1)
    new_level = Level(Offered("concurrency", value), True, client, 3, [client] * 3)
    for name, each in more.items():
        setattr(new_level, name, each)
    return new_level


def served(**more: object) -> ServerSide:
    """What a server tells of a level."""
    server_side = ServerSide(300, 100, 300, 10.9, 5.2, 20.0, 3.0, 2.0, 3.0, version="1", request_us=42.0)
    for name, each in more.items():
        setattr(server_side, name, each)
    return server_side


def document(*levels: Level, **config: object) -> Document:
    """A run of a server with statistics."""
    model = Model("iris", "", "onnxruntime_onnx", 64, config=dict(config))
    extensions = {"extensions": ["statistics"]}
    return Document(
        model,
        ["penstock", "perf"],
        "2026-01-01T00:00:00+00:00",
        "here:1",
        "http",
        levels=list(levels),
        server=extensions,
    )
