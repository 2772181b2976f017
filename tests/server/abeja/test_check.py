"""`penstock check --dialect abeja` reports what would be served, and every mistake, without running any code."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server.abeja.check import check_handler
from penstock.server.repository.check import CheckReport
from penstock.server.settings import Settings

NAMES = ("HANDLER", "CONTEXT", "ABEJA_USER_MODEL_ROOT")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def checked(folder: Path, **settings: object) -> CheckReport:
    return check_handler(Settings(dialect="abeja", model_repository=(str(folder),), **settings))  # type: ignore[arg-type]


def messages(report: CheckReport) -> list[str]:
    return [each.message for each in report.findings]


def test_a_handler_that_would_be_served_is_described(folder: Path) -> None:
    (folder / "main.py").write_text("raise SystemExit('this is never run')\ndef handler(request, context): ...\n")
    (folder / "requirements.txt").write_text("numpy\n")
    report = checked(folder)

    assert (report.exit_status, messages(report)) == (0, [])
    assert "handler    main:handler" in str(report)
    assert f"environment: {folder / 'requirements.txt'}" in str(report)
    assert "1 version would be served" in str(report)


def test_the_check_uses_the_marked_folder_and_the_handler_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a" / ".abeja").mkdir(parents=True)
    (folder / "a" / "package").mkdir()
    (folder / "a" / "package" / "deep.py").write_text("from elsewhere import anything as called\n")
    monkeypatch.setenv("HANDLER", "package.deep:called")

    assert messages(checked(folder)) == []
    assert messages(checked(folder, abeja_handler="main:handler")) == [
        "handler 'main:handler': there is no module 'main'"
    ]


@pytest.mark.parametrize("handler", ["main", "a:b:c"])
def test_a_handler_without_exactly_one_colon_is_a_mistake(folder: Path, handler: str) -> None:
    assert messages(checked(folder, abeja_handler=handler)) == [
        f"handler '{handler}': it must be module:name, with one colon"
    ]


def test_an_empty_handler_in_the_environment_is_a_mistake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "main.py").write_text("def handler(request, context): ...\n")
    monkeypatch.setenv("HANDLER", "")

    assert messages(checked(folder)) == ["handler '': it must be module:name, with one colon"]


def test_a_syntax_error_is_reported_with_its_line(folder: Path) -> None:
    (folder / "main.py").write_text("x = 1\ndef handler(request, context:\n    ...\n")
    (found,) = checked(folder).findings

    assert (found.path.name, found.line) == ("main.py", 2)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("def handler(request): ...", 1),
        ("def handler(a, b, c): ...", 1),
        ("def handler(a, b, *, c): ...", 1),
        ("x = 1\ndef handler(a, b):\n    yield {}", 2),
        ("other = 1", 0),
    ],
)
def test_a_handler_that_can_never_be_called_successfully_is_a_mistake(folder: Path, code: str, line: int) -> None:
    (folder / "main.py").write_text(code + "\n")
    (found,) = checked(folder).findings

    assert (found.is_mistake, found.line) == (True, line)


@pytest.mark.parametrize(
    "code",
    [
        "def handler(a, b, c=1): ...",
        "def handler(*given): ...",
        "async def handler(a, b): ...",
        "def handler(a, b, *, c=1):\n    def inner():\n        yield 1\n    return {'content': inner()}",
        "@decorated\ndef handler(a): ...",
        "class handler: ...",
        "handler = lambda a, b: {}",
        "from other import *",
    ],
)
def test_a_handler_that_may_be_called_successfully_is_no_mistake(folder: Path, code: str) -> None:
    (folder / "main.py").write_text(code + "\n")

    assert messages(checked(folder)) == []


def test_one_mistake_does_not_hide_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "requirements.txt").write_text("# of more\n-r more.txt\n")
    (folder / "Pipfile").write_text("[packages]\nx = {path = './nowhere'}\n")
    monkeypatch.setenv("CONTEXT", "{")
    report = checked(folder, abeja_health_port=8000, abeja_interpreter="no-such-python")

    assert report.exit_status == 1
    assert [each.path.name for each in report.findings[1:2]] == ["no-such-python"]
    assert messages(report)[0] == "both ports are 8000: they must be different"
    assert messages(report)[2].startswith("CONTEXT in the environment is not JSON")
    assert "nowhere" in messages(report)[3]
    assert messages(report)[4] == "handler 'main:handler': there is no module 'main'"


def test_requirements_are_not_read_when_installation_is_disabled(folder: Path) -> None:
    (folder / "main.py").write_text("def handler(request, context): ...\n")
    (folder / "requirements.txt").write_text("-r more.txt\n")

    assert messages(checked(folder, abeja_install=False)) == []
    assert "more.txt" in messages(checked(folder))[0]


def test_a_missing_folder_is_a_mistake(folder: Path) -> None:
    assert messages(checked(folder / "none")) == ["no such folder"]
