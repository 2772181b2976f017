"""Records the answers of the original: scenarios/*.py -> cases/*.json.

Not run by the tests. With the platform's proxy 2.6.5, compiled, and an environment of CPython 3.8 that has abejaruntime
1.1.1 and numpy 1.24.4, from the folder above tests:

    python -m tests.abeja.record /path/to/the/proxy /path/to/the/environment/bin [GROUP ...]

For each group, a new proxy with the runtime behind it is started, gets the requests in order, and is ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tests.originals import HOST, Player, free_port

from .original import ORIGINAL
from .scenarios.all_groups import GROUPS
from .scenarios.definitions import HANDLERS

_READY_WITHIN_S = 60


@contextlib.contextmanager
def served(server: Mapping[str, Any]) -> Iterator[Mapping[str, int]]:
    """Run the original for one group."""
    ports = {"": free_port(), "health": free_port()}
    scratch = tempfile.mkdtemp()
    environment = {
        "PATH": os.pathsep.join([RUNTIME, os.environ["PATH"]]),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": scratch,
        "PORT": str(ports[""]),
        "HEALTHCHECK_PORT": str(ports["health"]),
        **({"HANDLER": server["handler"]} if server["handler"] else {}),
        **server["environment"],
    }
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [PROXY], cwd=str(HANDLERS), env=environment, stdout=log, stderr=log, start_new_session=True
        )  # fmt: skip
        try:
            _await_ready(ports, child)
            yield ports
        except Exception:
            log.seek(0)
            sys.stderr.buffer.write(log.read()[-5000:])
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # only the session that was started for it
            child.wait()
            shutil.rmtree(scratch)


def _await_ready(ports: Mapping[str, int], child: Any) -> None:
    end = time.monotonic() + _READY_WITHIN_S
    case = {"method": "GET", "path": "/health_check", "port": "health"}
    while True:
        with contextlib.suppress(OSError):
            if Player(ORIGINAL, ports).play(case)["status"] == 200:
                return
        if child.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"it does not serve at {HOST}")
        time.sleep(0.05)


def main() -> None:
    """Record the groups that are named, or all."""
    named = sys.argv[3:]
    for group in GROUPS:
        if not named or group.name in named:
            ORIGINAL.record(group, served)
            sys.stdout.write(f"{group.name}: {len(group.requests)}\n")


if __name__ == "__main__":
    PROXY, RUNTIME = sys.argv[1:3]
    main()
