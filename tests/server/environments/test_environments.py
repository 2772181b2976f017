from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import WorkerSpec
from penstock.server.environments.environments import MARKER_FILE, Environments, default_folder
from penstock.server.python_models.loading import MIN_PYTHON, REQUIRED_PACKAGES
from tests.server.environments.fake_pythons import FakePython

LABEL = "the hooks of model 'm'"


@pytest.fixture
def python(tmp_path: Path) -> FakePython:
    return FakePython(tmp_path / "base")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def spec(tmp_path: Path, python: FakePython) -> WorkerSpec:
    (tmp_path / "requirements.txt").write_text("tiny==1\n")
    return WorkerSpec(str(python.path), tmp_path / "requirements.txt")


def environments_in(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir() if path.is_dir()) if store.exists() else []


# -- existing Pythons ------------------------------------------------------------------------------------------


def test_without_requirements_or_interpreter_the_servers_python_is_used(store: Path) -> None:
    assert Environments(store).interpreter(WorkerSpec(), LABEL) == ""


def test_an_interpreter_with_all_required_modules_is_used_as_is(store: Path, python: FakePython) -> None:
    found = Environments(store).interpreter(WorkerSpec(str(python.path)), LABEL)

    assert found == str(python.path)
    assert python.recorded_calls[-1].endswith(" numpy orjson")


