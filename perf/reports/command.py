"""`penstock perf report`: the page of a run, and several runs side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import comparing, comparison_page, console, document, page
from .document import DocumentError
from .extras import MissingExtraError
from .histograms import HistogramError

_TELLS = """\
One document: writes its page beside it, A.html of A.json, or where --html says, and tells the run in a few lines.
Several: tells what differs between them, warns where they cannot be compared, and gives the ratios of each level to
the same load in the first; --html writes a page with the curves over each other.
"""


def main(words: Sequence[str]) -> int:
    """Run a command line; return the exit status: 0 done, 1 a file cannot be read or written, 2 wrong usage."""
    args = _parser().parse_args(words)
    try:
        read = [(path.stem, document.read(path)) for path in args.documents]
        html = args.html
        if len(read) == 1:
            html = html or args.documents[0].with_suffix(".html")
            print(console.single(read[0][1], args.target_ms))
            page.write(read[0][1], html, args.target_ms)
        else:
            compared = comparing.runs(read)
            print(console.several(compared, args.target_ms))
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
        description="Lay out what `penstock perf` measured.",
        epilog=_TELLS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("documents", nargs="+", type=Path, metavar="A.json", help="what --json of a run has written")
    parser.add_argument("--html", type=Path, help="where the page goes")
    parser.add_argument(
        "--target-ms", type=_positive, help="the latency within which an answer counts for goodput (default: the run's)"
    )
    return parser


def _positive(word: str) -> float:
    value = float(word)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is no latency")
    return value
