"""A model's processes: a desk, predicting workers, one per training; and that none of them is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from penstock.backends.errors import InferError
from penstock.batching.spec import InstanceGroup, ModelSpec
from penstock.server.carrying.messages import read_answer
from penstock.server.deepaas import desk as desk_module
from penstock.server.deepaas.entries import DEEPAAS
from penstock.server.deepaas.loading import DeepaasModels
from penstock.server.deepaas.messages import CHECK, METADATA
from penstock.server.environments.environments import Environments
from tests.live import settings_for
from tests.processes import children, ends, lives
from tests.server.workers.orders import ends_within, scene

from .fake_trainers import shown

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "modules"
NONE: Mapping[str, str] = {}
MULTIPART = "multipart/form-data; boundary=edge"
UPLOAD = (
    b"--edge\r\ncontent-disposition: form-data; name=data; filename=f.txt\r\ncontent-type: text/plain\r\n\r\n"
    b"content\r\n--edge--\r\n"
)


def request(kind: str = "", body: bytes = b"", arguments: Mapping[str, str] = NONE) -> bytes:
    """Encode a request as a worker receives it."""
    headers = f'[["content-type", "{kind}"], ["content-length", "{len(body)}"]]' if kind else "[]"
    return f'{{"method": "POST", "query": "{urlencode(arguments)}", "headers": {headers}}}\n'.encode() + body


def spec_of(target: str, count: int = 1, folder: Path = HERE) -> ModelSpec:
    options = {"target": target, "warm": "true", "accept_header": "false", "show_errors": "false"}
    return ModelSpec("m", 1, folder, DEEPAAS, options=options, instances=(InstanceGroup(count=count),))


@contextlib.asynccontextmanager
async def opened(target: str = "waits", **settings: Any) -> AsyncIterator[tuple[DeepaasModels, Any]]:
    """Yield the models with one of them open, and its executors; then close all."""
    models = DeepaasModels(Environments(), settings_for(**settings))
    found = await models.open(spec_of(target))
    try:
        yield models, found.executors
    finally:
        await models.close()
        await asyncio.gather(*(outside.close() for outside in found.executors))


class Pipe:
    """A named pipe through which user code reports its process ids."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "told")
        os.mkfifo(self.path)

    async def pids(self) -> list[int]:
        """Wait for them."""
        return [int(word) for word in (await asyncio.to_thread(Path(self.path).read_text)).split()]


@pytest.fixture
def pipe(tmp_path: Path) -> Pipe:
    return Pipe(tmp_path)


async def is_gone(pid: int) -> bool:
    return await asyncio.to_thread(ends_within, pid, 10.0)


async def ended(models: DeepaasModels, uuid: str) -> Any:
    """Wait for a training's end."""
    run = models.trainings.find("m", uuid)
    assert run is not None
    await run.ended.wait()
    return shown(await models.jobs.get("m", uuid))


async def begun(models: DeepaasModels, **arguments: str) -> str:
    return str(shown(await models.jobs.start("m", request(arguments=arguments)))["uuid"])


def test_the_desk_answers_metadata_and_checks_arguments() -> None:
    async def work() -> None:
        async with opened() as (models, _):
            desk = models.desk_of("m")
            assert desk.description.trains
            assert shown(await desk.call(METADATA))["author"] == "A"
            assert read_answer(await desk.call(CHECK, request(arguments={"must": "x"})))[0] == 422

    scene(work())


def test_a_desk_that_dies_is_restarted_while_calls_wait() -> None:
    async def work() -> None:
        async with opened() as (models, _):
            desk = models.desk_of("m")
            before = desk.pid
            os.kill(before, signal.SIGKILL)
            assert await is_gone(before)

            metadata = await answered(lambda: desk.call(METADATA))

            assert int(shown(metadata)["summary"]) == desk.pid != before
            assert desk.description.trains

    scene(work())


async def answered(ask: Callable[[], Any]) -> bytes:
    """Repeat a call until the process's end is known; the first one may fail because it was in flight."""
    while True:
        with contextlib.suppress(InferError):
            return await ask()  # type: ignore[no-any-return]


