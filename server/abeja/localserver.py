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
_POLL_INTERVAL_S = 0.05
_PR_SET_PDEATHSIG = 1
_MAX_LOG_LINES = 10_000
_MAX_REDIRECTS = 30
_STOP_TIMEOUT_S = 40.0
_MIN_ERROR_STATUS, _MIN_SERVER_ERROR_STATUS = 400, 500
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "gzip, deflate", "User-Agent": "penstock"}


class LocalServerError(Exception):
    """Why the handler was not called, or its answer is an error.

    `log` is the server's output, complete once the server has ended.
    """

    def __init__(self, text: str, log: Iterable[str]) -> None:
        super().__init__(text)
        self.log = log


def _end_with_parent() -> None:
    """End the server even if the command is killed. Runs in the child of the main thread."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def print_line(line: str) -> None:
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
        self._log_prefix = f"handler '{handler}': "
        self._lines: deque[str] = deque(maxlen=_MAX_LOG_LINES)
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes]

    @property
    def endpoint(self) -> str:
        """Its URL, once it listens."""
        return f"http://{HOST}:{self._ports['HTTP']}"

    @contextlib.contextmanager
    def running(self, *, echo: bool) -> Iterator[None]:
        """Serve for the duration of the block. `echo`: print the server's output."""
        with subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - there are no threads yet
        ) as self._process:  # fmt: skip
            reader = threading.Thread(target=self._read_output, args=(echo,), daemon=True)
            reader.start()
            try:
                yield
            finally:
                self._process.send_signal(signal.SIGTERM)
                try:
                    self._process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                reader.join(_STOP_TIMEOUT_S)

    def _read_output(self, echo: bool) -> None:
        for raw in self._process.stdout or ():
            line = self._log_message(raw.decode(errors="replace").rstrip("\n"))
            self._lines.append(line)
            if not self._ports and (found := dict(_PORTS.findall(line))):
                self._ports = {name: int(port) for name, port in found.items()}
            if echo:
                print_line(line)

    def _log_message(self, line: str) -> str:
        """Return the message of a line of the log; for the handler's output, without its prefix."""
        try:
            message = str(json.loads(line)["msg"])
        except (ValueError, TypeError, KeyError):
            return line
        return message.removeprefix(self._log_prefix)

    def wait_ready(self) -> None:
        """Wait until the handler is ready. Raises: LocalServerError if the server ends before."""
        while self._process.poll() is None:
            if len(self._ports) > 1 and self._health_status() == http.HTTPStatus.OK:
                return
            time.sleep(_POLL_INTERVAL_S)
        raise self._error("failed to run local server : it has exited")

    def wait_end(self) -> None:
        """Wait until the server ends by itself. Raises: LocalServerError then."""
        self._process.wait()
        raise self._error("failed to run local server : it has exited")

    def _error(self, text: str) -> LocalServerError:
        return LocalServerError(text, self._lines)

    def _health_status(self) -> int:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self._send_request("GET", f"http://{HOST}:{self._ports['health']}/health_check", {}, b"")[0]
        return 0

    def post(self, content_type: str, body: bytes) -> bytes:
        """Call the handler. Returns: its answer's body. Raises: LocalServerError for a status of 400 and above."""
        method, url, headers = "POST", f"{self.endpoint}/", {"Content-Type": content_type}
        for _ in range(_MAX_REDIRECTS + 1):
            try:
                status, reason, location, answer = self._send_request(method, url, headers, body)
            except (OSError, http.client.HTTPException) as error:
                raise self._error(f"failed to send request : {error}") from None
            if status >= _MIN_ERROR_STATUS:
                message = reason or f"status code {status}"
                side = "Client" if status < _MIN_SERVER_ERROR_STATUS else "Server"
                raise self._error(f"failed to send request : {status} {side} Error: {message} for url: {url}")
            if status not in (301, 302, 303, 307, 308) or not location:
                return answer
            if status not in (307, 308):
                method, headers, body = "GET", {}, b""
            url = urljoin(url, location)
        raise self._error(f"failed to send request : Exceeded {_MAX_REDIRECTS} redirects.")

    @staticmethod
    def _send_request(method: str, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, str, str, bytes]:
        """Send a request. Returns: status, reason, redirect target, and body. Raises: OSError, HTTPException."""
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or HOST, parts.port)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request(method, path, body or None, {**_HEADERS, **headers})
            answer = connection.getresponse()
            return answer.status, answer.reason, answer.getheader("location", ""), answer.read()
        finally:
            connection.close()