def test_a_relative_interpreter_is_found_from_the_current_folder(
    store: Path, python: FakePython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(python.path.parent.parent)
    relative = str(python.path.relative_to(python.path.parent.parent))

    assert Environments(store).interpreter(WorkerSpec(relative), LABEL) == str(python.path)


def test_an_interpreter_needs_only_the_modules_required_by_the_caller(store: Path, python: FakePython) -> None:
    Environments(store).interpreter(WorkerSpec(str(python.path)), LABEL, ("numpy",))

    assert python.recorded_calls[-1].endswith(" numpy")


def test_an_interpreter_without_a_module_is_rejected_with_the_install_command(store: Path, python: FakePython) -> None:
    python.write(missing='{"orjson": "ModuleNotFoundError: none"}')

    with pytest.raises(InferError, match=rf"{LABEL}: .*orjson: .* {python.path} -m pip install orjson$") as raised:
        Environments(store).interpreter(WorkerSpec(str(python.path)), LABEL)

    assert raised.value.code is Code.INVALID


@pytest.mark.parametrize(("script", "says"), [
    ("#!/bin/sh\nprintf '[[3, 8, 1], \"\", \"\", \"\", {}]'", "is Python 3.8.1; workers need 3.11 or newer"),
    ("#!/bin/sh\necho broken >&2; exit 3", "does not run as Python: exit status 3: broken"),
    ("#!/bin/sh\nprintf 'caf\\351' >&2; exit 3", "does not run as Python: exit status 3: caf\ufffd"),
    ("#!/no/such/shell\n", "No such file"),
])  # fmt: skip
def test_an_interpreter_that_is_unusable_is_rejected_with_the_reason(tmp_path: Path, script: str, says: str) -> None:
    path = tmp_path / "python"
    path.write_text(script)
    path.chmod(0o755)

    with pytest.raises(InferError, match=says):
        Environments(tmp_path).interpreter(WorkerSpec(str(path)), LABEL)


@pytest.mark.parametrize("is_own_python", [False, True])
def test_python_models_accept_an_older_python_than_other_workers(
    store: Path, python: FakePython, spec: WorkerSpec, is_own_python: bool
) -> None:
    worker_spec = spec if is_own_python else WorkerSpec(str(python.path))
    python.write(minor=10)
    with pytest.raises(InferError, match=r"is Python 3\.10\.7; workers need 3\.11 or newer"):
        Environments(store).interpreter(worker_spec, LABEL)

    assert Environments(store).interpreter(worker_spec, LABEL, REQUIRED_PACKAGES, MIN_PYTHON).endswith("python")

    python.write(minor=9)
    with pytest.raises(InferError, match=r"is Python 3\.9\.7; workers need 3\.10 or newer"):
        Environments(store).interpreter(worker_spec, LABEL, REQUIRED_PACKAGES, MIN_PYTHON)


def test_a_missing_or_non_executable_interpreter_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("")

    with pytest.raises(InferError, match="no such file"):
        Environments(tmp_path).interpreter(WorkerSpec("/no/such/python"), LABEL)
    with pytest.raises(InferError, match="not an executable program"):
        Environments(tmp_path).interpreter(WorkerSpec(str(tmp_path / "python")), LABEL)


def test_an_unpacked_environment_is_used_as_is(store: Path, python: FakePython) -> None:
    (python.path.parent / "bin").mkdir()
    path = python.path.rename(python.path.parent / "bin" / "python")

    assert Environments(store).interpreter(WorkerSpec(requirements=python.path.parent), LABEL) == str(path)


def test_a_file_in_place_of_the_environments_folder_is_an_error_and_not_logged(
    tmp_path: Path, spec: WorkerSpec, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(InferError, match=r"cannot be stored in .*/file \(--environments\)"):
        Environments(tmp_path / "file").interpreter(spec, LABEL)
    assert caplog.records == []


def test_a_requirements_folder_that_is_not_an_environment_is_rejected(store: Path, tmp_path: Path) -> None:
    with pytest.raises(InferError, match=r"requirements: folder .* is not an environment: it has no bin/python"):
        Environments(store).interpreter(WorkerSpec(requirements=tmp_path), LABEL)


# -- created once ----------------------------------------------------------------------------------------------


def test_an_environment_is_made_once_and_kept(store: Path, spec: WorkerSpec, python: FakePython) -> None:
    first = Environments(store).interpreter(spec, LABEL)
    second = Environments(store).interpreter(spec, LABEL)

    assert first == second == str(store / environments_in(store)[0] / "bin" / "python")
    assert (python.runs("-m venv"), python.runs("-m pip")) == (1, 1)


def test_required_modules_are_installed_after_the_requirements(
    store: Path, spec: WorkerSpec, python: FakePython
) -> None:
    python.write(pip=f'case "$*" in *" numpy") echo "{{}}" > {python.missing};; esac', missing='{"numpy": "none"}')

    Environments(store).interpreter(spec, LABEL)

    installs = [line.split(" off ")[1] for line in python.recorded_calls if line.startswith("-m pip")]
    assert installs == [f"-r {spec.requirements}", "numpy"]


def test_an_environment_that_lacks_a_required_module_is_removed(
    store: Path, spec: WorkerSpec, python: FakePython
) -> None:
    python.write(missing='{"numpy": "ImportError: no such symbol"}')

    with pytest.raises(InferError, match="numpy: ImportError: no such symbol"):
        Environments(store).interpreter(spec, LABEL)

    assert environments_in(store) == []


def test_a_noexec_folder_is_reported_with_the_flag_for_another_folder(
    store: Path, spec: WorkerSpec, python: FakePython
) -> None:
    python.write(missing='{"numpy": "ImportError: n.so: failed to map segment from shared object"}')

    with pytest.raises(InferError, match=r"from shared object; .* noexec: store them elsewhere \(--environments\)$"):
        Environments(store).interpreter(spec, LABEL)


def test_different_requirements_modules_and_pythons_make_different_environments(
    store: Path, spec: WorkerSpec, python: FakePython
) -> None:
    Environments(store).interpreter(spec, LABEL)
    Environments(store, required_modules=("numpy",)).interpreter(spec, LABEL)
    python.write(prefix="/elsewhere")
    Environments(store).interpreter(spec, LABEL)
    assert spec.requirements is not None
    spec.requirements.write_text("tiny==2\n")
    Environments(store).interpreter(spec, LABEL)

    assert len(environments_in(store)) == 4


def test_parallel_requests_for_an_environment_create_it_once(store: Path, spec: WorkerSpec, python: FakePython) -> None:
    several = [Environments(store) for _ in range(3)]
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(several[number % 3].interpreter, spec, LABEL) for number in range(8)]
        found = {future.result(30) for future in futures}

    assert len(found) == 1
    assert python.runs("-m venv") == 1


def test_an_environment_that_another_process_creates_is_waited_for(
    store: Path, spec: WorkerSpec, python: FakePython, caplog: pytest.LogCaptureFixture
) -> None:
    Environments(store).interpreter(spec, LABEL)
    folder = store / environments_in(store)[0]
    marker = (folder / MARKER_FILE).read_bytes()
    (folder / MARKER_FILE).unlink()
    waiting = threading.Event()

    class WaitingHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting" in record.getMessage():
                waiting.set()

    logger, handler = logging.getLogger("penstock.environments"), WaitingHandler()
    logger.addHandler(handler)
    lock = os.open(folder.with_suffix(".lock"), os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with caplog.at_level(logging.INFO, "penstock"), ThreadPoolExecutor(1) as thread:
            future = thread.submit(Environments(store).interpreter, spec, LABEL)
            assert waiting.wait(10)
            (folder / MARKER_FILE).write_bytes(marker)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert future.result(10) == str(folder / "bin" / "python")
    finally:
        os.close(lock)
        logger.removeHandler(handler)

    assert python.runs("-m venv") == 1


@pytest.mark.parametrize("half", ["nothing", "content", "broken mark", "no python"])
def test_an_incomplete_environment_is_created_again(
    store: Path, spec: WorkerSpec, python: FakePython, half: str
) -> None:
    Environments(store).interpreter(spec, LABEL)
    folder = store / environments_in(store)[0]
    (folder / "stale").write_text("")
    if half == "broken mark":
        (folder / MARKER_FILE).write_text("{")
    elif half == "no python":
        (folder / "bin" / "python").unlink()
    else:
        (folder / MARKER_FILE).unlink()
    if half == "nothing":
        (folder / "bin" / "python").unlink()

    Environments(store).interpreter(spec, LABEL)

    assert python.runs("-m venv") == 2
    assert not (folder / "stale").exists()


def test_the_output_of_pip_is_logged_line_by_line(
    store: Path, spec: WorkerSpec, python: FakePython, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "penstock.environments"):
        Environments(store).interpreter(spec, LABEL)

    assert f"{LABEL}: pip: Collecting tiny" in caplog.messages


# -- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("output", "advice"), [
    ("ERROR: No matching distribution found for tiny==9", "correct the name or the version"),
    ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "update the hashes"),
    ("error: subprocess-exited-with-error", "request a version that has a wheel"),
    ("WARNING: Retrying after Failed to establish a new connection", "the package index cannot be reached"),
    ("something else", "see the log"),
])  # fmt: skip
def test_a_failure_of_pip_is_reported_with_advice(
    store: Path, spec: WorkerSpec, python: FakePython, output: str, advice: str
) -> None:
    python.write(pip=f"echo '{output}'; exit 1")

    with pytest.raises(InferError) as raised:
        Environments(store).interpreter(spec, LABEL)

    message = raised.value.message
    assert message.startswith(f"{LABEL}: the environment of {spec.requirements}: pip ended with 1: ")
    assert output in message
    assert advice in message
    assert environments_in(store) == []


