"""A service for tests, opened in worker processes, that sends invalid messages and harms its own process."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, Never

from penstock.server.workers.kinds import ERROR, REPLY

UNKNOWN_KIND = 70


class UnspeakableError(Exception):
    """An error that cannot be serialized."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Lying:
    """The body of a call is the name of a method; other bodies are echoed."""

    concurrent_messages = False

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.number = 0

    def on_open(self) -> tuple[bytes, Any]:
        return b"", None

    def call(self, kind: int, number: int, body: bytes, arrays: list[Any]) -> tuple[bytes, Any]:
        self.number = number
        act = getattr(self, body.decode(), None)
        return (str(act()).encode(), None) if act else (body, arrays)

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Any]) -> None:
        """Ignore the message."""

    def close(self) -> None:
        """Do nothing."""

    # -- lies --------------------------------------------------------------------------------------------------

    def garbage(self) -> None:
        os.write(self.channel.fileno(), b"\xff" * 1000)
        time.sleep(60)

    def error_that_is_none(self) -> None:
        self.channel.send(ERROR, self.number, b"{not JSON")
        time.sleep(60)

    def error_without_a_code(self) -> None:
        self.channel.send(ERROR, self.number, b'{"code": "NICE", "message": 1, "retry_after_ns": null}')
        time.sleep(60)

    def answer_to_another(self) -> None:
        self.channel.send(REPLY, self.number + 7)
        time.sleep(60)

    def what_nobody_takes(self) -> None:
        self.channel.send(UNKNOWN_KIND, 1, b"what is it")
        time.sleep(60)

    def descriptors(self) -> None:
        """Send descriptors with a message and with an answer, which must have none."""
        for _ in range(20):
            self.channel.send(UNKNOWN_KIND, 1, b"", descriptors=[0] * 10)
        self.channel.send(REPLY, self.number, b"sent", descriptors=[0] * 10)
        self.channel.receive()
        time.sleep(60)

    # -- harm --------------------------------------------------------------------------------------------------

    def truncated(self) -> str:
        """Truncate the memory shared with the server. Return the outcomes: "shrunk" or error numbers."""
        truncated_fds = set()
        for path in list(Path("/proc/self/fd").iterdir()):
            try:
                if "memfd:" in str(path.readlink()):
                    os.truncate(path, 0)
                    truncated_fds.add("shrunk")
            except OSError as error:
                truncated_fds.add(str(error.errno))
        return " ".join(truncated_fds - {str(errno.ENOENT)})

    def orphan(self) -> None:
        """End, and leave a child in its own group that writes to the server for as long as it can."""
        if not os.fork():
            os.setsid()
            signal.alarm(15)
            frames = struct.pack("<IHHQII", 0, UNKNOWN_KIND, 0, 0, 0, 0) * 40_000
            with contextlib.suppress(OSError):
                while True:
                    os.write(self.channel.fileno(), frames)
            os._exit(0)
        self.channel.receive(0.1)
        os._exit(3)

    def lame(self) -> None:
        """Lose the socket here, while a child still holds it and a thread keeps this process from ending."""
        if not os.fork():
            time.sleep(60)
            os._exit(0)
        threading.Thread(target=time.sleep, args=(60,)).start()
        os.closerange(3, 1000)

    def speechless(self) -> Never:
        sys.stderr.close()
        raise ValueError("lost words")

    def unspeakable(self) -> Never:
        raise UnspeakableError

    def at_home(self) -> None:
        """Do what user code may do that assumes it is alone in its process."""
        sys.stdout = sys.stderr = None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        os.umask(0o777)
        os.chdir("/")
        for act in (os.setsid, os.setpgrp):
            try:
                act()
            except OSError:
                continue


def open_service(settings: dict[str, Any], channel: Any) -> Lying:
    return Lying(channel)
