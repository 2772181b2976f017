"""Triton's `dynamic_batching` as Triton's tests (qa/L0_batcher, L0_model_queue) check it, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.clients import models
from tests.clients.gated_onnxruntime import Gated
from tests.clients.parallel_requests import Asking, answers
from tests.fakes import Gate
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

FOREVER = "max_queue_delay_microseconds: 3600000000"
SHORT_S = 0.4
SHORT = "max_queue_delay_microseconds: 400000"
LONGER = "max_queue_delay_microseconds: 1000000"
"""Within which some requests are sent, on a busy machine too."""
PREFERRED = "preferred_batch_size: [2, 6]"
EXPIRED, FULL = "Request timeout expired", "Exceeds maximum queue size"


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:
    return request.param


@contextmanager
def served(
    root: Path,
    batching: str,
    *,
    rows: int = 8,
    instances: int = 1,
    environ: dict[str, str] | None = None,
    executor: str = "thread",
    **settings: Any,
) -> Iterator[tuple[Live, Gated]]:
    """Serve the model `m` with a `dynamic_batching` of this text; its runs are recorded from now on."""
    config = f"max_batch_size: {rows} dynamic_batching {{ {batching} }} instance_group {{ count: {instances} }}"
    models.write_identity(root, "m", config)
    (root / "m" / "penstock.toml").write_text(f'[batching]\nexecutor = "{executor}"\n')
    gated = Gated()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environ or {}).items():
            patch.setenv(name, value)
        with live_server(root, loaders=gated.loaders, **settings) as live:
            gated.runs.clear()
            yield live, gated


def held(count: int) -> dict[str, str]:
    return {"TRITONSERVER_DELAY_SCHEDULER": str(count)}


@contextmanager
def busy(asking: Asking, gated: Gated) -> Iterator[None]:
    """Keep the only Instance busy with a request of the value 0 during the block."""
    gated.gate.close()
    first = asking.ask(1, 0.0)
    asking.live.call(gated.gate.entered())
    try:
        yield
    finally:
        gated.gate.open()
    assert answers([first])[0].error == ""


def values_run(gated: Gated) -> list[float]:
    """Return the values that ran, row by row, without the one that kept the Instance busy."""
    return [value for run in gated.runs for value in run if value]


class TestPreferredSizes:
    """max_batch_size 8, sizes 2 and 6, and a very long delay: an answer shows that its request was not delayed."""

    @pytest.mark.parametrize("rows", [2, 6, 7, 8])
    def test_a_request_of_a_preferred_size_or_beyond_the_largest_runs_immediately(
        self, tmp_path: Path, triton: Any, rows: int
    ) -> None:
        with served(tmp_path, f"{PREFERRED} {FOREVER}") as (live, _), Asking(live, triton, "m") as asking:
            assert [answer.error for answer in answers([asking.ask(rows)])] == [""]
            assert asking.counts() == ({rows: 1}, 1, rows)

    @pytest.mark.parametrize("rows", [1, 3, 5])
    def test_a_request_of_another_size_waits_for_the_delay(self, tmp_path: Path, triton: Any, rows: int) -> None:
        with served(tmp_path, f"{PREFERRED} {SHORT}") as (live, _), Asking(live, triton, "m") as asking:
            (answer,) = answers([asking.ask(rows)])

            assert answer.error == ""
            assert answer.after_s >= SHORT_S
            assert asking.counts() == ({rows: 1}, 1, rows)

    @pytest.mark.parametrize(
        ("rows", "sizes"),
        [((1, 1), {2: 1}), ((4, 2), {6: 1}), ((3, 7), {3: 1, 7: 1}), ((2, 6), {2: 1, 6: 1}), ((1, 6), {1: 1, 6: 1})],
    )
    def test_requests_that_complete_a_preferred_size_or_overflow_a_batch_run_immediately(
        self, tmp_path: Path, triton: Any, rows: tuple[int, ...], sizes: dict[int, int]
    ) -> None:
        with served(tmp_path, f"{PREFERRED} {FOREVER}") as (live, _), Asking(live, triton, "m") as asking:
            sent = asking.queue(*rows)

            assert [answer.error for answer in answers(sent)] == [""] * len(rows)
            assert asking.counts() == (sizes, len(sizes), sum(rows))

    def test_requests_of_one_and_three_rows_wait_and_run_together(self, tmp_path: Path, triton: Any) -> None:
        with served(tmp_path, f"{PREFERRED} {SHORT}") as (live, _), Asking(live, triton, "m") as asking:
            first, _ = answers(asking.queue(1, 3))

            assert first.after_s >= SHORT_S
            assert asking.counts() == ({4: 1}, 1, 4)

    def test_a_request_that_would_exceed_the_largest_size_closes_the_batch_and_waits(
        self, tmp_path: Path, triton: Any
    ) -> None:
        with served(tmp_path, f"{PREFERRED} {SHORT}") as (live, _), Asking(live, triton, "m") as asking:
            three, four = answers(asking.queue(3, 4))

            assert three.at_s < four.at_s
            assert four.after_s >= SHORT_S
            assert asking.counts() == ({3: 1, 4: 1}, 2, 7)

    def test_all_requests_that_fit_run_when_the_delay_is_over_preferred_size_or_not(
        self, tmp_path: Path, triton: Any
    ) -> None:
        with (
            served(tmp_path, f"{PREFERRED} max_queue_delay_microseconds: 1000") as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            sent = asking.queue(3, 4, 2)
            gated.gate.open()
            answers(sent)

            assert asking.counts() == ({1: 1, 7: 1, 2: 1}, 3, 10)

    def test_requests_of_different_shapes_are_batched_separately(self, tmp_path: Path, triton: Any) -> None:
        with served(tmp_path, f"{PREFERRED} {FOREVER}") as (live, _), Asking(live, triton, "m") as asking:
            sent = []
            for width in (4, 5, 4, 5):
                before = asking.accepted()
                sent.append(asking.ask(1, width=width))
                asking.until(lambda before=before: asking.accepted() > before)

            assert [answer.error for answer in answers(sent)] == [""] * 4
            assert asking.counts() == ({2: 2}, 2, 4)

    def test_a_preferred_size_runs_first_and_then_the_rest_without_a_delay(self, tmp_path: Path, triton: Any) -> None:
        with (
            served(tmp_path, PREFERRED) as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            sent = asking.queue(*[1] * 5)
            gated.gate.open()
            answers(sent)

            assert [len(run) for run in gated.runs] == [1, 2, 2, 1]


class TestRequestedOutputs:
    def test_requests_for_different_outputs_share_a_batch(self, tmp_path: Path, triton: Any) -> None:
        config = models.SIMPLE_CONFIG + f"dynamic_batching {{ {PREFERRED} {FOREVER} }}"
        models.write(
            tmp_path, "simple", models.SUM_AND_DIFFERENCE,
            ({f"INPUT{i}": (models.INT32, ["N", 16]) for i in (0, 1)},
             {f"OUTPUT{i}": (models.INT32, ["N", 16]) for i in (0, 1)}), config=config,
        )  # fmt: skip
        rows = np.arange(16, dtype=np.int32)[np.newaxis]

        def ask(positions: tuple[int, ...]) -> list[Any]:
            tensors = [triton.InferInput(f"INPUT{i}", rows.shape, "INT32") for i in (0, 1)]
            for each in tensors:
                each.set_data_from_numpy(rows)
            outputs = [triton.InferRequestedOutput(f"OUTPUT{i}") for i in positions]
            with asking.client() as client:
                found = client.infer("simple", tensors, outputs=outputs)
            return [found.as_numpy(f"OUTPUT{i}") for i in (0, 1)]

        with live_server(tmp_path) as live, Asking(live, triton, "simple") as asking:
            for selections in (((0,), (1,)), ((1, 0), (0,)), ((0,), (0,))):
                with ThreadPoolExecutor(2) as pool:
                    for selection, found in zip(selections, pool.map(ask, selections), strict=True):
                        assert [array is not None for array in found] == [0 in selection, 1 in selection]
                        assert 0 not in selection or (found[0] == 2 * rows).all()
                        assert 1 not in selection or not found[1].any()

            assert asking.counts() == ({2: 3}, 3, 6)


class TestDelayedScheduler:
    """TRITONSERVER_DELAY_SCHEDULER, which makes Triton's tests of batches exact."""

    @pytest.mark.parametrize(
        ("batching", "rows", "sizes"),
        [
            (f"{PREFERRED} {FOREVER}", (1,) * 6, {6: 1}),
            (f"{PREFERRED} {LONGER}", (1,) * 3, {2: 1, 1: 1}),
            (f"{PREFERRED} {FOREVER}", (2, 4), {6: 1}),
            (f"{PREFERRED} {FOREVER}", (6, 6), {6: 2}),
            (f"{PREFERRED} {LONGER}", (3, 4), {3: 1, 4: 1}),
            (f"{PREFERRED} {FOREVER}", (1, 8), {1: 1, 8: 1}),
            ("preferred_batch_size: [4] preserve_ordering: true", (1,) * 12, {4: 3}),
            (SHORT, (1,) * 12, {8: 1, 4: 1}),
            ("", (1,) * 12, {8: 1, 4: 1}),
        ],
    )
    @pytest.mark.parametrize("executor", ["thread", "loop"])
    def test_no_request_runs_until_the_configured_number_is_queued(
        self, tmp_path: Path, triton: Any, batching: str, rows: tuple[int, ...], sizes: dict[int, int], executor: str
    ) -> None:
        with (
            served(tmp_path, batching, environ=held(len(rows)), executor=executor) as (live, gated),
            Asking(live, triton, "m") as asking,
        ):
            sent = asking.queue(*rows[:-1])
            asking.until_waiting(len(rows) - 1)
            assert gated.runs == []
            sent += asking.queue(rows[-1])

            assert [answer.error for answer in answers(sent)] == [""] * len(rows)
            assert asking.counts() == (sizes, sum(sizes.values()), sum(rows))

    def test_the_scheduler_is_delayed_only_once(self, tmp_path: Path, triton: Any) -> None:
        with served(tmp_path, "", environ=held(2)) as (live, _), Asking(live, triton, "m") as asking:
            answers(asking.queue(1, 1))

            assert answers([asking.ask()])[0].error == ""
            assert asking.counts()[1:] == (2, 3)

    def test_a_queued_request_times_out_while_the_scheduler_is_delayed(self, tmp_path: Path, triton: Any) -> None:
        policy = "default_queue_policy { default_timeout_microseconds: 300000 }"
        with served(tmp_path, policy, environ=held(2)) as (live, _), Asking(live, triton, "m") as asking:
            (answer,) = answers([asking.ask()])

            assert EXPIRED in answer.error
            assert answer.after_s >= 0.3

    def test_a_model_without_dynamic_batching_is_not_delayed(self, tmp_path: Path, triton: Any) -> None:
        models.write_identity(tmp_path, "plain", "max_batch_size: 4")
        with (
            served(tmp_path, "", environ=held(9)) as (live, _),
            Asking(live, triton, "plain") as asking,
        ):
            assert answers([asking.ask()])[0].error == ""


