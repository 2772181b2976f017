"""Repeats: repeated log records are counted, and none is lost uncounted."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.settings import Settings
from penstock.server.telemetry import repeats
from penstock.server.telemetry.logs import Logs
from penstock.server.telemetry.repeats import MAX_KINDS, MAX_PER_WINDOW, WINDOW_S, Repeats

logger = logging.getLogger("penstock.test")


def record(
    text: str = "a hook has failed", *, line: int = 1, level: int = logging.WARNING, error: Exception | None = None,
    name: str = "penstock.hooks", model: str = "m",
) -> logging.LogRecord:  # fmt: skip
    raised = (type(error), error, None) if error else None
    log_record = logging.LogRecord(name, level, "hooks.py", line, text, None, raised)
    log_record.model = model
    return log_record


def passed(counted: Repeats, *records: logging.LogRecord, now_s: float = 0.0) -> int:
    return sum(counted.allows(each, now_s) for each in records)


def summaries(counted: Repeats, now_s: float) -> list[str]:
    return [each.getMessage() for each in counted.pop_expired(now_s)]


def test_repeated_records_are_written_up_to_the_limit_and_the_rest_counted() -> None:
    counted = Repeats()

    assert passed(counted, *[record() for _ in range(MAX_PER_WINDOW + 5)]) == MAX_PER_WINDOW
    assert summaries(counted, WINDOW_S - 0.01) == []
    assert summaries(counted, WINDOW_S) == ["5 more like this in a second: a hook has failed"]
    assert summaries(counted, WINDOW_S) == []
    assert not counted


def test_repeated_records_are_written_again_in_the_next_second() -> None:
    counted = Repeats()
    passed(counted, *[record() for _ in range(2 * MAX_PER_WINDOW)])
    counted.pop_expired(WINDOW_S)

    assert passed(counted, *[record() for _ in range(2 * MAX_PER_WINDOW)], now_s=WINDOW_S) == MAX_PER_WINDOW


def test_no_summary_is_logged_for_records_within_the_limit() -> None:
    counted = Repeats()
    passed(counted, *[record() for _ in range(MAX_PER_WINDOW)])

    assert summaries(counted, WINDOW_S) == []
    assert not counted


@pytest.mark.parametrize(
    "other",
    [record(line=2), record(model="n"), record(error=ValueError("x")), record("another"), record(name="penstock.http")],
    ids=["place", "model", "error", "text", "logger"],
)
def test_a_record_with_another_place_model_error_text_or_logger_is_not_a_repeat(other: logging.LogRecord) -> None:
    counted = Repeats()
    passed(counted, *[record() for _ in range(2 * MAX_PER_WINDOW)])

    assert counted.allows(other, 0.0)


@pytest.mark.parametrize(
    "free",
    [record(level=logging.INFO), *(record(name=name) for name in ("mine", "penstock_x", "penstock.workers.user"))],
    ids=["info", "users", "alike", "relayed"],
)
def test_info_records_and_records_of_users_are_always_written(free: logging.LogRecord) -> None:
    assert passed(Repeats(), *[free] * 1000) == 1000


def test_records_beyond_the_limit_of_kinds_are_distinguished_only_by_place_and_model() -> None:
    counted = Repeats()
    passed(counted, *[record(f"{number * 'x'}") for number in range(MAX_KINDS)])

    assert passed(counted, *[record(f"{number * 'y'}") for number in range(1, 101)]) == MAX_PER_WINDOW
    assert passed(counted, record(line=2), record(model="n")) == 2


def test_texts_from_one_place_are_repeats_if_they_differ_only_in_numbers() -> None:
    counted = Repeats()

    assert passed(counted, *[record(f"{'abcdefgh'[number % 8]} has failed") for number in range(100)]) == 100
    assert passed(counted, *[record(f"request {number} has failed") for number in range(100)]) == MAX_PER_WINDOW


@pytest.mark.parametrize("odd", [["a"], {"a": 1}, None, 7])
def test_a_record_with_an_unusual_message_or_model_passes_without_an_error(odd: object) -> None:
    strange = record()
    strange.msg, strange.model = odd, odd

    assert Repeats().allows(strange, 0.0)


def test_the_summary_of_repeats_names_the_model_and_has_no_traceback() -> None:
    counted = Repeats()
    passed(counted, *[record(error=ValueError("x")) for _ in range(MAX_PER_WINDOW + 1)])

    (over,) = counted.pop_expired(WINDOW_S)

    assert (over.name, over.levelname, over.model) == ("penstock.hooks", "WARNING", "m")  # type: ignore[attr-defined]
    assert over.exc_info is None


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.3)), max_size=300))
def test_every_record_is_either_written_or_counted(logged: list[tuple[int, float]]) -> None:
    counted, now_s = Repeats(), 0.0
    written: Counter[str] = Counter()
    dropped: Counter[str] = Counter()

    def log(at_s: float) -> None:
        for each in counted.pop_expired(at_s):
            number, text = each.getMessage().split(" more like this in a second: ")
            dropped[text] += int(number)

    for line, later_s in logged:
        now_s += later_s
        log(now_s)
        if counted.allows(record(str(line), line=line), now_s):
            written[str(line)] += 1
    log(now_s + WINDOW_S)

    assert written + dropped == Counter(str(line) for line, _ in logged)


class TestLogging:
    def log(self, stream: io.StringIO) -> Logs:
        return Logs(Settings(log_format="json"), stream)

    def lines(self, stream: io.StringIO) -> list[str]:
        return [json.loads(line)["msg"] for line in stream.getvalue().splitlines()]

    def fail(self, times: int) -> None:
        for _ in range(times):
            try:
                raise ValueError("no")
            except ValueError:
                logger.exception("it has failed", extra={"model": "m"})

    def test_the_summary_of_repeats_is_logged_when_logging_ends(self) -> None:
        stream = io.StringIO()
        logs = self.log(stream)
        logs.start()
        self.fail(MAX_PER_WINDOW + 3)
        logs.stop()

        assert self.lines(stream) == ["it has failed"] * MAX_PER_WINDOW + [
            "3 more like this in a second: it has failed"
        ]

    def test_the_summary_of_repeats_is_logged_even_if_nothing_else_is_logged(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = SummaryStream()
        monkeypatch.setattr(repeats, "WINDOW_S", 0.05)
        monkeypatch.setattr(sys.modules["penstock.server.telemetry.logs"], "WINDOW_S", 0.05)
        logs = self.log(stream)
        logs.start()
        self.fail(MAX_PER_WINDOW + 3)
        stream.wait()
        logs.stop()

        assert self.lines(stream)[-1] == "3 more like this in a second: it has failed"


class SummaryStream(io.StringIO):
    """A stream that lets a test wait for the summary of repeats."""

    def __init__(self) -> None:
        super().__init__()
        self._written = threading.Event()

    def write(self, text: str) -> int:
        if "more like this" in text:
            self._written.set()
        return super().write(text)

    def wait(self) -> None:
        assert self._written.wait(30)