def test_a_call_to_a_closed_desk_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with opened() as (models, _):
            desk = models.desk_of("m")
            await desk.close()
            with pytest.raises(InferError, match="is stopped"):
                await desk.call(METADATA)

    scene(work())


def test_a_desk_that_exceeds_its_time_limit_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with opened("waits") as (models, _):
            desk = models.desk_of("m")
            os.kill(desk.pid, signal.SIGSTOP)
            with pytest.raises(InferError):
                await desk.call(METADATA)
            assert shown(await answered(lambda: desk.call(METADATA)))["author"] == "A"

    monkeypatch.setattr(desk_module, "LIMIT_S", 0.05)
    scene(work())


@pytest.mark.parametrize("target", ["no_such_module", "waits:no_such_name"])
def test_a_model_that_cannot_be_opened_leaves_no_process_and_has_an_error(target: str) -> None:
    async def work() -> None:
        models = DeepaasModels(Environments(), settings_for())
        with pytest.raises(InferError, match="no_such"):
            await models.open(spec_of(target, count=2))
        with pytest.raises(InferError, match="not available"):
            models.desk_of("m")
        await models.close()

    scene(work())


def test_no_process_is_left_if_one_of_them_cannot_be_opened(tmp_path: Path) -> None:
    # the other process would never open: it waits in its import until it is killed
    (tmp_path / "one.py").write_text(
        "import os, signal\n"
        f"first = not os.path.exists({str(tmp_path / 'taken')!r})\n"
        f"open({str(tmp_path / 'taken')!r}, 'a').close()\n"
        "if first:\n    raise ValueError('no')\n"
        "signal.pause()\n"
    )

    async def work() -> None:
        models = DeepaasModels(Environments(), settings_for())
        with pytest.raises(InferError, match="ValueError: no"):
            await models.open(spec_of("one", folder=tmp_path))
        await models.close()

    scene(work())


def test_a_canceled_load_leaves_no_process(tmp_path: Path, pipe: Pipe) -> None:
    (tmp_path / "slow.py").write_text(
        f"import os, signal\nwith open({pipe.path!r}, 'w') as told:\n    told.write(str(os.getpid()))\nsignal.pause()\n"
    )

    async def work() -> None:
        models = DeepaasModels(Environments(), settings_for())
        opening = asyncio.ensure_future(models.open(spec_of("slow", folder=tmp_path)))
        await pipe.pids()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await models.close()

    scene(work())


def test_predicting_and_training_workers_are_warmed_and_the_desk_is_not(tmp_path: Path) -> None:
    (tmp_path / "warms.py").write_text(
        f"import os\nplace = {str(tmp_path)!r}\n"
        "def warm():\n    open(f'{place}/warm-{os.getpid()}', 'w').close()\n"
        "def train():\n    return os.getpid()\n"
    )

    async def work() -> None:
        models = DeepaasModels(Environments(), settings_for())
        found = await models.open(spec_of("warms", count=2, folder=tmp_path))
        predicting = {path.name for path in tmp_path.glob("warm-*")}
        uuid = str(shown(await models.jobs.start("m", request()))["uuid"])
        pid = (await ended(models, uuid))["result"]["output"]

        assert len(predicting) == 2
        assert f"warm-{models.desk_of('m').pid}" not in predicting
        assert {path.name for path in tmp_path.glob("warm-*")} == {*predicting, f"warm-{pid}"}
        await models.close()
        await asyncio.gather(*(outside.close() for outside in found.executors))

    scene(work())


