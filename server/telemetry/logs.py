"""Logs: each record of the process as one line, written by a dedicated thread so that no event loop waits for a disk.

Started and stopped by the process shell (`process.run`), never by a Server: logging belongs to the process. Records
carry their context as `extra={"request_id": ..., "model": ...}`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import queue
import re
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from penstock.server.settings import Settings

from .log_file import LogFile
from .repeats import WINDOW_S, Repeats

QUEUE_RECORDS = 10_000
MAX_TEXT_CHARS = 16_384
STOP_TIMEOUT_S = 2.0

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
# Control characters, line separators, lone surrogates and bidirectional marks, with which a client could forge a line
# or confuse a terminal.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LogLevels:
    """What is logged, and how: `format` is "default", the operator's choice, or "ISO8601", lines of text."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: int = 0
    format: str = "default"

    @classmethod
    def from_settings(cls, settings: Settings) -> LogLevels:
        """Return the levels in the settings."""
        form = "ISO8601" if settings.log_format == "ISO8601" else "default"
        return cls(settings.log_info, settings.log_warning, settings.log_error, settings.log_verbose, form)

    def allows(self, level: int) -> bool:
        """Return whether records of a level are written; critical ones always are."""
        if level >= logging.CRITICAL:
            return True
        if level >= logging.ERROR:
            return self.error
        if level >= logging.WARNING:
            return self.warning
        return self.info if level >= logging.INFO else self.verbose > 0

    @property
    def lowest(self) -> int:
        """The lowest level that is written."""
        levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
        return next((level for level in levels if self.allows(level)), logging.CRITICAL)


def escaped(text: str) -> str:
    """Make any text safe to show on one line."""
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]}... ({len(text)} characters)"
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def _stamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`2026-01-01T00:00:00.000Z INFO serve: message key=value`; a traceback follows, each line indented."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_stamp(record), record.levelname, f"{record.name.removeprefix('penstock.')}: {escaped(record.msg)}"]
        for name, value in _extras(record).items():
            text = escaped(str(value))
            parts.append(f"{name}={json.dumps(text) if set(text) & set(' =') or not text else text}")
        lines = [" ".join(parts)]
        if record.exc_text:
            lines += ["    " + escaped(line) for line in record.exc_text.split("\n")]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One JSON object: ts, level, msg, logger, the record's extra values, and its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"ts": _stamp(record), "level": record.levelname, "msg": record.msg, "logger": record.name}
        if len(record.msg) > MAX_TEXT_CHARS:
            line["msg"] = escaped(record.msg)
        line |= {name: value for name, value in _extras(record).items() if name not in line}
        if record.exc_text:
            line["traceback"] = record.exc_text
        return json.dumps(line, default=str)


def _traceback(exc_info: Any) -> str:
    """Format a traceback. Python 3.11 parses source for it, and raises SystemError if two threads do so at once."""
    for _ in range(3):
        with contextlib.suppress(SystemError):
            return logging.Formatter().formatException(exc_info)
    return repr(exc_info[1])


def _loggers(levels: LogLevels) -> dict[str, int]:
    """Return the level of each logger: Penstock's, and higher ones for libraries."""
    lowest = levels.lowest
    return {"": max(lowest, logging.INFO), "penstock": lowest, "uvicorn.error": max(lowest, logging.WARNING)}


class _RecordQueue(logging.Handler):
    """Puts records into the queue without waiting: what does not fit is dropped and counted.

    Repeated records are not rendered (repeats.py). Threads: any; `emit` is called with its lock held.
    """

    def __init__(self, records: queue.Queue[logging.LogRecord | None], process: str) -> None:
        super().__init__()
        self.records = records
        self.dropped = 0
        self.repeats = Repeats()
        self._context = {"process_name": process} if process else {}

    def emit(self, record: logging.LogRecord) -> None:
        try:
            now_s = time.monotonic()
            for summary in self.repeats.pop_expired(now_s):
                self._put(summary)
            if self.repeats.allows(record, now_s):
                self._put(record)
        except Exception:  # noqa: BLE001 - a format error must not reach the caller
            self.handleError(record)

    def flush_repeats(self, now_s: float) -> None:
        """Put summaries of repeats whose window has ended when nothing else is logged."""
        with self.lock:  # type: ignore[union-attr]
            for summary in self.repeats.pop_expired(now_s):
                self._put(summary)

    def _put(self, record: logging.LogRecord) -> None:
        # Rendered here: arguments may change, and a traceback would keep its frames alive.
        rendered = copy.copy(record)
        rendered.msg = record.getMessage()
        rendered.args = None
        vars(rendered).update(self._context)
        if record.exc_info:
            rendered.exc_text = record.exc_text or _traceback(record.exc_info)
            rendered.exc_info = None
        try:
            self.records.put_nowait(rendered)
        except queue.Full:
            self.dropped += 1


