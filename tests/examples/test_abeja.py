"""The handlers under examples/abeja are served and called as their README states."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.abeja.serving import Served, serving

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "abeja"
README = (EXAMPLE / "README.md").read_text("utf-8")
CURLS = [line for line in README.splitlines() if line.startswith("curl ")]
CHECK, TAX, FLIP = (
    line.removeprefix("penstock ") for line in README.splitlines() if line.startswith("penstock ") and " " in line[10:]
)
ANSWERS = [text.strip() for text in re.findall(r"```json\n(.*?)```", README, re.DOTALL)]
WITHIN_S = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("example") / "abeja")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder=folder / "tax") as found:
        yield found


def curl(served: Served, line: str) -> str:
    for port, name in (("5000", ""), ("5001", "health")):
        line = line.replace(f"127.0.0.1:{port}", f"127.0.0.1:{served.ports[name]}")
    return subprocess.run(shlex.split(line), capture_output=True, text=True, check=True, timeout=WITHIN_S).stdout


def called(folder: Path, line: str) -> bytes:
    words = [sys.executable, "-m", "penstock.server.cli", *shlex.split(line.partition(">")[0])]
    there = {**os.environ, "PENSTOCK_ABEJA_INSTALL": "false"}
    return subprocess.run(words, cwd=folder, env=there, capture_output=True, check=True, timeout=WITHIN_S).stdout


def test_the_abeja_example_answers_as_its_readme_states(served: Served) -> None:
    assert [curl(served, line) for line in CURLS] == ANSWERS


def test_check_reports_no_mistakes_in_the_abeja_example(folder: Path) -> None:
    assert b"0 mistakes" in called(folder / "tax", CHECK)
    assert b"0 mistakes" in called(folder / "flip", CHECK)


def test_the_tax_handler_can_be_called_without_a_server(folder: Path) -> None:
    assert json.loads(called(folder / "tax", TAX)) == json.loads(ANSWERS[0])


def test_the_flip_handler_mirrors_the_image(folder: Path) -> None:
    pytest.importorskip("cv2")
    image = pytest.importorskip("PIL.Image")
    before: Any = np.asarray(image.open(folder / "flip" / "cat.jpg"), np.int16)
    after: Any = np.asarray(image.open(io.BytesIO(called(folder / "flip", FLIP))), np.int16)

    assert after.shape == before.shape
    assert abs(after - before[:, ::-1]).mean() < 4 < abs(after - before).mean()
