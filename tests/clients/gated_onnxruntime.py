"""ONNX Runtime behind a gate: live tests see the order of the runs, and can keep an Instance busy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.backends.backend import Array, Backend, Binding, Loader
from penstock.backends.loading import load_onnx
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.statistics import CANCELED
from tests.fakes import PATIENCE_S, FakeBackend, Gate, fake_loader
from tests.live import Live, live_server


class Gated:
    """Loads models whose runs wait at `gate`, or at one of their own: `gate_of` the first number of the first row.

    `runs` has, for each run, the first number of each of its rows.
    """

    def __init__(self) -> None:
        self.gate = Gate(list)
        self.gate_of: dict[float, Gate] = {}
        self.runs: list[list[float]] = []

    @property
    def loaders(self) -> Mapping[str, Loader]:
        """The loaders for a live server."""
        return {"onnxruntime": self._load}

    def _load(self, path: Path, device: str, options: Mapping[str, str]) -> Backend:
        return _GatedBackend(load_onnx(path, device, options), self)


class _GatedBackend:
    def __init__(self, inner: Backend, gated: Gated) -> None:
        self._inner = inner
        self._gated = gated
        self.graph, self.platform = inner.graph, inner.platform
        self.node_inputs, self.node_outputs = inner.node_inputs, inner.node_outputs
        self.runtime_metadata = inner.runtime_metadata

    def bind(self, *args: Any, **more: Any) -> Binding:
        return _GatedBinding(self._inner.bind(*args, **more), self._gated)

    def close(self) -> None:
        self._inner.close()


class _GatedBinding:
    def __init__(self, inner: Binding, gated: Gated) -> None:
        self._inner = inner
        self._gated = gated
        self._lent: list[Array | None] = []
        self.capacity_rows = inner.capacity_rows

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        self._lent = self._inner.acquire_buffers(rows, shapes)
        return self._lent

    def run(self, names: Sequence[int]) -> list[Any]:
        gated, first = self._gated, self._lent[0]
        numbers = [float(row.flat[0]) for row in first] if first is not None else []
        gated.runs.append(numbers)
        gated.gate_of.get(numbers[0] if numbers else 0, gated.gate)([])
        return self._inner.run(names)

    def stop(self) -> None:
        self._inner.stop()


def at_a_gate(folder: Path, gate: Gate) -> Iterator[Live]:
    """Serve a model `m` [N,2] whose runs wait at a closed gate. For fixtures."""
    graph = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.onnx").touch()
    (folder / "m" / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n')
    with live_server(folder, loaders={"onnxruntime": fake_loader(FakeBackend(graph, gate))}) as live:
        gate.close()
        yield live
        gate.open()


async def waiting(live: Live, count: int) -> None:
    """Wait until this many requests of model `m` are queued."""
    model = live.server.engine.model("m")
    async with asyncio.timeout(PATIENCE_S):
        while model.waiting_requests != count:  # noqa: ASYNC110 - the queue tells nobody
            await asyncio.sleep(0)


async def cancelled(live: Live) -> int:
    """Count the canceled requests of model `m`."""
    return live.server.engine.model("m").statistics.snapshot().failures[CANCELED]
