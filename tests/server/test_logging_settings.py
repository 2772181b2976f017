"""Log settings: which values they accept and reject, and that the process then logs accordingly."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.settings import Settings, resolve
from penstock.server.telemetry.logs import LogLevels, Logs
from penstock.server.v2.logging_settings import LogSettings, settings_object

logger = logging.getLogger("penstock.test")
EVERY = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
    "log_format": "default",
}  # fmt: skip


def settings_for(**settings: Any) -> tuple[LogSettings, list[LogLevels]]:
    applied: list[LogLevels] = []
    return LogSettings(Settings(**settings), applied.append), applied


def say_all() -> None:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "%s", logging.getLevelName(level).lower())


def logged(changes: dict[str, Any]) -> list[str]:
    """Log at every level after a change, and return the lines written."""
    stream = io.StringIO()
    settings = Settings(log_format="json")
    logs = Logs(settings, stream)
    logs.start()
    try:
        LogSettings(settings, logs.apply).update(changes)
        say_all()
    finally:
        logs.stop()
    return stream.getvalue().splitlines()


def test_log_settings_have_the_names_and_order_of_triton() -> None:
    settings, _ = settings_for()

    assert list(settings.read().items()) == list(EVERY.items())


def test_log_settings_begin_with_the_values_of_the_flags() -> None:
    settings, _ = settings_for(log_info=False, log_verbose=2, log_file="/tmp/x.log")

    assert settings.read() == EVERY | {"log_file": "/tmp/x.log", "log_info": False, "log_verbose_level": 2}


@pytest.mark.parametrize(("flag", "read"), [("ISO8601", "ISO8601"), ("default", "default"), ("text", "default")])
def test_the_log_format_flag_accepts_the_values_of_triton(flag: str, read: str) -> None:
    stream = io.StringIO()
    logs = Logs(resolve({"log_format": flag, "log_verbose": "256"}, {}), stream)
    settings, _ = settings_for(log_format=flag, log_verbose=256)
    logs.start()
    logging.getLogger("penstock.test").error("said")
    logs.stop()

    assert settings.read() == EVERY | {"log_format": read, "log_verbose_level": 256}
    assert stream.getvalue().startswith("{") == (flag == "default")


def test_a_changed_log_setting_is_read_back_and_applied() -> None:
    settings, applied = settings_for()
    settings.update({"log_warning": False, "log_verbose_level": 1, "log_format": "ISO8601"})

    assert settings.read() == EVERY | {"log_warning": False, "log_verbose_level": 1, "log_format": "ISO8601"}
    assert applied == [LogLevels(warning=False, verbose=1, format="ISO8601")]


def test_null_leaves_a_log_setting_unchanged() -> None:
    settings, applied = settings_for()
    settings.update(dict.fromkeys(EVERY))

    assert (settings.read(), applied) == (EVERY, [])


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"log_file": "x"}, Code.UNSUPPORTED, "log file location can not be updated through network protocol"),
        ({"log_info": "true"}, Code.INVALID, "expect boolean for 'log_info'"),
        ({"log_error": 1}, Code.INVALID, "expect boolean for 'log_error'"),
        ({"log_verbose_level": -1}, Code.INVALID, "expect int32 for 'log_verbose_level'"),
        ({"log_verbose_level": True}, Code.INVALID, "expect int32 for 'log_verbose_level'"),
        ({"log_verbose_level": 2**32}, Code.INVALID, "expect int32 for 'log_verbose_level'"),
        ({"log_format": 1}, Code.INVALID, "expect string for 'log_format'"),
        ({"log_format": "xml"}, Code.INVALID, "invalid argument for log_format, got: xml"),
        ({"log_color": True}, Code.INVALID, "unknown log setting 'log_color'"),
    ],
)
def test_an_invalid_log_setting_is_rejected_and_changes_nothing(changes: dict[str, Any], code: Code, text: str) -> None:
    settings, applied = settings_for()

    with pytest.raises(InferError) as raised:
        settings.update({"log_info": False, **changes})

    assert (raised.value.code, raised.value.message) == (code, text)
    assert (settings.read(), applied) == (EVERY, [])


@pytest.mark.parametrize("body", [b"[]", b"1", b"{", b'"x"', b"null"])
def test_log_settings_must_be_a_json_object(body: bytes) -> None:
    with pytest.raises(InferError):
        settings_object(body)


def test_an_empty_body_requests_no_change() -> None:
    assert settings_object(b" \n") == {}


@pytest.mark.parametrize(
    ("changes", "levels"),
    [
        ({}, ["info", "warning", "error"]),
        ({"log_verbose_level": 1}, ["debug", "info", "warning", "error"]),
        ({"log_info": False}, ["warning", "error"]),
        ({"log_warning": False}, ["info", "error"]),
        ({"log_info": False, "log_warning": False, "log_error": False}, []),
    ],
)
def test_the_process_logs_the_levels_that_were_set(changes: dict[str, Any], levels: list[str]) -> None:
    assert [json.loads(line)["msg"] for line in logged(changes)] == levels


def test_iso8601_is_one_line_of_text_that_begins_with_the_time() -> None:
    first, *_ = logged({"log_format": "ISO8601"})

    stamp, rest = first.split(" ", 1)
    assert (stamp[10], stamp[-1], rest) == ("T", "Z", "INFO test: info")


def test_the_log_level_is_restored_when_logs_stop() -> None:
    before = logging.getLogger("penstock").level
    logged({"log_verbose_level": 1})

    assert logging.getLogger("penstock").level == before


def test_only_the_level_of_the_penstock_logger_changes_within_another_program() -> None:
    ours, root = logging.getLogger("penstock"), logging.getLogger()
    before = ours.level, root.level
    try:
        LogSettings(Settings()).update({"log_info": False})
        assert (ours.level, root.level) == (logging.WARNING, before[1])
    finally:
        ours.setLevel(before[0])