LEVELS = "priority_levels: 3 default_priority_level: 2"


class TestPriorityLevels:
    @pytest.mark.parametrize(
        ("priorities", "order"),
        [
            ((3, 2, 1, 0, 9, 1), [3, 6, 2, 4, 5, 1]),
            ((0, 0, 0), [1, 2, 3]),
            ((3, 3, 1, 1), [3, 4, 1, 2]),
            ((2**40, 1), [2, 1]),
        ],
    )
    def test_the_highest_priority_runs_first_and_within_a_level_the_oldest(
        self, tmp_path: Path, triton: Any, priorities: tuple[int, ...], order: list[int]
    ) -> None:
        with (
            served(tmp_path, LEVELS, rows=1) as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            sent = []
            for number, priority in enumerate(priorities, 1):
                sent += asking.queue(1, value=number, priority=priority)
            gated.gate.open()
            answers(sent)

            assert values_run(gated) == order

    def test_a_batch_is_filled_from_lower_priority_levels(self, tmp_path: Path, triton: Any) -> None:
        with (
            served(tmp_path, f"{LEVELS} preferred_batch_size: [4]", rows=4) as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            sent = []
            for number, priority in enumerate((3, 3, 2, 1, 1), 1):
                sent += asking.queue(1, value=number, priority=priority)
            gated.gate.open()
            answers(sent)

            assert gated.runs[1:] == [[4, 5, 3, 1], [2]]

    def test_the_shape_with_the_highest_priority_request_runs_first(self, tmp_path: Path, triton: Any) -> None:
        with (
            served(tmp_path, LEVELS) as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            sent = asking.queue(1, value=1, width=4, priority=3)
            sent += asking.queue(1, value=2, width=5, priority=2)
            sent += asking.queue(1, value=3, width=6, priority=1)
            gated.gate.open()
            answers(sent)

            assert values_run(gated) == [3, 2, 1]

    def test_the_number_of_priority_levels_may_be_the_largest_64_bit_integer(self, tmp_path: Path, triton: Any) -> None:
        most = 2**64 - 1
        with (
            served(tmp_path, f"priority_levels: {most} default_priority_level: {most}", rows=1) as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            sent = asking.queue(1, value=1) + asking.queue(1, value=2, priority=2**33)
            sent += asking.queue(1, value=3, priority=2**32)
            gated.gate.open()
            answers(sent)

            assert values_run(gated) == [3, 2, 1]


def policy(**members: Any) -> str:
    words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in members.items()}
    return "{ " + " ".join(f"{name}: {value}" for name, value in words.items()) + " }"


class TestTimeouts:
    def test_a_request_is_rejected_when_it_times_out_while_the_instance_is_busy(
        self, tmp_path: Path, triton: Any
    ) -> None:
        queue = f"default_queue_policy {policy(default_timeout_microseconds=400_000, allow_timeout_override=True)}"
        with (
            served(tmp_path, queue) as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            untimed, shorter, longer = [
                asking.queue(1, **options)[0] for options in ({}, {"timeout": 200_000}, {"timeout": 10_000_000})
            ]
            rejected = answers([untimed, shorter, longer])
            for answer, limit_s in zip(rejected, (0.4, 0.2, 0.4), strict=True):
                assert EXPIRED in answer.error
                assert answer.after_s >= limit_s
            assert min(rejected, key=lambda answer: answer.at_s) is rejected[1]
            assert asking.waiting() == 0
        assert values_run(gated) == []

    def test_a_timeout_at_admission_and_in_the_queue_has_exactly_tritons_message(
        self, tmp_path: Path, triton: Any
    ) -> None:
        status = "StatusCode.UNAVAILABLE" if triton is tritonclient.grpc else "503"
        with served(tmp_path, "") as (live, gated), Asking(live, triton, "m") as asking:
            for timeout_us in (200_000, 10_000):  # by the second one the server has learned the run time
                with busy(asking, gated):
                    (answer,) = answers([asking.ask(timeout=timeout_us)])
                assert answer.error == f"[{status}] {EXPIRED}"
            assert live.call(refused_late(live)) == 1

    def test_a_request_expires_little_later_than_its_timeout(self, tmp_path: Path) -> None:
        """Measured by the server: clients add delays of their own."""
        waits_us = (50_000, 110_000, 170_000, 230_000, 290_000)
        with (
            served(tmp_path, "") as (live, gated),
            Asking(live, tritonclient.grpc, "m") as asking,
            busy(asking, gated),
        ):
            late_ns = []
            for wait_us in waits_us:
                before_ns = failed_ns(live)
                assert EXPIRED in answers([asking.ask(timeout=wait_us)])[0].error
                late_ns.append(failed_ns(live) - before_ns - wait_us * 1000)

            assert -1_000_000 <= min(late_ns) < 2_000_000  # the machine may have delayed the others

    def test_a_request_cannot_shorten_its_timeout_without_allow_timeout_override(
        self, tmp_path: Path, triton: Any
    ) -> None:
        queue = f"default_queue_policy {policy(default_timeout_microseconds=400_000)}"
        with (
            served(tmp_path, queue) as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            (answer,) = answers(asking.queue(1, timeout=100_000))

            assert EXPIRED in answer.error
            assert answer.after_s >= 0.4

    def test_a_delayed_request_runs_after_all_that_have_not_timed_out_and_never_fails(
        self, tmp_path: Path, triton: Any
    ) -> None:
        members = policy(timeout_action="DELAY", default_timeout_microseconds=9_000_000, allow_timeout_override=True)
        with (
            served(tmp_path, f"default_queue_policy {members}", rows=1) as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            # far enough apart for the second to arrive before the first times out
            sent = asking.queue(1, value=1, timeout=2_000_000)
            sent += asking.queue(1, value=2, timeout=50_000)
            sent += asking.queue(1, value=3)
            asking.until(lambda: put_off(live) == 2)
            sent += asking.queue(1, value=4)
            gated.gate.open()

            assert [answer.error for answer in answers(sent)] == [""] * 4
            assert values_run(gated) == [3, 4, 2, 1]

    def test_each_priority_level_has_its_own_timeout_policy(self, tmp_path: Path, triton: Any) -> None:
        reject = policy(default_timeout_microseconds=200_000)
        levels = f"{LEVELS} priority_queue_policy {{ key: 1 value {reject} }}"
        with (
            served(tmp_path, levels, rows=1) as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            high, low = asking.queue(1, value=1, priority=1)[0], asking.queue(1, value=2, priority=3)[0]
            (answer,) = answers([high])
            assert EXPIRED in answer.error
            assert answer.after_s >= 0.2
            gated.gate.open()

            assert answers([low])[0].error == ""


async def refused_late(live: Live) -> int:
    """Count the requests rejected at admission because they would have been late."""
    return live.server.engine.model("m").event_counts.get("late_refusals", 0)


def failed_ns(live: Live) -> int:
    """Return the total time of the failed requests."""

    async def read() -> int:
        return live.server.engine.model("m").statistics.snapshot().fail.ns

    return live.call(read())


def put_off(live: Live) -> int:
    """Count the queued requests whose deadline was removed."""

    async def without() -> int:
        (lane,) = live.server.engine.model("m").scheduler._lanes.values()
        return sum(not request.deadline_ns for request in lane.waiting_requests())

    return live.call(without())


class TestQueueSize:
    def test_each_priority_level_has_its_own_maximum_queue_size(self, tmp_path: Path, triton: Any) -> None:
        levels = (
            f"{LEVELS} default_queue_policy {policy(max_queue_size=2)}"
            f" priority_queue_policy {{ key: 1 value {policy(max_queue_size=1)} }}"
        )
        with (
            served(tmp_path, levels) as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            sent = [asking.queue(1, priority=level)[0] for level in (1, 2, 2, 3, 3)]
            refused = [answers([asking.ask(priority=level)])[0] for level in (1, 2, 3, 0)]
            gated.gate.open()

            assert all(FULL in answer.error for answer in refused)
            assert [answer.error for answer in answers(sent)] == [""] * 5

    def test_an_expired_request_frees_its_place_in_the_queue(self, tmp_path: Path, triton: Any) -> None:
        members = policy(max_queue_size=2, default_timeout_microseconds=60_000_000, allow_timeout_override=True)
        with (
            served(tmp_path, f"default_queue_policy {members}") as (live, gated),
            Asking(live, triton, "m") as asking,
            busy(asking, gated),
        ):
            stays = asking.queue(1)
            expiring = asking.queue(1, timeout=100_000)
            assert EXPIRED in answers(expiring)[0].error
            stays += asking.queue(1)
            assert FULL in answers([asking.ask()])[0].error
            gated.gate.open()

            assert [answer.error for answer in answers(stays)] == ["", ""]


class TestPreservedOrder:
    def test_answers_wait_for_the_answers_to_earlier_requests(self, tmp_path: Path, triton: Any) -> None:
        text = "preserve_ordering: true preferred_batch_size: [1]"
        with served(tmp_path, text, rows=1, instances=2) as (live, gated), Asking(live, triton, "m") as asking:
            gated.gate.close()
            sent = asking.queue(1, value=1)
            live.call(gated.gate.entered())
            gated.gate_of[2] = Gate(list)
            gated.gate_of[2].close()
            sent += asking.queue(1, value=2)
            live.call(gated.gate_of[2].entered())
            sent += asking.queue(1, value=3, timeout=100_000)
            asking.until_waiting(0)
            gated.gate_of[2].open()
            asking.until(lambda: asking.counts()[1] == 1)
            assert not any(each.done() for each in sent)
            gated.gate.open()
            first, second, expired = answers(sent)

            assert (first.value, second.value) == (1, 2)
            assert EXPIRED in expired.error

    def test_answers_do_not_wait_for_earlier_requests_without_preserve_ordering(
        self, tmp_path: Path, triton: Any
    ) -> None:
        with served(tmp_path, "", rows=1, instances=2) as (live, gated), Asking(live, triton, "m") as asking:
            gated.gate.close()
            gated.gate_of[2] = Gate(list)
            first = asking.queue(1, value=1)
            live.call(gated.gate.entered())

            assert answers(asking.queue(1, value=2))[0].error == ""
            assert not first[0].done()
            gated.gate.open()
            assert answers(first)[0].error == ""


class TestShutdown:
    @pytest.mark.parametrize(("batching", "environ"), [(FOREVER, None), ("", held(9))])
    @pytest.mark.parametrize("executor", ["thread", "loop"])
    def test_a_delayed_batch_is_answered_immediately_when_the_server_stops(
        self, tmp_path: Path, triton: Any, batching: str, environ: dict[str, str] | None, executor: str
    ) -> None:
        with served(tmp_path, batching, environ=environ, executor=executor) as (live, gated):
            asking = Asking(live, triton, "m")
            sent = asking.queue(1, 1)
            assert gated.runs == []

        with asking:
            assert [answer.error for answer in answers(sent)] == ["", ""]
            assert len(gated.runs) == 1

    def test_a_delayed_batch_is_answered_immediately_when_its_model_is_unloaded(
        self, tmp_path: Path, triton: Any
    ) -> None:
        with (
            served(tmp_path, FOREVER, model_control_mode="explicit", load_model=("m",)) as (live, _),
            Asking(live, triton, "m") as asking,
        ):
            sent = asking.queue(1, 1)
            with asking.client() as client:
                client.unload_model("m")

            assert [answer.error for answer in answers(sent)] == ["", ""]


class TestConfiguration:
    TEXT = f"""
        {PREFERRED} max_queue_delay_microseconds: 7 {LEVELS}
        default_queue_policy {{ timeout_action: DELAY default_timeout_microseconds: 9 max_queue_size: 3 }}
        priority_queue_policy {{ key: 1 value {{ default_timeout_microseconds: 5 allow_timeout_override: true }} }}
    """

    @pytest.mark.parametrize("rows", [1, 8])
    def test_every_field_of_dynamic_batching_is_reported_over_http(self, tmp_path: Path, rows: int) -> None:
        text = self.TEXT.replace(PREFERRED, "") if rows == 1 else self.TEXT
        with (
            served(tmp_path, text, rows=rows) as (live, _),
            tritonclient.http.InferenceServerClient(live.address) as client,
        ):
            found = client.get_model_config("m")["dynamic_batching"]

            assert found == {
                "preferred_batch_size": [2, 6] if rows == 8 else [1],
                "max_queue_delay_microseconds": 7,
                "preserve_ordering": False,
                "priority_levels": 3,
                "default_priority_level": 2,
                "default_queue_policy": {
                    "timeout_action": "DELAY",
                    "default_timeout_microseconds": 9,
                    "allow_timeout_override": False,
                    "max_queue_size": 3,
                },
                "priority_queue_policy": {
                    "1": {
                        "timeout_action": "REJECT",
                        "default_timeout_microseconds": 5,
                        "allow_timeout_override": True,
                        "max_queue_size": 0,
                    }
                },
            }

    def test_dynamic_batching_is_reported_over_grpc(self, tmp_path: Path) -> None:
        with (
            served(tmp_path, "preserve_ordering: true") as (live, _),
            tritonclient.grpc.InferenceServerClient(live.grpc_address) as client,
        ):
            found = client.get_model_config("m").config.dynamic_batching

            assert found.preserve_ordering
            assert list(found.preferred_batch_size) == [8]
