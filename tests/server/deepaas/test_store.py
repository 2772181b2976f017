"""Records of trainings outlive their server, and errors in saving them harm no training."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.server.deepaas import store as module
from penstock.server.deepaas.records import TrainingRecord, TrainingStatus
from penstock.server.deepaas.store import Store, file_of
from tests.live import settings_for

from .fake_trainers import done

RECORD = TrainingRecord("a" * 32, "m", TrainingStatus.DONE, '{"date": "x"}', 1.5, "a line\n")


async def save_and_read(file: Path | None, *records: TrainingRecord, without: str = "") -> list[TrainingRecord]:
    """Save records, and read them with a later Store."""
    store = Store(file)
    await store.open()
    for record in records:
        store.put(record)
    if without:
        store.drop(without)
    await store.close()
    later = Store(file)
    try:
        return await later.open()
    finally:
        await later.close()


def test_saved_records_are_read_later_in_their_order_of_creation(tmp_path: Path) -> None:
    records = [TrainingRecord(uuid * 32, "m", TrainingStatus.DONE, "{}", 1.0, "") for uuid in "cab"]

    found = done(save_and_read(tmp_path / "made" / "jobs.sqlite", *records))

    assert found == records


def test_a_record_saved_again_replaces_the_first_and_keeps_its_place(tmp_path: Path) -> None:
    first = TrainingRecord("a" * 32, "m", TrainingStatus.RUNNING, "{}")
    other = TrainingRecord("b" * 32, "m", TrainingStatus.RUNNING, "{}")
    last = TrainingRecord("a" * 32, "m", TrainingStatus.ERROR, '{"message": "x"}', 2.0)

    assert done(save_and_read(tmp_path / "jobs", first, other, last)) == [last, other]


def test_a_dropped_record_is_removed_from_the_file(tmp_path: Path) -> None:
    assert done(save_and_read(tmp_path / "jobs", RECORD, without=RECORD.uuid)) == []


def test_logs_are_read_only_on_request(tmp_path: Path) -> None:
    async def work() -> list[str]:
        await save_and_read(tmp_path / "jobs", RECORD)
        store = Store(tmp_path / "jobs")
        (found,) = await store.open()
        logs = [found.log, await store.log(found.uuid), await store.log("b" * 32)]
        await store.close()
        return logs

    assert done(work()) == ["", "a line\n", ""]


def test_without_a_file_records_are_kept_in_memory() -> None:
    async def work() -> list[str]:
        store = Store(None)
        await store.open()
        store.put(RECORD)
        await store.flush()
        there = await store.log(RECORD.uuid)
        store.drop(RECORD.uuid)
        after = await store.log(RECORD.uuid)
        await store.close()
        return [there, after]

    assert done(work()) == ["a line\n", ""]


def test_a_file_is_used_by_one_server_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> list[TrainingRecord]:
        first, second = Store(tmp_path / "jobs"), Store(tmp_path / "jobs")
        await first.open()
        await second.open()
        first.put(RECORD)
        second.put(TrainingRecord("b" * 32, "m", TrainingStatus.DONE, "{}"))
        assert await second.log(RECORD.uuid) == ""
        await second.close()
        await first.close()
        return await save_and_read(tmp_path / "jobs")

    assert done(work()) == [TrainingRecord(RECORD.uuid, "m", TrainingStatus.DONE, RECORD.document, 1.5)]
    assert "another server uses it" in caplog.text


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + bytes(200)], ids=["text", "broken"])
def test_a_file_that_is_not_a_database_is_left_unchanged(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "jobs").write_bytes(content)

    assert done(save_and_read(tmp_path / "jobs", RECORD)) == []
    assert (tmp_path / "jobs").read_bytes() == content
    assert "kept in memory only" in caplog.text


def test_a_file_of_a_later_version_is_left_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = sqlite3.connect(tmp_path / "jobs")
    base.execute("PRAGMA user_version = 99")
    base.close()

    assert done(save_and_read(tmp_path / "jobs", RECORD)) == []
    assert "later version" in caplog.text


def test_a_location_that_cannot_be_written_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")

    assert done(save_and_read(tmp_path / "file" / "jobs", RECORD)) == []
    assert "kept in memory only" in caplog.text


def test_a_disk_that_hangs_on_close_locks_the_file_no_longer_than_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    async def work() -> Path | None:
        store = Store(tmp_path / "jobs")
        await store.open()
        store.put(RECORD)
        await store.close()
        goes_on.set()
        store._thread.shutdown()
        later = Store(tmp_path / "jobs")
        await later.open()
        await later.close()
        return later.file

    monkeypatch.setattr(Store, "_write", lambda store, batch: goes_on.wait(30))
    monkeypatch.setattr(module, "CLOSE_LIMIT_S", 0.0)

    assert done(work()) == tmp_path / "jobs"


def test_a_full_disk_causes_one_warning_and_loses_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> list[str]:
        store = Store(tmp_path / "jobs")
        await store.open()
        full, roomy = "PRAGMA max_page_count = 1", "PRAGMA max_page_count = 100000"
        await store._on_thread(store._database.execute, full)  # type: ignore[union-attr]
        large = TrainingRecord("b" * 32, "m", TrainingStatus.DONE, "{}", 1.0, "x" * 100_000)
        for _ in range(2):
            store.put(large)
            await store.flush()
        meanwhile = await store.log(large.uuid)
        await store._on_thread(store._database.execute, roomy)  # type: ignore[union-attr]
        store.put(RECORD)
        await store.close()
        return [meanwhile, *(record.uuid for record in await save_and_read(tmp_path / "jobs"))]

    with caplog.at_level(logging.WARNING):
        assert done(work()) == ["x" * 100_000, "b" * 32, RECORD.uuid]
    assert caplog.text.count("cannot be saved") == 1


@pytest.mark.parametrize("retry_s", [0.0, 1000.0], ids=["soon", "at-the-end"])
def test_records_that_a_full_disk_rejected_are_written_when_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry_s: float
) -> None:
    async def work() -> list[str]:
        store = Store(tmp_path / "jobs")
        await store.open()
        store.put(RECORD)
        await store.flush()
        await store._on_thread(store._database.execute, "PRAGMA max_page_count = 1")  # type: ignore[union-attr]
        store.put(TrainingRecord("b" * 32, "m", TrainingStatus.DONE, "{}", 1.0, "x" * 100_000))
        await store.flush()
        store.drop(RECORD.uuid)
        await store.flush()
        await store._on_thread(store._database.execute, "PRAGMA max_page_count = 100000")  # type: ignore[union-attr]
        while not retry_s and store._pending:  # noqa: ASYNC110 - saving has no event
            await asyncio.sleep(0)
        await store.close()
        return [record.uuid for record in await save_and_read(tmp_path / "jobs")]

    monkeypatch.setattr(module, "RETRY_S", retry_s)
    assert done(work()) == ["b" * 32]


def test_records_are_readable_only_by_their_user(tmp_path: Path) -> None:
    done(save_and_read(tmp_path / "made" / "jobs", RECORD))

    assert (tmp_path / "made" / "jobs").stat().st_mode & 0o077 == 0
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0


def test_each_server_has_a_file_for_its_address_and_port() -> None:
    there = {"XDG_STATE_HOME": "/state"}
    place = Path("/state/penstock/deepaas")

    assert file_of(settings_for(http_port=5000, http_address="::1"), there) == place / "__1-5000.sqlite"
    assert file_of(settings_for(http_port=5001, http_address="0.0.0.0"), there) == place / "0.0.0.0-5001.sqlite"
    assert file_of(settings_for(http_port=0), there) is None
    assert file_of(settings_for(http_port=5000, deepaas_jobs="none"), there) is None
    assert file_of(settings_for(http_port=0, deepaas_jobs="/a/b"), there) == Path("/a/b")
    assert file_of(settings_for(http_port=5000), {"XDG_STATE_HOME": "relative"}) is not None


def test_a_record_saved_while_an_older_one_is_being_written_is_written_afterwards(tmp_path: Path) -> None:
    later = replace(RECORD, document='{"date": "y"}', log="")

    async def work() -> list[TrainingRecord]:
        store = Store(tmp_path / "jobs")
        await store.open()
        store.put(RECORD)
        await asyncio.sleep(0)  # it is being written
        store.put(later)
        await store.close()
        return await save_and_read(tmp_path / "jobs")

    assert done(work()) == [later]


def test_a_record_that_cannot_be_written_leaves_no_open_transaction(tmp_path: Path) -> None:
    wrong = replace(RECORD, uuid="b" * 32, model=None)  # type: ignore[arg-type]  # which its table refuses

    async def work() -> list[TrainingRecord]:
        store = Store(tmp_path / "jobs")
        await store.open()
        store.put(wrong)
        await store.flush()
        store.drop(wrong.uuid)
        store.put(RECORD)
        await store.close()
        return await save_and_read(tmp_path / "jobs")

    assert done(work()) == [replace(RECORD, log="")]
