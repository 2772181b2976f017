"""Repositories on disk for the tests in this folder, and the fake Engine that loads them. The model files are empty."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading.completion import complete
from penstock.batching.spec import InstanceGroup, ModelSpec
from penstock.server.repository.control import ModelControl
from penstock.server.repository.repository import Repository

GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))


class FakeChange:
    """A Change that records whether it is committed or abandoned, and the number of Instances of its first group."""

    def __init__(self, notes: list[tuple[str, int]], groups: list[InstanceGroup]) -> None:
        self._notes = notes
        self._count = groups[0].count

    def commit(self) -> list[Any]:
        self._notes.append(("committed", self._count))
        return []

    async def abandon(self) -> None:
        self._notes.append(("abandoned", self._count))


class FakeEngine:
    """Completes every model with one graph; fails for the given models or versions (`a2`).

    `gate`, if given, must be set before a model opens, and `leaving` before a replaced one is gone.
    `changes`: whether served models can be resized.
    """

    def __init__(self, graph: Signature = GRAPH, failures: Mapping[str, Exception] | None = None) -> None:
        self.graph = graph
        self.failures = dict(failures or {})
        self.served: dict[str, list[Any]] = {}
        self.absent: dict[str, list[str]] = {}
        self.retired: list[Any] = []
        self.opened: list[tuple[str, int]] = []
        self.requested_counts: list[list[int]] = []
        self.on_change: list[tuple[str, int]] = []
        self.changes = False
        self.now = self.most = 0
        self.indexes: list[dict[str, str]] = []
        self.repository: Repository | None = None
        self.gate: asyncio.Event | None = None
        self.leaving: asyncio.Event | None = None

    async def open(self, spec: ModelSpec) -> Any:
        self.opened.append((spec.name, spec.version))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        if self.repository is not None:
            self.indexes = self.repository.index()
        if self.gate is not None:
            await self.gate.wait()
        self.now -= 1
        failure = self.failures.get(spec.name) or self.failures.get(f"{spec.name}{spec.version}")
        if failure is not None:
            raise failure
        done = complete(spec, self.graph)
        return SimpleNamespace(name=spec.name, version=str(spec.version), spec=done, platform="onnxruntime_onnx")

    async def change(self, model: Any, spec: ModelSpec) -> Any:
        self.requested_counts.append([group.count for group in spec.instances])
        failure = self.failures.get(f"{spec.name}{spec.version}")
        if failure is not None:
            raise failure
        return FakeChange(self.on_change, [*spec.instances]) if self.changes else None

    def publish(self, name: str, models: Iterable[Any], absent: Iterable[str] = ()) -> asyncio.Task[None]:
        retired = self.served.pop(name, [])
        new = list(models)
        self.absent[name] = list(absent)
        if new:
            self.served[name] = new
        return self.retire(retired)

    def retire(self, models: Iterable[Any]) -> asyncio.Task[None]:
        async def retire() -> None:
            if self.leaving is not None:
                await self.leaving.wait()
            self.retired += retired

        retired = list(models)
        return asyncio.ensure_future(retire())


def make(root: Path, *files: str, **texts: str) -> Path:
    """Create empty files; `texts` are written to `<model>/config.pbtxt`."""
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for model, text in texts.items():
        (root / model).mkdir(parents=True, exist_ok=True)
        (root / model / "config.pbtxt").write_text(text, encoding="utf-8")
    return root


def native(root: Path, model: str, text: str) -> None:
    """Write `<model>/penstock.toml`."""
    (root / model / "penstock.toml").write_text(text, encoding="utf-8")


async def look_twice(control: ModelControl) -> None:
    """Poll as often as needed to load what has changed."""
    await control.poll()
    await control.poll()
