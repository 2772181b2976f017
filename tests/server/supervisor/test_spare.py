"""What a spare has made ready before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_the_collector_has_nothing_to_walk_over_when_a_spare_begins_to_serve() -> None:
    program = "import gc; from penstock.server.supervisor.roles import prepare; prepare(); print(len(gc.get_objects()))"

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)

    assert int(ended.stdout) < 1000
