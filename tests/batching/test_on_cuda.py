"""The CUDA Binding on a fake device, run by overlapping Instances, from the Engine to the streams."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import InferError
from penstock.batching.devices.placement import Devices
from penstock.batching.engine import Engine
from penstock.batching.loading.opening import close_model, open_model
from penstock.batching.model import Model
from penstock.batching.running import reload_backoff
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_session import fake_cuda_loader
from tests.backends.onnx_models import node, save, value
from tests.fakes import PATIENCE_S

FP32 = 1
STICKY = 700
ROWS = 4


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def doubling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that adds its input to itself."""
    path = tmp_path_factory.mktemp("models") / "model.onnx"
    return save(path, [node("Add", ["x", "x"], ["y"])], [value("x", FP32, ["n", 4])], [value("y", FP32, ["n", 4])])


def spec_of(path: Path, count: int = 1, rows: int = ROWS) -> ModelSpec:
    groups = (InstanceGroup(count, ("cuda:0",)),)
    return ModelSpec("m", 1, path, policy=BatchPolicy(max_batch_rows=rows), instances=groups)


@asynccontextmanager
async def served(
    runtime: FakeRuntime, path: Path, count: int = 1, rows: int = ROWS
) -> AsyncIterator[tuple[Engine, Model]]:
    engine = Engine(asyncio.get_running_loop(), {"onnxruntime": fake_cuda_loader(runtime)})
    engine.devices = Devices()
    try:
        yield engine, await engine.load(spec_of(path, count, rows))
    finally:
        await engine.stop(PATIENCE_S)


async def infer_all(engine: Engine, model: Model, count: int) -> list[bool]:
    """Send `count` requests at once. Returns: whether each answer is correct; each failed one has its own error."""
    inputs = [np.full((1, 4), number, np.float32) for number in range(count)]
    ends = await asyncio.gather(*(engine.infer(model, [each]) for each in inputs), return_exceptions=True)
    for number, end in enumerate(ends):
        assert isinstance(end, InferError) or (end[0] == 2 * number).all()  # type: ignore[index]
    return [not isinstance(end, InferError) for end in ends]


@pytest.mark.anyio
async def test_two_batches_are_on_the_device_at_once_and_every_answer_is_correct(doubling: Path) -> None:
    runtime = FakeRuntime()
    async with served(runtime, doubling, rows=1) as (engine, model):
        before = runtime.copies["h2d"]
        with runtime.hold(0):
            asking = asyncio.create_task(infer_all(engine, model, 5))
            async with asyncio.timeout(PATIENCE_S):
                while runtime.copies["h2d"] < before + 2:  # noqa: ASYNC110 - the Instance's thread makes them
                    await asyncio.sleep(0)
            assert not asking.done()

        assert all(await asking)
        assert model.device_ns["cuda:0"] > 0
    assert not any(runtime.alive.values())


@pytest.mark.anyio
async def test_each_of_several_instances_has_its_session_and_all_are_freed(doubling: Path) -> None:
    runtime = FakeRuntime()
    async with served(runtime, doubling, count=3) as (engine, model):
        assert all(await infer_all(engine, model, 40))
        assert len({id(thread.placement.backend) for thread in model.thread_instances}) == 3
    assert not any(runtime.alive.values())


@pytest.mark.parametrize("after", [0, 3, 8])
@pytest.mark.parametrize("call", ["cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"])
@pytest.mark.anyio
async def test_a_sticky_cuda_error_fails_every_request_and_marks_the_device_lost_for_the_process(
    doubling: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    monkeypatch.setattr(reload_backoff, "MIN_RETRY_NS", 0)
    runtime = FakeRuntime()
    async with served(runtime, doubling) as (engine, model):
        devices: Any = engine.devices
        runtime.fail(call, STICKY, after)
        answered = await infer_all(engine, model, 24)
        later = [await infer_all(engine, model, 1) for _ in range(8)]
        refused = await infer_all(engine, model, 24)

        assert len(answered) == 24
        assert not any(refused)
        assert later[-1] == [False]
        assert runtime.calls["cudaGetDeviceCount"] == 2  # it was loaded once, and reloaded once
        assert not model.healthy
        assert "CUDA error 700" in devices.lost_reason
        assert model.inflight == 0


def test_a_second_session_that_does_not_fit_fails_the_load_and_frees_everything(doubling: Path) -> None:
    runtime = FakeRuntime()
    model = open_model(spec_of(doubling), {"onnxruntime": fake_cuda_loader(runtime)}, lambda *_: None)
    one = runtime.alive["bytes"]
    close_model(model)
    full = FakeRuntime(memory=one + one // 2)
    with pytest.raises(InferError):
        open_model(spec_of(doubling, count=2), {"onnxruntime": fake_cuda_loader(full)}, lambda *_: None)
    gc.collect()

    assert not any(full.alive.values())
