"""`penstock perf -m MODEL ...`: perf_analyzer's command line, from its arguments to its exit status."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from penstock.perf.generator.fleet import FleetError
from penstock.perf.payloads.preparing import InputError
from penstock.perf.reports import document as documents
from penstock.perf.reports.document import Document
from penstock.perf.reports.extras import MissingExtraError, needed

from . import csv
from .command_line import options as options_of
from .console import Console
from .control import ControlError
from .export import Export
from .flags import UsageError, split, usage
from .measuring import EMPTY, UNSTABLE
from .model import DescriptionError
from .options import Options
from .session import Listener, Listeners, SessionError, profile

DONE, NOT_STABLE, WINDOW_TOO_SHORT, FAILED = 0, 2, 3, 99
"""Those of perf_analyzer: done, the first level never became stable, no request ended in a window, and any other
failure, including wrong usage.
"""
INTERRUPTED = 130
"""A shell's status for Ctrl-C, so that a partial run is not taken for a whole one; perf_analyzer's is 0."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


REFUSALS = (MissingExtraError, SessionError, ControlError, DescriptionError, InputError, FleetError, OSError)
"""The errors that prevent a run; their text is for the user."""


class Interrupts(Listener):
    """On the first Ctrl-C or SIGTERM, stops a run and writes the results so far; on the second, exits at once."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._interrupt_count = False

    def is_interrupted(self) -> bool:
        return self._interrupt_count

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, self._on_signal) for number in SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in zip(SIGNALS, self._before, strict=True):
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interrupt_count:
            raise KeyboardInterrupt
        self._interrupt_count = True
        self._print_line("Interrupted: waiting for requests under way, then writing what there is. Again: end at once.")


def main(arguments: Sequence[str]) -> int:
    """Run a command line. Returns: the exit status."""
    try:
        pairs, _ = split(arguments)
        keys = {key for key, _ in pairs}
        if "help" in keys:
            print(usage())
            return DONE
        if "version" in keys:
            print(_version())
            return DONE
        options = options_of(arguments, _warn)
    except UsageError as error:
        _warn(f"Error: {error}")
        _warn("`penstock perf --help` lists the flags.")
        return FAILED
    return run(options)


def run(options: Options) -> int:
    """Drive a model, print and write the results. Returns: the exit status."""
    console, export = Console(options), Export()
    try:
        for extra in ("hdrh.histogram", *(["plotly"] if options.html else [])):
            needed(extra)  # reported now and not at the end of the run
        for path in filter(None, (options.csv, options.json, options.html, options.export)):
            _check_writable(path)
        with Interrupts(_warn) as interrupts:
            watched = (console, interrupts, export) if options.export else (console, interrupts)
            document = profile(options, Listeners(*watched))
            console.close(document)
            all_written = _write(options, document, export)
    except REFUSALS as error:
        _warn(f"error: {error}")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status(document) if all_written else FAILED


def status(document: Document) -> int:
    """Return the exit status of a run that began."""
    if document.failed:
        _warn(f"error: {document.failed}")
        return WINDOW_TOO_SHORT if document.failed == EMPTY else FAILED
    if document.levels and document.levels[0].ended == UNSTABLE:
        _warn("Failed to obtain stable measurement.")
        return NOT_STABLE
    return INTERRUPTED if document.interrupted else DONE


def _check_writable(path: Path) -> None:
    """Check before the run that a file can be written. Raises: OSError."""
    new = not path.exists()
    path.open("ab").close()
    if new:
        path.unlink()


def _write(options: Options, document: Document, export: Export) -> bool:
    """Write every requested file. A failure of one does not affect the others."""
    all_written = True
    for path, write in (
        (options.csv, lambda path: csv.write(document, options, path)),
        (options.json, lambda path: documents.write(document, path)),
        (options.html, lambda path: _write_page(document, path)),
        (options.export, export.write),
    ):
        try:
            if path is not None:
                write(path)
        except Exception as error:  # noqa: BLE001 - a run of minutes is not lost for one file
            _warn(f"error: {path}: {error}")
            all_written = False
    return all_written


def _write_page(document: Document, path: Path) -> None:
    from penstock.perf.reports import page

    page.write(document, path)


def _version() -> str:
    from importlib.metadata import version

    return f"penstock perf {version('penstock')}, with the command line of Perf Analyzer 2.47.0"


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
