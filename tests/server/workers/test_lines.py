"""The output of a worker, logged line by line."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.workers.lines import LAST_LINES, LINE_BYTES, LINES_PER_S, LineSplitter, Output
from penstock.server.workers.order import WorkerLost
from penstock.server.workers.worker import Worker
from tests.server.workers.orders import CALL, ended, order, scene

CUTS = st.lists(st.integers(0, 60), max_size=8)


def pieces(text: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


@given(st.lists(st.text("ab é", max_size=8), max_size=8), CUTS)
def test_lines_are_unchanged_when_read_in_any_pieces(written: list[str], cuts: list[int]) -> None:
    lines = LineSplitter()
    text = "".join(f"{line}\n" for line in written).encode()

    assert [line for piece in pieces(text, cuts) for line in lines.feed(piece, 0.0)] == [
        line for line in written if line
    ]
    assert lines.flush() == []


def test_a_line_without_a_newline_is_returned_by_flush() -> None:
    lines = LineSplitter()

    assert lines.feed(b"one\ntwo", 0.0) == ["one"]
    assert lines.flush() == ["two"]
    assert lines.flush() == []


def test_a_progress_bar_is_split_into_lines() -> None:
    assert LineSplitter().feed(b"10%\r20%\r\n30%\n", 0.0) == ["10%", "20%", "30%"]


def test_bytes_that_are_not_utf8_are_escaped() -> None:
    assert LineSplitter().feed(b"\xff ok\n", 0.0) == ["\\xff ok"]


@pytest.mark.parametrize("step", [1000, LINE_BYTES, 3 * LINE_BYTES])
def test_a_long_line_is_cut_once(step: int) -> None:
    lines = LineSplitter()
    text = b"x" * (3 * LINE_BYTES) + b"\nnext\n"
    output_lines = [line for start in range(0, len(text), step) for line in lines.feed(text[start : start + step], 0.0)]

    assert output_lines == ["x" * LINE_BYTES + "... (cut)", "next"]


@settings(max_examples=40)
@given(st.integers(LINES_PER_S - 50, LINES_PER_S + 150), st.integers(20, 900))
def test_every_line_is_returned_or_counted_as_dropped(count: int, step: int) -> None:
    lines = LineSplitter()
    text = b"".join(b"%d\n" % number for number in range(count))
    output_lines = [line for start in range(0, len(text), step) for line in lines.feed(text[start : start + step], 0.0)]

    assert output_lines == [str(number) for number in range(min(count, LINES_PER_S))]

    rest = lines.flush()
    dropped = 0
    if rest and (found := re.fullmatch(r"(\d+) lines dropped", rest[0])):
        dropped = int(found[1])
        del rest[0]
    assert len(output_lines) + dropped + len(rest) == count
    assert rest == [str(number) for number in range(count - len(rest), count)]
    assert len(rest) == min(LAST_LINES, count - len(output_lines))


def test_dropped_lines_are_reported_once_a_second() -> None:
    lines = LineSplitter()
    lines.feed(b"x\n" * (LINES_PER_S + 1000), 10.0)

    assert lines.report(10.9) == []
    assert lines.feed(b"y\n", 11.0) == ["1000 lines dropped", "y"]
    assert lines.report(12.1) == []


class Ahead(asyncio.SelectorEventLoop):
    """An event loop whose clock can also be advanced by hand."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def test_dropped_lines_are_reported_without_further_output() -> None:
    output_lines: list[str] = []
    loop = Ahead()

    async def write() -> None:
        read, written = os.pipe()
        output = Output(read, "component 'C'", {}, on_line=output_lines.append)
        for text, hundredths in ((b"x\n", 50), (b"x\n" * 600, 60), (b"x\n" * 700, 150)):
            os.write(written, text)
            for _ in range(hundredths):
                loop.ahead_s += 0.01
                for _ in range(3):
                    await asyncio.sleep(0)
        assert [line for line in output_lines if line != "x"] == ["101 lines dropped", "200 lines dropped"]
        output.close()
        os.close(written)

    try:
        loop.run_until_complete(write())
    finally:
        loop.close()


@pytest.mark.slow
class TestOutput:
    """With real workers."""

    def test_the_output_of_a_worker_is_logged_with_its_log_fields(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)

        async def work() -> None:
            worker = Worker(order(log_fields={"model": "iris"}))
            await worker.call(CALL, b"print hello\nyou")
            await ended(worker)

        scene(work())

        assert [(record.getMessage(), record.__dict__["model"]) for record in caplog.records] == [
            ("the test's worker: hello", "iris"),
            ("the test's worker: you", "iris"),
        ]

    def test_harmless_lines_are_logged_at_debug_level(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "penstock.workers")

        async def work() -> None:
            worker = Worker(order(harmless_lines=("is on", "is off")))
            await worker.call(CALL, b"print a: oneDNN is on.\nan error")
            await ended(worker)

        scene(work())

        assert [(record.levelname, record.getMessage()) for record in caplog.records][:2] == [
            ("DEBUG", "the test's worker: a: oneDNN is on."),
            ("INFO", "the test's worker: an error"),
        ]

    def test_the_last_output_of_a_crashed_worker_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)

        async def work() -> None:
            worker = Worker(order())
            worker.call(CALL, b"write no end of line")
            with pytest.raises(WorkerLost):
                await worker.call(CALL, b"crash")
            await worker.ended

        scene(work())
        messages = [record.getMessage() for record in caplog.records]

        assert messages[0] == "the test's worker: no end of lineFatal Python error: Segmentation fault"
        assert any("in crash" in line for line in messages)
        assert messages[-1] == "the test's worker ended: signal 11 (SIGSEGV)"

    def test_a_flood_of_output_is_dropped_except_for_its_end(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)

        async def work() -> None:
            worker = Worker(order())
            await worker.call(CALL, b"flood 100000")
            await ended(worker)

        scene(work())
        messages = [record.getMessage() for record in caplog.records]
        dropped = [int(found[1]) for line in messages if (found := re.search(r"(\d+) lines dropped", line))]

        assert messages[-1] == "the test's worker: line 99999"
        assert len(messages) - len(dropped) + sum(dropped) == 100_000

    def test_the_traceback_of_a_failed_call_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)

        async def work() -> None:
            worker = Worker(order())
            await asyncio.gather(worker.call(CALL, b"fail badly"), return_exceptions=True)
            await ended(worker)

        scene(work())

        assert "the test's worker: ValueError: badly" in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("least", "logged", "level"),
    [
        (logging.INFO, True, logging.INFO),
        (logging.WARNING, True, logging.WARNING),
        (logging.WARNING, False, None),
        (logging.CRITICAL, True, None),
    ],
)
def test_always_logged_output_uses_the_level_of_the_logger(
    least: int, logged: bool, level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def write() -> None:
        read, written = os.pipe()
        os.write(written, b"said\n")
        os.close(written)
        Output(read, "component 'C'", {}, always_logged=logged).close()

    with caplog.at_level(least, "penstock.workers"):
        asyncio.run(write())

    assert [(record.levelno, record.message) for record in caplog.records] == (
        [] if level is None else [(level, "component 'C': said")]
    )
