"""Check a machine with a GPU: `python -m penstock.perf.gpu_check`, one dated table in under nine minutes.

Each part runs in a process of its own with a time limit; one that fails or exceeds it is reported as a row. Rows are
written to rows.jsonl as they come, and all of them with the table at the end to gpu_check.json and gpu_check.md: in
$OUT if it is set, else in the working folder. docs/gpu-check.md lists the commands to check a machine.

`--device cpu --quick` tests the check itself on a machine without a GPU: its figures are not those of any GPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .claims import FAILS, HOLDS
from .gpu.context import GPU, CheckContext, out_folder
from .gpu.machine import describe_machine
from .gpu.parts import PARTS, ROWS, TOTAL_S, chosen, run_all
from .gpu.rows import Row, figure, parse_row, summary, table

_FAILED, _USAGE = 1, 2
_LOG_CHARACTERS = 500_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print the table. Returns: the exit status: 0 all rows hold, 1 some do not, 2 wrong usage."""
    start_s = time.monotonic()
    args = _arguments().parse_args(arguments)
    try:
        parts = chosen(args.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return _USAGE
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as temporary_folder:
        folder = args.folder or Path(temporary_folder)
        out = out_folder() or folder
        for each in (folder, out):
            each.mkdir(parents=True, exist_ok=True)
        rows_file = folder / ROWS
        if args.fresh:
            rows_file.unlink(missing_ok=True)
        context = CheckContext(
            args.device, folder.resolve(), args.quick, earlier=_earlier_rows(rows_file, rerun=args.only)
        )
        writer = RowWriter((rows_file, out / ROWS))
        writer.begin(context.earlier)
        rows: list[Row] = []
        try:
            rows = run_all(parts, context, writer, start_s)
        finally:
            rows = rows or list(writer.rows)
            text = write_report(context, rows, time.monotonic() - start_s, out)
            print(f"\n{text}", flush=True)
            (out / "logs.txt").write_text(logs(folder), "utf-8")
    return _FAILED if any(row.held is False for row in rows) else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.gpu_check", description=__doc__)
    parser.add_argument("--device", default=GPU, help=f"{GPU}, or cpu for trying the check itself")
    parser.add_argument("--quick", action="store_true", help="small models and short loads: no figure means anything")
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help=f"these parts: {names}")
    parser.add_argument("--folder", type=Path, help="work here and keep it: another run with --only goes on from it")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run found in the folder")
    return parser


def _earlier_rows(path: Path, rerun: Sequence[str]) -> tuple[Row, ...]:
    """Return what an earlier run found in the same folder, except for parts that run again."""
    lines = path.read_text("utf-8").splitlines() if path.exists() and rerun else []
    return tuple(row for row in map(parse_row, lines) if row is not None and row.part not in rerun)


class RowWriter:
    """Writes each Row to files as it comes, and prints it."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(dict.fromkeys(path.resolve() for path in files))
        self.rows: list[Row] = []

    def begin(self, earlier: Sequence[Row]) -> None:
        """Start the files with existing rows."""
        self.rows = list(earlier)
        for path in self._files:
            path.write_text("".join(f"{row.line()}\n" for row in earlier), "utf-8")

    def __call__(self, row: Row) -> None:
        self.rows.append(row)
        for path in self._files:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{row.line()}\n")
        verdict = "" if row.held is None else f"  {HOLDS if row.held else FAILS}"
        print(f"{row.part:10}{row.what}: {figure(row.value)} {row.unit}{verdict}  {row.note}".rstrip(), flush=True)


def logs(folder: Path) -> str:
    """Return the end of each process's log, in one text: few files can be returned from a borrowed machine."""
    tails = [
        (path.name, path.read_text("utf-8", "replace")[-_LOG_CHARACTERS:]) for path in sorted(folder.glob("*.log"))
    ]
    return "\n".join(f"== {name}\n{text}" for name, text in tails if text)


def write_report(context: CheckContext, rows: Sequence[Row], took_s: float, out: Path) -> str:
    """Write the table and the figures. Returns: the table."""
    stand_in = "" if context.on_gpu and not context.quick else "NOT A GPU'S FIGURES: a stand-in. "
    where = context.device if context.on_gpu else "the CPU"
    today = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    description = describe_machine() | {"took": f"{took_s:.0f} s of at most {TOTAL_S:.0f}"}
    text = table(f"{stand_in}{today}, {where}{', small models' if context.quick else ''}", rows, description)
    (out / "gpu_check.md").write_text(text, "utf-8")
    document = {
        "at": today, "device": context.device, "quick": context.quick, "took_s": took_s, "machine": description,
        "summary": summary(rows), "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    (out / "gpu_check.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return text


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops what it has started
    raise SystemExit(main())
