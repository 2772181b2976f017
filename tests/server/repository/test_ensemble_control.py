"""Loading and unloading ensembles in parallel: every call ends, and every served ensemble has all its steps."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Backend
from penstock.backends.errors import InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec
from penstock.server.hooks.engine import HookedEngine
from penstock.server.repository.control import ModelControl
from penstock.server.repository.control_options import ControlOptions
from penstock.server.repository.repository import Repository
from penstock.server.repository.scan import ModelEntry
from tests.clients.ensembles import config, step, write_ensemble
from tests.fakes import PATIENCE_S, FakeBackend
from tests.server.repository.folders import look_twice

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


class SlowRepository(Repository):
    """A Repository that sets `has_read` after the next read of the model `held`, and returns it once `go` is set."""

    held = ""

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__(paths)
        self.has_read, self.go = threading.Event(), threading.Event()

    def read(self, name: str, config: Any = None) -> tuple[ModelEntry | None, bytes]:
        found = super().read(name, config)
        if name == self.held:
            self.held = ""
            self.has_read.set()
            assert self.go.wait(PATIENCE_S)
        return found


class House:
    def __init__(self, root: Path) -> None:
        self.repository = SlowRepository([root])
        self.engine = Engine(asyncio.get_running_loop(), {"onnxruntime": load})
        self.models = HookedEngine(self.engine)
        self.control = ModelControl(self.repository, self.models, ControlOptions(mode="explicit"))

    async def do(self, word: str, name: str) -> None:
        try:
            if word == "load":
                await self.control.load(name)
            else:
                await self.control.unload(name, dependents=word == "unload all")
        except InferError:
            # an ensemble whose step was unloaded during its load
            pass

    async def held_back(self, loading: str, reading: str, meanwhile: Callable[[], Awaitable[object]]) -> None:
        """Load a model, and hold one read for it back until `meanwhile` has finished."""
        self.repository.held = reading
        held = asyncio.ensure_future(self.do("load", loading))
        await asyncio.to_thread(self.repository.has_read.wait, PATIENCE_S)
        await meanwhile()
        self.repository.go.set()
        await held

    async def stop(self) -> None:
        await self.control.stop()
        await self.models.stop(10)

    def versions(self, name: str) -> list[str]:
        return [model.version for model in self.engine.models() if model.name == name]

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
        await house.stop()


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["load", "unload", "unload all"]), st.sampled_from(sorted(NEEDS))), max_size=6
        ),
        max_size=6,
    )
)
def test_parallel_loads_and_unloads_end_with_every_served_ensemble_having_its_steps(
    orders: list[list[tuple[str, str]]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        asyncio.run(carry_out(Path(name), orders))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    write(tmp_path)
    new_house = House(tmp_path)
    await new_house.control.start()
    async with asyncio.timeout(30):
        yield new_house
    await new_house.stop()


@pytest.mark.anyio
class TestChangesDuringLoads:
    @pytest.mark.parametrize("loading", ["a", "ab"])
    async def test_a_load_that_has_read_older_files_serves_the_newer_ones(
        self, house: House, tmp_path: Path, loading: str
    ) -> None:
        async def replace() -> None:
            (tmp_path / "a" / "1").rename(tmp_path / "a" / "2")
            await house.control.load("a")
            assert house.versions("a") == ["2"]

        await house.held_back(loading, "a", replace)

        assert house.versions("a") == ["2"]
        assert loading in house.ready()

    async def test_a_step_added_to_an_ensemble_during_its_load_is_loaded_with_the_ensemble(
        self, house: House, tmp_path: Path
    ) -> None:
        await house.control.load("aa")

        async def replace() -> None:
            text = config("aa", ["x"], ["y"], [step("b", [("x", "x")], [("y", "y")])])
            (tmp_path / "aa" / "config.pbtxt").write_text(text)

        (tmp_path / "aa" / "2").mkdir()
        await house.held_back("aa", "aa", replace)

        assert house.ready() == {"a", "b", "aa"}

    async def test_loading_an_ensemble_keeps_a_step_that_was_loaded_from_a_request(self, house: House) -> None:
        files = {"7/model.onnx": b""}
        await house.held_back("ab", "a", lambda: house.control.load("a", "{}", files))

        assert house.versions("a") == ["7"]
        assert house.ready() == {"a", "b", "ab"}

    async def test_an_ensemble_that_waited_for_its_step_is_read_again_for_a_dependent_ensemble(
        self, house: House, tmp_path: Path
    ) -> None:
        (tmp_path / "a").rename(tmp_path / ".a")
        await house.do("load", "ab")
        (tmp_path / ".a").rename(tmp_path / "a")
        await house.control.load("a")
        assert house.versions("ab") == ["1"]
        (tmp_path / "ab" / "2").mkdir()
        await house.control.load("abb")

        assert house.versions("ab") == ["2"]

    async def test_polling_retries_an_ensemble_when_its_missing_step_is_added(
        self, house: House, tmp_path: Path
    ) -> None:
        await look_twice(house.control)
        assert house.ready() == set(NEEDS)
        text = config("aa", ["x"], ["y"], [step("late", [("x", "x")], [("y", "y")])])
        (tmp_path / "aa" / "config.pbtxt").write_text(text)
        (tmp_path / "aa" / "1").rename(tmp_path / "aa" / "2")
        await look_twice(house.control)
        assert house.versions("aa") == ["1"]
        (tmp_path / "b").rename(tmp_path / "late")
        await look_twice(house.control)

        assert house.versions("aa") == ["2"]
        assert house.ready() == {"a", "aa", "late"}

    async def test_an_ensemble_that_changes_while_its_step_loads_waits_for_the_next_polls(
        self, house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        open_, file = house.models.open, tmp_path / "aa" / "config.pbtxt"

        async def copied_meanwhile(spec: ModelSpec) -> Model:
            file.write_text('name: "aa"\nplatf')
            return await open_(spec)

        await look_twice(house.control)
        original = file.read_text()
        file.write_text(f"{original}\n")
        (tmp_path / "a" / "1").rename(tmp_path / "a" / "2")
        (tmp_path / "aa" / "1").rename(tmp_path / "aa" / "2")
        with monkeypatch.context() as patch:
            patch.setattr(house.models, "open", copied_meanwhile)
            await look_twice(house.control)
        assert house.versions("a") == ["2"]
        assert (house.versions("aa"), [each.getMessage() for each in caplog.records if each.levelno > 20]) == (
            ["1"],
            [],
        )
        file.write_text(original)
        await look_twice(house.control)

        assert house.versions("aa") == ["2"]

    async def test_unloading_an_ensemble_keeps_a_step_that_an_ensemble_being_loaded_needs(self, house: House) -> None:
        await house.control.load("aa")
        await house.held_back("ab", "b", lambda: house.control.unload("aa", dependents=True))
        assert house.ready() == {"a", "b", "ab"}
        await house.control.unload("ab", dependents=True)

        assert house.ready() == set()

    async def test_unloading_a_step_waits_for_the_load_of_an_ensemble_that_needs_the_step(self, house: House) -> None:
        house.repository.held = "b"
        loading = asyncio.ensure_future(house.control.load("ab"))
        await asyncio.to_thread(house.repository.has_read.wait, PATIENCE_S)
        unloading = asyncio.ensure_future(house.control.unload("a"))
        await asyncio.sleep(0)
        house.repository.go.set()

        # both were requested in time: the load still finds the step that the unload removes
        await loading
        await unloading
        assert house.ready() == {"b"}
