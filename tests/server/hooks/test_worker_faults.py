"""Faults of hooks in worker processes: one request fails, and each of the others ends once, with its own answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import WorkerSpec
from penstock.server.hooks import worker_replicas
from penstock.server.hooks.runner import Hooks
from penstock.server.workers.backoff import Backoff
from tests.processes import children, descriptors
from tests.server.hooks.stage import PuppetEngine, Stage, refusal
from tests.server.hooks.test_in_workers import worker_pids

pytestmark = pytest.mark.slow

GUARD_S = 60.0
FAULTY = """
    import ctypes, os, sys, time
    kept = []
    def spin():
        while True:
            pass
    def flood():
        line = "x" * 1000
        for _ in range(20_000):
            print(line)
            print(line, file=sys.stderr)
    def leak():
        for _ in range(200):
            kept.append(bytearray(8 << 20))
            kept[-1][::4096] = bytes([1]) * (2 << 10)
            time.sleep(0.01)
    def wait_for(name):
        with open(name) as pipe:
            pipe.read()
    FAULTS = {
        "spin": spin,
        "hold": lambda: ctypes.PyDLL(None).usleep(60_000_000),
        "compute": lambda: 7 ** 30_000_000 % 3,
        "exit": lambda: os._exit(3),
        "sys.exit": lambda: sys.exit(3),
        "abort": os.abort,
        "crash": lambda: ctypes.string_at(0),
        "flood": flood,
        "leak": leak,
        "wrong": lambda: object(),
    }
    def pre_inference(sample, metadata):
        if "pipe" in sample:
            wait_for(sample["pipe"])
        wrong = FAULTS[sample["fault"]]() if "fault" in sample else None
        return [sample["n"]] * 4 if wrong is None else wrong
    def post_inference(prediction, metadata): return int(prediction[0][0, 0])
"""
KILLED = Code.EXPIRED, "pre_inference of model 'm' took longer than its limit of 0.5 s"
ENDS = {
    "spin": KILLED,
    "hold": KILLED,
    "compute": KILLED,
    "exit": (Code.NOT_READY, "exit status 3"),
    "sys.exit": (Code.INTERNAL, "pre_inference failed; see the server log, request id"),
    "abort": (Code.NOT_READY, "signal 6"),
    "crash": (Code.NOT_READY, "signal 11"),
    "leak": (Code.NOT_READY, "memory"),
    "wrong": (Code.INVALID, "pre_inference returned a value that the model cannot take: input 'x' takes FP32"),
    "flood": None,
}
SHARED = "shared"

Scene = Callable[[Stage], Awaitable[None]]


@pytest.fixture
def act(tmp_path: Path) -> Callable[[Scene], None]:
    """Play a scene, close its hooks, and check that nothing is left behind."""

    def run(scene: Scene) -> None:
        async def main() -> None:
            before, others = descriptors(), children()  # other tests' resource tracker, for one
            stage = Stage(tmp_path)
            async with asyncio.timeout(GUARD_S):
                try:
                    await scene(stage)
                finally:
                    await stage.close()
            gc.collect()
            await asyncio.sleep(0)
            assert children() <= others
            assert descriptors() <= before

        asyncio.run(main())

    return run


class Ledger:
    """Records how each request ended, by its number."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self.ends: dict[int, list[int | InferError]] = {}

    async def ask(self, number: int, **more: str) -> None:
        """Send a request and record how it ends."""
        ends = self.ends.setdefault(number, [])
        try:
            ends.append(int(await self._hooks.predict({"n": number, **more}, f"r{number}")))
        except InferError as error:
            ends.append(error)

    async def load(self, count: int, at_once: int, fault: Callable[[int], dict[str, str]] = lambda _: {}) -> None:
        """Send `count` requests, `at_once` of them at a time."""
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:
                await self.ask(number, **fault(number))

        await asyncio.gather(*(client() for _ in range(at_once)))

    def harmed(self) -> dict[int, InferError]:
        """Give the requests that failed; check that all others ended once, with their own answers."""
        failed: dict[int, InferError] = {}
        for number, (end,) in self.ends.items():
            if isinstance(end, InferError):
                failed[number] = end
            else:
                assert end == number
        return failed


