"""`penstock perf` against live servers, from its words to its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.perf import command
from penstock.perf.profiling.control import control_for
from penstock.perf.profiling.options import Options, Rule
from penstock.perf.profiling.session import profile, target
from penstock.perf.reports import document as documents
from tests.clients import models, sequence_models
from tests.live import Live, live_server

QUICK = "--measurement-mode count_windows --measurement-request-count 20 -s 100000 --no-progress"
PROGRAM = [sys.executable, "-c", "import sys; from penstock.perf.command import main; sys.exit(main())"]
STARTS = """
    direct {} control_input [
      { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] }
    ]
"""
DYING = Path(__file__).with_name("dying_server.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = models.write_examples(tmp_path_factory.mktemp("repository"))
    sequence_models.write_accumulator(root, "sums", sequence_models.config(8, STARTS + sequence_models.STATE % ""))
    with live_server(root, allow_client_shm=True) as server:
        yield server


@pytest.mark.parametrize(
    "words",
    [
        "-m simple --concurrency-range 1:3:2",
        "-m simple -b 4 --input-tensor-format json --output-tensor-format json",
        "-m simple_string --string-data 7 -i grpc --grpc-compression-algorithm gzip",
        "-m sums --concurrency-range 2 --sequence-length 4",
        "-m sums -i grpc --streaming --request-rate-range 500:1000:500 --request-distribution poisson",
        "-m simple --shared-memory system --request-count 30 --warmup-request-count 5 --processes 2",
    ],
)
def test_a_model_is_driven_and_reported(
    live: Live, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exceeds_threshold = live.grpc_address if "-i grpc" in words else live.address
    files = f"-f {tmp_path / 'a.csv'} --verbose-csv --json {tmp_path / 'a.json'}"
    status = command.main(f"-u {exceeds_threshold} {words} {QUICK} {files}".split())
    printed = capsys.readouterr()

    assert status == 0, printed.err
    assert "Inferences/Second vs. Client Average Batch Latency" in printed.out
    run = documents.read(tmp_path / "a.json")
    levels = 2 if ":" in words else 1
    assert [(level.stable, level.ended, level.client.errors) for level in run.levels] == [(True, "", {})] * levels
    assert all(level.server is not None and level.server.requests > 0 for level in run.levels)
    assert len((tmp_path / "a.csv").read_text("utf-8").splitlines()) == 1 + levels
    if "-b 4" in words:
        assert run.levels[0].client.rows == 4 * run.levels[0].client.requests
    if "--request-count" in words:
        assert run.levels[0].client.requests == 30
        assert run.levels[0].server is not None
        assert run.levels[0].server.requests == 30


def test_a_model_whose_requests_all_fail_is_reported_in_the_words_of_the_server(
    live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"-u {live.address} -m simple_string --string-data word {QUICK}"

    assert command.main(words.split()) == 99
    assert "every request failed: " in capsys.readouterr().err


def test_a_missing_model_or_server_is_reported(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["-u", live.address, "-m", "none"]) == 99
    assert "'none' is not found" in capsys.readouterr().err


def test_a_run_works_without_a_command_line(live: Live) -> None:
    traced = (("trace_level", ("OFF",)), ("trace_rate", ("500",)))
    options = Options("simple", url=live.address, rule=Rule(total_requests=20), trace=traced)
    run = profile(options)

    assert (run.protocol, run.model.max_batch_size, run.failed) == ("http", 8, "")
    assert run.levels[0].client.requests == 20
    assert control_for(target(options)).trace()["trace_rate"] == "500"


def test_ctrl_c_ends_a_run_that_then_writes_its_results(live: Live, tmp_path: Path) -> None:
    names = {"-f": "a.csv", "--json": "a.json", "--html": "a.html", "--profile-export-file": "a.prof"}
    files = [word for flag, name in names.items() for word in (flag, str(tmp_path / name))]
    endless = "--concurrency-range 1:2 --measurement-mode count_windows --measurement-request-count 20 -r 1000000 -v"
    words = ["-u", live.address, "-m", "simple", *endless.split(), "-s", "0", *files]
    with subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "Pass [4]" in line:
                running.send_signal(signal.SIGINT)
                break
        out, err = running.communicate(timeout=60)

    assert running.returncode == 130, err
    assert "Interrupted: " in err
    assert "[interrupted]" in out
    run = documents.read(tmp_path / "a.json")
    assert (run.interrupted, run.failed) == (True, "")
    assert [(level.stable, level.ended) for level in run.levels] == [(False, "interrupted")]
    assert run.levels[0].client.requests > 0
    assert len((tmp_path / "a.csv").read_text("utf-8").splitlines()) == 1
    assert b"<html" in (tmp_path / "a.html").read_bytes()
    assert json.loads((tmp_path / "a.prof").read_text("utf-8"))["experiments"][0]["requests"]


def test_a_server_that_dies_is_reported_and_not_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, str(DYING)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        words = f"-u 127.0.0.1:{port} -m m --concurrency-range 1:4:3 {QUICK} --json {tmp_path / 'a.json'}"
        status = command.main(words.split())

    printed = capsys.readouterr()
    run = documents.read(tmp_path / "a.json")
    assert status == 99
    assert server.returncode == 9
    first, second = run.levels
    assert (first.stable, first.ended) == (True, "")
    assert (second.stable, second.settled) == (False, 0)
    assert "the server was lost in window " in second.ended
    assert run.failed == second.ended
    assert sum(second.client.errors.values()) >= 1
    assert second.ended in printed.err
    assert "Concurrency: 4" not in printed.out


def test_importing_any_module_needs_no_extra() -> None:
    folder = Path(__file__).parents[3] / "perf" / "profiling"
    names = ", ".join(f"penstock.perf.profiling.{path.stem}" for path in sorted(folder.glob("[a-z]*.py")))
    program = f"import sys\nfor name in ('rich', 'plotly', 'hdrh', 'psutil'): sys.modules[name] = None\nimport {names}"

    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)
