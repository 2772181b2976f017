"""Ensembles that come and go: whatever is loaded and unloaded at once, it ends, and what serves has all its steps."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Backend
from penstock.backends.errors import InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.server.hooks.engine import HookedEngine
from penstock.server.repository.control import Choices, ModelControl
from penstock.server.repository.repository import Repository
from tests.clients.ensembles import config, step, write_ensemble
from tests.fakes import FakeBackend

NEEDS = {"a": (), "b": (), "ab": ("a", "b"), "abb": ("ab", "b"), "aa": ("a", "a")}
SIDES = (TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),)


def load(path: Path, device: str, options: Mapping[str, str]) -> Backend:
    return FakeBackend(Signature(*SIDES), lambda inputs: inputs)


def write(root: Path) -> None:
    for name, needs in NEEDS.items():
        tensors = ["x", *(f"t{number}" for number in range(1, len(needs))), "y"]
        steps = [
            step(other, [("x", tensors[number])], [("y", tensors[number + 1])]) for number, other in enumerate(needs)
        ]
        if steps:
            write_ensemble(root, name, config(name, ["x"], ["y"], steps))
        else:
            (root / name / "1").mkdir(parents=True)
            (root / name / "1" / "model.onnx").touch()
            (root / name / "config.pbtxt").write_text("instance_group { count: 1 kind: KIND_CPU }")


class House:
    def __init__(self, root: Path) -> None:
        self.repository = Repository([root])
        self.engine = Engine(asyncio.get_running_loop(), {"onnxruntime": load})
        self.models = HookedEngine(self.engine)
        self.control = ModelControl(self.repository, self.models, Choices(mode="explicit"))

    async def do(self, word: str, name: str) -> None:
        try:
            if word == "load":
                await self.control.load(name)
            else:
                await self.control.unload(name, dependents=word == "unload all")
        except InferError:
            # an ensemble whose step was taken away while it was being loaded
            pass

    def ready(self) -> set[str]:
        return {row["name"] for row in self.repository.index() if row.get("state") == "READY"}


async def carry_out(root: Path, orders: list[list[tuple[str, str]]]) -> None:
    house = House(root)
    async with asyncio.timeout(30):
        await house.control.start()
        for at_once in orders:
            await asyncio.gather(*(house.do(word, name) for word, name in at_once))
            ready = house.ready()
            assert ready == {model.name for model in house.engine.models()}
            assert all(ready.issuperset(NEEDS[name]) for name in ready)
        for word in ("load", "unload"):
            for name in NEEDS:
                await house.do(word, name)
            assert house.ready() == (set(NEEDS) if word == "load" else set())
        await house.control.stop()
        await house.models.stop(10)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["load", "unload", "unload all"]), st.sampled_from(sorted(NEEDS))), max_size=6
        ),
        max_size=6,
    )
)
def test_whatever_is_asked_for_at_once_ends_and_what_serves_has_all_its_steps(
    orders: list[list[tuple[str, str]]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        asyncio.run(carry_out(Path(name), orders))