def serving(hooks: Hooks) -> int:
    """Give the number of workers that serve."""
    assert hooks._placement is not None
    return sum(replica.is_serving for replica in hooks._placement.replicas._live)


async def is_whole(hooks: Hooks, count: int) -> None:
    """Wait until `count` workers serve."""
    while serving(hooks) < count:  # noqa: ASYNC110 - by the start of a process
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("fault", "replicas"), [*((fault, SHARED) for fault in ENDS), ("exit", None), ("spin", None), ("sys.exit", None)]
)
def test_a_fault_in_a_hook_fails_only_its_own_request(
    act: Callable[[Scene], None], fault: str, replicas: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    end = ENDS[fault]
    memory = WorkerSpec(memory_bytes=400 << 20 if fault == "leak" else 0)
    limit_s = 0.5 if end == KILLED else 20

    async def scene(stage: Stage) -> None:
        hooks = await stage.load(FAULTY, workers=2, replicas=replicas, worker=memory, timeout_s=limit_s)
        ledger = Ledger(hooks)
        await ledger.load(120, 8, lambda number: {"fault": fault} if number == 60 else {})
        harmed = ledger.harmed()

        assert len(ledger.ends) == 120
        assert set(harmed) == ({60} if end else set())
        if end:
            assert harmed[60].code is end[0]
            assert end[1] in harmed[60].message
        await is_whole(hooks, 2)
        await ledger.load(60, 8)

    act(scene)


@pytest.mark.parametrize("replicas", [SHARED, None], ids=["shared", "one request each"])
def test_killing_a_worker_under_load_fails_only_the_call_that_it_ran(
    act: Callable[[Scene], None], replicas: str | None, tmp_path: Path
) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(FAULTY, workers=2, replicas=replicas)
        ledger = Ledger(hooks)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        stuck = asyncio.ensure_future(ledger.ask(1000, pipe=str(pipe)))
        # opening it for writing waits until the hook has opened it for reading
        gate = await asyncio.to_thread(os.open, pipe, os.O_WRONLY)
        try:
            load = asyncio.ensure_future(ledger.load(400, 8))
            while not (victims := [pid for pid in worker_pids(hooks) if has_open(pid, pipe)]):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            os.kill(victims[0], signal.SIGKILL)
            await stuck
            await load
        finally:
            os.close(gate)  # otherwise the end of a failed scene would wait for the hook
        harmed = ledger.harmed()

        assert len(victims) == 1
        assert set(harmed) == {1000}
        assert (harmed[1000].code, "signal 9" in harmed[1000].message) == (Code.NOT_READY, True)
        await is_whole(hooks, 2)

    act(scene)


def has_open(pid: int, file: Path) -> bool:
    """Tell whether a process has a file open: it may be a moment after the other end of a pipe has been."""
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if each.readlink() == file:
                return True
    return False


def test_killing_every_worker_under_load_fails_only_the_calls_that_they_ran(act: Callable[[Scene], None]) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(FAULTY, workers=2, replicas=SHARED)
        ledger = Ledger(hooks)
        load = asyncio.ensure_future(ledger.load(1000, 16))
        killed = set(worker_pids(hooks))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        await load
        harmed = ledger.harmed()

        assert len(ledger.ends) == 1000
        assert len(harmed) <= 2
        assert all(error.code is Code.NOT_READY for error in harmed.values())
        await is_whole(hooks, 2)
        assert not killed & set(worker_pids(hooks))

    act(scene)


@pytest.mark.parametrize("replicas", [SHARED, None], ids=["shared", "one request each"])
def test_requests_between_repeated_worker_exits_are_answered(
    act: Callable[[Scene], None], replicas: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = functools.partial(Backoff, first_s=10 * GUARD_S, max_s=10 * GUARD_S)
    monkeypatch.setattr(worker_replicas, "Backoff", never)  # a second restart would come too late

    async def scene(stage: Stage) -> None:
        hooks = await stage.load(FAULTY, workers=1, replicas=replicas)
        ledger = Ledger(hooks)
        for number in range(6):
            await ledger.ask(number, **({"fault": "exit"} if number % 2 else {}))

        assert set(ledger.harmed()) == {1, 3, 5}

    act(scene)


def test_a_stopped_worker_is_killed_and_replaced_while_the_other_continues(act: Callable[[Scene], None]) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(FAULTY, workers=2, replicas=SHARED)
        ledger = Ledger(hooks)
        victim = worker_pids(hooks)[0]
        os.kill(victim, signal.SIGSTOP)
        await ledger.load(200, 4)
        harmed = ledger.harmed()

        assert len(harmed) <= 1
        assert all("stopped" in error.message for error in harmed.values())
        await is_whole(hooks, 2)
        assert victim not in worker_pids(hooks)

    act(scene)


def test_a_request_fails_when_the_worker_that_holds_its_state_has_ended(act: Callable[[Scene], None]) -> None:
    source = """
        current = None
        def pre_inference(sample, metadata):
            global current
            current = sample
            return [sample] * 4
        def post_inference(prediction, metadata): return current
    """

    async def scene(stage: Stage) -> None:
        engine = PuppetEngine()
        hooks = await stage.load(source, engine, workers=1)
        call = asyncio.ensure_future(hooks.predict(5))
        await engine.gather(1)
        os.kill(worker_pids(hooks)[0], signal.SIGKILL)
        while serving(hooks):  # noqa: ASYNC110 - by the death of a process
            await asyncio.sleep(0.005)
        engine.run()
        with pytest.raises(InferError, match="ended, and the state that this request had left there is lost") as why:
            await call
        assert why.value.code is Code.NOT_READY

        again = asyncio.ensure_future(hooks.predict(6))
        await engine.gather(1)
        engine.run()
        assert await again == b"6"

    act(scene)


def test_a_file_that_cannot_be_reloaded_is_reported_and_retried(
    act: Callable[[Scene], None], caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        import os
        def pre_inference(sample, metadata): return [sample] * 4
    """

    async def scene(stage: Stage) -> None:
        hooks = await stage.load(source, workers=1)
        path = stage._folder / "hooks.py"
        path.write_text("import nothing_of_that_name")
        os.kill(worker_pids(hooks)[0], signal.SIGKILL)
        while "nothing_of_that_name" not in (await refusal(hooks.predict(1)))[1]:
            pass  # the call that ran in the worker, or was about to
        assert stage.model.blockers
        reason = "cannot be loaded: ModuleNotFoundError: No module named 'nothing_of_that_name'"
        assert await refusal(hooks.predict(1)) == (Code.NOT_READY, f"hooks file hooks.py {reason}")
        path.write_text("def pre_inference(sample, metadata): return [5] * 4")
        await is_whole(hooks, 1)
        assert not stage.model.blockers
        assert await hooks.predict(1) == b"[[[5.0,5.0,5.0,5.0]]]"
        assert any(f"hooks file {path} {reason}" in message for message in caplog.messages)  # the full path

    act(scene)


def test_cancelling_calls_to_a_worker_does_not_affect_other_requests(
    act: Callable[[Scene], None], tmp_path: Path
) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(FAULTY, workers=1, replicas=SHARED)
        pid = worker_pids(hooks)
        ledger = Ledger(hooks)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        runs = asyncio.ensure_future(hooks.predict({"n": 1, "pipe": str(pipe)}))
        gate = await asyncio.to_thread(os.open, pipe, os.O_WRONLY)
        waits = [asyncio.ensure_future(hooks.predict({"n": 2, "fault": "exit"})) for _ in range(5)]
        load = asyncio.ensure_future(ledger.load(20, 4))
        await asyncio.sleep(0)
        ahead = 1  # already sent to the worker
        for each in (runs, *waits[ahead:]):
            each.cancel()
        await asyncio.wait((runs, *waits[ahead:]))
        waits[0].cancel()
        os.close(gate)
        await load

        assert len(ledger.harmed()) <= 1
        assert len(ledger.ends) == 20
        await is_whole(hooks, 1)
        assert len(pid) == 1

    act(scene)
