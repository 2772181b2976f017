"""Workers of a server in this process that start in milliseconds: tests/forking.py forks them.

They differ from real ones: such a worker is a grandchild of this process, and has the modules that other workers
import. So workers with another Python, in another place or with another environment for Python itself are really
started, and so are all workers in the tests about workers and their processes.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any, cast

from penstock.server.workers.process import _CHILD, Process, _kill_group, _path_variable
from tests.forking import TENSORFLOW, one_forker

_READ_AT_START = ("PYTHON", "LD_", "LANG", "LC_", "OMP_", "OPENBLAS_", "MALLOC_")
"""Prefixes of the variables that affect a process before it can be told anything."""


class ForkedProcess(Process):
    """The replacement for a started process."""

    def _spawn(self) -> subprocess.Popen[bytes]:
        order = self._order
        if order.interpreter or order.mounts or any(name.startswith(_READ_AT_START) for name in order.environment):
            return super()._spawn()
        sock, begun, output = self._descriptors
        runtime = (TENSORFLOW,) if order.settings.get("loader", "").endswith("load_tensorflow") else ()
        forked = one_forker(*runtime).start(
            ["python", str(_CHILD), str(sock), str(begun), "", "{}"], pass_fds=(sock, begun), stdout=output,
            stderr=output, cwd=order.folder, env={**os.environ, **_path_variable(order), **order.environment},
        )  # fmt: skip
        return cast("subprocess.Popen[bytes]", forked)

    def _wait(self, process: Any) -> int:
        if isinstance(process, subprocess.Popen):
            return super()._wait(process)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors: Any = ()
        with self._lock:
            self.pid = process.pid
            if self._killed:
                _kill_group(process.pid)
        status: int = process.wait()
        with self._lock:
            self._reaped = True
        return status
