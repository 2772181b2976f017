"""The counts of started and ended workers on the metrics page."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from penstock.server.fronts.pending_statistics import PendingStatistics, add_statistics
from penstock.server.telemetry.hardware import Hardware
from penstock.server.telemetry.metrics import Metrics
from penstock.server.workers.order import ENDED, STARTED, WorkerLost
from penstock.server.workers.worker import Worker
from tests.fakes import fake_model
from tests.server.workers.orders import CALL, ended, order, scene


@pytest.mark.slow
def test_starts_and_unexpected_ends_of_workers_are_counted() -> None:
    async def work() -> Counter[str]:
        counts: Counter[str] = Counter()
        counted = order(on_event=lambda event: counts.update([event]))
        await ended(Worker(counted))
        worker = Worker(counted)
        with pytest.raises(WorkerLost):
            await worker.call(CALL, b"exit 1")
        await worker.ended
        return counts

    assert scene(work()) == {STARTED: 2, "workers_ended_exit": 1}


def test_the_metrics_page_has_worker_counts_only_for_models_with_workers() -> None:
    model = fake_model("iris", 3)
    model.count_event(STARTED, 3)
    model.count_event(ENDED + "memory", 2)

    class Models:
        def models(self) -> list[object]:
            return [model, fake_model("plain")]

    page = asyncio.run(Metrics(Models(), Hardware()).render()).decode()  # type: ignore[arg-type]

    assert 'penstock_workers_started_total{model="iris",version="3"} 3\n' in page
    assert 'penstock_workers_ended_total{model="iris",version="3",reason="memory"} 2\n' in page
    assert 'penstock_workers_ended_total{model="iris",version="3",reason="time"} 0\n' in page
    assert 'penstock_workers_started_total{model="plain"' not in page


def test_worker_counts_of_front_ends_are_added_in_the_engine() -> None:
    model = fake_model("iris")
    there = PendingStatistics(lambda: None)

    add_statistics(model, there.flush({STARTED: 2, ENDED + "exit": 1}), None)
    add_statistics(model, there.flush({STARTED: 1}), None)

    assert model.event_counts == {STARTED: 3, ENDED + "exit": 1}


def test_a_model_is_not_ready_while_any_front_end_reports_failing_hooks() -> None:
    model = fake_model("iris")
    fronts = PendingStatistics(lambda: None), PendingStatistics(lambda: None)
    ready = [model.ready]

    for hindered in (True, False):
        for front in fronts:
            front.record_hindered(hindered=hindered)
            add_statistics(model, front.flush({}), front)
            ready.append(model.ready)

    assert ready == [True, False, False, False, True]
    assert model.healthy
