"""What remains of trainings when their server ends: a record with the reason, and no process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from penstock.server.deepaas.trainings import SERVER_ENDED
from tests.server.workers.orders import ends_within

from .live_models import PREDICT, TRAIN, ask, ended, pids_of, served

pytestmark = pytest.mark.slow


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    """Make a pipe through which a call reports its process ids."""
    os.mkfifo(tmp_path / "told")
    return str(tmp_path / "told")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["asked", "killed"])
def test_a_server_that_ends_leaves_a_record_of_each_training_and_no_process(
    tmp_path: Path, pipe: str, number: int
) -> None:
    jobs = ("--deepaas-jobs", str(tmp_path / "jobs"))
    with served(tmp_path / "log", *jobs) as server:
        done = ask(server.port, "POST", TRAIN, how="give").json["uuid"]
        expected = ended(server.port, done)
        runs = ask(server.port, "POST", TRAIN, told=pipe).json["uuid"]
        (pid,) = pids_of(pipe)
        waits = ask(server.port, "POST", TRAIN, how="give").json["uuid"]
        status = server.end(number)

    assert status == (0 if number == signal.SIGTERM else -number)
    assert ends_within(pid, 10.0)
    with served(tmp_path / "later", *jobs) as server:
        records = ask(server.port, "GET", TRAIN).json
        log = ask(server.port, "GET", f"{TRAIN}{done}/log").body
        assert server.end() == 0

    assert records[0] == expected
    assert [record["uuid"] for record in records] == [done, runs, waits]
    assert [(record["status"], record["message"]) for record in records[1:]] == [("error", SERVER_ENDED)] * 2
    assert b"Epoch 1/2\n" in log


def test_a_stopping_server_ends_the_child_processes_of_a_training(tmp_path: Path, pipe: str) -> None:
    with served(tmp_path / "log", "--deepaas-jobs", "none") as server:
        ask(server.port, "POST", TRAIN, told=pipe, how="child")
        pids = pids_of(pipe)

        assert server.end() == 0
        assert all(ends_within(pid, 10.0) for pid in pids)


def test_two_servers_never_share_a_job_file(tmp_path: Path) -> None:
    jobs = ("--deepaas-jobs", str(tmp_path / "jobs"))
    with served(tmp_path / "log", *jobs) as first, served(tmp_path / "other", *jobs) as second:
        uuid = ended(first.port, ask(first.port, "POST", TRAIN, how="give").json["uuid"])["uuid"]
        assert ended(second.port, ask(second.port, "POST", TRAIN, how="give").json["uuid"])["status"] == "done"

        assert [record["uuid"] for record in ask(first.port, "GET", TRAIN).json] == [uuid]
        assert len(ask(second.port, "GET", TRAIN).json) == 1
        assert "another server uses it" in (tmp_path / "other").read_text()


def test_trainings_run_even_if_their_records_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with served(tmp_path / "log", "--deepaas-jobs", str(tmp_path / "file" / "jobs")) as server:
        record = ended(server.port, ask(server.port, "POST", TRAIN, how="give").json["uuid"])

        assert record["status"] == "done"
        assert ask(server.port, "POST", PREDICT, how="give").status == 200
        assert "trainings are kept in memory only" in (tmp_path / "log").read_text()