def test_creating_an_environment_is_retried_after_a_failure(store: Path, spec: WorkerSpec, python: FakePython) -> None:
    python.write(pip="exit 1")
    with pytest.raises(InferError):
        Environments(store).interpreter(spec, LABEL)
    python.write()

    assert Environments(store).interpreter(spec, LABEL)


def test_offline_only_stored_environments_are_used(store: Path, spec: WorkerSpec, python: FakePython) -> None:
    with pytest.raises(InferError, match=f"is not stored in {store}, and --offline forbids downloads"):
        Environments(store, offline=True).interpreter(spec, LABEL)
    assert python.runs("-m venv") == 0

    path = Environments(store).interpreter(spec, LABEL)

    assert Environments(store, offline=True).interpreter(spec, LABEL) == path


def test_a_python_of_another_version_than_the_pipfile_requires_logs_a_warning(
    tmp_path: Path, store: Path, python: FakePython, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "Pipfile").write_text('[requires]\npython_version = "3.6"\n')

    with caplog.at_level("WARNING", "penstock.environments"):
        path = Environments(store).interpreter(WorkerSpec(str(python.path), tmp_path / "Pipfile"), LABEL)

    assert Path(path).exists()
    assert "requires Python 3.6, but its interpreter is" in caplog.text


def test_an_environments_folder_that_cannot_be_written_is_an_error(tmp_path: Path, spec: WorkerSpec) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(InferError, match=r"cannot be stored in .*file/kept \(--environments\)"):
        Environments(tmp_path / "file" / "kept").interpreter(spec, LABEL)


