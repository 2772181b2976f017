"""The answers that clients receive about trainings."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.carrying.messages import pack_answer, read_answer
from penstock.server.deepaas.jobs import Jobs
from penstock.server.deepaas.messages import CHECK
from penstock.server.deepaas.trainings import SERVER_ENDED

from .fake_trainers import Bench, done, shown, turns

REQUEST = b'{"method": "POST", "query": "", "headers": []}\n'


class FakeDesk:
    """A Desk that accepts arguments, unless the test sets another answer."""

    def __init__(self) -> None:
        self.answer = pack_answer(200, b"application/json; charset=utf-8", b'{"sleep": 0.0, "data": null}')
        self.calls: list[tuple[int, bytes]] = []

    async def call(self, kind: int, body: bytes = b"") -> bytes:
        """Answer."""
        self.calls.append((kind, body))
        return self.answer


class Office:
    """Jobs of one model, `m`."""

    def __init__(self, at_once: int = 1) -> None:
        self.bench, self.desk = Bench(at_once), FakeDesk()
        self.jobs = Jobs(self._desk_of, self.bench.runs)

    def _desk_of(self, name: str) -> FakeDesk:
        if name != "m":
            raise InferError(Code.NOT_READY, "not there")
        return self.desk

    async def start(self) -> Any:
        """Start a training."""
        answer = await self.jobs.start("m", REQUEST)
        await turns()
        return shown(answer)


def test_a_started_training_is_reported_as_running() -> None:
    async def work() -> Any:
        office = Office()
        begun = await office.start()
        assert office.desk.calls == [(CHECK, REQUEST)]
        assert office.bench.trainers[0].request == REQUEST
        await office.bench.runs.close()
        return begun

    begun = done(work())

    uuid = begun["uuid"]
    assert len(uuid) == 32
    assert list(begun.items()) == [
        ("date", "2026-11-23 12:00:00.000250"),
        ("args", {"sleep": 0.0, "data": None}),
        ("uuid", uuid),
        ("status", "running"),
    ]


def test_a_successful_training_has_its_result() -> None:
    async def work() -> None:
        office = Office()
        begun = await office.start()
        office.bench.clock.pass_s(3.020907)
        office.bench.trainers[0].give({"acc": 0.9, "loss": float("nan")})
        await turns()

        answer = await office.jobs.get("m", begun["uuid"])

        assert answer.endswith(
            b'"status": "done", "result": {"output": {"acc": 0.9, "loss": NaN}, '
            b'"finish_date": "2026-11-23 12:00:03.021157", "duration": "0:00:03.020907"}}'
        )
        await office.bench.runs.close()

    done(work())


def test_a_failed_training_has_its_error_message() -> None:
    async def work() -> None:
        office = Office()
        begun = await office.start()
        office.bench.trainers[0].raise_("train boom")
        await turns()

        ended = shown(await office.jobs.get("m", begun["uuid"]))

        assert ended == {**begun, "status": "error", "message": "train boom"}
        await office.bench.runs.close()

    done(work())


def test_a_training_whose_process_died_has_an_error_message() -> None:
    async def work() -> None:
        office = Office()
        begun = await office.start()
        office.bench.trainers[0].fail("it ended: signal 9 (SIGKILL)")
        await turns()

        ended = shown(await office.jobs.get("m", begun["uuid"]))

        assert (ended["status"], ended["message"]) == ("error", "it ended: signal 9 (SIGKILL)")
        await office.bench.runs.close()

    done(work())


def test_a_clock_set_back_makes_no_negative_duration() -> None:
    async def work() -> None:
        office = Office()
        begun = await office.start()
        office.bench.clock.pass_s(-60)
        office.bench.trainers[0].give(None)
        await turns()

        assert shown(await office.jobs.get("m", begun["uuid"]))["result"]["duration"] == "0:00:00"
        await office.bench.runs.close()

    done(work())


def test_waiting_trainings_are_reported_as_running_and_listed_in_order() -> None:
    async def work() -> None:
        office = Office()
        begun = [await office.start() for _ in range(3)]

        assert shown(await office.jobs.list("m")) == begun
        assert shown(await office.jobs.list("other")) == []
        assert [run.phase for run in office.bench.runs.trainings_of("m")] == ["training", "waiting", "waiting"]
        await office.bench.runs.close()

    done(work())


@pytest.mark.parametrize("waits", [False, True], ids=["running", "waiting"])
def test_a_deleted_training_is_canceled_and_no_longer_found(waits: bool) -> None:
    async def work() -> None:
        office = Office()
        begun = [await office.start(), await office.start()][waits]

        assert shown(await office.jobs.delete("m", begun["uuid"])) == {**begun, "status": "cancelled"}
        assert read_answer(await office.jobs.get("m", begun["uuid"]))[0] == 404
        assert len(shown(await office.jobs.list("m"))) == 1
        assert read_answer(await office.jobs.delete("m", begun["uuid"]))[0] == 404
        await office.bench.runs.close()

    done(work())


@pytest.mark.parametrize("how", ["give", "raise_"])
def test_deleting_an_ended_training_removes_its_record(how: str) -> None:
    async def work() -> None:
        office = Office()
        begun = await office.start()
        getattr(office.bench.trainers[0], how)("words")
        await turns()
        ended = shown(await office.jobs.get("m", begun["uuid"]))

        assert shown(await office.jobs.delete("m", begun["uuid"])) == ended
        assert shown(await office.jobs.list("m")) == []
        await office.bench.runs.close()

    done(work())


def test_the_next_training_begins_when_one_is_canceled() -> None:
    async def work() -> None:
        office = Office()
        first, second = await office.start(), await office.start()
        await office.jobs.delete("m", first["uuid"])
        await turns()

        assert [trainer.uuid for trainer in office.bench.trainers] == [first["uuid"], second["uuid"]]
        await office.bench.runs.close()

    done(work())


def test_an_unknown_training_is_answered_with_404() -> None:
    async def work() -> list[bytes]:
        jobs = Office().jobs
        return [await ask("m", "0" * 32) for ask in (jobs.get, jobs.delete, jobs.log, jobs.progress, jobs.page)]

    assert {read_answer(answer) for answer in done(work())} == {
        (404, b"text/plain; charset=utf-8", b"", b"404: Not Found")
    }


def test_invalid_arguments_are_answered_by_the_desk_and_start_no_training() -> None:
    async def work() -> None:
        office = Office()
        office.desk.answer = pack_answer(422, b"application/json", b'{"sleep": ["no"]}')

        assert await office.jobs.start("m", REQUEST) == office.desk.answer
        assert shown(await office.jobs.list("m")) == []
        await office.bench.runs.close()

    done(work())


def test_a_stopping_server_starts_no_training() -> None:
    async def work() -> None:
        office = Office()
        await office.bench.runs.close()
        with pytest.raises(InferError, match="the server is stopping"):
            await office.jobs.start("m", REQUEST)

    done(work())


def test_progress_and_log_follow_the_output_of_the_training() -> None:
    async def work() -> None:
        office = Office()
        uuid, waits = (await office.start())["uuid"], (await office.start())["uuid"]
        office.bench.clock.pass_s(2.5)
        for line in ("Epoch 1/4", "50/100 [=====>    ] - loss: <b>"):
            office.bench.trainers[0].line(line)

        progress = shown(await office.jobs.progress("m", uuid))
        assert progress == {
            "uuid": uuid, "model": "m", "status": "running", "phase": "training", "elapsed": 2.5, "progress": 0.125,
            "epoch": 1, "epochs": 4, "epoch_progress": 0.5, "last_line": "50/100 [=====>    ] - loss: <b>",
        }  # fmt: skip
        assert shown(await office.jobs.progress("m", waits))["phase"] == "waiting"
        _, kind, lines, body = read_answer(await office.jobs.log("m", uuid))
        assert body == b"Epoch 1/4\n50/100 [=====>    ] - loss: <b>\n"
        assert kind == b"text/plain; charset=utf-8"
        assert b"nosniff" in lines

        await office.bench.runs.close()
        progress = shown(await office.jobs.progress("m", uuid))
        assert (progress["status"], progress["phase"], progress["progress"], progress["epoch"]) == (
            "error",
            "ended",
            0.125,
            1,
        )
        assert shown(await office.jobs.get("m", uuid))["message"] == SERVER_ENDED

    done(work())


def test_the_page_of_a_training_loads_nothing_external_and_inserts_no_html() -> None:
    async def work() -> tuple[int, bytes, bytes, bytes]:
        office = Office()
        uuid = (await office.start())["uuid"]
        answer = read_answer(await office.jobs.page("m", uuid))
        await office.bench.runs.close()
        return answer

    status, kind, lines, page = done(work())

    assert (status, kind) == (200, b"text/html; charset=utf-8")
    assert b"default-src 'none'" in lines
    assert lines.endswith(b"\r\n")
    assert not lines.endswith(b"\r\n\r\n")
    assert b"innerHTML" not in page
    assert b"//" not in page.replace(b"<!DOCTYPE html>", b"")
