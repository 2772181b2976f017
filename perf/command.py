"""`penstock perf`: its subcommands and what each runs. Without one, it is perf_analyzer's command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

WORDS = {
    "report": "reports.command",
    "peers": "peers.command",
    "tune": "tuning.command",
    "gate": "gate.command",
}
"""The subcommands besides driving one model, and the module whose `main(words)` runs each."""
USAGE_STATUS = 2
INTERRUPTED_STATUS = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, or drive a model. Returns: the exit status: 0 done, 1 failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    module = WORDS.get(arguments[0]) if arguments else None
    try:
        chosen = importlib.import_module(f".{module or 'profiling.command'}", __package__)
    except ModuleNotFoundError as error:  # the gate is for developers of Penstock
        print(f"penstock perf {arguments[0]} needs {error.name}: pip install 'penstock[dev]'", file=sys.stderr)
        return USAGE_STATUS
    except KeyboardInterrupt:  # nothing to write yet
        return INTERRUPTED_STATUS
    return int(chosen.main(arguments[1:] if module else arguments))