def test_a_missing_home_folder_is_an_error_only_when_an_environment_is_stored(
    store: Path, spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    homeless = Environments()

    assert homeless.interpreter(WorkerSpec(), LABEL) == ""
    with pytest.raises(InferError) as refused:
        homeless.interpreter(spec, LABEL)
    assert refused.value.message == (
        f"{LABEL}: its environment cannot be stored: the user has no home folder; set --environments"
    )
    assert Path(Environments(store).interpreter(spec, LABEL)).exists()


def test_closing_stops_pip_and_removes_the_unfinished_environment(
    store: Path, spec: WorkerSpec, python: FakePython, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pids")
    python.write(pip=f"echo $$ > {tmp_path}/pids; sleep 1000")
    environments = Environments(store)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(environments.interpreter, spec, LABEL)
        pid = int((tmp_path / "pids").read_text())  # blocks until pip runs
        environments.close()
        with pytest.raises(InferError, match="Server is stopping") as raised:
            future.result(10)

    assert raised.value.code is Code.NOT_READY
    assert environments_in(store) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# -- packed ----------------------------------------------------------------------------------------------------


def pack(path: Path, python: FakePython, *, missing: str = "{}", unpack: bool = False) -> Path:
    python.write(missing=missing)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(python.path, "bin/python")
        if unpack:
            content = b"corrects prefixes"
            member = tarfile.TarInfo("bin/conda-unpack")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_a_packed_environment_is_unpacked_once_and_its_prefixes_are_corrected(
    tmp_path: Path, store: Path, python: FakePython
) -> None:
    packed = pack(tmp_path / "environment.tar.gz", python, unpack=True)

    first = Environments(store, offline=True).interpreter(WorkerSpec(requirements=packed), LABEL)
    second = Environments(store, offline=True).interpreter(WorkerSpec(requirements=packed), LABEL)

    assert first == second == str(store / environments_in(store)[0] / "bin" / "python")
    assert python.runs(str(Path(first).parent / "conda-unpack")) == 1
    assert json.loads((store / environments_in(store)[0] / MARKER_FILE).read_text())["made_of"] == str(packed)


def test_a_repacked_environment_is_another_environment(tmp_path: Path, store: Path, python: FakePython) -> None:
    packed = pack(tmp_path / "environment.tar.gz", python)
    Environments(store).interpreter(WorkerSpec(requirements=packed), LABEL)
    pack(packed, python, unpack=True)
    Environments(store).interpreter(WorkerSpec(requirements=packed), LABEL)

    assert len(environments_in(store)) == 2


def test_a_packed_environment_needs_only_the_modules_required_by_the_caller(
    tmp_path: Path, store: Path, python: FakePython
) -> None:
    packed = pack(tmp_path / "environment.tar.gz", python)

    Environments(store, offline=True).interpreter(WorkerSpec(requirements=packed), LABEL, ("numpy",))

    assert python.recorded_calls[-1].endswith(" numpy")


def test_a_created_environment_has_all_modules_that_workers_can_use(
    store: Path, spec: WorkerSpec, python: FakePython
) -> None:
    Environments(store).interpreter(spec, LABEL, ("numpy",))

    assert python.recorded_calls[-1].endswith(" numpy orjson")


def test_a_packed_environment_without_a_module_is_rejected_offline(
    tmp_path: Path, store: Path, python: FakePython
) -> None:
    packed = pack(tmp_path / "environment.tar.gz", python, missing='{"orjson": "none"}')

    with pytest.raises(InferError, match=r"lacks orjson, which workers need, .*: add them before packing it"):
        Environments(store, offline=True).interpreter(WorkerSpec(requirements=packed), LABEL)

    assert environments_in(store) == []


def test_an_archive_that_is_not_a_packed_environment_is_rejected(tmp_path: Path, store: Path) -> None:
    broken, other = tmp_path / "broken.tar.gz", tmp_path / "other.tar.gz"
    broken.write_bytes(b"not a tar")
    with tarfile.open(other, "w:gz") as archive:
        archive.add(broken, "README")

    with pytest.raises(InferError, match="is not a packed environment"):
        Environments(store).interpreter(WorkerSpec(requirements=broken), LABEL)
    with pytest.raises(InferError, match="has no bin/python"):
        Environments(store).interpreter(WorkerSpec(requirements=other), LABEL)

    assert environments_in(store) == []


def test_environments_are_kept_in_the_users_cache_folder() -> None:
    assert default_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/penstock/environments")
    assert default_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "penstock" / "environments"


# -- packages beside the requirements ----------------------------------------------------------------------------


def _installs(python: FakePython) -> list[str]:
    return [line.split(" off ")[1] for line in python.recorded_calls if line.startswith("-m pip")]


def test_packages_are_installed_after_the_requirements(store: Path, spec: WorkerSpec, python: FakePython) -> None:
    Environments(store).interpreter(replace(spec, packages=("boto3", "dill")), LABEL)

    assert _installs(python) == [f"-r {spec.requirements}", "boto3 dill"]


def test_an_environment_can_be_created_from_packages_without_requirements(
    store: Path, python: FakePython, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spec = WorkerSpec(str(python.path), packages=("boto3", "dill"))
    first = Environments(store).interpreter(spec, LABEL)
    second = Environments(store, offline=True).interpreter(spec, LABEL)

    assert first == second
    assert _installs(python) == ["boto3 dill"]
    assert f"{LABEL}: creating the environment of boto3, dill in" in caplog.text


def test_different_packages_make_different_environments(store: Path, spec: WorkerSpec) -> None:
    for packages in ((), ("boto3",), ("boto3", "dill")):
        Environments(store).interpreter(replace(spec, packages=packages), LABEL)

    assert len(environments_in(store)) == 3


def test_packages_are_not_fetched_offline(store: Path, python: FakePython) -> None:
    spec = WorkerSpec(str(python.path), packages=("boto3",))

    with pytest.raises(InferError, match=r"environment of boto3 is not stored in .*, and --offline forbids"):
        Environments(store, offline=True).interpreter(spec, LABEL)
    assert _installs(python) == []
