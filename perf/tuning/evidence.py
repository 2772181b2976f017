"""Evidence: the results of a search, as tables and as JSON with every measurement."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.perf.profiling import environment
from penstock.perf.profiling.model import ModelDescription
from penstock.perf.profiling.session import document_model
from penstock.perf.reports import document as documents
from penstock.perf.reports.console import lines
from penstock.perf.reports.document import Document, Level
from penstock.perf.reports.formats import count, ms, ratio, size

from .arguments import TuneOptions
from .duels import Measurement, Round, median_ratio
from .knobs import ORIGINAL, Setting, describe
from .search import SearchResult, Trial

FORMAT = "penstock-tune/1"
HEADINGS = ("setting", "against", "looks", "rounds", "ratio", "score", "p50", "p99", "memory", "verdict")


@dataclass(slots=True)
class Evidence:
    """All results. `configs`: each setting's configuration as loaded; `error`: what went wrong, or empty."""

    options: TuneOptions
    model: ModelDescription
    url: str
    server: dict[str, Any]
    sharing: str
    found: SearchResult
    levels: Mapping[Setting, list[Level]]
    configs: Mapping[Setting, dict[str, Any]]
    notes: Sequence[str] = ()
    error: str = ""
    made_at: str = ""

    def __post_init__(self) -> None:
        self.made_at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def describe_score(tuning: TuneOptions) -> str:
    """Describe the score."""
    if tuning.target_ms is not None:
        score = "requests/s at the highest concurrency" if tuning.closed_loop else "highest rate in requests/s"
        return f"{score} with p{tuning.percentile} within {tuning.target_ms:g} ms"
    if tuning.closed_loop:
        return "requests/s"
    return f"1/s of p{tuning.percentile}: one second through the latency at the given rate"


def conclusion(evidence: Evidence) -> str:
    """Say in a few sentences what is kept, and why."""
    result = evidence.found
    last = result.final_trial
    sentences = [f"The search ended early: {result.ended_early}."] if result.ended_early else []
    if evidence.error:
        sentences.append(f"It failed: {evidence.error}.")
    if result.original is not None and result.original.why:
        sentences.append(f"The configuration as it is: {result.original.why}.")
    if result.kept == ORIGINAL:
        sentences.append(_nothing_kept(result))
    elif last is not None and last.kept:
        sentences.append(
            f"Kept: {describe(result.kept)}; {ratio(median_ratio(last.rounds))} as it was in the median"
            f" ({_ratio_range(last.rounds)}), {last.verdict}."
        )
    else:
        sentences.append(f"Best so far, not confirmed against the configuration as it was: {describe(result.kept)}.")
    return " ".join(sentences)


def _nothing_kept(result: SearchResult) -> str:
    last, tried = result.final_trial, len(result.trials)
    if last is not None and not last.kept and not result.ended_early:
        return (
            f"Nothing is kept: {describe(last.setting)} won on the way, but not against the configuration as it is:"
            f" {last.verdict}."
        )
    if not tried:
        return "No other setting was tried."
    settings = f"{tried} other setting{'s' * (tried > 1)}"
    if result.ended_early:
        return f"{settings} tried, none of which had won by then."
    return f"Nothing was measurably better than the current configuration; {settings} tried."


