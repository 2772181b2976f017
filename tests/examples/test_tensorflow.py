"""The commands of examples/tensorflow/README.md make a model that answers as the README states."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.perf.server_process import penstock

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_model_made_by_the_readmes_commands_answers_as_stated(tmp_path: Path) -> None:
    for name in ("iris", "tensorflow"):
        shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("1"))
    text = (EXAMPLES / "tensorflow" / "README.md").read_text("utf-8")
    (block,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    python, flag, program = shlex.split(block, comments=True)
    (stated,) = re.findall(r"with their classes, `(.*)`", text)
    training = subprocess.run(
        [sys.executable, tmp_path / "tensorflow" / "make.py"], capture_output=True, text=True, check=True
    )
    assert int(training.stdout.split()[0]) > 140

    assert (python, flag) == (".venv/bin/python", "-c")
    with penstock(tmp_path / "tensorflow" / "models") as server:
        program = program.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == stated
