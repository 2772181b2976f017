"""`penstock perf tune` against a live server, from its words to its files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.perf import command as perf
from penstock.perf.generator.orders import Target
from penstock.perf.profiling.control import control_for
from penstock.perf.reports import document as documents
from penstock.perf.tuning import command, duels, live_bench
from penstock.perf.tuning.duels import Measurement, Round
from penstock.perf.tuning.knobs import ORIGINAL, Setting, value_of
from penstock.perf.tuning.search import SearchResult, Trial
from penstock.server.repository.pbtxt import parse
from tests.clients import models
from tests.live import Live, live_server

TWO: Setting = (("instance_count", 2),)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = models.write_examples(tmp_path_factory.mktemp("repository"))
    with live_server(root, model_control_mode="explicit", load_model=("simple",)) as server:
        yield server


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Duel over one round: whatever wins it."""
    monkeypatch.setattr(live_bench, "WARM_UP_MS", 5)
    monkeypatch.setattr(duels, "ROUNDS_TO_WIN", (1, 1))


def served(live: Live) -> dict[str, Any]:
    return control_for(Target("127.0.0.1", live.http_port)).config("simple")


def words(live: Live, out: Path, more: str) -> list[str]:
    return f"tune -m simple -u {live.address} --concurrency-range 2 -p 15 --out {out} {more}".split()


def test_every_setting_is_tried_and_the_model_is_restored(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = served(live)
    status = perf.main(words(live, tmp_path, "--over instance_count --cores 4"))

    assert status == 0, capsys.readouterr().err
    assert served(live) == before
    found = json.loads((tmp_path / "evidence.json").read_text("utf-8"))
    assert [trial["setting"] for trial in found["trials"]] == [{"instance_count": 2}]
    assert all(trial["verdict"] for trial in found["trials"])
    runs = [documents.read(tmp_path / each["file"]) for each in found["documents"]]
    assert all(level.client.requests and not level.client.errors for run in runs for level in run.levels)
    assert (tmp_path / "config.pbtxt").exists() == bool(found["kept"])


def test_the_kept_setting_is_written_loadable_and_stays_applied_on_request(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = Trial("", TWO, ORIGINAL, rounds=[Round(Measurement(1.0), Measurement(1.2))], verdict="ahead", kept=True)

    class Decided:
        def __init__(self, *is_written: object) -> None:
            self.found = SearchResult(TWO, confirmed=True, final_trial=last)

        def run(self) -> SearchResult:
            return self.found

    monkeypatch.setattr(command, "Search", Decided)
    assert perf.main(words(live, tmp_path, "--apply")) == 0, capsys.readouterr().err

    written, _ = parse(tmp_path / "config.pbtxt")
    assert [group.count for group in written.instance_group] == [2]
    assert "count = 2" in (tmp_path / "penstock.toml").read_text("utf-8")
    assert value_of(served(live), ORIGINAL, "instance_count") == 2


def test_a_missing_model_is_reported_in_one_line(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert perf.main(f"tune -m none -u {live.address} --out {tmp_path}".split()) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_invalid_arguments_are_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert perf.main(["tune", "-m", "m", "--out", str(tmp_path), "-l", "5"]) == 2
    assert perf.main(["tune", "-m", "m"]) == 2
    assert perf.main(["tune", "--help"]) == 0
    assert "--latency-target" in capsys.readouterr().out
