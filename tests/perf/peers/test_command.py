"""The command line, and what it does when it is stopped or nothing can be had."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.peers import command, environments, reference_answers, results
from penstock.perf.peers.environments import InstallError
from penstock.perf.peers.roster import PEERS


def parsed(*words: str) -> Any:
    return command.parser().parse_args(words)


def test_by_default_all_peers_models_and_wires_are_measured() -> None:
    args = parsed()

    assert (args.peers, args.models, args.wires) == (
        tuple(PEERS),
        ("iris", "mlp", "cnn"),
        ("json", "binary", "grpc"),
    )
    assert (args.concurrency, args.rounds, args.seconds, args.keep) == ((1, 8, 32), 3, 1.2, False)


def test_lists_are_put_in_order() -> None:
    args = parsed("--peers", "mosec, penstock", "--concurrency", "32,1,32", "--models", "cnn")

    assert (args.peers, args.concurrency, args.models) == (("penstock", "mosec"), (1, 32), ("cnn",))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--peers", "triton"], "triton: not of penstock, pytriton"),
        (["--wires", ","], "none: not of json"),
        (["--concurrency", "0"], "'0' is not a whole number above 0"),
        (["--rounds", "-1"], "not a whole number"),
        (["--seconds", "nan"], "from 0.1 to 3600"),
        (["--seconds", "x"], "from 0.1 to 3600"),
    ],
)
def test_invalid_arguments_are_rejected(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)

    assert ended.value.code == 2
    assert error in capsys.readouterr().err


@given(st.text(max_size=12))
def test_any_number_is_parsed_or_rejected_in_one_line(text: str) -> None:
    for read in (command._counts, command._seconds, command._choices_of(PEERS)):
        with contextlib.suppress(argparse.ArgumentTypeError):
            assert read(text)


def test_list_shows_each_peer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["--list", "--folder", str(tmp_path)]) == 0

    error = capsys.readouterr().out
    assert "penstock: this environment (installed)\n" in error
    assert "mosec: mosec==" in error
    assert "(not installed)" in error
    assert "    wires: own JSON, raw bytes\n" in error


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_answers, "prepare", lambda names: {})


@pytest.mark.usefixtures("nothing_runs")
def test_a_peer_that_cannot_be_installed_is_reported_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def provide(peer: Any, *words: Any) -> environments.Environment:
        if peer.name == "mosec":
            raise InstallError("no such version")
        return environments.Environment(Path("python"), {"mlserver": "1.7.1"})

    measured: list[Sequence[str]] = []
    monkeypatch.setattr(environments, "provide", provide)
    monkeypatch.setattr(command, "measure", lambda plan, peers, *rest: measured.append(list(peers)))
    page, file = tmp_path / "page.md", tmp_path / "peers.json"
    words = ["--peers", "mosec,mlserver", "--markdown", str(page), "--json", str(file)]

    assert command.main(words) == 1  # nothing was measured
    assert measured == [["mlserver"]]
    assert "Not measured: mosec: no such version." in capsys.readouterr().out
    assert "| mosec | no such version |" in page.read_text()
    assert json.loads(file.read_text())["versions"]["mlserver"]["mlserver"] == "1.7.1"


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_its_results_so_far(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], by: signal.Signals
) -> None:
    def measure(plan: Any, peers: Any, models: Any, results_found: results.Results, say: Any) -> None:
        results_found.cells.append(results.Cell("penstock", "iris", "json", "v2 JSON", 1, error="so far"))
        try:
            signal.raise_signal(by)
        finally:
            signal.raise_signal(by)  # again, while the servers are ended

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(environments, "provide", lambda *words: environments.Environment(Path("python"), {}))
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    assert command.main(["--peers", "penstock", "--json", str(tmp_path / "peers.json")]) == 130
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    results_found = json.loads((tmp_path / "peers.json").read_text())
    assert (results_found["interrupted"], results_found["cells"][0]["error"]) == (True, "so far")
    assert "Interrupted: not all rounds were run." in capsys.readouterr().out