class Logs:
    """The process's logging from `start` to `stop`.

    Threads: records may come from any; one thread writes them. `dropped` counts records not written because the writer
    fell behind by QUEUE_RECORDS. `process` is included in every record, if a server has several.
    """

    def __init__(self, settings: Settings, stream: TextIO, process: str = "") -> None:
        """Open the log file, if configured; otherwise the log goes to `stream`. Raises: LogFileError."""
        self._fallback = stream
        self._file = LogFile(settings.log_file) if settings.log_file else None
        self._stream: LogFile | TextIO = self._file or stream
        self._lost_count = 0
        text = settings.log_format == "text" or (settings.log_format != "json" and self._stream.isatty())
        self._default_formatter = TextFormatter() if text else JsonFormatter()
        self._formatter: logging.Formatter = self._default_formatter
        self._levels = LogLevels.from_settings(settings)
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(QUEUE_RECORDS)
        self._record_queue = _RecordQueue(self._records, process)
        self._record_queue.addFilter(lambda record: self._levels.allows(record.levelno))
        self._writer = threading.Thread(target=self._write_all, name="penstock-logs", daemon=True)
        self._previous_levels: list[tuple[logging.Logger, int]] = []

    @property
    def dropped(self) -> int:
        """Records that were not written."""
        return self._record_queue.dropped

    def start(self) -> None:
        """Take over the root logger and those of verbose libraries."""
        for name in _loggers(self._levels):
            logger = logging.getLogger(name)
            self._previous_levels.append((logger, logger.level))
        self.apply(self._levels)
        logging.getLogger().addHandler(self._record_queue)
        logging.captureWarnings(capture=True)
        self._writer.start()

    def apply(self, levels: LogLevels) -> None:
        """Apply new levels. Call it after `start`."""
        self._levels = levels
        self._formatter = TextFormatter() if levels.format == "ISO8601" else self._default_formatter
        for name, level in _loggers(levels).items():
            logging.getLogger(name).setLevel(level)

    def stop(self) -> None:
        """Write what is queued and restore logging; waits at most STOP_TIMEOUT_S for a stuck stream."""
        logging.captureWarnings(capture=False)
        logging.getLogger().removeHandler(self._record_queue)
        for logger, level in self._previous_levels:
            logger.setLevel(level)
        self._record_queue.flush_repeats(math.inf)
        with contextlib.suppress(queue.Full):
            self._records.put(None, timeout=STOP_TIMEOUT_S)
        self._writer.join(STOP_TIMEOUT_S)

    def _write_all(self) -> None:
        reported = 0
        while (record := self._next()) is not None:
            self._write(record)
            if (dropped := self.dropped) > reported:
                message = f"{dropped - reported} log records dropped: they could not be written fast enough"
                self._write(logging.makeLogRecord({"name": "penstock.logs", "levelname": "WARNING", "msg": message}))
                reported = dropped
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _next(self) -> logging.LogRecord | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._records.get(timeout=WINDOW_S if self._record_queue.repeats else None)
            self._record_queue.flush_repeats(time.monotonic())

    def _write(self, record: logging.LogRecord) -> None:
        # A closed or full stream, or a record that cannot be written, must not end the writer.
        text = self._text_of(record)
        try:
            self._stream.write(text + "\n")
            if self._records.empty():
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._lost_count += 1
            if self._lost_count == 1:
                self._report_loss(error)
            return
        if self._lost_count:
            lost, self._lost_count = self._lost_count, 0
            message = f"{lost} log records are lost: the log could not be written"
            self._write(logging.makeLogRecord({"name": "penstock.logs", "levelname": "WARNING", "msg": message}))

    def _text_of(self, record: logging.LogRecord) -> str:
        """Format a record; if its `extra`, which may hold any user objects, cannot be formatted, it is omitted."""
        try:
            return self._formatter.format(record)
        except Exception as error:  # noqa: BLE001 - __str__ may be user code
            safe_values = {
                name: value for name, value in vars(record).items() if name in _STANDARD or isinstance(value, str)
            }
            safe_values["msg"] = f"{record.msg} (the details cannot be formatted: {type(error).__name__})"
            return self._formatter.format(logging.makeLogRecord(safe_values))

    def _report_loss(self, error: OSError | ValueError) -> None:
        """Report on the stream why the file cannot be written; a failure of the stream itself cannot be reported."""
        if self._file is not None and isinstance(error, OSError):
            text = f"penstock: --log-file {self._file.path}: {error.strerror}; log records are lost until this is fixed"
            with contextlib.suppress(OSError, ValueError):
                self._fallback.write(f"{text}\n")
                self._fallback.flush()
