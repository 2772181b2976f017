"""Which handlers are served and which are not: names, folders, ports and requirements."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.abeja.scenarios.definitions import HANDLERS
from tests.abeja.serving import COMMAND, PORTS, Served, Started, await_ready, environment, serving, started
from tests.forking import Forker
from tests.originals import free_port, get

WRONG = [
    "main", "a:b:c", "main:", ":handler", ":", " main:handler", "main:handler ", "main:none", "nothing:handler",
    "main.py:handler", "package/deeper:handler", ".inside:handler", "package:none", "package.none:handler",
    "callables:instance.method",
]  # fmt: skip
OPEN = """
import sys

from penstock.backends.errors import InferError
from penstock.server.abeja.inside.service import open_service

for name in sys.argv[1:]:
    try:
        open_service({"handler": name, "strict": False, "fallback_folders": []}, None)
    except InferError as error:
        print(error.code.name)
    else:
        print("served")
"""
"""Opens a service for each of several names, as the worker of a handler does first."""
MODULES = {
    "syntax": "def handler(request, context",
    "raises": "raise RuntimeError('said at import')",
    "lacks": "import nothing_like_this",
    "lacks_a_name": "raise AttributeError('deep')",
    "leaves": "raise SystemExit(5)",
}
WHERE = (
    "import os\n\nHERE = os.path.basename(os.getcwd())\n\n\n"
    "def handler(request, context):\n    return {'content': HERE}\n"
)
"""A handler that answers with the name of the folder that it was imported in."""
SLOW = (
    "import pathlib, time\n\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.01)\n\n\n"
    "def handler(request, context):\n    return {'content': 'at last'}\n"
)
"""A module whose import waits until a file exists."""
FOLDERS = {
    "none": ([], "here"),
    "here": ([".", "a"], "here"),
    "below": (["a"], "a"),
    "nearest": (["a/b", "a"], "a"),
    "two-below": (["a/b"], "b"),
    "three-below": (["a/b/c"], "c"),
    "four-below": (["a/b/c/d"], "here"),
    "hidden": ([".hidden"], ".hidden"),
}

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    project = tmp_path / "here"
    project.mkdir()
    return project


def answer_body(served: Served) -> Any:
    """Give the body of an answer."""
    answer = served.player.play(get("any", "/").written())
    assert answer["status"] == 200, answer
    return answer["body"]


StatusOf = Callable[..., int]


@pytest.fixture
def status_of(forker: Forker) -> StatusOf:
    """Give a function that runs a server that must not start, and returns its exit status."""

    def status(folder: Path, *words: str, **more: str) -> int:
        with started(*words, folder=folder, start=forker.start, **more) as served:
            return served.child.wait(60)

    return status


def test_invalid_and_missing_handlers_cannot_be_opened() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPEN, "callables:anonymous", *WRONG], cwd=HANDLERS, env=environment({}),
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    assert done.stdout.split() == ["served"] + ["INVALID"] * len(WRONG)


@pytest.mark.parametrize("name", ["main", "main:none"])
def test_a_missing_handler_exits_with_status_1(name: str, status_of: StatusOf) -> None:
    assert status_of(HANDLERS, f"--handler={name}") == 1


def test_an_empty_handler_exits_with_status_1(folder: Path, status_of: StatusOf) -> None:
    (folder / "main.py").write_text(WHERE)

    assert status_of(folder, HANDLER="") == 1
    assert status_of(folder, "--handler=") == 1


@pytest.mark.parametrize("name", list(MODULES))
def test_a_module_that_cannot_be_imported_exits_with_status_1(name: str, folder: Path, status_of: StatusOf) -> None:
    (folder / f"{name}.py").write_text(MODULES[name])

    assert status_of(folder, f"--handler={name}:handler") == 1


def test_the_handler_comes_from_the_flag_then_the_environment_then_main(folder: Path) -> None:
    for name in ("main", "other", "third"):
        (folder / f"{name}.py").write_text(f"def handler(request, context):\n    return {{'content': {name!r}}}\n")

    with serving(folder=folder) as served:
        assert answer_body(served) == "main"
    with serving(folder=folder, HANDLER="other:handler") as served:
        assert answer_body(served) == "other"
    with serving("--handler=third:handler", folder=folder, HANDLER="other:handler") as served:
        assert answer_body(served) == "third"


@pytest.mark.parametrize("name", list(FOLDERS))
def test_the_handler_is_imported_in_the_marked_folder(name: str, folder: Path) -> None:
    marked, expected = FOLDERS[name]
    for path in [".", *marked]:
        (folder / path).mkdir(parents=True, exist_ok=True)
        (folder / path / "main.py").write_text(WHERE)
    for path in marked:
        (folder / path / ".abeja").mkdir()

    with serving(folder=folder) as served:
        assert answer_body(served) == expected


def test_a_marker_that_is_a_file_is_ignored(folder: Path) -> None:
    (folder / "main.py").write_text(WHERE)
    (folder / "a").mkdir()
    (folder / "a" / ".abeja").touch()

    with serving(folder=folder) as served:
        assert answer_body(served) == "here"


def test_a_marked_folder_without_the_module_exits_with_status_1(folder: Path, status_of: StatusOf) -> None:
    (folder / "main.py").write_text(WHERE)
    (folder / "a" / ".abeja").mkdir(parents=True)

    assert status_of(folder) == 1


def test_the_handler_works_in_the_folder_of_abeja_user_model_root(folder: Path, forker: Forker) -> None:
    (folder / "a").mkdir()
    shutil.copy(HANDLERS / "inside.py", folder / "a" / "main.py")

    with started(folder=folder, start=forker.start, ABEJA_USER_MODEL_ROOT="a") as served:
        await_ready(served)
        answer = answer_body(served)

    assert '"folder": "a"' in answer
    assert f'"ABEJA_TRAINING_RESULT_DIR": "{folder}/a/abejainc_training_result"' in answer


def test_health_is_503_until_the_handler_is_imported(folder: Path) -> None:
    (folder / "main.py").write_text(SLOW)

    with started(folder=folder) as served:
        early = [
            served.player.play(get("any", path, port=port).written())
            for path, port in (("/health_check", "health"), ("/health_check", ""), ("/", ""), ("/any?x", ""))
        ]
        (folder / "go").touch()
        await_ready(served)
        late = served.player.play(get("any", "/health_check").written())
        answer = answer_body(served)

    assert [(each["status"], each["headers"]["content-type"], each["body"]) for each in early] == [
        (503, "application/json", '{"status":"service unavailable"}')
    ] * 4
    assert (late["status"], late["body"], answer) == (200, '{"status":"ok"}', "at last")


def test_both_ports_can_come_from_the_environment(folder: Path, forker: Forker) -> None:
    (folder / "main.py").write_text(WHERE)
    ports = {"": free_port(), "health": free_port()}
    variables = environment({"PORT": str(ports[""]), "HEALTHCHECK_PORT": str(ports["health"])})
    command = [*COMMAND, "--http-address=127.0.0.1"]

    with (folder / "log").open("wb") as log, forker.start(command, cwd=folder, env=variables, stderr=log) as child:
        try:
            served = Started(ports, child, log)
            await_ready(served)
            assert answer_body(served) == "here"
        finally:
            child.terminate()


def test_using_one_port_for_both_purposes_fails_the_start(folder: Path, forker: Forker) -> None:
    (folder / "main.py").write_text(WHERE)
    port = str(free_port())

    words = [*COMMAND, *PORTS[2:], "--port", port, "--health-port", port]
    done = forker.run(words, cwd=folder, env=environment({}))

    assert done.returncode != 0


class TestRequirements:
    """Requirements are installed or not; without a network, none can be."""

    @pytest.fixture
    def project(self, folder: Path) -> Path:
        (folder / "main.py").write_text(WHERE)
        (folder / "requirements.txt").write_text("--no-index\n./no/such/package\n")
        return folder

    def test_requirements_are_not_installed_when_installation_is_disabled(self, project: Path) -> None:
        with serving("--abeja-install=false", folder=project) as served:
            assert answer_body(served) == "here"

    def test_requirements_that_cannot_be_installed_exit_with_status_1(self, project: Path, status_of: StatusOf) -> None:
        assert status_of(project, f"--environments={project / 'kept'}") == 1

    def test_an_invalid_pipfile_takes_precedence_and_exits_with_status_1(
        self, project: Path, status_of: StatusOf
    ) -> None:
        (project / "Pipfile").write_text("[packages\n")

        assert status_of(project, f"--environments={project / 'kept'}") == 1
