from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.settings import Settings
from penstock.server.telemetry.log_file import LogFile, LogFileError
from penstock.server.telemetry.logs import MAX_TEXT_CHARS, QUEUE_RECORDS, Logs, escaped

logger = logging.getLogger("penstock.test")


@contextmanager
def logs_to(stream: io.StringIO, settings: Settings | None = None) -> Iterator[Logs]:
    logs = Logs(settings or Settings(log_format="json"), stream)
    logs.start()
    try:
        yield logs
    finally:
        logs.stop()


def logged(say: Callable[[], object], settings: Settings | None = None) -> str:
    stream = io.StringIO()
    with logs_to(stream, settings):
        say()
    return stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class StuckStream(io.StringIO):
    """A stream that blocks until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.free = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.free.wait()
        return super().write(text)


def test_a_json_record_has_time_level_message_logger_and_extra_fields() -> None:
    text = logged(lambda: logger.error("model %s broke", "iris", extra={"request_id": "r1", "model": "iris"}))

    line = json.loads(text)
    assert list(line) == ["ts", "level", "msg", "logger", "request_id", "model"]
    assert line["ts"].endswith("Z")
    assert {**line, "ts": ""} == {
        "ts": "",
        "level": "ERROR",
        "msg": "model iris broke",
        "logger": "penstock.test",
        "request_id": "r1",
        "model": "iris",
    }


def test_a_text_record_is_one_readable_line() -> None:
    text = logged(
        lambda: logger.info("served", extra={"model": "iris", "why": "a reason", "path": ""}),
        Settings(log_format="text"),
    )

    assert text.partition(" ")[2] == 'INFO test: served model=iris why="a reason" path=""\n'


def test_the_auto_format_is_text_on_a_terminal_and_json_elsewhere() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with logs_to(stream, Settings()):
            logger.info("hello")

    assert terminal.getvalue().endswith("INFO test: hello\n")
    assert json.loads(pipe.getvalue())["msg"] == "hello"


def test_a_traceback_is_part_of_the_record() -> None:
    def fail() -> None:
        try:
            raise KeyError("first\nsecond")
        except KeyError:
            logger.exception("failed")

    line = json.loads(logged(fail))
    text = logged(fail, Settings(log_format="text"))

    assert line["msg"] == "failed"
    assert "KeyError" in line["traceback"]
    first, *rest = text.splitlines()
    assert first.endswith("ERROR test: failed")
    assert all(other.startswith("    ") for other in rest)


@given(st.text())
def test_escaped_text_stays_on_one_line_and_can_always_be_written(text: str) -> None:
    safe = escaped(text)

    assert len(safe.splitlines()) <= 1
    assert safe.encode("utf-8").decode("utf-8") == safe
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in safe)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_client_cannot_forge_a_log_line(log_format: str) -> None:
    forged = 'x"}\n2026-01-01T00:00:00.000Z INFO serve: \x1b[2Jforged\r\u2028\u202e'

    text = logged(lambda: logger.error("no %s", forged, extra={"model": forged}), Settings(log_format=log_format))

    assert len(text.splitlines()) == 1
    assert text.rstrip("\n").isprintable()


def test_a_very_long_message_is_truncated() -> None:
    text = logged(lambda: logger.error("x" * 10 * MAX_TEXT_CHARS))

    assert json.loads(text)["msg"].endswith(f"... ({10 * MAX_TEXT_CHARS} characters)")
    assert len(text) < 2 * MAX_TEXT_CHARS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), ["INFO", "WARNING", "ERROR"]),
        (Settings(log_verbose=1), ["DEBUG", "INFO", "WARNING", "ERROR"]),
        (Settings(log_info=False), ["WARNING", "ERROR"]),
        (Settings(log_warning=False), ["INFO", "ERROR"]),
        (Settings(log_info=False, log_warning=False, log_error=False), []),
    ],
)
def test_each_log_level_is_switched_separately(settings: Settings, expected: list[str]) -> None:
    def say() -> None:
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "x")

    assert [json.loads(line)["level"] for line in logged(say, settings).splitlines()] == expected


def test_uvicorn_records_are_logged_once_and_only_from_warning_up() -> None:
    def say() -> None:
        logging.getLogger("uvicorn.error").info("Started server process")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")

    lines = [json.loads(line) for line in logged(say).splitlines()]
    assert [(line["logger"], line["msg"]) for line in lines] == [("uvicorn.error", "Invalid HTTP request received.")]


def test_logging_never_waits_for_the_stream_and_reports_dropped_records() -> None:
    stream = StuckStream()
    with logs_to(stream) as logs:
        logger.info("first")
        stream.entered.wait()
        for _ in range(QUEUE_RECORDS + 7):
            logger.info("x")
        dropped = logs.dropped
        stream.free.set()

    messages = [json.loads(line)["msg"] for line in stream.getvalue().splitlines()]
    assert dropped == 7
    assert len(messages) == QUEUE_RECORDS + 2
    assert messages[1] == "7 log records dropped: they could not be written fast enough"


def test_a_closed_stream_does_not_end_the_writer() -> None:
    stream = io.StringIO()
    with logs_to(stream):
        stream.close()
        logger.info("lost")

    assert "penstock-logs" not in [thread.name for thread in threading.enumerate()]


class Textless:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("log_format", "about"), [("json", {(1, 2): "a key that is no name"}), ("json", Textless()), ("text", Textless())]
)
def test_an_extra_field_that_cannot_be_formatted_loses_neither_the_record_nor_the_writer(
    log_format: str, about: object
) -> None:
    def say() -> None:
        logger.info("first", extra={"counts": about, "model": "iris"})
        logger.info("second")

    first, second = logged(say, Settings(log_format=log_format)).splitlines()

    assert "first (the details cannot be formatted: " in first
    assert "iris" in first
    assert "second" in second


def test_a_message_that_does_not_match_its_arguments_is_reported_without_an_exception(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own handlers raise such an error

    def say() -> None:
        logger.info("%d rows", "many")
        logger.warning("%d rows", "many")
        logger.info("next")

    text = logged(say)

    assert json.loads(text)["msg"] == "next"
    assert capsys.readouterr().err.count("Message: '%d rows'") == 2


def test_stopping_logs_restores_the_previous_logging_configuration() -> None:
    before = (logging.getLogger().level, list(logging.getLogger().handlers), logging.getLogger("penstock").level)

    logged(lambda: logger.info("x"))

    after = (logging.getLogger().level, list(logging.getLogger().handlers), logging.getLogger("penstock").level)
    assert after == before


def test_every_record_of_a_named_process_has_its_process_name() -> None:
    stream = io.StringIO()
    logs = Logs(Settings(log_format="json"), stream, "front-1")
    logs.start()
    logger.info("here")
    logs.stop()

    assert json.loads(stream.getvalue())["process_name"] == "front-1"


def test_records_are_appended_to_the_log_file_instead_of_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest's own handlers would put the surrogate in a report that xdist cannot send
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    path = tmp_path / "penstock.log"
    path.write_text("before\n")
    settings = Settings(log_format="text", log_file=str(path))

    stream = logged(lambda: logger.info("one \udc80 \u20ac"), settings)
    stream += logged(lambda: logger.info("two"), settings)

    before, one, two = path.read_text("utf-8").splitlines()
    assert (stream, before) == ("", "before")
    assert one.endswith(r"INFO test: one \udc80 " + "\u20ac")
    assert two.endswith("INFO test: two")


def test_processes_append_whole_lines_to_one_log_file(tmp_path: Path) -> None:
    path = tmp_path / "penstock.log"
    settings = Settings(log_format="text", log_file=str(path))
    text = "x" * 10_000
    with logs_to(io.StringIO(), settings) as one, logs_to(io.StringIO(), settings):
        for _ in range(20):
            logger.info(text)

    assert one.dropped == 0
    assert [line.rpartition(" ")[2] for line in path.read_text("utf-8").splitlines()] == [text] * 40


@pytest.mark.parametrize(("name", "why"), [("no/such.log", "No such file or directory"), ("", "Is a directory")])
def test_a_log_file_that_cannot_be_opened_is_a_one_line_error(tmp_path: Path, name: str, why: str) -> None:
    path = tmp_path / name

    with pytest.raises(LogFileError, match=f"--log-file {path}: failed to open log file: {why}"):
        Logs(Settings(log_file=str(path)), io.StringIO())


FULL = """
import logging, resource, sys
from penstock.server.settings import Settings
from penstock.server.telemetry.logs import Logs

