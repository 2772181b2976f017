"""perf/ensemble.py: what it serves, and what it says of what it measured."""

from __future__ import annotations

from pathlib import Path

from penstock.perf.ensemble import CHAIN, FIRST, PAIR, SECOND, STEPS, Sides, call, write
from penstock.perf.wrk import Load
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.scan import scan


def load(cpu_us: float = 0.0, p50_ms: float = 0.0, refused: int = 0) -> Load:
    return Load(1000.0, p50_ms, 0.0, cpu_us, refused, 0)


def sides(pair_us: float, chain_ms: float, refused: int = 0) -> Sides:
    return Sides(
        {FIRST: [load(20)], SECOND: [load(20)], PAIR: [load(pair_us, refused=refused)]},
        {FIRST: [load(p50_ms=0.1)], CHAIN: [load(p50_ms=chain_ms)]},
        {FIRST: [0.3], CHAIN: [0.2]},
    )


def test_the_repository_is_valid(tmp_path: Path) -> None:
    write(tmp_path)
    entries, findings = scan([tmp_path], Defaults())

    assert (findings, [entry.findings for entry in entries]) == ([], [()] * 4)
    (chain,) = [entry.specs[0].ensemble for entry in entries if entry.name == CHAIN]
    assert chain is not None
    assert len(chain.steps) == STEPS


def test_the_request_states_the_length_of_its_head() -> None:
    sent = call(PAIR)

    assert len(sent.bodies[0]) - int(sent.headers["Inference-Header-Content-Length"]) == 64


def test_the_report_states_which_claims_hold() -> None:
    good, bad = sides(45, 1.9).lines(), sides(47, 2.1, refused=3).lines()

    assert [line.endswith(": holds") for line in good] == [False, True, True, True]
    assert [line.endswith("DOES NOT HOLD") for line in bad] == [False, True, True, False, False]
    assert bad[-1] == "3 FAILED"