def table(result: SearchResult) -> list[tuple[str, ...]]:
    """Return a row for each trial, after the headings."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    if result.original is not None:
        rows.append((describe(ORIGINAL), "", "", "", "", *_figures(result.original), result.original.why))
    trials = [*result.trials, *([result.final_trial] if result.final_trial is not None else [])]
    return rows + [_row(trial) for trial in trials]


def _row(trial: Trial) -> tuple[str, ...]:
    screenings = " ".join(ratio(each) for each in trial.screening_ratios)
    duel = (str(len(trial.rounds)), ratio(median_ratio(trial.rounds))) if trial.rounds else ("", "")
    verdict = f"KEPT: {trial.verdict}" if trial.kept else trial.verdict
    figures = _figures(
        _median_measurement(trial.rounds) if trial.rounds else trial.measurement, with_score=bool(trial.rounds)
    )
    return (describe(trial.setting), describe(trial.incumbent), screenings, *duel, *figures, verdict)


def _median_measurement(rounds: Sequence[Round]) -> Measurement:
    """Return the challenger's measurement with the median score."""
    ordered = sorted((each.challenger for each in rounds), key=lambda each: each.score)
    return ordered[len(ordered) // 2]


def _figures(measured: Measurement | None, *, with_score: bool = True) -> tuple[str, ...]:
    """Format a measurement. The score of a glance is comparable only with others of its kind."""
    if measured is None or (not measured.score and not measured.per_s):
        return ("", "", "", "")
    score = count(measured.score) if with_score else ""
    return (score, ms(measured.p50_us), ms(measured.p99_us), size(measured.memory_bytes))


def _ratio_range(rounds: Sequence[Round]) -> str:
    ratios = [each.ratio for each in rounds]
    return f"{ratio(min(ratios))} to {ratio(max(ratios))} over {len(ratios)} rounds"


def terminal_text(evidence: Evidence) -> str:
    """Return the text for the terminal."""
    return "\n".join([*lines([(*row,) for row in _shortened(table(evidence.found))]), "", conclusion(evidence)])


def _shortened(rows: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Shorten the rows for the terminal; the files have the rest."""
    for number, row in enumerate(rows):
        verdict = row[-1] if len(row[-1]) <= 80 else row[-1][:77] + "..."
        yield (row[0], *row[3:8], "" if not number else verdict)


def markdown(evidence: Evidence, command: str) -> str:
    """Return the Markdown page."""
    tuning, protocol = evidence.options, "gRPC" if evidence.options.options.grpc else "HTTP"
    rows = [[cell.replace("|", "/").replace("\n", " ") or " " for cell in row] for row in table(evidence.found)]
    head = [
        f"# What `penstock perf tune` found about model `{evidence.model.name}`",
        "",
        conclusion(evidence),
        "",
        f"- Made {evidence.made_at} at {evidence.url}, {protocol}, {tuning.options.input.batch} rows in each request.",
        f"- Score: {describe_score(tuning)}.",
        *(f"- {note}" for note in evidence.notes if note),
        *([f"- Sharing: {evidence.sharing}."] if evidence.sharing else []),
        "- To repeat: `" + command + "`",
        "",
    ]
    body = [f"| {' | '.join(row)} |" for row in rows]
    body.insert(1, "|" + "---|" * len(HEADINGS))
    return "\n".join((*head, *body, "", _LEGEND, ""))


_LEGEND = """`looks`: short measurements relative to the incumbent's; settings without prospect were dropped.
`rounds`, `ratio`: of a duel, both loaded anew and measured in turns in the same minutes; the median of the challenger's
score as a share of the incumbent's. A challenger is kept that is ahead in all of 7 rounds, in all but one of 11, two of
14 or three of 17, and by 3% in the median: one that is no different passes the first of these once in 60 times. The
last duel is against the configuration as it was; only its ratio tells what was gained.
`documents/`: every measurement; `penstock perf report documents/A.json documents/B.json` lays two side by side."""


def write(evidence: Evidence, folder: Path, command: str) -> None:
    """Write evidence.json, evidence.md and documents/. Raises: OSError."""
    documents_folder = folder / "documents"
    documents_folder.mkdir(parents=True, exist_ok=True)
    names = {}
    for number, setting in enumerate(evidence.levels):
        names[setting] = f"documents/{number:02d}.json"
        documents.write(_document(evidence, setting), folder / names[setting])
    result = evidence.found
    content = {
        "format": FORMAT,
        "made_at": evidence.made_at,
        "command": command,
        "conclusion": conclusion(evidence),
        "score": describe_score(evidence.options),
        "kept": dict(result.kept),
        "confirmed": result.confirmed,
        "ended": result.ended_early,
        "failed": evidence.error,
        "notes": list(evidence.notes),
        "documents": [{"setting": dict(setting), "file": name} for setting, name in names.items()],
        "as_it_is": _measurement_json(result.original),
        "trials": [_trial_json(each) for each in result.trials],
        "last": _trial_json(result.final_trial) if result.final_trial is not None else None,
    }
    (folder / "evidence.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", "utf-8")
    (folder / "evidence.md").write_text(markdown(evidence, command), "utf-8")


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {
        "axis": trial.axis,
        "setting": dict(trial.setting),
        "against": dict(trial.incumbent),
        "looks": [_finite_or_none(each) for each in trial.screening_ratios],
        "rounds": [
            {"incumbent": _measurement_json(each.incumbent), "challenger": _measurement_json(each.challenger)}
            for each in trial.rounds
        ],
        "ratio": _finite_or_none(median_ratio(trial.rounds)) if trial.rounds else None,
        "kept": trial.kept,
        "verdict": trial.verdict,
    }


def _measurement_json(measured: Measurement | None) -> dict[str, Any] | None:
    if measured is None:
        return None
    fields = dataclasses.asdict(measured)
    return {name: _finite_or_none(value) if isinstance(value, float) else value for name, value in fields.items()}


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _document(evidence: Evidence, setting: Setting) -> Document:
    options, model = evidence.options.options, evidence.model
    config = evidence.configs.get(setting, model.config)
    machine = {**environment.machine(), "sharing": evidence.sharing}
    return Document(
        document_model(model, config),
        list(options.command),
        evidence.made_at,
        evidence.url,
        "grpc" if options.grpc else "http",
        batch=options.input.batch,
        levels=list(evidence.levels[setting]),
        server=evidence.server,
        machine=machine,
        versions=environment.versions(evidence.server),
        options={"tune": describe(setting)},
        target_ms=evidence.options.target_ms,
    )
