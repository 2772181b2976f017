from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.server import cli
from penstock.server.settings import Settings, known_settings

NOTHING = (
    "nothing to serve: pass the PATH of a model repository, an .onnx file or a SavedModel; "
    "with --dialect cortex, a project's folder"
)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that would have been served, recorded instead."""
    found: list[Settings] = []

    def note(settings: Settings) -> int:
        found.append(settings)
        return 0

    monkeypatch.setattr(cli, "_serve", note)
    for name in os.environ:
        if name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)
    return found


def test_serve_takes_paths_and_flags_in_any_order(served: list[Settings]) -> None:
    status = cli.main(["serve", "a", "--http-port", "9000", "b", "--exit-timeout-secs=5", "--model-repository", "c"])

    assert status == 0
    assert served == [Settings(model_repository=("a", "b", "c"), http_port=9000, exit_timeout_secs=5.0)]


def test_tritonserver_as_command_or_program_name_serves_with_triton_flags(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model-store=/mnt/models", "--grpc-port=9000", "--http-port=8080", "--strict-model-config=False"]
    expected = Settings(
        model_repository=("/mnt/models",), grpc_port=9000, http_port=8080, disable_auto_complete_config=False
    )

    assert cli.main(["tritonserver", *words]) == 0
    assert cli.main(["/opt/tritonserver/bin/tritonserver", *words]) == 0
    monkeypatch.setattr(sys, "argv", ["/opt/tritonserver/bin/tritonserver", *words])  # through a symbolic link
    assert cli.main() == 0

    assert served == [expected, expected, expected]


def test_an_unambiguous_flag_may_be_abbreviated_on_the_tritonserver_command_line(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model-repo=/models", "--model-st", "/more", "--strict-r=0", "--backend-dir=/opt", "--grpc-use-ssl=0"]

    assert cli.main(["tritonserver", *words]) == 0
    assert served == [Settings(model_repository=("/models", "/more"), strict_readiness=False)]
    assert "--backend-directory has no effect" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tritonserver", "--model-repository=/models", "--grpc=1"])
    assert "unknown argument --grpc=1" in capsys.readouterr().err


def test_a_boolean_flag_may_have_a_value_or_stand_alone(served: list[Settings]) -> None:
    cli.main(
        ["serve", "--access-log", "./a", "--exit-on-error", "true", "--strict-readiness=0", "--allow-metrics", "0"]
    )

    expected = Settings(
        model_repository=("./a",), access_log=True, exit_on_error=True, strict_readiness=False, allow_metrics=False
    )
    assert served == [expected]


def test_a_path_may_follow_a_boolean_flag(
    served: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    paths = ["models", "not/there", "s3://bucket", "m=package.module"]

    for path in paths:
        cli.main(["serve", "--access-log", path])

    assert [settings.model_repository for settings in served] == [(path,) for path in paths]


def test_paths_on_the_command_line_replace_the_paths_of_the_environment(
    served: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_MODEL_REPOSITORY", "from-environment")

    cli.main(["serve"])
    cli.main(["serve", "given"])

    assert [settings.model_repository for settings in served] == [("from-environment",), ("given",)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve"], NOTHING),
        (["serve", "a", "--htp-port=3"], "unknown argument --htp-port=3; did you mean '--http-port'?"),
        (["serve", "a", "--http-port", "x"], "--http-port must be a whole number from 0 to 65535, not 'x'"),
        (["serve", "a", "--http-port"], "argument --http-port: expected one argument"),
        (
            ["serve", "a", "--allow-http", "maybe"],
            "--allow-http must be true or false, not 'maybe', and there is no PATH of that name",
        ),
        (["check"], NOTHING),
        (["srve", "a"], "unknown command 'srve'; did you mean 'serve'?"),
        (["models"], "unknown command 'models'; penstock --help lists the commands"),
        (["/", "--http-port=0"], "unknown command '/'; to serve it: penstock serve / --http-port=0"),
        (
            ["check", "--dialect", "cortex"],
            "nothing to serve: pass the PATH of a project, the folder with its cortex.yaml",
        ),
    ],
)
def test_wrong_usage_prints_one_line_and_exits_with_status_2(
    words: list[str], message: str, served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    status: object
    try:
        status = cli.main(words)
    except SystemExit as ended:
        status = ended.code

    assert status == 2
    assert capsys.readouterr().err == f"penstock: {message}\n"
    assert not served


def test_a_flag_of_penstock_serve_cannot_be_abbreviated(served: list[Settings]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "a", "--http-por", "1"])


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])

    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert [item.flag for item in known_settings() if f"{item.flag} " not in text] == []


def test_penstock_without_a_command_prints_the_help_and_exits_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "serve models" in capsys.readouterr().out


def test_check_reports_the_models_that_serve_with_the_same_arguments_would_serve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    iris = Path(__file__).parents[2] / "examples" / "iris"

    status = cli.main(["check", str(iris), "--http-port", "9000", "--default-max-batch-size", "16"])

    assert status == 0
    text = capsys.readouterr().out
    assert "iris version 1, onnxruntime" in text
    assert "up to 16 rows" in text


def test_check_reports_a_missing_path_and_exits_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(tmp_path / "absent")]) == 1
    assert f"{tmp_path / 'absent'}: does not exist" in capsys.readouterr().out


NEEDS = "--grpc-use-ssl requires --grpc-server-cert and --grpc-server-key"


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (["--grpc-use-ssl"], [NEEDS]),
        (["--grpc-use-ssl", "--allow-grpc=0"], []),
        (["--grpc-use-ssl", "--grpc-server-cert=no.pem", "--grpc-server-key=no.key"], ["no.pem"]),
        (["--load-model=iris"], ["--load-model requires --model-control-mode explicit"]),
        (["--model-control-mode=explicit", "--load-model=*", "--load-model=iris"], ["loads every model"]),
        (["--grpc-port=8000", "--grpc-use-ssl"], ["HTTP and gRPC cannot both be served on port 8000", NEEDS]),
        (["--metrics-port=8001", "--metrics-address=0.0.0.0"], ["gRPC and metrics cannot both be served on port 8001"]),
        (["--metrics-port=8001", "--metrics-address=127.0.0.2"], []),
        (["--http-port=0", "--grpc-port=0"], []),
    ],
)
def test_check_reports_settings_with_which_the_server_would_not_start(
    flags: list[str], reported: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    iris = Path(__file__).parents[2] / "examples" / "iris"

    status = cli.main(["check", str(iris), *flags])

    lines = [line for line in capsys.readouterr().out.splitlines() if "would not start" in line]
    assert status == (1 if reported else 0)
    assert [line.startswith("the server would not start: ") for line in lines] == [True] * len(reported)
    assert all(text in line for text, line in zip(reported, lines, strict=True))


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_prints_the_installed_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 0
    assert capsys.readouterr().out.startswith("penstock 0.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "usage"),
    [
        ("serve", "PATH..."),
        ("check", "[--invariance] PATH..."),
        ("doctor", "[--json] [PATH...]"),
        ("probe", "[PATH...]"),
    ],
)
def test_the_usage_line_of_each_command_lists_its_arguments(
    word: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([word, "--help"])

    assert capsys.readouterr().out.startswith(f"usage: penstock {word} {usage} [--FLAG VALUE ...]\n")


@pytest.mark.parametrize("words", [["version"], ["perf", "--help"]])
def test_a_closed_pipe_on_standard_output_prints_no_traceback(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "penstock.server.cli", *words], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)

    assert (done.returncode, done.stderr) == (cli.PIPE_STATUS, b"")


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["check", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    """Help appears at once: only one small third-party module is imported, and no slow one of Python's."""
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom penstock.server.cli import main\n"
        f"try: main({words})\nexcept SystemExit: pass\n"
        "more = {name.partition('.')[0] for name in set(sys.modules) - before if 'cython' not in name}\n"
        "slow = {'asyncio', 'concurrent', 'ctypes', 'http', 'multiprocessing', 'ssl', 'unittest'}\n"
        "print(*sorted(more & slow | more - sys.stdlib_module_names - {'httptools', 'penstock'}), file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path("/"))

    assert done.stdout.startswith("usage: penstock")
    assert not done.stderr.strip()


class Gone(io.StringIO):
    """A standard output that can no longer be written to."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def flush(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "reported"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 0, ""),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "the report could not be written: No space left on device",
        ),
    ],
    ids=["penstock check | head", "a full disk"],
)
def test_a_report_that_cannot_be_written_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: OSError, status: int, reported: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stdout", Gone(error))

    assert cli.main(["check", str(tmp_path)]) == status
    assert reported in capsys.readouterr().err
    assert sys.stdout is None
