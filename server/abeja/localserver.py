"""LocalServer: serves a handler in a separate process while a command runs. Used by local.py."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import urljoin, urlsplit

HOST = "localhost"
_PORTS = re.compile(r"\b(HTTP|health) on http://[^\s,]*:(\d+)")
_LOOK_S = 0.05
_PR_SET_PDEATHSIG = 1
_LAST_LINES = 10_000
_MOST_REDIRECTS = 30
_END_S = 40.0
_FAILED, _FAULTS = 400, 500
_ACCEPTS = {"Accept": "*/*", "Accept-Encoding": "gzip, deflate", "User-Agent": "penstock"}


class FailedError(Exception):
    """Why the handler was not called, or its answer is an error.

    `log` is the server's output, complete once the server has ended.
    """

    def __init__(self, text: str, log: Iterable[str]) -> None:
        super().__init__(text)
        self.log = log


def _end_with_parent() -> None:
    """End the server even if the command is killed. Runs in the child of the main thread."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def say(line: str) -> None:
    """Print a line with one write: another thread may print, too."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class LocalServer:
    """`penstock abeja` in this folder, on loopback. Threads: the main one; another reads its output."""

    def __init__(self, handler: str, port: str, environment: Mapping[str, str]) -> None:
        self._command = [
            sys.executable, "-m", "penstock.server.cli", "abeja", f"--handler={handler}", f"--port={port}",
            "--health-port=0", "--http-address=127.0.0.1", "--log-format=json",
        ]  # fmt: skip
        self._environment = environment
        self._said = f"handler '{handler}': "
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._ports: dict[str, int] = {}
        self._child: subprocess.Popen[bytes]

    @property
    def endpoint(self) -> str:
        """Its URL, once it listens."""
        return f"http://{HOST}:{self._ports['HTTP']}"

    @contextlib.contextmanager
    def running(self, *, tells: bool) -> Iterator[None]:
        """Serve for the duration of the block. `tells`: print the server's output."""
        with subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - there are no threads yet
        ) as self._child:  # fmt: skip
            reader = threading.Thread(target=self._read, args=(tells,), daemon=True)
            reader.start()
            try:
                yield
            finally:
                self._child.send_signal(signal.SIGTERM)
                try:
                    self._child.wait(_END_S)
                except subprocess.TimeoutExpired:
                    self._child.kill()
                reader.join(_END_S)

    def _read(self, tells: bool) -> None:
        for raw in self._child.stdout or ():
            line = self._text(raw.decode(errors="replace").rstrip("\n"))
            self._lines.append(line)
            if not self._ports and (found := dict(_PORTS.findall(line))):
                self._ports = {name: int(port) for name, port in found.items()}
            if tells:
                say(line)

    def _text(self, line: str) -> str:
        """Return the message of a line of the log; for the handler's output, without its prefix."""
        try:
            said = str(json.loads(line)["msg"])
        except (ValueError, TypeError, KeyError):
            return line
        return said.removeprefix(self._said)

    def await_ready(self) -> None:
        """Wait until the handler is ready. Raises: FailedError if the server ends before."""
        while self._child.poll() is None:
            if len(self._ports) > 1 and self._health() == http.HTTPStatus.OK:
                return
            time.sleep(_LOOK_S)
        raise self._failed("failed to run local server : it has ended")

    def await_end(self) -> None:
        """Wait until the server ends by itself. Raises: FailedError then."""
        self._child.wait()
        raise self._failed("failed to run local server : it has ended")

    def _failed(self, text: str) -> FailedError:
        return FailedError(text, self._lines)

    def _health(self) -> int:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self._asked("GET", f"http://{HOST}:{self._ports['health']}/health_check", {}, b"")[0]
        return 0

    def post(self, content_type: str, body: bytes) -> bytes:
        """Call the handler. Returns: its answer's body. Raises: FailedError for a status of 400 and above."""
        method, url, headers = "POST", f"{self.endpoint}/", {"Content-Type": content_type}
        for _ in range(_MOST_REDIRECTS + 1):
            try:
                status, reason, place, answer = self._asked(method, url, headers, body)
            except (OSError, http.client.HTTPException) as error:
                raise self._failed(f"failed to send request : {error}") from None
            if status >= _FAILED:
                said = reason or f"status code {status}"
                whose = "Client" if status < _FAULTS else "Server"
                raise self._failed(f"failed to send request : {status} {whose} Error: {said} for url: {url}")
            if status not in (301, 302, 303, 307, 308) or not place:
                return answer
            if status not in (307, 308):
                method, headers, body = "GET", {}, b""
            url = urljoin(url, place)
        raise self._failed(f"failed to send request : Exceeded {_MOST_REDIRECTS} redirects.")

    @staticmethod
    def _asked(method: str, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, str, str, bytes]:
        """Send a request. Returns: status, reason, redirect target, and body. Raises: OSError, HTTPException."""
        place = urlsplit(url)
        connection = http.client.HTTPConnection(place.hostname or HOST, place.port)
        try:
            path = (place.path or "/") + (f"?{place.query}" if place.query else "")
            connection.request(method, path, body or None, {**_ACCEPTS, **headers})
            answer = connection.getresponse()
            return answer.status, answer.reason, answer.getheader("location", ""), answer.read()
        finally:
            connection.close()
