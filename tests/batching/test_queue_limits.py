"""Queue limits: the defaults, and that configured limits apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import InferError
from penstock.batching.devices.memory import limit_bytes, usable_bytes
from penstock.batching.request import InferRequest
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.queue_limits import (
    FULL_BATCHES,
    MEMORY_FRACTION,
    MIN_BYTES,
    MIN_ROWS,
    QueueLimits,
    max_split_rows,
    queue_rows,
)
from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.spec import BatchPolicy
from tests.fakes import fake_model, fake_request

IMAGE = 3 * 224 * 224 * 4
GIB = 1 << 30
KINDS: tuple[dict[str, Any], ...] = ({}, {"priority_levels": 2, "default_priority": 1})
MODEL = fake_model()


def scheduler_of(memory_bytes: int = 128 * GIB, **policy: Any) -> Scheduler:
    terms = {"max_batch_rows": 256} | policy
    return Scheduler(BatchPolicy(**terms), CostModel(), memory_bytes=memory_bytes)


def image(rows: int = 1, row_bytes: int = IMAGE) -> InferRequest:
    request = fake_request(MODEL, rows)
    request.nbytes = rows * row_bytes
    return request


def taken_in(scheduler: Scheduler, most: int = 3000, **kind: int) -> int:
    """Return how many requests of a kind wait when the next one is rejected."""
    for count in range(most):
        try:
            scheduler.add(image(**kind))
        except InferError:
            return count
    return most


@pytest.mark.parametrize("kind", KINDS, ids=["a line", "levels"])
class TestDefaultLimits:
    def test_four_full_batches_of_images_fit_in_the_queue(self, kind: dict[str, Any]) -> None:
        assert taken_in(scheduler_of(**kind)) == 4 * 256

    def test_the_row_limit_grows_with_the_maximum_batch_size(self, kind: dict[str, Any]) -> None:
        assert taken_in(scheduler_of(max_batch_rows=512, **kind), row_bytes=16) == 4 * 512

    def test_full_batches_of_64_clients_fit_in_the_queue(self, kind: dict[str, Any]) -> None:
        assert taken_in(scheduler_of(max_batch_rows=64, **kind), rows=64, row_bytes=16) == 64

    def test_small_requests_are_limited_to_the_minimum_row_limit(self, kind: dict[str, Any]) -> None:
        assert taken_in(scheduler_of(max_batch_rows=64, **kind), row_bytes=16) == MIN_ROWS

    def test_one_models_queue_takes_at_most_its_share_of_memory(self, kind: dict[str, Any]) -> None:
        assert taken_in(scheduler_of(8 * GIB, **kind)) == 8 * GIB // MEMORY_FRACTION // IMAGE

    @pytest.mark.parametrize("memory_bytes", [0, GIB])
    def test_the_minimum_byte_limit_applies_if_memory_is_small(self, kind: dict[str, Any], memory_bytes: int) -> None:
        assert taken_in(scheduler_of(memory_bytes, **kind)) == MIN_BYTES // IMAGE

    def test_the_minimum_limits_apply_if_batches_are_small(self, kind: dict[str, Any]) -> None:
        assert taken_in(scheduler_of(max_batch_rows=1, **kind)) == MIN_BYTES // IMAGE
        assert taken_in(scheduler_of(max_batch_rows=1, **kind), row_bytes=16) == MIN_ROWS

    def test_rows_are_limited_by_count_after_large_rows_have_arrived(self, kind: dict[str, Any]) -> None:
        scheduler = scheduler_of(**kind)
        scheduler.add(image(256))
        large = taken_in(scheduler, 400)
        small = taken_in(scheduler, row_bytes=16)

        assert (large, small) == (400, MIN_ROWS - 1 - 400)

    def test_a_request_larger_than_the_minimum_limit_leaves_room_for_more(self, kind: dict[str, Any]) -> None:
        scheduler = scheduler_of(max_batch_rows=2, **kind)
        scheduler.add(image(2, MIN_BYTES))

        assert not scheduler.is_full()
        assert taken_in(scheduler, row_bytes=MIN_BYTES) == 2 * FULL_BATCHES - 2


@pytest.mark.parametrize("kind", KINDS, ids=["a line", "levels"])
@pytest.mark.parametrize(
    ("limits", "waiting"),
    [({"max_queue_rows": 3}, 3), ({"max_queue_bytes": 5 * IMAGE}, 5), ({"max_queue_rows": 2000}, 2000)],
)
def test_configured_queue_limits_override_the_defaults(
    kind: dict[str, Any], limits: dict[str, int], waiting: int
) -> None:
    scheduler = scheduler_of(**kind, **limits)
    scheduler.limits.adapt_max_nbytes(image(1, GIB))

    assert taken_in(scheduler, row_bytes=IMAGE if "max_queue_bytes" in limits else 16) == waiting


def test_requests_without_rows_and_models_without_batches_have_default_limits() -> None:
    room = QueueLimits(BatchPolicy(max_batch_rows=0), 128 * GIB)

    assert (room.max_rows, room.adapt_max_nbytes(image(0))) == (MIN_ROWS, MIN_BYTES)
    assert queue_rows(BatchPolicy(max_batch_rows=0, max_queue_requests=5000)) == 5000


@pytest.mark.parametrize(
    ("rows", "nbytes", "requests", "allowed"),
    [(6, 70, 5, True), (7, 70, 5, False), (6, 71, 5, False), (6, 70, 6, False)],
)
def test_a_group_of_requests_is_allowed_only_within_every_limit(
    rows: int, nbytes: int, requests: int, allowed: bool
) -> None:
    limits = QueueLimits(BatchPolicy(max_queue_rows=6, max_queue_bytes=70, max_queue_requests=5))

    assert limits.allows(rows, nbytes, requests) == allowed


@pytest.mark.parametrize(("queue_rows", "split_rows"), [(0, 3 * 8), (20, 20)])
def test_the_parts_of_one_request_fit_within_the_queues_limits_on_requests_and_rows(
    queue_rows: int, split_rows: int
) -> None:
    policy = BatchPolicy(max_batch_rows=8, max_queue_requests=3, max_queue_rows=queue_rows)

    assert max_split_rows(policy, 8) == split_rows


class TestMemory:
    @pytest.fixture
    def proc(self, tmp_path: Path) -> Path:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text("MemTotal:       4096 kB\nMemFree:  1 kB\n")
        (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
        return tmp_path / "proc"

    def test_usable_memory_is_the_machines_if_no_cgroup_limits_it(self, proc: Path, tmp_path: Path) -> None:
        assert usable_bytes(proc, tmp_path / "none") == 4096 * 1024

    def test_usable_memory_is_what_the_tightest_cgroup_allows(self, proc: Path, tmp_path: Path) -> None:
        for folder, limit in (("", "max"), ("a", "1000"), ("a/b", "2000")):
            (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "cgroup" / folder / "memory.max").write_text(f"{limit}\n")

        assert usable_bytes(proc, tmp_path / "cgroup") == 1000
        assert limit_bytes(tmp_path / "cgroup", "0::/\n") is None

    @pytest.mark.parametrize("text", ["", "MemTotal: max kB\n", "MemTotal:\n"])
    def test_usable_memory_is_unknown_if_the_system_does_not_report_it(
        self, proc: Path, tmp_path: Path, text: str
    ) -> None:
        (proc / "meminfo").write_text(text)

        assert usable_bytes(proc, tmp_path / "none") == usable_bytes(tmp_path / "none", tmp_path / "none") == 0
