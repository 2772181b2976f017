"""A peer is started with what it reads, is asked, sleeps and wakes, and ends with all it has started."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.perf.peers import serving
from penstock.perf.peers.environments import Environment
from penstock.perf.peers.peer import Peer
from penstock.perf.peers.serving import CallError, Model, StartError
from penstock.perf.peers.wires import raw_bytes

ECHO = """
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

subprocess.Popen(["sleep", "60"], start_new_session=True)

class Echo(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200 if self.path == "/" + os.environ["MODEL_NAME"] else 500, body)

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", int(os.environ["HTTP_PORT"])), Echo).serve_forever()
"""
ROW = np.array([[1, 2]], np.float32)
HERE = Environment(Path(sys.executable), {})


def peer(program: str) -> Peer:
    wires = (raw_bytes("/iris"), raw_bytes("/other"))
    return Peer("echo", "echo", (), ("{python}", "-S", "server.py"), "/", wires, "", files={"server.py": program})


def model(folder: Path) -> Model:
    (folder / "model.onnx").touch()
    return Model("iris", folder / "model.onnx", (ROW,), (ROW,))


def test_a_peer_is_called_suspended_resumed_and_leaves_no_process(tmp_path: Path) -> None:
    echo = peer(ECHO)
    good, bad = echo.wires
    with serving.served(echo, HERE, model(tmp_path)) as server:
        answer = server.ask(good, "iris", ROW)
        with pytest.raises(CallError, match=r"^500: "):
            server.ask(bad, "iris", ROW)
        pids = server.tree.pids()
        server.suspend()
        server.resume()
        again = server.ask(good, "iris", ROW)

    assert np.array_equal(answer, ROW.ravel())
    assert np.array_equal(again, ROW.ravel())
    assert len(pids) == 2  # with the one that had left its session
    assert server.tree.pids() == []


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('starting'); raise SystemExit('no such backend')", "it ended with status 1: no such backend"),
        ("raise SystemExit(3)", "it ended with status 3: it said nothing"),
    ],
)
def test_a_peer_that_exits_reports_the_last_line_of_its_log(program: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=re.escape(reason)), serving.served(peer(program), HERE, model(tmp_path)):
        pass


def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    nowhere = Environment(Path("/nowhere/python"), {})
    with pytest.raises(StartError, match=r"nowhere"), serving.served(peer(""), nowhere, model(tmp_path)):
        pass


def test_the_folder_is_kept_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))
    (tmp_path / "model.onnx").touch()
    with pytest.raises(StartError), serving.served(peer("raise SystemExit(1)"), HERE, model(tmp_path), keep=True):
        pass

    assert (tmp_path / "server.py").exists()
    assert (tmp_path / "r" / "iris" / "1" / "model.onnx").is_symlink()
