"""Some tests of the other modules here, run through a front end: the answers must be the same.

`PENSTOCK_TEST_FRONTS=1 pytest tests/clients` runs all of them that way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHOSEN = (
    "test_tritonclient_http.py",
    "test_tritonclient_grpc.py",
    "test_metrics_live.py",
    "test_predict.py",
    "test_grpc_messages.py::test_a_watcher_is_notified_when_the_server_exits",
    "test_grpc_messages.py::test_an_idle_stream_does_not_delay_the_exit_of_the_server",
    "test_dynamic_batching.py::TestShutdown",
    "test_sequence_batches.py::TestShutdown",
    "test_combinations.py::TestUnloading",
    "test_decoupled.py::test_a_server_that_exits_finishes_its_decoupled_requests",
    "test_decoupled.py::test_a_model_is_unloaded_after_its_generators_have_ended",
)


@pytest.mark.slow
def test_clients_of_a_front_end_receive_the_same_answers() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    chosen = [str(HERE / each) for each in CHOSEN]
    environ = os.environ | {"PENSTOCK_TEST_FRONTS": "1"}
    done = subprocess.run(
        [*words, *chosen], env=environ, capture_output=True, text=True, check=False, cwd=HERE.parents[1]
    )

    assert done.returncode == 0, done.stdout[-10_000:]
