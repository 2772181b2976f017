"""Trainings over HTTP: started, listed, followed and ended; and predictions at the same time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import Live, live_server
from tests.server.workers.orders import ends_within

from .live_models import HERE, PREDICT, TRAIN, Later, ask, ask_until, ended, pids_of

pytestmark = pytest.mark.slow

TROUBLE = b"500 Internal Server Error\n\nServer got itself in trouble"
MULTIPART = "multipart/form-data; boundary=edge"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """Serve the model."""
    before = Path.cwd()
    os.chdir(HERE)
    try:
        with live_server(Path("m=waits"), dialect="deepaas") as live:
            yield live
    finally:
        os.chdir(before)


@pytest.fixture(autouse=True)
def _nothing_runs_on(live: Live) -> Iterator[None]:
    """Cancel all trainings after a test, since the next one would wait for them."""
    yield
    for record in ask(live.http_port, "GET", TRAIN).json:
        ask(live.http_port, "DELETE", TRAIN + record["uuid"])


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    """Make a pipe through which a call reports its process ids."""
    os.mkfifo(tmp_path / "told")
    return str(tmp_path / "told")


def test_a_training_is_started_listed_finished_and_deleted(live: Live) -> None:
    begun = ask(live.http_port, "POST", TRAIN, how="give")
    uuid = begun.json["uuid"]
    record = ended(live.http_port, uuid)

    assert begun.status == 200
    assert record["result"]["output"] == {"acc": 0.9}
    assert record in ask(live.http_port, "GET", TRAIN).json
    assert ask(live.http_port, "DELETE", TRAIN + uuid).json == record
    assert ask(live.http_port, "GET", TRAIN + uuid).status == 404


def test_invalid_arguments_of_a_training_are_rejected_at_once(live: Live) -> None:
    refused = ask(live.http_port, "POST", TRAIN, must="x")

    assert (refused.status, refused.json) == (422, {"must": ["Not a valid integer."]})


def test_predictions_are_answered_while_one_training_runs_and_another_waits(live: Live, pipe: str) -> None:
    runs = ask(live.http_port, "POST", TRAIN, told=pipe).json["uuid"]
    pids_of(pipe)
    waits = ask(live.http_port, "POST", TRAIN, how="give").json["uuid"]

    assert ask(live.http_port, "POST", PREDICT, how="give").json["predictions"] == {"acc": 0.9}
    assert ask(live.http_port, "GET", f"{TRAIN}{waits}/progress").json["phase"] == "waiting"
    assert ask(live.http_port, "POST", TRAIN, must="x").status == 422

    assert ask(live.http_port, "DELETE", TRAIN + runs).json["status"] == "cancelled"
    assert ended(live.http_port, waits)["status"] == "done"


def test_the_progress_log_and_page_of_a_running_training_are_served(live: Live, pipe: str) -> None:
    uuid = ask(live.http_port, "POST", TRAIN, told=pipe).json["uuid"]
    pids_of(pipe)

    log = ask_until(lambda answer: b"Epoch" in answer.body, live.http_port, f"{TRAIN}{uuid}/log")
    pipe_path = ask(live.http_port, "GET", f"{TRAIN}{uuid}/progress").json
    page = ask(live.http_port, "GET", f"{TRAIN}{uuid}/page")

    assert (pipe_path["status"], pipe_path["phase"], pipe_path["epochs"]) == ("running", "training", 2)
    assert (log.kind, log.body.splitlines()[0]) == ("text/plain; charset=utf-8", b"Epoch 1/2")
    assert (page.status, page.kind) == (200, "text/html; charset=utf-8")
    assert ask(live.http_port, "DELETE", TRAIN + uuid).status == 200
    assert ask(live.http_port, "GET", f"{TRAIN}{uuid}/page").status == 404


def test_a_training_reads_its_uploaded_file(live: Live) -> None:
    body = b"--edge\r\ncontent-disposition: form-data; name=data; filename=f.txt\r\n\r\n\xc3\xa9\r\n--edge--\r\n"
    begun = ask(live.http_port, "POST", TRAIN, body, MULTIPART)

    assert begun.json["args"]["data"] == ["data", "application/octet-stream", "f.txt"]
    assert ended(live.http_port, begun.json["uuid"])["result"]["output"]["content"] == "\u00e9"


def test_a_training_whose_process_is_killed_fails_and_the_next_one_runs(live: Live, pipe: str) -> None:
    uuid = ask(live.http_port, "POST", TRAIN, told=pipe).json["uuid"]
    (pid,) = pids_of(pipe)
    os.kill(pid, signal.SIGKILL)

    record = ended(live.http_port, uuid)

    assert record["status"] == "error"
    assert "signal 9 (SIGKILL)" in record["message"]
    assert ended(live.http_port, ask(live.http_port, "POST", TRAIN, how="give").json["uuid"])["status"] == "done"


def test_deleting_a_training_leaves_no_process(live: Live, pipe: str) -> None:
    uuid = ask(live.http_port, "POST", TRAIN, told=pipe, how="child").json["uuid"]
    pids = pids_of(pipe)

    assert ask(live.http_port, "DELETE", TRAIN + uuid).json["status"] == "cancelled"
    assert all(ends_within(pid, 10.0) for pid in pids)


def test_a_prediction_whose_process_is_killed_fails_alone_with_the_originals_500(live: Live, pipe: str) -> None:
    running = Later(live.http_port, "POST", PREDICT, told=pipe)
    (pid,) = pids_of(pipe)
    waiting = Later(live.http_port, "POST", PREDICT, how="give")
    os.kill(pid, signal.SIGKILL)
    running.join(30)
    waiting.join(30)

    assert (running.answer.status, running.answer.body) == (500, TROUBLE)
    assert running.answer.kind == "text/plain; charset=utf-8"
    assert waiting.answer.json["predictions"] == {"acc": 0.9}


def test_a_prediction_that_exits_its_process_is_answered_with_the_originals_500(live: Live) -> None:
    ended_itself = ask(live.http_port, "POST", PREDICT, how="exit")

    assert (ended_itself.status, ended_itself.body) == (500, TROUBLE)
    assert ask(live.http_port, "POST", PREDICT, how="give").json["predictions"] == {"acc": 0.9}


def test_a_killed_desk_fails_no_prediction_and_is_restarted(live: Live) -> None:
    desk = int(ask(live.http_port, "GET", "/v2/models/m/").json["summary"])
    os.kill(desk, signal.SIGKILL)

    assert ask(live.http_port, "POST", PREDICT, how="give").status == 200
    assert ends_within(desk, 10.0)
    answer = ask_until(lambda answer: answer.status == 200, live.http_port, "/v2/models/m/")
    assert int(answer.json["summary"]) != desk
