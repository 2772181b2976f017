"""ModelControl over a fake Engine that waits until the test releases it."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.repository.control import NOT_ALLOWED, ModelControl
from penstock.server.repository.control_options import ControlOptions
from penstock.server.repository.poll_history import UNSTABLE_POLLS
from penstock.server.repository.repository import UNSTABLE, Repository
from tests.server.repository.folders import FakeEngine, look_twice, make

pytestmark = pytest.mark.anyio
EXPLICIT = ControlOptions(mode="explicit")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class House:
    root: Path
    repository: Repository
    engine: FakeEngine
    control: ModelControl

    def rows(self) -> list[str]:
        return [
            " ".join(filter(None, (row["name"], row.get("version"), row.get("state"), row.get("reason"))))
            for row in self.repository.index()
        ]

    async def turns(self, when: Callable[[], object]) -> None:
        """Let the event loop turn until the condition holds."""
        async with asyncio.timeout(10):
            while not when():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)


@asynccontextmanager
async def house(root: Path, choices: ControlOptions = EXPLICIT, *, start: bool = True) -> AsyncIterator[House]:
    repository, engine = Repository([root]), FakeEngine()
    control = ModelControl(repository, engine, choices)
    if start:
        await control.start()
    try:
        async with asyncio.timeout(10):
            yield House(root, repository, engine, control)
    finally:
        await control.stop()


async def refusal(work: Coroutine[Any, Any, Any]) -> tuple[Code, str]:
    with pytest.raises(InferError) as caught:
        await work
    return caught.value.code, caught.value.message


class TestLoading:
    async def test_no_model_is_loaded_before_a_load_is_requested(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx")
        async with house(tmp_path) as it:
            assert it.rows() == ["a", "b"]
            assert it.repository.index(ready=True) == []
            assert it.repository.ready()
            await it.control.load("a")
            assert it.rows() == ["a 1 READY", "b"]

    async def test_readiness_lists_the_versions_that_should_serve(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx", "c/1/model.onnx", "d/1/model.onnx")
        async with house(tmp_path) as it:
            it.engine.failures["b"] = InferError(Code.INVALID, "broken")
            await it.control.load("a")
            await refusal(it.control.load("b"))
            await it.control.load("c")
            await it.control.unload("c")
            await it.turns(lambda: "c 1 UNAVAILABLE unloaded" in it.rows())

            assert list(it.repository.readiness()) == [("a", "1", True), ("b", "1", False)]

    async def test_the_server_is_not_ready_while_a_model_loads(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path) as it:
            it.engine.gate = asyncio.Event()
            loading = asyncio.ensure_future(it.control.load("a"))
            await it.turns(lambda: it.engine.opened)
            assert it.rows() == ["a 1 LOADING"]
            assert not it.repository.ready()
            it.engine.gate.set()
            await loading
            assert it.repository.ready()

    async def test_old_versions_serve_until_all_new_versions_are_open(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", a="version_policy { latest { num_versions: 2 } }")
        async with house(tmp_path) as it:
            await it.control.load("a")
            make(tmp_path, "a/2/model.onnx", "a/3/model.onnx")
            it.engine.gate, it.engine.leaving = asyncio.Event(), asyncio.Event()
            loading = asyncio.ensure_future(it.control.load("a"))
            await it.turns(lambda: len(it.engine.opened) == 3)
            assert [model.version for model in it.engine.served["a"]] == ["1"]
            assert it.rows() == ["a 1 READY", "a 2 LOADING", "a 3 LOADING"]
            assert it.repository.index(ready=True) == [{"name": "a", "version": "1", "state": "READY"}]
            it.engine.gate.set()
            await it.turns(lambda: len(it.engine.served["a"]) == 2)
            assert it.rows() == ["a 1 UNLOADING", "a 2 READY", "a 3 READY"]
            assert it.repository.ready()
            it.engine.leaving.set()
            await loading
            assert it.rows() == ["a 1 UNAVAILABLE unloaded", "a 2 READY", "a 3 READY"]

    async def test_a_load_serves_all_versions_of_a_model_or_none(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "a/2/model.onnx", a="version_policy { all { } }")
        async with house(tmp_path) as it:
            it.engine.failures["a2"] = InferError(Code.UNSUPPORTED, f"{tmp_path}/a/2/model.onnx is no good")
            code, text = await refusal(it.control.load("a"))

            assert code is Code.INVALID
            assert text == ("load failed for model 'a': version 2 is at UNAVAILABLE state: 2/model.onnx is no good;")
            assert it.engine.served == {}
            assert it.engine.absent == {"a": ["2"]}
            assert it.rows() == ["a 1 UNAVAILABLE unloaded", "a 2 UNAVAILABLE 2/model.onnx is no good"]
            await it.turns(lambda: [model.version for model in it.engine.retired] == ["1"])
            assert not it.repository.ready()

    async def test_a_load_fails_when_the_file_of_a_version_is_missing(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/x", a="max_batch_size: 1")
        async with house(tmp_path) as it:
            code, text = await refusal(it.control.load("a"))

            assert code is Code.INVALID
            why = "version 1 is at UNAVAILABLE state: 1: there is no model.onnx"
            assert text.startswith(f"load failed for model 'a': {why}")
            assert it.engine.absent == {"a": ["1"]}

    async def test_a_model_without_versions_is_known_but_fails_to_load(self, tmp_path: Path) -> None:
        make(tmp_path, a="max_batch_size: 1")
        async with house(tmp_path) as it:
            why = "a: at least one version must be available under the version policy of model 'a'"
            assert await refusal(it.control.load("a")) == (Code.INVALID, f"load failed for model 'a': {why}")
            # to requests, the model is known but has no available version
            assert it.engine.absent == {"a": []}

    async def test_a_missing_specific_version_does_not_fail_a_load(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", a="version_policy { specific { versions: [1, 2] } }")
        async with house(tmp_path) as it:
            await it.control.load("a")
            assert it.rows() == ["a 1 READY"]
            assert it.repository.ready()

    async def test_a_failed_load_leaves_the_served_versions_unchanged(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path) as it:
            await it.control.load("a")
            served = it.engine.served["a"]
            (tmp_path / "a" / "config.pbtxt").write_text("nonsense")
            code, text = await refusal(it.control.load("a"))

            assert code is Code.INTERNAL
            assert text.startswith("failed to load 'a', failed to poll from model repository: config.pbtxt:1: ")
            assert str(tmp_path) not in text
            assert it.repository.ready()
            assert it.repository.index(ready=True)[0]["reason"] == text.partition("repository: ")[2]
            (tmp_path / "a" / "config.pbtxt").unlink()
            make(tmp_path, "a/2/model.onnx")
            it.engine.failures["a"] = RuntimeError("boom")
            assert (await refusal(it.control.load("a")))[0] is Code.INVALID
            assert it.engine.served["a"] is served
            assert it.rows() == ["a 1 READY", "a 2 UNAVAILABLE RuntimeError: boom"]

    async def test_a_served_version_shows_why_its_reload_failed_until_a_load_succeeds(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx")
        file, aside = tmp_path / "a" / "1" / "model.onnx", tmp_path / "aside"
        async with house(tmp_path) as it:
            await it.control.load("a")
            file.rename(aside)
            file.write_bytes(b"new")
            it.engine.failures["a"] = InferError(Code.INVALID, "no good")
            await refusal(it.control.load("a"))
            assert it.rows() == ["a 1 READY no good"]

            aside.rename(file)  # the served file again
            await it.control.load("a")
            assert it.rows() == ["a 1 READY"]
            assert len(it.engine.opened) == 2

            file.write_bytes(b"newer")
            await refusal(it.control.load("a"))
            it.engine.failures.clear()
            await it.control.load("a")
            assert it.rows() == ["a 1 READY"]

    async def test_a_model_is_reloaded_only_after_its_files_change_or_it_was_unloaded(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path) as it:
            for _ in range(3):
                await it.control.load("a")
            assert it.engine.opened == [("a", 1)]
            (tmp_path / "a" / "1" / "model.onnx").write_bytes(b"new")
            await it.control.load("a")
            assert len(it.engine.opened) == 2
            await it.control.unload("a")
            await it.control.load("a")
            assert len(it.engine.opened) == 3

    @pytest.mark.parametrize("failure", [InferError(Code.INVALID, "broken"), ValueError("broken")])
    async def test_a_failed_load_is_logged_once_with_its_model_and_version(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, failure: Exception
    ) -> None:
        caplog.set_level(logging.INFO)
        make(tmp_path, "a/1/model.onnx", "b/2/model.onnx")
        async with house(tmp_path, ControlOptions(mode="none"), start=False) as it:
            it.engine.failures["a"] = failure
            await it.control.start()

        (logged,) = [record for record in caplog.records if "broken" in record.getMessage()]
        assert (logged.levelname, vars(logged)["model"], vars(logged)["version"]) == ("ERROR", "a", "1")
        assert (logged.exc_info is None) == isinstance(failure, InferError)
        (ready,) = [record for record in caplog.records if record.getMessage() == "model b version 2: ready"]
        assert (vars(ready)["model"], vars(ready)["version"]) == ("b", "2")

    async def test_a_mistake_in_a_configuration_is_logged_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        make(tmp_path, "a/1/model.onnx", a="max_batch_sice: 1")
        async with house(tmp_path, ControlOptions(mode="none")):
            pass

        assert len([message for message in caplog.messages if "max_batch_sice" in message]) == 1

    async def test_a_version_that_fails_to_load_is_retried(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path, ControlOptions(mode="explicit", max_retries=2)) as it:
            it.engine.failures["a"] = InferError(Code.INTERNAL, "no good")
            await refusal(it.control.load("a"))
            assert len(it.engine.opened) == 3
            assert "failed to load 'a' version 1: no good; trying again, at most 1 times" in caplog.messages
            it.engine.gate = asyncio.Event()
            loading = asyncio.ensure_future(it.control.load("a"))
            await it.turns(lambda: len(it.engine.opened) == 4)
            it.engine.failures.clear()
            it.engine.gate.set()
            await loading
            assert it.rows() == ["a 1 READY"]

    @pytest.mark.parametrize("mode", ["none", "poll"])
    async def test_load_and_unload_are_rejected_outside_explicit_mode(self, tmp_path: Path, mode: str) -> None:
        async with house(tmp_path, ControlOptions(mode=mode)) as it:
            assert not it.control.is_explicit
            assert await refusal(it.control.load("..")) == (Code.NOT_READY, NOT_ALLOWED)
            assert await refusal(it.control.unload("a")) == (Code.NOT_READY, NOT_ALLOWED)

    async def test_two_models_with_the_same_name_fail_to_load(self, tmp_path: Path) -> None:
        make(tmp_path, "one/a/1/model.onnx", "two/a/1/model.onnx", "two/b/1/model.onnx")
        repository, engine = Repository([tmp_path / "one", tmp_path / "two"]), FakeEngine()
        control = ModelControl(repository, engine, EXPLICIT)
        await control.start()
        why = "model appears in two or more repositories"
        rows = [{"name": "a", "state": "UNAVAILABLE", "reason": why}, {"name": "b"}]

        assert await control.index() == rows
        # clients do not learn the paths of the two models
        text = f"failed to load 'a', failed to poll from model repository: {why}"
        assert await refusal(control.load("a")) == (Code.INTERNAL, text)
        assert await control.index() == rows
        assert await control.index(ready=True) == []

    async def test_a_single_file_model_is_loaded_by_name_but_rejects_a_configuration(self, tmp_path: Path) -> None:
        make(tmp_path, "alone.onnx")
        async with house(tmp_path / "alone.onnx") as it:
            assert it.rows() == ["alone"]
            await it.control.load("alone")
            assert it.rows() == ["alone 1 READY"]
            assert "cannot be configured" in (await refusal(it.control.load("alone", "{}")))[1]
            assert it.rows()[0].startswith("alone 1 READY alone: cannot be configured")

    async def test_the_reason_for_a_single_file_model_does_not_reveal_its_path(self, tmp_path: Path) -> None:
        make(tmp_path, "alone.onnx")
        (tmp_path / "alone.toml").write_text("[batching]\ncap = 0\n")
        async with house(tmp_path / "alone.onnx") as it:
            await refusal(it.control.load("alone"))

            assert it.rows() == [
                "alone UNAVAILABLE alone.toml:2: batching.cap must be an integer of at least 1, not 0 (integer)"
            ]


class TestUnloading:
    async def test_a_model_is_unloading_until_its_accepted_requests_finish(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path) as it:
            await it.control.load("a")
            it.engine.leaving = asyncio.Event()
            unloading = asyncio.ensure_future(it.control.unload("a", dependents=True))
            await it.turns(lambda: "a" not in it.engine.served)
            assert it.rows() == ["a 1 UNLOADING"]
            assert it.repository.ready()
            assert not unloading.done()
            it.engine.leaving.set()
            await unloading
            assert it.rows() == ["a 1 UNAVAILABLE unloaded"]

    async def test_unloading_a_model_that_is_not_loaded_succeeds(self, tmp_path: Path) -> None:
        async with house(tmp_path) as it:
            await it.control.unload("a")
            assert it.rows() == []

    async def test_a_model_can_be_loaded_while_its_previous_version_is_unloading(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path) as it:
            await it.control.load("a")
            it.engine.leaving = asyncio.Event()
            unloading = asyncio.ensure_future(it.control.unload("a"))
            await it.turns(lambda: "a" not in it.engine.served)
            loading = asyncio.ensure_future(it.control.load("a"))
            await it.turns(lambda: "a" in it.engine.served)
            assert it.rows() == ["a 1 READY"]
            it.engine.leaving.set()
            await asyncio.gather(unloading, loading)
            assert it.rows() == ["a 1 READY"]


class TestParallelLoads:
    async def test_loads_of_one_model_run_in_turn_and_of_different_models_in_parallel(self, tmp_path: Path) -> None:
        make(tmp_path, *(f"m{number}/1/model.onnx" for number in range(8)))
        async with house(tmp_path, ControlOptions(mode="explicit", max_concurrent_loads=3)) as it:
            it.engine.gate = asyncio.Event()
            same = [asyncio.ensure_future(it.control.load("m0", "{}")) for _ in range(4)]
            await it.turns(lambda: it.engine.opened)
            assert it.engine.opened == [("m0", 1)]
            others = [asyncio.ensure_future(it.control.load(f"m{number}")) for number in range(1, 8)]
            await it.turns(lambda: len(it.engine.opened) == 3)
            it.engine.gate.set()
            await asyncio.gather(*same, *others)

            assert it.engine.most == 3
            assert it.engine.opened.count(("m0", 1)) == 4
            assert len(it.engine.retired) == 3

    async def test_parallel_loads_and_unloads_end_in_the_state_requested_last(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path) as it:
            calls = [it.control.load("a", "{}"), it.control.unload("a"), it.control.load("a"), it.control.unload("a")]
            await asyncio.gather(*calls, *(it.control.load("a") for _ in range(5)))
            assert it.rows() == ["a 1 READY"]
            assert len(it.engine.served["a"]) == 1

    async def test_a_load_finishes_after_its_caller_is_canceled(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path) as it:
            it.engine.gate = asyncio.Event()
            loading = asyncio.ensure_future(it.control.load("a"))
            await it.turns(lambda: it.engine.opened)
            loading.cancel()
            it.engine.gate.set()
            await it.turns(lambda: it.rows() == ["a 1 READY"])

    async def test_stopping_cancels_loads_in_progress_and_serves_none_of_their_versions(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "a/2/model.onnx", a="version_policy { all { } }")
        async with house(tmp_path) as it:
            it.engine.gate = asyncio.Event()
            loading = asyncio.ensure_future(it.control.load("a"))
            await it.turns(lambda: len(it.engine.opened) == 2)
            await it.control.stop()
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert it.engine.served == {}


class TestFilesOfRequests:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "temporary"
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        return folder

    async def test_files_of_a_request_are_kept_only_while_they_serve(self, tmp_path: Path, folder: Path) -> None:
        async with house(make(tmp_path / "root", "a/1/model.onnx")) as it:
            await it.control.load("a", "{}", {"2/model.onnx": b"x"})
            files_kept = list(folder.iterdir())
            assert len(files_kept) == 1
            assert it.rows() == ["a 2 READY"]
            await it.control.load("a", "{}", {"3/model.onnx": b"x"})
            assert list(folder.iterdir()) != files_kept
            await it.control.load("a")
            assert list(folder.iterdir()) == []
            assert it.rows()[0] == "a 1 READY"
            await it.control.load("a", "{}", {"3/model.onnx": b"x"})
            await it.control.unload("a")
            assert list(folder.iterdir()) == []
            await it.control.load("a", "{}", {"3/model.onnx": b"x"})
        assert list(folder.iterdir()) == []

    @pytest.mark.parametrize("failure", [InferError(Code.INVALID, "no good"), OSError("no disk")])
    async def test_a_failed_load_removes_the_files_of_its_request(
        self, tmp_path: Path, folder: Path, failure: Exception
    ) -> None:
        async with house(make(tmp_path / "root", "a/1/model.onnx")) as it:
            it.engine.failures["a"] = failure
            text = (await refusal(it.control.load("a", "{}", {"1/model.onnx": b"x"})))[1]
            assert str(folder) not in text
            await refusal(it.control.load("a", '{"name": "b"}', {"1/model.onnx": b"x"}))
            await refusal(it.control.load("a", "nonsense", {"1/model.onnx": b"x"}))
            assert list(folder.iterdir()) == []

    async def test_files_of_a_request_need_a_configuration(self, tmp_path: Path) -> None:
        async with house(tmp_path) as it:
            code, text = await refusal(it.control.load("a", None, {"1/model.onnx": b"x"}))
            assert code is Code.INTERNAL
            assert text.startswith("failed to load 'a', failed to poll from model repository: ")
            assert "'config' must be given" in text

    async def test_a_configuration_in_a_request_applies_to_the_files_on_disk(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "a/2/model.onnx", a="max_batch_size: 7")
        async with house(tmp_path) as it:
            await it.control.load("a", '{"versionPolicy": {"all": {}}}')
            assert it.rows() == ["a 1 READY", "a 2 READY"]
            assert it.engine.served["a"][0].spec.policy.max_batch_rows != 7
            await it.control.load("a")
            assert it.rows() == ["a 1 UNAVAILABLE unloaded", "a 2 READY"]
            assert it.engine.served["a"][0].spec.policy.max_batch_rows == 7


class TestStartup:
    async def test_only_the_named_models_are_loaded_at_startup(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx", "c/1/model.onnx")
        async with house(tmp_path, ControlOptions("explicit", ("c", "a", "a")), start=False) as it:
            assert await it.control.start() == []
            assert it.rows() == ["a 1 READY", "b", "c 1 READY"]

    async def test_an_unknown_model_name_at_startup_is_reported(self, tmp_path: Path) -> None:
        async with house(tmp_path, ControlOptions("explicit", ("a",)), start=False) as it:
            assert await it.control.start() == ["failed to load 'a', failed to poll from model repository"]
            assert it.repository.ready()

    async def test_a_star_loads_all_models_at_startup(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx")
        async with house(tmp_path, ControlOptions("explicit", ("*",))) as it:
            assert it.rows() == ["a 1 READY", "b 1 READY"]

    async def test_a_model_added_after_startup_is_in_the_index(self, tmp_path: Path) -> None:
        async with house(tmp_path) as it:
            make(tmp_path, "late/1/model.onnx", "nothing/x")
            assert await it.control.index() == [{"name": "late"}]

    async def test_a_load_that_cannot_read_the_files_fails_and_keeps_the_served_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path) as it:
            await it.control.load("a")
            make(tmp_path, "a/2/model.onnx")
            refuse(monkeypatch, tmp_path / "a")
            why = "a: cannot be read: Too many open files"
            text = f"failed to load 'a', failed to poll from model repository: {why}"
            assert await refusal(it.control.load("a")) == (Code.INTERNAL, text)
            assert it.rows() == [f"a 1 READY {why}"]

    async def test_a_load_whose_files_do_not_fit_on_disk_keeps_the_served_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def write(name: str, files: object) -> Path:
            raise OSError(errno.ENOSPC, "No space left on device")

        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path) as it:
            await it.control.load("a")
            monkeypatch.setattr("penstock.server.repository.overrides.write_files", write)
            why = "the files could not be written: No space left on device"
            text = f"failed to load 'a', failed to poll from model repository: {why}"
            assert await refusal(it.control.load("a", "{}", {"1/model.onnx": b"x"})) == (Code.INTERNAL, text)
            assert it.rows() == ["a 1 READY"]


def of(count: int, more: str = "") -> str:
    return f"instance_group [ {{ count: {count} kind: KIND_CPU }} ] {more}"


class TestResizing:
    async def test_a_model_is_resized_without_a_reload_when_only_its_instance_group_changes(
        self, tmp_path: Path
    ) -> None:
        make(tmp_path, "a/1/model.onnx", a=of(1))
        async with house(tmp_path) as it:
            it.engine.changes = True
            await it.control.load("a")
            make(tmp_path, a=of(3))
            await it.control.load("a")
            await it.control.load("a")

            assert it.engine.opened == [("a", 1)]
            assert it.engine.on_change == [("committed", 3)]
            assert it.rows() == ["a 1 READY"]

    async def test_a_configuration_in_a_request_that_changes_only_instances_resizes_the_model(
        self, tmp_path: Path
    ) -> None:
        make(tmp_path, "a/1/model.onnx", a=of(1))
        async with house(tmp_path) as it:
            it.engine.changes = True
            await it.control.load("a")
            await it.control.load("a", '{"instance_group": [{"count": 2, "kind": "KIND_CPU"}]}')
            await it.control.load("a")

            assert len(it.engine.opened) == 1
            assert it.engine.on_change == [("committed", 2), ("committed", 1)]

    @pytest.mark.parametrize("more", ["", "max_batch_size: 4 dynamic_batching { }"])
    async def test_the_reported_configuration_with_another_instance_count_resizes_the_model(
        self, tmp_path: Path, more: str
    ) -> None:
        make(tmp_path, "a/1/model.onnx", a=of(1, more))
        async with house(tmp_path) as it:
            it.engine.changes = True
            await it.control.load("a")
            reported = dict(it.repository.config_json(it.engine.served["a"][0]))
            reported["instance_group"][0]["count"] = 2
            await it.control.load("a", json.dumps(reported))
            assert (len(it.engine.opened), it.engine.on_change) == (1, [("committed", 2)])

            await it.control.load("a", json.dumps(reported | {"metric_tags": {"a": "b"}}))
            assert len(it.engine.opened) == 2

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("config.pbtxt", of(2, "max_batch_size: 3")), ("config.pbtxt", of(2, "optimization { priority: 1 }")),
            ("penstock.toml", "[batching]\nmax_batch_size = 3\n"), ("1/model.onnx", "x"), ("labels.txt", "x"),
            ("2/model.onnx", "x"), ("config.pbtxt", ""),
        ],
    )  # fmt: skip
    async def test_any_change_besides_the_instance_group_reloads_the_model(
        self, tmp_path: Path, file: str, text: str
    ) -> None:
        make(tmp_path, "a/1/model.onnx", a=of(1))
        async with house(tmp_path) as it:
            it.engine.changes = True
            await it.control.load("a")
            make(tmp_path, "a/2/model.onnx" if file.startswith("2") else "a/1/model.onnx", a=of(2))
            (tmp_path / "a" / file).write_text(text)
            await it.control.load("a")

            assert it.engine.on_change == []
            assert len(it.engine.opened) == 2

    async def test_a_model_is_reloaded_when_the_engine_cannot_resize_it(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", a=of(1))
        async with house(tmp_path) as it:
            it.engine.changes = True
            await it.control.load("a")
            it.engine.changes = False
            make(tmp_path, a=of(2))
            await it.control.load("a")

            assert it.engine.requested_counts == [[2]]
            assert len(it.engine.opened) == 2

    async def test_a_resize_applies_to_all_versions_or_to_none(self, tmp_path: Path) -> None:
        every = "version_policy { all {} }"
        make(tmp_path, "a/1/model.onnx", "a/2/model.onnx", a=of(1, every))
        async with house(tmp_path) as it:
            it.engine.changes = True
            await it.control.load("a")
            it.engine.failures["a2"] = InferError(Code.INTERNAL, "no memory")
            make(tmp_path, a=of(2, every))

            text = "load failed for model 'a': version 2 is at UNAVAILABLE state: no memory;"
            assert await refusal(it.control.load("a")) == (Code.INVALID, text)

            assert it.engine.on_change == [("abandoned", 2)]
            assert it.rows() == ["a 1 READY", "a 2 READY no memory"]
            it.engine.failures.clear()
            await it.control.load("a")
            assert it.rows() == ["a 1 READY", "a 2 READY"]
            assert it.engine.on_change[1:] == [("committed", 2), ("committed", 2)]
            assert len(it.engine.opened) == 2

    async def test_an_invalid_configuration_leaves_the_instances_unchanged(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", a=of(1))
        async with house(tmp_path) as it:
            it.engine.changes = True
            await it.control.load("a")
            make(tmp_path, a="--- wrong ---")
            await refusal(it.control.load("a"))
            make(tmp_path, a=of(2))
            await it.control.load("a")

            assert it.engine.on_change == [("committed", 2)]
            assert len(it.engine.opened) == 1

    async def test_a_model_that_was_unloaded_is_opened_rather_than_resized(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", a=of(1))
        async with house(tmp_path) as it:
            it.engine.changes = True
            await it.control.load("a")
            await it.control.unload("a")
            make(tmp_path, a=of(2))
            await it.control.load("a")

            assert it.engine.requested_counts == []
            assert len(it.engine.opened) == 2

    async def test_polling_resizes_a_model_when_only_its_instance_group_changes(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", a=of(1))
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            it.engine.changes = True
            make(tmp_path, a=of(2))
            await look_twice(it.control)
            await look_twice(it.control)

            assert it.engine.on_change == [("committed", 2)]
            assert len(it.engine.opened) == 1


class TestPolling:
    async def test_polling_loads_only_the_models_that_changed(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx")
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            await look_twice(it.control)
            assert len(it.engine.opened) == 2
            (tmp_path / "a" / "penstock.toml").write_text("[batching]\nmax_batch_size = 3\n")
            make(tmp_path, "b/2/model.onnx", "c/1/model.onnx")
            await look_twice(it.control)
            assert sorted(it.engine.opened[2:]) == [("a", 1), ("b", 2), ("c", 1)]
            assert it.rows() == ["a 1 READY", "b 1 UNAVAILABLE unloaded", "b 2 READY", "c 1 READY"]

    async def test_a_deleted_model_is_unloaded_at_the_next_poll(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx")
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            shutil.rmtree(tmp_path / "a")
            await it.control.poll()
            assert list(it.engine.served) == ["b"]
            assert it.rows() == ["b 1 READY"]
            assert it.repository.ready()

    async def test_a_model_that_failed_to_load_is_retried_only_after_it_changes(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            it.engine.failures["a"] = InferError(Code.INVALID, "no good")
            (tmp_path / "a" / "1" / "model.onnx").write_bytes(b"half")
            await look_twice(it.control)
            await look_twice(it.control)
            assert len(it.engine.opened) == 2
            assert it.rows() == ["a 1 READY no good"]
            it.engine.failures.clear()
            (tmp_path / "a" / "1" / "model.onnx").write_bytes(b"whole")
            await look_twice(it.control)
            assert len(it.engine.opened) == 3

    async def test_the_previous_version_is_served_after_the_latest_is_deleted(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "a/2/model.onnx")
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            shutil.rmtree(tmp_path / "a" / "2")
            await look_twice(it.control)
            assert it.rows() == ["a 1 READY", "a 2 UNAVAILABLE unloaded"]

    async def test_models_stay_loaded_while_their_repository_is_missing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root = make(tmp_path / "models", "a/1/model.onnx")
        async with house(root, ControlOptions("poll", poll_interval_s=3600)) as it:
            root.rename(tmp_path / "away")
            await look_twice(it.control)
            await look_twice(it.control)
            assert it.rows() == ["a 1 READY"]
            assert [line for line in caplog.messages if "cannot be read" in line] == [
                f"{root}: cannot be read: No such file or directory; its models stay as they are"
            ]
            (tmp_path / "away").rename(root)
            shutil.rmtree(root / "a")
            await look_twice(it.control)
            assert it.rows() == []

    async def test_an_unreadable_model_folder_keeps_its_model_and_does_not_affect_other_models(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx", "c/1/model.onnx", "lost+found/x")
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            refuse(monkeypatch, tmp_path / "a", tmp_path / "lost+found")
            (tmp_path / "b" / "penstock.toml").write_text("[batching]\nmax_batch_size = 3\n")
            shutil.rmtree(tmp_path / "c")
            await look_twice(it.control)
            assert it.engine.opened[3:] == [("b", 1)]
            assert it.rows() == ["a 1 READY", "b 1 READY"]
            assert it.repository.ready()

    async def test_models_stay_loaded_when_the_process_is_out_of_file_descriptors(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx")
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            refuse(monkeypatch, tmp_path, tmp_path / "a", tmp_path / "b")
            await look_twice(it.control)
            assert it.rows() == ["a 1 READY", "b 1 READY"]

    async def test_a_model_that_could_not_be_read_is_retried_without_a_change(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx")
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            make(tmp_path, "a/2/model.onnx", "b/2/model.onnx")
            with monkeypatch.context() as patch:
                # only listing the versions fails: the configuration alone shows that the folder is a model
                make(tmp_path, a="", b="")
                refuse(patch, tmp_path / "a")
                await look_twice(it.control)
                why = "a: cannot be read: Too many open files"
                assert it.rows() == [f"a 1 READY {why}", "b 1 UNAVAILABLE unloaded", "b 2 READY"]
            await look_twice(it.control)
            assert it.rows() == ["a 1 UNAVAILABLE unloaded", "a 2 READY", "b 1 UNAVAILABLE unloaded", "b 2 READY"]

    async def test_a_model_being_copied_is_loaded_once_two_polls_find_the_same_files(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            begun = len(it.engine.opened)
            for folder in (tmp_path / "a" / "2", tmp_path / "new" / "1"):
                folder.mkdir(parents=True)
            for length in (0, 1, 2, 3):
                for folder in (tmp_path / "a" / "2", tmp_path / "new" / "1"):
                    (folder / "model.onnx").write_bytes(b"x" * length)
                await it.control.poll()
                assert it.engine.opened[begun:] == []
                assert it.repository.ready()
            await it.control.poll()

            assert sorted(it.engine.opened[begun:]) == [("a", 2), ("new", 1)]
            assert it.rows() == ["a 1 UNAVAILABLE unloaded", "a 2 READY", "new 1 READY"]
            assert [record for record in caplog.records if record.levelno > logging.INFO] == []

    async def test_a_model_that_changes_between_poll_and_read_waits_for_the_next_polls(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = make(tmp_path, "a/1/model.onnx") / "a" / "1" / "model.onnx"
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            begun = len(it.engine.opened)
            file.write_bytes(b"half")
            await it.control.poll()
            read = it.repository.read
            with monkeypatch.context() as patch:
                patch.setattr(it.repository, "read", lambda name: (file.write_bytes(b"whole"), read(name))[1])
                await it.control.poll()
            assert it.engine.opened[begun:] == []
            await look_twice(it.control)

            assert it.engine.opened[begun:] == [("a", 1)]

    async def test_a_model_that_changes_at_every_poll_is_logged_and_marked_in_the_index(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path, ControlOptions("poll", poll_interval_s=3600)) as it:
            file = make(tmp_path, "new/1/model.onnx") / "new" / "1" / "model.onnx"
            rows = []
            for length in range(UNSTABLE_POLLS + 2):
                file.write_bytes(b"x" * length)
                await it.control.poll()
                rows.append(it.rows()[1])
            assert rows == ["new"] * (UNSTABLE_POLLS - 1) + [f"new UNAVAILABLE {UNSTABLE}"] * 3
            await it.control.poll()

            assert it.rows() == ["a 1 READY", "new 1 READY"]
        assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == [
            "model new: its files have changed at each of the last 10 polls; it is loaded once two polls agree"
        ]

    async def test_models_of_an_emptied_repository_are_unloaded_at_the_second_poll(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root = make(tmp_path / "models", "a/1/model.onnx", "b/1/model.onnx")
        async with house(root, ControlOptions("poll", poll_interval_s=3600)) as it:
            root.rename(tmp_path / "share")
            root.mkdir()
            await it.control.poll()
            assert it.rows() == ["a 1 READY", "b 1 READY"]
            root.rmdir()
            (tmp_path / "share").rename(root)
            await look_twice(it.control)
            assert it.rows() == ["a 1 READY", "b 1 READY"]
            assert len(it.engine.opened) == 2
            shutil.rmtree(root)
            root.mkdir()
            await it.control.poll()
            assert it.rows() == ["a 1 READY", "b 1 READY"]
            await it.control.poll()
            assert it.rows() == []

        warning = f"{root}: contains no models any more; they are unloaded if the next poll finds none either"
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [warning] * 2


def refuse(patch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Make listing these folders fail."""
    listed = Path.iterdir

    def iterdir(self: Path) -> Iterator[Path]:
        if self in folders:
            raise OSError(errno.EMFILE, "Too many open files", str(self))
        return listed(self)

    patch.setattr(Path, "iterdir", iterdir)