path, most = sys.argv[1], resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
logs = Logs(Settings(log_format="text", log_file=path), sys.stderr)
logs.start()
for number in range(9):
    logging.getLogger("penstock.test").info("%d %s", number, 150 * "x")
while logs._lost_count < 3:
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
logging.getLogger("penstock.test").info("again")
logs.stop()
"""


def test_a_full_disk_is_reported_once_on_stderr_and_logging_resumes_when_space_is_free(tmp_path: Path) -> None:
    path = tmp_path / "penstock.log"
    words = [sys.executable, "-c", FULL, str(path)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stderr

    text = f"penstock: --log-file {path}: File too large; log records are lost until this is fixed\n"
    assert printed == text
    # 5 is the line that was written in two parts
    lines = [line.partition(": ")[2].split(" x")[0] for line in path.read_text().splitlines()]
    assert lines == ["0", "1", "2", "3", "4", "5", "again", "3 log records are lost: the log could not be written"]


def test_a_partly_written_log_line_is_completed_before_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, room = LogFile(str(tmp_path / "log")), [8]

    class Disk:
        def write(self, text: bytes) -> int:
            accepted = text[: room[0]]
            room[0] -= len(accepted)
            if not accepted:
                raise OSError(28, "No space left on device")
            written.extend(accepted)
            return len(accepted)

    written = bytearray()
    file.close()
    monkeypatch.setattr(file, "_file", Disk())
    file.write("first\n")
    file.write("second\n")
    with pytest.raises(OSError, match="No space"):
        file.write("lost\n")
    room[0] = 100
    file.write("third\n")

    assert written == b"first\nsecond\nthird\n"
