"""Which requests of sequences share a batch, counted exactly, and their fate when their model is unloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http

from tests.clients.parallel_requests import Asking, answers
from tests.clients.sequence_models import CONTROLS, STATE, config, write_accumulator
from tests.live import live_server

pytestmark = pytest.mark.slow

AN_HOUR_US = 3_600_000_000
DELAY = f"max_queue_delay_microseconds: {AN_HOUR_US}"
IDLE = f"max_sequence_idle_microseconds: {AN_HOUR_US}"
LOADED: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("m",)}


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:
    return request.param


class Sequenced(Asking):
    """Clients of the model `m`, which adds up what each sequence sends."""

    def one(self, identity: int, value: float, flags: str = "") -> Any:
        """Send a request of a sequence; `flags`: "s" for its first, "e" for its last."""
        options = {"sequence_id": identity, "sequence_start": "s" in flags, "sequence_end": "e" in flags}
        return self.ask(1, value, 1, **options)

    def line(self, *identities: int, flags: str = "") -> list[Any]:
        """Send a request of each sequence once the previous one is queued; its value is its sequence."""
        sent = []
        for identity in identities:
            before = self.waiting()
            sent.append(self.one(identity, identity, flags))
            self.until_waiting(before + 1)
        return sent

    def _check(self, sent: Any, found: Any) -> None:
        """Read a sum."""


@contextmanager
def served(root: Path, triton: Any, strategy: str, rows: int = 4, **settings: Any) -> Iterator[Sequenced]:
    """Serve the model with this `sequence_batching`."""
    write_accumulator(root, "m", config(rows, strategy + CONTROLS + STATE % ""))
    (root / "m" / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n')
    with live_server(root, **settings) as live, Sequenced(live, triton, "m") as asking:
        yield asking


def values(sent: list[Any]) -> list[float]:
    """Wait for answers; none of them is an error."""
    found = answers(sent)
    assert [each.error for each in found] == [""] * len(found)
    return [each.value for each in found]


class TestBatches:
    """Delayed until enough requests are queued, with the environment variable of Triton's own tests."""

    @pytest.mark.parametrize(("strategy", "size"), [("direct { }", 3), ("oldest { }", 1)])
    def test_queued_sequences_share_a_batch_and_a_single_sequence_keeps_its_slot(
        self, tmp_path: Path, triton: Any, monkeypatch: pytest.MonkeyPatch, strategy: str, size: int
    ) -> None:
        monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "3")
        with served(tmp_path, triton, strategy) as asking:
            first = asking.line(1, 2, flags="s")
            assert asking.counts() == ({}, 0, 0)
            assert values([*first, asking.one(3, 3, "s")]) == [1, 2, 3]
            assert asking.counts() == ({3: 1}, 1, 3)

            assert values([asking.one(3, 4, "e")]) == [7]
            assert asking.counts() == ({3: 2} if size == 3 else {1: 1, 3: 1}, 2, 4)

    def test_two_requests_of_one_sequence_never_share_a_batch(
        self, tmp_path: Path, triton: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "4")
        with served(tmp_path, triton, "oldest { }") as asking:
            sent = [*asking.line(1, flags="s"), *asking.line(1), *asking.line(2, flags="se"), asking.one(1, 1, "e")]

            assert values(sent) == [1, 2, 2, 3]
            assert asking.counts() == ({2: 1, 1: 2}, 3, 4)

    def test_a_preferred_size_runs_immediately_and_a_smaller_batch_waits_for_the_delay(
        self, tmp_path: Path, triton: Any
    ) -> None:
        strategy = f"oldest {{ max_candidate_sequences: 2 preferred_batch_size: [ 2 ] {DELAY} }}"
        with served(tmp_path, triton, strategy) as asking:
            first = asking.line(1, flags="se")
            assert asking.counts() == ({}, 0, 0)
            assert values([*first, asking.one(2, 2, "se")]) == [1, 2]
            assert values([*asking.line(3, flags="se"), asking.one(4, 4, "se")]) == [3, 4]
            assert asking.counts() == ({2: 2}, 2, 4)


def idle(asking: Sequenced) -> list[Any]:
    """Start a sequence that takes the only slot and then falls silent, and two that wait for it."""
    assert values([asking.one(1, 1, "s")]) == [1]
    return asking.line(2, 3, flags="s")


class TestShutdown:
    """A model that is unloaded does not wait for further requests of its sequences."""

    def test_a_delayed_batch_is_answered_immediately_when_its_model_is_unloaded(
        self, tmp_path: Path, triton: Any
    ) -> None:
        with served(tmp_path, triton, f"direct {{ minimum_slot_utilization: 0.5 {DELAY} }}", **LOADED) as asking:
            sent = asking.line(1, flags="s")
            with asking.client() as client:
                client.unload_model("m")

            assert values(sent) == [1]

    def test_a_delayed_batch_is_answered_immediately_when_the_server_stops(self, tmp_path: Path, triton: Any) -> None:
        with served(tmp_path, triton, f"direct {{ minimum_slot_utilization: 0.5 {DELAY} }}") as asking:
            sent = asking.line(1, flags="s")
            asking.live.call(asking.live.server.drain())

            assert values(sent) == [1]

    def test_a_request_that_waits_for_a_silent_sequence_is_answered_when_its_model_is_unloaded(
        self, tmp_path: Path, triton: Any
    ) -> None:
        with served(tmp_path, triton, f"oldest {{ }} {IDLE}", rows=1, **LOADED) as asking:
            sent = idle(asking)
            with asking.client() as client:
                client.unload_model("m")

            assert values(sent) == [2, 3]

    def test_a_replaced_model_finishes_its_queue_and_its_successor_knows_no_sequences(
        self, tmp_path: Path, triton: Any
    ) -> None:
        with served(tmp_path, triton, f"direct {{ }} {IDLE}", rows=1, **LOADED) as asking:
            sent = idle(asking)
            (tmp_path / "m" / "config.pbtxt").write_text(config(2, f"direct {{ }} {IDLE}" + CONTROLS + STATE % ""))
            with asking.client() as client:
                client.load_model("m")

            assert values(sent) == [2, 3]
            (unknown,) = answers([asking.one(1, 1)])
            assert "must specify the START flag on the first request of the sequence" in unknown.error
            assert values([asking.one(1, 5, "s")]) == [5]
