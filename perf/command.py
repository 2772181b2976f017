"""`penstock perf`: its words, and what each runs. Without a word it is perf_analyzer's command line."""

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
"""What else than driving one model is done, and the module whose `main(words)` does it."""
USAGE_STATUS = 2
INTERRUPTED_STATUS = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a word, or drive a model; return the exit status: 0 done, 1 failed, 2 wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    module = WORDS.get(words[0]) if words else None
    try:
        chosen = importlib.import_module(f".{module or 'profiling.command'}", __package__)
    except ModuleNotFoundError as error:  # the gate is for those who work on Penstock
        print(f"penstock perf {words[0]} needs {error.name}: pip install 'penstock[dev]'", file=sys.stderr)
        return USAGE_STATUS
    except KeyboardInterrupt:  # so early there is nothing to write
        return INTERRUPTED_STATUS
    return int(chosen.main(words[1:] if module else words))
