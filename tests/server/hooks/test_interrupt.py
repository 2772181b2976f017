from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.server.hooks.pool_thread import InterruptedHookError, interrupt


@contextmanager
def spinning(file: Path) -> Iterator[SimpleNamespace]:
    """Have a thread spin in a function of `file` until it is interrupted or the block ends."""
    names = {"go_on": [True], "began": threading.Event()}
    exec(compile("def spin():\n    began.set()\n    while go_on: pass\n", str(file), "exec"), names)
    spins = SimpleNamespace(raised=None, began=names["began"])

    def run() -> None:
        try:
            names["spin"]()  # type: ignore[operator]
        except InterruptedHookError as error:
            spins.raised = error

    spins.thread = threading.Thread(target=run)
    spins.thread.start()
    assert spins.began.wait(5)
    try:
        yield spins
    finally:
        names["go_on"].clear()  # type: ignore[attr-defined]
        spins.thread.join(5)


@pytest.mark.parametrize("file", ["handlers/h.py", "encoder.py", "src/deep/x.py"])
def test_a_thread_that_spins_in_a_file_of_the_project_is_interrupted(tmp_path: Path, file: str) -> None:
    with spinning(tmp_path / file) as spins:
        assert interrupt(spins.thread.ident, tmp_path / "handlers", tmp_path)
        spins.thread.join(5)
    assert isinstance(spins.raised, InterruptedHookError)


@pytest.mark.parametrize("file", ["venv/lib/site-packages/x.py", "../other.py"])
def test_a_thread_that_spins_outside_the_project_is_not_interrupted(tmp_path: Path, file: str) -> None:
    (tmp_path / "p").mkdir()
    with spinning((tmp_path / "p" / file).resolve()) as spins:
        assert not interrupt(spins.thread.ident, tmp_path / "p" / "handlers", tmp_path / "p")
    assert spins.raised is None
