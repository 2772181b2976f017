"""`abeja model run-local`: its output and exit status.

Recorded by hand from abejacli 2.1.0 on CPython 3.8, its container replaced by the proxy 2.6.5 in the same folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.server.abeja import local
from penstock.server.abeja.localserver import LocalServer
from tests.abeja.scenarios.definitions import HANDLERS
from tests.abeja.serving import COMMAND, environment, serving
from tests.forking import Forker
from tests.processes import children

INPUTS = {
    "request.json": b'{"total_without_tax":100}',
    "nope.json": b'{"nope": 100}',
    "odd.json": '{"b" : 1,\n "a": "日", "c": 1.0, "c": 2}'.encode(),
    "bad.json": b"{bad",
    "a.jpeg": b"\xff\xd8\x00",
    "a.PNG": b"P",
    "a.gif": b"GIF",
    "a.txt": b"x",
    "none": b"x",
}
IMAGE = ["--image", "abeja-inc/all-cpu:19.04"]
INFO = [
    "[info] preparing image : abeja/all-cpu:19.04",
    "[info] building image",
    "[info] setting up local server",
    "[info] waiting server running",
    "[info] sending request to model",
    "[info] finish requesting to model",
]
ANSWERS = {
    "seeds:mended": b'{\n    "total": 108.0\n}\n',
    "local:text": b"hello\n",
    "local:number": b"5\n",
    "local:nan": b"NaN\n",
    "local:word": b'"\\u65e5\\u672c"\n',
    "local:japanese": b'{\n    "\\u65e5": "\\u672c"\n}\n',
    "local:lines": b'{"a": 1}\n{"b": 2}\n',
    "local:empty": b"\n",
    "local:no_content": b"\n",
    "local:jpeg": b"\xff\xd8\xff\n\n",
}
ERRORS = {
    "local:failing": "500 Server Error: Internal Server Error",
    "local:leaving": "500 Server Error: Internal Server Error",
    "local:not_found": "404 Client Error: Not Found",
    "local:calm": "420 Client Error: status code 420",
    "local:last": "599 Server Error: status code 599",
}
WRONG = {
    "no-input": (["-h", "seeds:mended", *IMAGE], 'Missing option "--input"'),
    "no-handler": ([*IMAGE, "--input", "request.json"], 'Missing option "-h" / "--handler"'),
    "no-image": (["-h", "seeds:mended", "--input", "request.json"], 'Missing option "-i" / "--image"'),
    "environment": (
        ["-h", "seeds:mended", *IMAGE, "--input", "request.json", "-e", "1A:b"],
        "1A:b is not a valid environment variable, environment variable name should be ^[a-zA-Z_][a-zA-Z0-9_]*$",
    ),
    "device": (["-h", "seeds:mended", *IMAGE, "--input", "request.json", "-d", "phone"], "invalid choice: phone"),
    "extra": (["-h", "seeds:mended", *IMAGE, "--input", "request.json", "extra"], "unexpected extra argument (extra)"),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("project")
    for module in ("seeds.py", "local.py"):
        shutil.copy(HANDLERS / module, project)
    for name, content in INPUTS.items():
        (project / name).write_bytes(content)
    return project


Done = subprocess.CompletedProcess[bytes]
Run = Callable[..., Done]


def run(folder: Path, *words: str, start: Callable[..., Any] = subprocess.Popen) -> Done:
    """Run `abeja model run-local`. `start`: called like Popen to start it."""
    command = [*COMMAND, "model", "run-local", *words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as aside:
        child = start(command, cwd=folder, env=environment({}), stdout=out, stderr=aside)
        status = child.wait(100)
        out.seek(0), aside.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), aside.read())


class Within(LocalServer):
    """Serves in the process of the tests, which starts a second faster; its log is lost."""

    @contextlib.contextmanager
    def running(self, *, echo: bool) -> Iterator[None]:
        with serving(f"--handler={self._environment['HANDLER']}", folder=Path.cwd(), **self._environment) as served:
            self._ports = {"HTTP": served.ports[""], "health": served.ports["health"]}
            yield

    def wait_ready(self) -> None:
        """Return at once: `running` yields a server that is ready."""


@pytest.fixture
def quickly(folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Give a function that does what `run` does, but in this process, with a server Within."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(local, "LocalServer", Within)

    def do(*words: str) -> Done:
        try:
            status = local.run_local(["run-local", *words])
        except SystemExit as ended:
            status = int(ended.code or 0)
        message = capfdbinary.readouterr()
        return subprocess.CompletedProcess(words, status, message.out, message.err)

    return do


def answer(quickly: Run, handler: str, *words: str) -> bytes:
    """Give the output of a quiet run."""
    done = quickly("--handler", handler, *IMAGE, "--quiet", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("handler", list(ANSWERS))
def test_quiet_run_local_prints_only_the_answer(quickly: Run, handler: str) -> None:
    assert answer(quickly, handler, "--input", "request.json") == ANSWERS[handler]


@pytest.mark.parametrize("short", [False, True], ids=["long", "short"])
def test_the_command_lines_of_the_seed_run(folder: Path, short: bool, forker: Forker) -> None:
    words = (
        ["-h", "seeds:mended", "-i", "abeja/all-cpu:19.04"]
        if short
        else ["--image", "abeja/all-cpu:19.04", "--handler", "seeds:mended"]
    )

    start = forker.start if short else subprocess.Popen
    done = run(folder, *words, "--input", "request.json", "-q" if short else "--quiet", start=start)

    assert (done.returncode, done.stdout) == (0, ANSWERS["seeds:mended"])


def test_run_local_prints_each_step_unless_quiet(folder: Path, forker: Forker) -> None:
    done = run(folder, "-h", "local:printing", *IMAGE, "--input", "request.json", start=forker.start)

    printed = done.stdout.decode().splitlines()
    assert done.returncode == 0
    assert [line for line in printed if line.startswith("[info]")] == INFO
    assert [printed[0], *printed[-2:]] == [INFO[0], INFO[-1], "x"]
    assert "said by the handler" in printed


@pytest.mark.parametrize("handler", list(ERRORS))
def test_run_local_prints_the_error_status_but_not_the_body(quickly: Run, handler: str) -> None:
    done = quickly("-h", handler, *IMAGE, "--input", "request.json", "-q")

    printed = done.stderr.decode()
    first, blank, title = printed[printed.index("[error]") :].split("\n")[:3]
    assert (done.returncode, done.stdout) == (1, b"")
    assert re.sub(r":\d+/$", ":PORT/", first) == (
        f"[error] failed to send request : {ERRORS[handler]} for url: http://localhost:PORT/"
    )
    assert (blank, title) == ("", " ------ Local Server Error ------ ")


def test_run_local_prints_an_error_with_the_server_log(folder: Path, forker: Forker) -> None:
    done = run(folder, "-h", "local:failing", *IMAGE, "--input", "request.json", "-q", start=forker.start)

    first, blank, title, *log = done.stderr.decode().split("\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert first.startswith(f"[error] failed to send request : {ERRORS['local:failing']} for url: http://localhost:")
    assert (blank, title) == ("", " ------ Local Server Error ------ ")
    assert "ValueError: a text for the log" in log


def test_the_400_answer_of_the_seed_is_printed(folder: Path, forker: Forker) -> None:
    done = run(folder, "-h", "seeds:mended", *IMAGE, "--input", "nope.json", "-q", start=forker.start)

    assert done.returncode == 1
    assert re.match(
        rb"\[error\] failed to send request : 400 Client Error: Bad Request for url: http://localhost:\d+/\n\n"
        rb" ------ Local Server Error ------ \n",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("name", "kind", "body"),
    [
        ("odd.json", "application/json", '{"b": 1, "a": "\\u65e5", "c": 2}'),
        ("a.jpeg", "image/jpeg", "\xff\xd8\0"),
        ("a.PNG", "image/png", "P"),
        ("a.gif", "image/gif", "GIF"),
    ],
    ids=["json", "jpeg", "png", "gif"],
)
def test_the_input_is_posted_with_the_content_type_of_its_file_name(
    quickly: Run, name: str, kind: str, body: str
) -> None:
    request = json.loads(answer(quickly, "local:saw", "--input", name))

    headers = {"accept": "*/*", "accept-encoding": "gzip, deflate", "content-length": str(len(body))}
    assert request == {"type": kind, "method": "POST", "body": body, "headers": headers}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.txt", "not supported a.txt: "),
        ("none", "not supported none: "),
        ("missing.json", "specifield file doesn't exist missing.json: "),
    ],
    ids=["text", "without an ending", "missing"],
)
def test_an_unsupported_or_missing_input_is_reported(quickly: Run, name: str, message: str) -> None:
    done = quickly("-h", "seeds:mended", *IMAGE, "--input", name, "-q")

    assert (done.returncode, done.stdout, done.stderr.decode()) == (1, b"", f"[error] {message}\n")


def test_an_input_that_is_not_json_exits_with_status_1(quickly: Run) -> None:
    done = quickly("-h", "seeds:mended", *IMAGE, "--input", "bad.json", "-q")

    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.parametrize("image", ["all-cpu", "a:b:c"])
def test_an_image_without_name_and_tag_is_rejected(quickly: Run, image: str) -> None:
    done = quickly("-h", "seeds:mended", "-i", image, "--input", "request.json", "-q")

    assert (done.returncode, done.stderr.decode()) == (1, f"[error] invalid image and tag format : {image}\n")


@pytest.mark.parametrize("name", list(WRONG))
def test_an_invalid_command_line_exits_with_status_2(quickly: Run, name: str) -> None:
    words, message = WRONG[name]

    done = quickly(*words)

    assert (done.returncode, done.stdout) == (2, b"")
    assert message in done.stderr.decode()


def test_the_handler_gets_the_environment_given_by_flags(folder: Path, quickly: Run) -> None:
    without_flags = json.loads(answer(quickly, "local:environment", "--input", "request.json", "-o", "1"))
    with_flags = json.loads(
        answer(
            quickly, "local:environment", "--input", "request.json", "-o2", "-eA:b:c", "-eB",
            "-e", "A:2:3", "--environment", "HANDLER:x:y", "-e", "ABEJA_ORGANIZATION_ID:9",
            "-e", "ABEJA_TRAINING_RESULT_DIR:r",
        )
    )  # fmt: skip

    usual = {"HANDLER": "local:environment", "ABEJA_ORGANIZATION_ID": "1", "ABEJA_TRAINING_RESULT_DIR": str(folder)}
    assert without_flags == {**usual, "A": None, "B": None}
    assert with_flags == {
        **usual,
        "ABEJA_ORGANIZATION_ID": "2",
        "ABEJA_TRAINING_RESULT_DIR": f"{folder}/r",
        "A": "2:3",
        "B": "",
    }


def test_docker_options_are_accepted_and_ignored(quickly: Run) -> None:
    words = ["-d", "x86_gpu", "--no_cache", "--v1", "--no-cache", "--device-type=raspberry3", "--organization_id", "5"]

    assert answer(quickly, "local:text", "--input", "request.json", *words) == b"hello\n"


def test_a_handler_that_cannot_be_loaded_is_reported_with_the_server_log(folder: Path, forker: Forker) -> None:
    done = run(folder, "-h", "nomodule:x", *IMAGE, "--input", "request.json", "-q", start=forker.start)

    printed = done.stderr.decode()
    assert (done.returncode, done.stdout) == (1, b"")
    assert printed.startswith("[error] failed to run local server : ")
    assert "\n\n ------ Local Server Error ------ \n" in printed
    assert "nomodule" in printed


def test_run_local_server_serves_until_it_is_interrupted(folder: Path) -> None:
    command = [*COMMAND, "model", "run-local-server", "-h", "seeds:mended", *IMAGE]
    with subprocess.Popen(
        command, cwd=folder, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:  # fmt: skip
        try:
            assert child.stdout
            printed = [next(child.stdout).decode().rstrip("\n")]
            while not printed[-1].startswith(" -----------"):
                printed.append(next(child.stdout).decode().rstrip("\n"))
        finally:
            child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=60)

    at = printed.index(" ----- Local Server ----- ")
    assert [line for line in printed[:at] if line.startswith("[info]")] == INFO[:4]
    endpoint = re.sub(r":\d+$", ":PORT", printed[at + 3])
    assert [*printed[at : at + 3], endpoint, *printed[at + 4 :]] == [
        " ----- Local Server ----- ", " Started successfully!", "", " Endpoint : http://localhost:PORT",
        " Handler :  seeds:mended", " Image :    abeja/all-cpu:19.04", "", " you can now access this http api!", "",
        " press Ctrl + C to stop", " ------------------------ ",
    ]  # fmt: skip
    assert (child.returncode, stderr.decode()) == (1, "\nAborted!\n")


def test_killing_run_local_server_ends_its_server(folder: Path, forker: Forker) -> None:
    command = [*COMMAND, "model", "run-local-server", "-h", "seeds:mended", *IMAGE]
    with forker.start(
        command, cwd=folder, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as child:  # fmt: skip
        assert child.stdout
        next(line for line in child.stdout if line.startswith(b" Endpoint"))
        (server,) = children(child.pid)
        ended = os.pidfd_open(server)
        child.kill()

    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
