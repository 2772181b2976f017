"""ModelControl over local and remote repositories."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.repository.control import ModelControl
from penstock.server.repository.control_options import ControlOptions
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.mirrors import MirroredRepository, Mirrors, make_defaults
from penstock.server.repository.repository import Repository
from penstock.server.settings import Settings
from tests.server.repository.folders import FakeEngine, look_twice, make
from tests.server.repository.stores import URL, Store, put, registered

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def store() -> Iterator[type[Store]]:
    with registered() as new_store:
        put({"a/1/model.onnx": "a"})
        yield new_store


@asynccontextmanager
async def house(*paths: object, mode: str = "none", names: tuple[str, ...] = ()) -> AsyncIterator[ModelControl]:
    """A ModelControl over paths and URLs."""
    mirrors = Mirrors.from_paths(map(str, paths))
    mirrors.open()
    repository = mirrors.repository(Defaults())
    # 3600: the tests poll themselves
    control = ModelControl(repository, FakeEngine(), ControlOptions(mode, names, poll_interval_s=3600))
    try:
        await control.start()
        yield control
    finally:
        await control.stop()
        mirrors.close()


async def rows(control: ModelControl) -> list[str]:
    return [
        " ".join(filter(None, (row["name"], row.get("version"), row.get("state"), row.get("reason"))))
        for row in await control.index()
    ]


class TestStart:
    async def test_local_and_remote_repositories_are_served_together(self, tmp_path: Path, store: type[Store]) -> None:
        make(tmp_path, "b/1/model.onnx")
        async with house(tmp_path, URL, URL) as control:
            assert await rows(control) == ["a 1 READY", "b 1 READY"]

    async def test_a_model_in_both_repositories_is_unavailable(self, tmp_path: Path, store: type[Store]) -> None:
        make(tmp_path, "a/1/model.onnx")
        async with house(tmp_path, URL) as control:
            assert await rows(control) == ["a UNAVAILABLE model appears in two or more repositories"]

    async def test_a_model_that_cannot_be_copied_is_unavailable_with_a_reason(self, store: type[Store]) -> None:
        put({"b/1/model.onnx": "b"})
        store.fails["/bucket/models/a/1/model.onnx"] = PermissionError("denied to me")
        async with house(URL) as control:
            reason = f"a: could not be copied: {URL}/a: permission denied: denied to me"
            assert await rows(control) == [f"a UNAVAILABLE {reason}", "b 1 READY"]

    async def test_a_store_that_fails_after_it_was_opened_is_among_the_reasons_of_startup(
        self, store: type[Store]
    ) -> None:
        mirrors = Mirrors.from_paths([URL])
        mirrors.open()
        store.fails["/bucket/models"] = ConnectionError("down")
        control = ModelControl(mirrors.repository(Defaults()), FakeEngine())
        try:
            reasons = await control.start()
        finally:
            await control.stop()
            mirrors.close()
        text = f"{mirrors.paths[0]}: could not be synchronized: {URL}: ConnectionError: down"
        assert reasons == [text]
        assert mirrors.with_urls(text) == f"{URL}: could not be synchronized: {URL}: ConnectionError: down"


class TestPolling:
    async def test_models_changed_in_the_store_are_loaded_and_unloaded(self, store: type[Store]) -> None:
        async with house(URL, mode="poll") as control:
            put({"b/1/model.onnx": "b", "a/2/model.onnx": "a"})
            await look_twice(control)
            assert await rows(control) == ["a 1 UNAVAILABLE unloaded", "a 2 READY", "b 1 READY"]

            Store().rm(f"{URL}/a", recursive=True)
            await look_twice(control)
            assert await rows(control) == ["b 1 READY"]

    async def test_nothing_is_fetched_while_the_store_is_unchanged(self, store: type[Store]) -> None:
        async with house(URL, mode="poll") as control:
            store.fetched.clear()
            await look_twice(control)
            assert store.fetched == []

    async def test_models_stay_loaded_while_their_store_is_down(
        self, tmp_path: Path, store: type[Store], caplog: pytest.LogCaptureFixture
    ) -> None:
        async with house(tmp_path, URL, mode="poll") as control:
            store.fails["/bucket/models"] = ConnectionError("down")
            make(tmp_path, "b/1/model.onnx")
            await look_twice(control)
            await look_twice(control)
            assert await rows(control) == ["a 1 READY", "b 1 READY"]
            assert sum("ConnectionError: down" in record.getMessage() for record in caplog.records) == 1

    async def test_a_model_that_could_not_be_copied_keeps_serving_and_is_retried(self, store: type[Store]) -> None:
        async with house(URL, mode="poll") as control:
            put({"a/2/model.onnx": "a", "b/1/model.onnx": "b"})
            store.fails.update(dict.fromkeys(("/bucket/models/a/2", "/bucket/models/b/1"), OSError("slow down")))
            await look_twice(control)
            await look_twice(control)
            text = f"b: could not be copied: {URL}/b: OSError: slow down"
            assert await rows(control) == ["a 1 READY", f"b UNAVAILABLE {text}"]

            store.fails.clear()
            await look_twice(control)
            assert await rows(control) == ["a 1 UNAVAILABLE unloaded", "a 2 READY", "b 1 READY"]


class TestExplicit:
    async def test_the_index_lists_the_models_of_the_store_without_copying(self, store: type[Store]) -> None:
        async with house(URL, mode="explicit") as control:
            put({"b/1/model.onnx": "b"})
            assert await rows(control) == ["a", "b"]
            assert store.fetched == []

    async def test_a_load_copies_the_model_again(self, store: type[Store]) -> None:
        async with house(URL, mode="explicit", names=("a",)) as control:
            put({"a/2/model.onnx": "a", "b/1/model.onnx": "b"})
            assert await rows(control) == ["a 1 READY", "b"]
            await control.load("a")
            assert await rows(control) == ["a 1 UNAVAILABLE unloaded", "a 2 READY", "b"]
            assert not any("/b/" in place for place in store.fetched)

    async def test_a_load_that_cannot_be_copied_fails_and_keeps_the_served_version(self, store: type[Store]) -> None:
        async with house(URL, mode="explicit", names=("a",)) as control:
            put({"a/2/model.onnx": "a"})
            store.fails["/bucket/models/a/2/model.onnx"] = OSError("reset")
            with pytest.raises(InferError) as caught:
                await control.load("a")
            why = f"a: could not be copied: {URL}/a: OSError: reset"
            text = f"failed to load 'a', failed to poll from model repository: {why}"
            assert (caught.value.code, caught.value.message) == (Code.INTERNAL, text)
            assert (await rows(control))[0] == f"a 1 READY {why}"

    async def test_loading_a_model_deleted_from_the_store_fails(self, store: type[Store]) -> None:
        async with house(URL, mode="explicit", names=("a",)) as control:
            Store().rm(f"{URL}/a", recursive=True)
            put({"b/1/model.onnx": "b"})
            with pytest.raises(InferError, match="failed to load 'a', failed to poll from model repository"):
                await control.load("a")
            assert await rows(control) == ["a 1 READY", "b"]

    async def test_a_local_model_loads_while_a_store_is_down(self, tmp_path: Path, store: type[Store]) -> None:
        make(tmp_path, "b/1/model.onnx")
        async with house(tmp_path, URL, mode="explicit", names=("a",)) as control:
            store.fails["/bucket/models"] = store.fails["/bucket/models/b"] = OSError("down")
            await control.load("b")
            assert await rows(control) == ["a 1 READY", "b 1 READY"]


def test_without_a_url_the_repository_is_not_mirrored(tmp_path: Path) -> None:
    mirrors = Mirrors.from_paths([str(tmp_path)])

    assert type(mirrors.repository(Defaults())) is Repository
    assert mirrors.paths == [tmp_path]


def test_a_url_makes_a_mirrored_repository(store: type[Store]) -> None:
    mirrors = Mirrors.from_paths([URL])

    assert isinstance(mirrors.repository(Defaults()), MirroredRepository)
    mirrors.close()


def test_the_settings_become_the_defaults_of_models() -> None:
    settings = Settings(
        default_max_batch_size=7, model_config_name="c", disable_auto_complete_config=True,
        backend_config=(
            "default-max-batch-size=9", "onnxruntime,default-max-batch-size=3", "tensorflow,gpu-memory-fraction=0.25",
        ),
    )  # fmt: skip

    assert make_defaults(settings) == Defaults(
        max_batch_rows=3, tensorflow_rows=9, tensorflow_options={"gpu_memory_fraction": "0.25"}, config_name="c",
        auto_complete=False,
    )  # fmt: skip
    assert make_defaults(Settings(default_max_batch_size=7)).max_batch_rows == 7
    assert make_defaults(Settings(backend_config=("tensorflow,default-max-batch-size=0",))).for_tensorflow == (0, {})