@pytest.mark.usefixtures("started_workers")
def test_a_training_has_its_own_process_which_ends_with_it(pipe: Pipe) -> None:
    async def work() -> None:
        async with opened() as (models, _):
            uuid = await begun(models, told=pipe.path, how="give")
            (pid,) = await pipe.pids()
            record = await ended(models, uuid)

            assert (record["status"], record["result"]["output"]) == ("done", {"acc": 0.9})
            assert record["args"] == {"told": pipe.path, "how": "give", "must": 1, "data": None}
            assert pid != models.desk_of("m").pid
            assert not lives(pid)
            run = models.trainings.find("m", uuid)
            assert run is not None
            assert set((await models.trainings.log(run)).splitlines()) == {"Epoch 1/2", "by stderr"}

    scene(work())


def test_a_training_that_raises_has_the_error_status(pipe: Pipe) -> None:
    async def work() -> None:
        async with opened() as (models, _):
            record = await ended(models, await begun(models, how="raise"))

            assert (record["status"], record["message"]) == ("error", "train boom")

    scene(work())


def test_a_training_whose_process_exits_has_an_error_with_the_exit_status(pipe: Pipe) -> None:
    async def work() -> None:
        async with opened() as (models, _):
            uuid = await begun(models, how="exit")
            record = await ended(models, uuid)

            assert record["status"] == "error"
            assert record["message"] == f"training {uuid} of model 'm' ended: exit status 3"

    scene(work())


def test_a_killed_training_has_an_error_with_the_signal(pipe: Pipe) -> None:
    async def work() -> None:
        async with opened() as (models, _):
            uuid = await begun(models, told=pipe.path)
            (pid,) = await pipe.pids()
            os.kill(pid, signal.SIGKILL)
            record = await ended(models, uuid)

            assert record["status"] == "error"
            assert "signal 9 (SIGKILL): by another process, or because memory ran out" in record["message"]

    scene(work())


def test_deleting_a_training_ends_its_process_and_child_processes(pipe: Pipe) -> None:
    async def work() -> None:
        async with opened() as (models, _):
            uuid = await begun(models, told=pipe.path, how="child")
            pids = await pipe.pids()

            assert shown(await models.jobs.delete("m", uuid))["status"] == "cancelled"
            for pid in pids:
                assert await is_gone(pid)

    scene(work())


def test_a_training_deleted_while_its_model_is_loading_never_runs(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def work() -> None:
        async with opened() as (models, _):
            uuid = await begun(models, told=str(pids))

            assert shown(await models.jobs.delete("m", uuid))["status"] == "cancelled"
            assert models.trainings.trainings_of("m") == []

    scene(work())
    assert not pids.exists()


def test_a_trainings_upload_exists_during_the_training_and_is_removed_afterwards() -> None:
    async def work() -> None:
        async with opened() as (models, _):
            answer = shown(await models.jobs.start("m", request(MULTIPART, UPLOAD)))
            assert answer["args"]["data"] == ["data", "text/plain", "f.txt"]
            record = await ended(models, answer["uuid"])

            assert record["result"]["output"]["content"] == "content"
            assert not Path(record["result"]["output"]["path"]).exists()

    scene(work())


def test_stopping_the_server_ends_a_training(pipe: Pipe) -> None:
    async def work() -> list[int]:
        async with opened() as (models, _):
            await begun(models, told=pipe.path, how="child")
            return await pipe.pids()

    assert all(ends(pid) for pid in scene(work()))


def test_unloading_a_model_ends_its_trainings_unless_another_load_replaced_it(pipe: Pipe) -> None:
    async def work() -> None:
        models = DeepaasModels(Environments(), settings_for())
        first = await models.open(spec_of("waits"))
        uuid = await begun(models, told=pipe.path)
        await pipe.pids()

        second = await models.open(spec_of("waits"))
        await asyncio.gather(*(outside.close() for outside in first.executors))
        assert shown(await models.jobs.get("m", uuid))["status"] == "running"
        assert shown(await models.desk_of("m").call(METADATA))["author"] == "A"

        await asyncio.gather(*(outside.close() for outside in second.executors))
        record = await ended(models, uuid)
        assert record["message"] == "model 'm' was unloaded while the training ran"
        with pytest.raises(InferError, match="not available"):
            models.desk_of("m")
        await models.close()

    others = children()
    scene(work())
    assert children() <= others
