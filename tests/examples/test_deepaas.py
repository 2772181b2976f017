"""The model under examples/deepaas is served, called and trained as its README states."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forking import the_forker
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepaas"
README = (EXAMPLE / "README.md").read_text("utf-8")
CURLS = [line for line in README.splitlines() if line.startswith("curl ")]
CALLS = [line.removeprefix("penstock ") for line in README.splitlines() if line.startswith("penstock deepaas-cli")]
ANSWERS = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", README, re.DOTALL)]
WITHIN_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("example") / "deepaas")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with live_server(dialect="deepaas", model_repository=("languages=languages",), deepaas_jobs="none") as found:
            yield found


def output_of(live: Live, folder: Path, line: str) -> str:
    words = shlex.split(line.replace("127.0.0.1:5000", live.address))
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True, timeout=WITHIN_S).stdout


def called(folder: Path, line: str) -> str:
    words = [sys.executable, "-m", "penstock.server.cli", *shlex.split(line)]
    done = the_forker().run(words, cwd=folder, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    printed: str = done.stdout
    return printed


def ended(live: Live, folder: Path, uuid: str) -> Any:
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        found = {each["uuid"]: each for each in json.loads(output_of(live, folder, CURLS[6]))}[uuid]
        if found["status"] != "running":
            return found
    raise AssertionError("the training has not ended")


def test_the_deepaas_example_answers_as_its_readme_states(live: Live, folder: Path) -> None:
    metadata, spanish, german, table, refused = (output_of(live, folder, line) for line in CURLS[:5])

    assert json.loads(metadata)["languages"] == ["english", "german", "spanish"]
    assert [json.loads(spanish), json.loads(refused)] == ANSWERS
    assert [each["language"] for each in json.loads(german)["languages"]] == ["german", "english"]
    assert [line.split(",")[0] for line in table.split()] == ["german", "spanish", "english"]


def test_the_deepaas_example_trains_a_language_and_reports_its_progress(live: Live, folder: Path) -> None:
    record = json.loads(output_of(live, folder, CURLS[5]))
    done = ended(live, folder, record["uuid"])
    place = f"curl -s {live.url}/v2/models/languages/train/{record['uuid']}"

    assert record["args"] == {"language": "french", "file": ["file", "text/plain", "french.txt"], "epochs": 5}
    assert (done["status"], done["result"]["output"]) == ("done", {"language": "french", "pairs": 71})
    assert "Epoch 5/5: 71 pairs of letters" in output_of(live, folder, f"{place}/log")
    assert json.loads(output_of(live, folder, f"{place}/progress"))["epoch"] == 5
    assert "<html" in output_of(live, folder, f"{place}/page")
    assert output_of(live, folder, CURLS[3]).startswith("french,")


def test_deepaas_cli_calls_the_examples_methods_without_a_server(folder: Path) -> None:
    metadata, predicted, _ = (called(folder, line) for line in CALLS)

    assert '"name": "languages"' in metadata
    assert "'language': 'spanish'" in predicted
    assert json.loads((folder / "record.json").read_text())["result"]["output"]["pairs"] == 71


def test_check_reports_no_mistakes_in_the_deepaas_example(folder: Path) -> None:
    assert "0 mistakes" in called(folder, "check --dialect deepaas languages=languages")
