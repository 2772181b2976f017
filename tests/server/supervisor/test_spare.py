"""What a spare has prepared before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_a_prepared_spare_has_few_objects_tracked_by_the_garbage_collector() -> None:
    program = "import gc; from penstock.server.supervisor.roles import prepare; prepare(); print(len(gc.get_objects()))"

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)

    assert int(ended.stdout) < 1000
