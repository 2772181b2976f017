"""`python -m penstock.server.seldon.importable` prints the folder of `seldon_core`, for PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).parent)
