"""ONNX Runtime alone: rows per second without a server, an upper bound for any server of the model.

It runs in a process of its own, so that its threads end with it: `python -m penstock.perf.baselines.onnx_runtime
MODEL.onnx`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import penstock.backends  # noqa: F401 - before onnxruntime: it turns off what that reports home

SIZES = (1, 2, 4, 8, 16, 32, 64)
FREE_AXIS = 256
_SECONDS = 0.2


def best_rows_per_s(path: Path) -> dict[str, float]:
    """Measure in a fresh process. Returns: the best over batch sizes by thread count, and "best" over all."""
    command = [sys.executable, "-m", "penstock.perf.baselines.onnx_runtime", str(path)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    rates: dict[str, float] = json.loads(completed.stdout)
    return rates


def _rates(path: str, threads: int) -> list[float]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (node,) = session.get_inputs()
    shape = [size if isinstance(size, int) else FREE_AXIS for size in node.shape[1:]]
    rates = []
    for rows in SIZES:
        feed = {node.name: np.random.default_rng(0).random((rows, *shape), dtype=np.float32)}
        session.run(None, feed)
        runs, start, elapsed_s = 0, time.perf_counter(), 0.0
        while elapsed_s < _SECONDS:
            session.run(None, feed)
            runs += 1
            elapsed_s = time.perf_counter() - start
        rates.append(rows * runs / elapsed_s)
        if elapsed_s / runs > _SECONDS:  # larger batches would only take longer
            break
    return rates


def main() -> None:
    """Print the rates as JSON."""
    rates = {f"{threads} threads": max(_rates(sys.argv[1], threads)) for threads in range(1, _cores() + 1)}
    print(json.dumps({**rates, "best": max(rates.values())}))


def _cores() -> int:
    return min(2, len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main()
