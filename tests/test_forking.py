"""Forked commands and workers behave like started ones: outputs, status, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import InferError
from penstock.server.workers import worker
from penstock.server.workers.kinds import FIRST_CALL
from penstock.server.workers.order import Order
from penstock.server.workers.process import Process
from tests.forking import Forker
from tests.workers import ForkedProcess

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
MODEL = """
import os, signal, sys, time

print("path", sys.path[:3], os.getcwd(), sorted(os.environ))
print("session", os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGCHLD), sys.stdout.encoding)
print("modules", "tests" in sys.modules, sys.dont_write_bytecode)
print("aside", file=sys.stderr)
if os.path.exists("wait"):
    print("waiting", flush=True)
    time.sleep(60)
if os.path.exists("leave"):
    sys.exit(7)
"""

pytestmark = pytest.mark.slow


def done_by(start: Any, words: list[str], folder: Path) -> tuple[int, list[str]]:
    """Run a command that imports the model. Returns: the status and the printed lines."""
    with (folder / "out").open("w+b") as out, (folder / "aside").open("w+b") as aside:
        environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONPATH": str(folder)}
        child = start(
            words, cwd=folder, env=environment, stdout=out, stderr=aside, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        status = child.wait(60)
    output = (folder / "out").read_text("utf-8") + (folder / "aside").read_text("utf-8")
    return status, [
        line for line in output.splitlines() if not line.startswith("20")
    ]  # without log lines, which contain times


@pytest.mark.parametrize("marker", ["", "leave"], ids=["to its end", "left"])
@pytest.mark.parametrize("module", [False, True], ids=["the command", "the module"])
def test_a_forked_command_behaves_like_a_started_command(
    module: bool, marker: str, forker: Forker, tmp_path: Path
) -> None:
    (tmp_path / "said.py").write_text(MODEL)
    if marker:
        (tmp_path / marker).touch()
    program = [sys.executable, "-m", "penstock.server.cli"] if module else [PENSTOCK]
    words = [*program, "deepaas-cli", "m=said", "warm"]

    started, forked = done_by(subprocess.Popen, words, tmp_path), done_by(forker.start, words, tmp_path)

    assert forked == started
    assert "session True" in forked[1][1]


def test_a_forked_command_can_be_terminated(forker: Forker, tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text(MODEL)
    (tmp_path / "wait").touch()
    with (tmp_path / "out").open("w+b") as out:
        child = forker.start(
            [PENSTOCK, "deepaas-cli", "m=said", "warm"], cwd=tmp_path, stdout=out, stderr=out,
            env={"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip

        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0)
        assert child.poll() is None
        child.terminate()

        assert child.wait(60) == -signal.SIGTERM
    assert child.poll() == -signal.SIGTERM


@pytest.mark.parametrize("text", [False, True], ids=["bytes", "text"])
def test_a_forked_command_may_write_to_pipes(text: bool, forker: Forker, tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text("import sys\nprint('said', flush=True)\nprint('aside', file=sys.stderr)")
    words = [PENSTOCK, "deepaas-cli", "m=said", "warm"]
    there: dict[str, Any] = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path)}, "text": text}

    with forker.start(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **there) as child:
        assert child.stdout is not None
        (output, *_) = child.stdout
    with forker.start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **there) as child:
        assert child.stdout is not None
        both = set(child.stdout)

    assert output == ("said\n" if text else b"said\n")
    assert {output, "aside\n" if text else b"aside\n"} <= both


def test_run_returns_the_output_and_status_of_a_forked_command(forker: Forker, tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text(MODEL)
    (tmp_path / "leave").touch()
    words = [PENSTOCK, "deepaas-cli", "m=said", "warm"]
    there: dict[str, Any] = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path), "LANG": "C.UTF-8"}, "text": True}

    started = subprocess.run(words, capture_output=True, check=False, start_new_session=True, **there)
    forked = forker.run(words, **there)

    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert "aside" in forked.stderr


SERVICE = """
import json, os, signal, sys


class Says:
    concurrent_messages = False

    def on_open(self):
        return b"", None

    def call(self, kind, number, body, arrays):
        said = {
            "words": sys.argv[1:], "path": sys.path, "folder": os.getcwd(), "environment": dict(os.environ),
            "session": os.getsid(0) == os.getpid(), "input": os.readlink("/proc/self/fd/0"),
            "name": open("/proc/self/comm").read(), "files": len(os.listdir("/proc/self/fd")),
            "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
            "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "bytecode": sys.dont_write_bytecode,
        }
        if kind == %(end)d:
            os._exit(7)
        if kind == %(die)d:
            os.kill(os.getpid(), signal.SIGSEGV)
        return json.dumps(said).encode(), [array + 1 for array in arrays]

    def on_message(self, kind, number, body, arrays):
        pass

    def close(self):
        pass


def open_service(settings, channel):
    return Says()
"""
SAYS, END, DIE = FIRST_CALL, FIRST_CALL + 1, FIRST_CALL + 2


def worked(kind: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run one worker that reports its environment, one that exits, and one that crashes. Returns: their results."""
    found: list[Any] = []
    (folder / "says.py").write_text(SERVICE % {"end": END, "die": DIE})
    monkeypatch.setattr(worker, "Process", kind)

    async def main(call: int) -> None:
        lost = asyncio.Event()
        order = Order("says", {}, "the worker", folder=folder, path=(str(folder),), environment={"A": "b"})
        begun = worker.Worker(order, lambda _: lost.set())
        try:
            await begun.ready
            body, arrays = await begun.call(call, b"", [np.zeros(2)])
            found.append((json.loads(bytes(body)), [np.asarray(array).tolist() for array in arrays]))
        except InferError as error:
            found.append((error.code, error.message))
        finally:
            begun.kill("the test is over")
            await lost.wait()

    for call in (SAYS, END, DIE):
        asyncio.run(main(call))
    return found


def test_a_forked_worker_behaves_like_a_started_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, forked = worked(Process, tmp_path, monkeypatch), worked(ForkedProcess, tmp_path, monkeypatch)

    assert forked == started
    assert "exit status 7" in forked[1][1]
    assert "SIGSEGV" in forked[2][1]
