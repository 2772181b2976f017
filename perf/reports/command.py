"""`penstock perf report`: the page of a run, and comparisons of several runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import comparison, comparison_page, console, document, page
from .document import DocumentError
from .extras import MissingExtraError
from .histograms import HistogramError

_DESCRIPTION = """\
One document: prints a summary of the run and writes its page, A.html for A.json, or the file given by --html.
Several: prints the differences between them, warns if they cannot be compared, and prints the ratio of each level to
the same load in the first; --html writes a page that overlays their curves.
"""


def main(arguments: Sequence[str]) -> int:
    """Run a command line. Returns: the exit status: 0 done, 1 a file cannot be read or written, 2 wrong usage."""
    args = _parser().parse_args(arguments)
    try:
        documents = [(path.stem, document.read(path)) for path in args.documents]
        html = args.html
        if len(documents) == 1:
            html = html or args.documents[0].with_suffix(".html")
            print(console.describe_run(documents[0][1], args.target_ms))
            page.write(documents[0][1], html, args.target_ms)
        else:
            compared = comparison.runs(documents)
            print(console.describe_comparison(compared, args.target_ms))
            if html:
                comparison_page.write(compared, html, args.target_ms)
    except (DocumentError, HistogramError, MissingExtraError, OSError) as error:
        print(f"penstock perf report: {error}", file=sys.stderr)
        return 1
    if html:
        print(f"Page: {html}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock perf report",
        description="Summarize and compare the results of `penstock perf`.",
        epilog=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("documents", nargs="+", type=Path, metavar="A.json", help="a file written by --json of a run")
    parser.add_argument("--html", type=Path, help="file for the page")
    parser.add_argument(
        "--target-ms",
        type=_positive,
        help="maximum latency of a response that counts toward goodput (default: the run's)",
    )
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no latency")
    return value
