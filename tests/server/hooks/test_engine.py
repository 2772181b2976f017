"""HookedEngine opens, publishes, swaps and retires models together with their hooks."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.backend import Backend
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.spec import BatchPolicy, HookSpec, ModelSpec
from penstock.server.hooks.engine import HookedEngine
from tests.fakes import PATIENCE_S, FakeBackend, Gate

pytestmark = pytest.mark.anyio
GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
HOOKS = "def pre_inference(sample, metadata):\n    return sample\n"
TABLE = """
import pathlib

class Table:
    def __del__(self, gone=pathlib.Path({!r})):
        gone.touch()

TABLE = Table()
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class House:
    """A HookedEngine, its Engine, and a backend for each load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gate = Gate(list)
        self.loading = threading.Event()
        self.loading.set()
        self.backends: list[FakeBackend] = []
        self.engine = Engine(asyncio.get_running_loop(), {"fake": self._load})
        self.hooked = HookedEngine(self.engine)

    def _load(self, path: Path, device: str, options: Mapping[str, str]) -> Backend:
        backend = FakeBackend(GRAPH, self.gate)
        self.backends.append(backend)
        if not self.loading.wait(PATIENCE_S):
            raise TimeoutError("nobody let it load")
        return backend

    def spec(self, version: int = 1, hooks: str = "") -> ModelSpec:
        hook_spec = None
        if hooks:
            path = self.folder / "hooks.py"
            path.write_text(hooks)
            hook_spec = HookSpec(path)
        policy = BatchPolicy(executor="thread")
        return ModelSpec("m", version, Path("model"), policy=policy, backend="fake", hooks=hook_spec)


@asynccontextmanager
async def house(folder: Path) -> AsyncIterator[House]:
    new_house = House(folder)
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            yield new_house
    finally:
        new_house.loading.set()
        new_house.gate.open()
        await new_house.hooked.stop(PATIENCE_S)


async def refusal(hooked: HookedEngine, spec: ModelSpec) -> str:
    """Give the error of opening a model, without keeping the traceback alive as `pytest.raises` would."""
    try:
        await hooked.open(spec)
    except InferError as error:
        return error.message
    return ""


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class TestOpening:
    async def test_a_published_model_has_its_hooks(self, tmp_path: Path) -> None:
        async with house(tmp_path) as it:
            model = await it.hooked.open(it.spec(hooks=HOOKS))
            assert it.hooked.hooks_of(model).has_pre
            with pytest.raises(InferError, match="is not found"):
                it.engine.model("m")
            await it.hooked.publish("m", [model])
            assert it.engine.model("m") is model
            assert model.load_s > 0

    async def test_a_model_whose_hooks_do_not_load_is_closed(self, tmp_path: Path) -> None:
        async with house(tmp_path) as it:
            with pytest.raises(InferError, match="nonsense"):
                await it.hooked.open(it.spec(hooks="import nonsense_that_is_not_there"))
            await it.hooked.stop(PATIENCE_S)
            assert it.backends[0].closed

    async def test_a_model_is_closed_after_its_load_is_cancelled(self, tmp_path: Path) -> None:
        async with house(tmp_path) as it:
            it.loading.clear()
            opening = asyncio.ensure_future(it.hooked.open(it.spec()))
            while not it.backends:  # noqa: ASYNC110 - a thread's work
                await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            it.loading.set()
            while not it.backends[0].closed:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def test_open_fails_while_the_server_stops(self, tmp_path: Path) -> None:
        async with house(tmp_path) as it:
            await it.hooked.stop(0)
            with pytest.raises(InferError) as caught:
                await it.hooked.open(it.spec())
            assert caught.value.code is Code.NOT_READY
            while not it.backends[0].closed:  # noqa: ASYNC110
                await asyncio.sleep(0)


@pytest.mark.usefixtures("no_collector")
class TestFreedMemory:
    """Objects that belong to a model are freed without the garbage collector."""

    async def test_objects_held_by_hooks_are_freed_when_their_model_is_retired(self, tmp_path: Path) -> None:
        log_path = tmp_path / "gone"
        async with house(tmp_path) as it:
            for _ in range(2):  # the thread of the second model may still be ending
                model = await it.hooked.open(it.spec(hooks=TABLE.format(str(log_path)) + HOOKS))
                await it.hooked.retire((model,))
            assert log_path.exists()

    async def test_objects_held_by_hooks_are_freed_when_their_load_fails(self, tmp_path: Path) -> None:
        log_path = tmp_path / "gone"
        async with house(tmp_path) as it:
            for _ in range(2):
                message = await refusal(it.hooked, it.spec(hooks=TABLE.format(str(log_path)) + "pre_inference = 1"))
                assert "pre_inference is not a function" in message
                await asyncio.gather(*it.hooked._retiring)
            assert log_path.exists()

    async def test_weights_are_freed_when_the_load_of_a_model_fails(self, tmp_path: Path) -> None:
        read: list[weakref.ref[Gate]] = []

        def fails(path: Path, device: str, options: Mapping[str, str]) -> Backend:
            weights = Gate(list)
            read.append(weakref.ref(weights))
            raise InferError(Code.INVALID, "the weights are wrong")

        async with house(tmp_path) as it:
            hooked = HookedEngine(Engine(asyncio.get_running_loop(), {"fake": fails}))
            assert await refusal(hooked, it.spec()) == "the weights are wrong"
            while read[0]() is not None:  # noqa: ASYNC110 - a thread's work
                await asyncio.sleep(0)


class TestSwapping:
    async def test_the_old_model_finishes_the_requests_that_its_hooks_accepted(self, tmp_path: Path) -> None:
        async with house(tmp_path) as it:
            old = await it.hooked.open(it.spec(1, HOOKS))
            await it.hooked.publish("m", [old])
            it.gate.close()
            x = np.ones((1, 4), np.float32)
            call = asyncio.ensure_future(it.hooked.hooks_of(old).infer({"x": x}))
            await it.gate.entered()
            it.gate.open()
            new = await it.hooked.open(it.spec(2, HOOKS))
            retired = it.hooked.publish("m", [new])

            assert it.engine.model("m") is new
            assert (await call)["y"].tolist() == x.tolist()
            await retired
            assert [backend.closed for backend in it.backends] == [True, False]
            with pytest.raises(InferError, match="is being unloaded"):
                it.hooked.hooks_of(old)

    async def test_a_model_that_is_held_keeps_its_hooks(self, tmp_path: Path) -> None:
        async with house(tmp_path) as it:
            old = await it.hooked.open(it.spec(1, HOOKS))
            await it.hooked.publish("m", [old])
            it.engine.hold(old)
            retired = it.hooked.publish("m", [])
            await turns()
            answer = await it.hooked.hooks_of(old).infer({"x": np.ones((1, 4), np.float32)})

            assert answer["y"].shape == (1, 4)
            assert not retired.done()
            it.engine.release(old)
            await retired
            assert it.backends[0].closed

    async def test_stop_waits_for_models_that_are_being_retired(self, tmp_path: Path) -> None:
        async with house(tmp_path) as it:
            model = await it.hooked.open(it.spec())
            it.hooked.publish("m", [model])
            it.hooked.publish("m", [])
            assert await it.hooked.stop(PATIENCE_S) == 0
            assert it.backends[0].closed
