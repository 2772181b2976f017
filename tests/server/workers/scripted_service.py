"""A service for tests, opened in worker processes: it does what the body of a call says."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import urllib
from pathlib import Path
from typing import Any

from penstock.backends.errors import Code, InferError

GIL_HOLDERS = ctypes.PyDLL(None)
"""Functions that are called through it keep the GIL."""


class Doing:
    """The body of a call is a word: those in `ACTS` do something, others are echoed with their tensors."""

    def __init__(self, settings: dict[str, Any], channel: Any) -> None:
        self.concurrent_messages = settings.get("listens", False)
        self.channel = channel
        self.messages: list[bytes] = []
        self.hearing = threading.Event()
        self.objects: list[Any] = []

    def on_open(self) -> tuple[bytes, Any]:
        return b"open", None

    def call(self, kind: int, number: int, body: bytes, arrays: list[Any]) -> tuple[bytes, Any]:
        word, _, rest = body.decode().partition(" ")
        act = getattr(self, word, None)
        if act is not None:
            return str(act(rest)).encode(), None
        return body, arrays

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Any]) -> None:
        self.messages.append(body)
        self.hearing.set()

    def close(self) -> None:
        self.run_at_close()

    run_at_close = staticmethod(lambda: None)

    # -- acts --------------------------------------------------------------------------------------------------

    def refuse(self, rest: str) -> None:
        raise InferError(Code.OVERLOADED, rest, 7)

    def fail(self, rest: str) -> None:
        raise ValueError(rest)

    def leave(self, rest: str) -> None:
        sys.exit(3)

    def exit(self, rest: str) -> None:
        os._exit(int(rest))

    def abort(self, rest: str) -> None:
        os.abort()

    def crash(self, rest: str) -> None:
        ctypes.string_at(0)

    def kill(self, rest: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self, rest: str) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def spin(self, rest: str) -> None:
        while True:
            pass

    def hold(self, rest: str) -> None:
        GIL_HOLDERS.pause()

    def sleep(self, rest: str) -> None:
        time.sleep(float(rest))

    def print(self, rest: str) -> None:
        sys.stdout.write(f"{rest}\n")

    def write(self, rest: str) -> None:
        os.write(1, rest.encode())

    def flood(self, rest: str) -> None:
        for number in range(int(rest)):
            sys.stdout.write(f"line {number}\n")

    def yes(self, rest: str) -> None:
        subprocess.run(["yes"], check=False)  # as fast as a pipe goes

    def mute(self, rest: str) -> None:
        os.close(1)
        os.close(2)

    def cut(self, rest: str) -> None:
        os.closerange(3, 1 << 20)  # whichever number the parent of many files has given it
        time.sleep(60)

    def linger(self, rest: str) -> None:
        """Delay the end of this process after its socket closes until a pipe has data: large processes take time."""

        def flush() -> None:
            os.closerange(3, 1 << 20)
            os.read(os.open(rest, os.O_RDONLY), 1)

        sys.stdout.flush = flush  # type: ignore[method-assign]  # the last that is done

    def grow(self, rest: str) -> None:
        self.objects.append(b"x" * (int(rest) << 20))
        time.sleep(60)

    def start(self, rest: str) -> int:
        """Start a process that outlives this one unless it is killed."""
        return subprocess.Popen(["sleep", "60"], start_new_session=rest == "apart").pid

    def fork(self, rest: str) -> int:
        """Leave a child with all open descriptors, in another process group."""
        pid = os.fork()
        if not pid:
            os.setsid()
            time.sleep(60)
        return pid

    def come_back_twice(self, rest: str) -> int:
        """Fork, through Python or by calling C, and return from the call in the child, too."""
        return os.fork() if rest == "python" else int(GIL_HOLDERS.fork())

    def status_of(self, rest: str) -> int:
        return os.waitpid(int(rest), 0)[1]

    def bomb(self, rest: str) -> None:
        """Start processes that start others all the time, up to a limit in parallel."""
        for _ in range(int(rest)):
            if not os.fork():
                while True:
                    if os.fork():
                        os._exit(0)
        time.sleep(60)

    def hold_later(self, rest: str) -> None:
        threading.Timer(0.05, self.hold, [""]).start()

    def hear(self, rest: str) -> str:
        self.hearing.wait(10)
        return b" ".join(self.messages).decode()

    def say(self, rest: str) -> None:
        self.channel.send(64, 5, rest.encode())

    def place(self, rest: str) -> str:
        return f"{Path.cwd()} {sys.path[0]} {os.environ.get('MARK', '')} {sys.executable}"

    def submodule(self, rest: str) -> str:
        """Use a submodule of which only the package is imported."""
        return str(getattr(urllib, rest).__name__)

    def promise(self, rest: str) -> None:
        """Register an exit handler that makes a file."""
        atexit.register(Path(rest).touch)

    def promise_pool(self, rest: str) -> None:
        """Start a process that waits for work, and is told at exit that there is none, as in a process pool."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        atexit.register(Path(rest).touch)
        atexit.register(os.waitpid, child, 0)
        threading._register_atexit(os.close, write)  # type: ignore[attr-defined]  # as concurrent.futures does

    def end_badly(self, rest: str) -> None:
        """Register an exit handler that runs before those of pools and raises."""
        threading._register_atexit(sys.exit)  # type: ignore[attr-defined]
        threading._register_atexit(os.close, -1)  # type: ignore[attr-defined]

    def stay(self, rest: str) -> None:
        """Register an exit handler that never returns."""
        atexit.register(threading.Event().wait)

    def close_slowly(self, rest: str) -> None:
        self.run_at_close = lambda: time.sleep(60)

    def descriptors(self, rest: str) -> str:
        return " ".join(path.name for path in Path("/proc/self/fd").iterdir())


class DoingOnLoop(Doing):
    """The same service, on an event loop."""

    is_async = True

    def __init__(self, settings: dict[str, Any], channel: Any) -> None:
        super().__init__(settings, channel)
        self.notified = asyncio.Event()

    async def call(self, kind: int, number: int, body: bytes, arrays: list[Any]) -> tuple[bytes, Any]:  # type: ignore[override]
        if body == b"tick":
            self.objects.append(asyncio.create_task(self.tick()))
            return b"", None
        if body == b"ticked":
            await asyncio.gather(*self.objects)
            return b"ticked", None
        if body == b"heard":
            await self.notified.wait()
            return self.messages[0], None
        if body == b"wait":
            await asyncio.sleep(60)
        return super().call(kind, number, body, arrays)

    async def tick(self) -> None:
        await asyncio.sleep(0.01)

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Any]) -> None:
        super().on_message(kind, number, body, arrays)
        self.notified.set()


def open_service(settings: dict[str, Any], channel: Any) -> Doing:
    if "raises" in settings:
        raise InferError(Code.INVALID, settings["raises"])
    if "exits" in settings:
        os._exit(settings["exits"])
    if "hangs" in settings:
        time.sleep(60)
    if "breaks" in settings:
        raise KeyError(settings["breaks"])
    return (DoingOnLoop if settings.get("loop") else Doing)(settings, channel)
