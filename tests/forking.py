"""Commands that start in milliseconds: forks of one process that has imported what they would.

Each is a process like another, with a session, arguments, folder, environment and outputs of its own: it is killed, is
waited for and exits as one that was started. Differences: it has modules that it would not import, what Python reads
of the environment before it runs (but for PYTHONPATH, PYTHONPYCACHEPREFIX and PYTHONDONTWRITEBYTECODE) is that of
LANG=C.UTF-8 alone, and it is no child of its requester. So some commands of each kind are really started.

The workers of a server within this process are forked likewise where conftest.py says so (tests/workers.py), which
takes a fifth of what starting them does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

_IMPORTED = (
    "penstock.server.abeja.dialect", "penstock.server.abeja.command", "penstock.server.deepaas.cli",
    "penstock.server.deepaas.command", "penstock.server.deepaas.dialect", "penstock.server.process",
    "penstock.server.serve", "penstock.server.cli", "penstock.server.workers.child", "penstock.server.workers.service",
    "penstock.server.abeja.inside.service", "penstock.server.deepaas.inside.service",
    "penstock.server.hooks.worker_service", "penstock.server.isolated.inside",
    "penstock.server.python_models.inside.service", "penstock.server.seldon.inside.service",
)  # fmt: skip
_ALONE = {"OPENBLAS_NUM_THREADS": "1"}
"""A fork has only the thread that forks."""
TENSORFLOW = "tensorflow"
MADE: list[Forker] = []
"""The forkers to close: conftest.py does so."""
_MOST_BYTES = 1 << 20
_NUMBER = struct.Struct("<i")


class Forked:
    """One command, with the part of subprocess.Popen that is used. `stdout` and `stderr`: pipes, if requested."""

    def __init__(self, connection: socket.socket, args: Sequence[str], pipes: Sequence[IO[Any] | None]) -> None:
        self.args = args
        self.returncode: int | None = None
        self.stdout, self.stderr = pipes
        self._connection = connection
        self.pid = self._number()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it to end. Returns: the exit status, below 0 for a signal. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _end(self) -> None:
        self.returncode = self._number()
        self._connection.close()

    def _number(self) -> int:
        found: int = _NUMBER.unpack(self._connection.recv(_NUMBER.size))[0]
        return found


class Forker:
    """Starts commands. It ends with the process that made it, or when it is closed. more: the_forker's."""

    def __init__(self, *more: str) -> None:
        self._sock, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(there.fileno()), *more],
                pass_fds=(there.fileno(),),
                # the tree under test may be there, while another one is installed
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
                | _ALONE,
                stdin=subprocess.DEVNULL,
            )

    def start(
        self,
        words: Sequence[str],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        text: bool = False,
        pass_fds: Sequence[int] = (),
        **_: Any,  # no input and a session of its own, which each has
    ) -> Forked:
        """Start a command as subprocess.Popen would. `words`: `penstock`, or `python -m penstock.server.cli`, and more.

        Or `python`, and child.py with the arguments of a worker, of which the first are `pass_fds`.
        """
        environment = dict(os.environ if env is None else env)
        order = json.dumps({"words": list(words), "folder": str(cwd or Path.cwd()), "environment": environment})
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there, contextlib.ExitStack() as ours:
            out, read_out = _output(stdout, 1, ours)
            aside, read_aside = (out, None) if stderr == subprocess.STDOUT else _output(stderr, 2, ours)
            socket.send_fds(self._sock, [order.encode()], [out, aside, there.fileno(), *pass_fds])
        numbers, mode = (read_out, read_aside), "r" if text else "rb"
        return Forked(here, words, [None if number is None else os.fdopen(number, mode) for number in numbers])

    def run(
        self, words: Sequence[str], *, timeout: float = 60, text: bool = False, **more: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command as subprocess.run would, with captured outputs and any status."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as aside:
            child = self.start(words, stdout=out, stderr=aside, **more)
            try:
                status = child.wait(timeout)
            finally:
                child.kill()
            outputs = []
            for file in (out, aside):
                file.seek(0)
                outputs.append(file.read().decode() if text else file.read())
        return subprocess.CompletedProcess(list(words), status, *outputs)

    def close(self) -> None:
        self._sock.close()
        self._process.wait()


@functools.cache
def the_forker(*more: str) -> Forker:
    """Return this process's own Forker, made at the first call. more: TENSORFLOW, for one that has imported it."""
    MADE.append(Forker(*more))
    return MADE[-1]


def one_forker(*more: str, asking: threading.Lock = threading.Lock()) -> Forker:  # noqa: B008 - one for all
    """Return the same Forker to callers on different threads."""
    with asking:
        return the_forker(*more)


def _output(target: IO[bytes] | int | None, usual: int, ours: contextlib.ExitStack) -> tuple[int, int | None]:
    """Give the descriptor that a command writes to, and the one that its pipe is read from, if it has one.

    asked: a file, PIPE, DEVNULL, or None for this process's own, which `usual` is. ours: closes what was opened here.
    """
    if target is None:
        return usual, None
    if not isinstance(target, int):
        return target.fileno(), None
    read, write = os.pipe() if target == subprocess.PIPE else (None, os.open(os.devnull, os.O_WRONLY))
    ours.callback(os.close, write)
    return write, read


def main(sock: socket.socket, *more: str) -> int:
    """Fork for as long as requested. Returns: in a fork, the exit status of its command."""
    before = dict(os.environ)
    for name in _IMPORTED:
        importlib.import_module(name)
    if TENSORFLOW in more:
        from penstock.backends.loading import import_tensorflow

        import_tensorflow()
        importlib.import_module("penstock.backends.tensorflow")
    own_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [entry for entry in sys.path if entry not in own_paths]  # each command brings its own
    brought = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that those that wait for a command are reaped automatically
    while True:
        order, descriptors, _, _ = socket.recv_fds(sock, _MOST_BYTES, 5)
        if not order:
            return 0
        if os.fork() == 0:
            sock.close()
            command = json.loads(order)
            command["environment"] = brought | command["environment"]  # an import sets variables that are not given
            return _waited_for(command, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _waited_for(order: dict[str, Any], out: int, aside: int, report_fd: int, *passed: int) -> int:
    """Fork once more: one process becomes the command and reports its pid; the other reports how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    report = socket.socket(fileno=report_fd)
    child = os.fork()
    if child == 0:
        os.setsid()
        report.send(_NUMBER.pack(os.getpid()))
        report.close()
        return _run(order, out, aside, passed)
    for descriptor in (out, aside, *passed):
        os.close(descriptor)
    if passed:  # what a worker has started ends with it, and its group has its number until it is reaped
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        report.send(_NUMBER.pack(status))
    finally:
        os._exit(0)


def _run(order: dict[str, Any], out: int, aside: int, passed: Sequence[int]) -> int:
    for descriptor, number in ((out, 1), (aside, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), "utf-8")  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
    program, *words = order["words"]
    first = str(Path(program).parent)
    if words[:2] == ["-m", "penstock.server.cli"]:
        first, words = order["folder"], words[2:]
    if passed:
        program, words = words[0], [*map(str, passed), str(os.getppid()), *words[4:]]
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    if not passed:
        sys.path.insert(0, first)
    importlib.invalidate_caches()
    sys.argv[:] = [program, *words]
    if passed:
        return _work(words)
    from penstock.server import cli

    return cli.main()


def _work(words: list[str]) -> int:
    """Run as a worker whose packages are already imported."""
    from penstock.server.workers import child

    child.make_importable = lambda folders: None
    child.main(words)
    return 0


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:]))
