"""Records what the original answers: scenarios/*.py -> cases/*.json.

Not run by the tests. With an environment that has deepaas 2.6.0 on CPython 3.10 (aiohttp 3.14.5, webargs 5.5.3,
marshmallow 3.26.2, numpy), from the root of the repository:

    /path/to/its/bin/python -m tests.deepaas.record [GROUP ...]

The server of each group is started anew, asked in order, and ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.originals import await_port, free_port

from .command_runs import COMMANDS as COMMANDED
from .command_runs import run
from .replay import MODULES, ORIGINAL, installed, words_of
from .scenarios.all_groups import GROUPS
from .scenarios.commands import COMMANDS

_PROGRAMS = Path(sys.executable).parent


def environment_of(server: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Give the original's environment: its models are installed in `folder`, which is its home too."""
    return {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join([str(MODULES), str(folder)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        **server.get("environment", {}),
    }


@contextlib.contextmanager
def served(server: Mapping[str, Any]) -> Iterator[int]:
    """Run the original for one group. Yields: its port."""
    with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("w+b") as log:
        folder, port = Path(name), free_port()
        installed(server, folder)
        words = [str(_PROGRAMS / "deepaas-run"), "--listen-port", str(port), *words_of(server, folder)]
        child = subprocess.Popen(
            words, cwd=name, env=environment_of(server, folder), stdout=log, stderr=log, start_new_session=True
        )
        try:
            await_port(port, lambda: child.poll() is None)
            yield port
        except Exception:
            log.seek(0)
            sys.stderr.buffer.write(log.read()[-5000:])
            raise
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):  # to the session that was begun for it, and nothing else
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(2)


def main() -> None:
    """Record the groups that are named, or all; `commands` is what deepaas-cli is told to do."""
    for group in GROUPS:
        if not sys.argv[1:] or group.name in sys.argv[1:]:
            ORIGINAL.record(group, served)
            print(group.name, len(group.requests), flush=True)  # noqa: T201 - a command
    if not sys.argv[1:] or "commands" in sys.argv[1:]:
        cases = [command.written() for command in COMMANDS]
        lines = [json.dumps({**case, "answer": run(case, [str(_PROGRAMS / case["program"])])}) for case in cases]
        COMMANDED.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
