"""What a worker writes to standard error about a hook file that cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import InferError
from penstock.server.hooks.worker_service import open_service


def test_the_traceback_of_a_failed_load_begins_in_the_hook_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hooks.py"
    path.write_text("def licence():\n    raise RuntimeError('none found')\n\n\nlicence()\n")
    nobody: Any = None

    with pytest.raises(InferError, match="cannot be loaded: RuntimeError: none found"):
        open_service(
            {"path": str(path), "decoupled": False, "roots": [], "mounts": {}, "dialect": "", "model": "m"}, nobody
        )

    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{path}", line 5, in <module>']
    assert lines[-1] == "RuntimeError: none found"
