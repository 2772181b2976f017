"""The errors of a model.py that cannot be loaded: they show its own code, and nothing of how it was imported."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.server.python_models.inside.errors import failure_text, line_of_error, traceback_text
from penstock.server.python_models.messages import LOG
from penstock.server.python_models.upcalls import Upcalls


def failure(file: Path) -> Exception:
    spec = importlib.util.spec_from_file_location("failing", file)
    assert spec is not None
    assert spec.loader is not None
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:  # noqa: BLE001 - whatever the file raises
        importing = error.__traceback__
        return error.with_traceback(importing and importing.tb_next)
    raise AssertionError


def test_error_texts_contain_only_frames_of_user_code(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("def licence():\n    raise RuntimeError('none found')\n\n\nlicence()\n")
    error = failure(file)

    at = f"\n\nAt:\n  {file}(2): licence\n  {file}(5): <module>\n"
    assert failure_text(error) == f"RuntimeError: none found{at}"
    first, _, second, *_ = traceback_text(error).splitlines()
    assert first == "RuntimeError: none found"
    assert second == f'  File "{file}", line 5, in <module>'


def test_a_syntax_error_is_reported_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("def execute(self requests):\n")
    error = failure(file)

    assert failure_text(error) == traceback_text(error) == "SyntaxError: invalid syntax (model.py, line 1)"
    assert line_of_error(str(file), error) == 1


def test_a_traceback_from_user_code_is_logged_as_the_exception_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "model.py"
    file.write_text("raise RuntimeError('none found')\n")
    log_record = {"level": "error", "file": str(file), "line": 1, "message": traceback_text(failure(file))}
    nobody: Any = None

    Upcalls(nobody, {"model": "m"}, nobody).on_message(LOG, 0, json.dumps(log_record).encode(), [])

    (record,) = caplog.records
    assert record.getMessage() == f"{file}:1: RuntimeError: none found"
    assert (record.exc_text or "").splitlines()[0] == "Traceback (most recent call last):"
