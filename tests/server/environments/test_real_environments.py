"""Environments created by the real pip from wheels that the tests make, without network access."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from penstock.batching.spec import WorkerSpec
from penstock.server.environments.environments import REQUIRED_MODULES, Environments
from penstock.server.workers.kinds import FIRST_CALL
from penstock.server.workers.order import Order
from penstock.server.workers.worker import Worker
from tests.server.environments.fake_pythons import repack, sha256_of, write_wheel

pytestmark = pytest.mark.slow

LABEL = "the hooks of model 'm'"
SERVICE = """
import sys
import tiny


class Says:
    concurrent_messages = False

    def on_open(self):
        return b"", None

    def call(self, kind, number, body, arrays):
        return f"{tiny.VALUE} {sys.prefix}".encode(), [array + 1 for array in arrays]

    def on_message(self, kind, number, body, arrays):
        pass

    def close(self):
        pass


def open_service(settings, channel):
    return Says()
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        write_wheel(folder, "tiny", version, f"VALUE = {version}\n")
    return folder


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_COMPILE", "1")  # the tests import little of numpy
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


def value(python: str) -> str:
    command = [python, "-c", "import tiny; print(tiny.VALUE)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_pip_installs_requirements_and_packages_together_or_packages_alone(tmp_path: Path, wheels: Path) -> None:
    write_wheel(wheels, "beside", "1.0", "from tiny import VALUE\n")
    (tmp_path / "requirements.txt").write_text("tiny\n-c constraints.txt\n")
    (tmp_path / "constraints.txt").write_text("tiny<2\n")
    environments = Environments(tmp_path / "kept", required_modules=())
    command = ["-c", "import beside, tiny; print(beside.VALUE)"]

    both = environments.interpreter(
        WorkerSpec(requirements=tmp_path / "requirements.txt", packages=("beside", "tiny<2")), LABEL
    )
    alone = environments.interpreter(WorkerSpec(packages=("beside", "tiny")), LABEL)

    for python, version in ((both, "1.0"), (alone, "2.0")):
        assert subprocess.run([python, *command], capture_output=True, text=True, check=True).stdout.strip() == version
        assert Path(python).is_relative_to(tmp_path / "kept")
    script = Path(both).with_name("pip")  # its shebang names its folder, which must not have moved
    assert subprocess.run([script, "--version"], capture_output=True, check=True).stdout


def test_a_locked_pipfile_with_a_local_package_is_installed(tmp_path: Path, wheels: Path) -> None:
    wheel = wheels / "tiny-1.0-py3-none-any.whl"
    mine = write_wheel(tmp_path / "lib", "mine", "1.0", "VALUE = 'mine'\n")
    (tmp_path / "Pipfile").write_text('[packages]\ntiny = "*"\ne1839a8 = {path = "lib/mine-1.0-py3-none-any.whl"}\n')
    lock = {
        "_meta": {"requires": {}, "sources": [{"url": "https://pypi.org/simple", "verify_ssl": True, "name": "pypi"}]},
        "default": {
            "tiny": {"version": "==1.0", "hashes": [f"sha256:{sha256_of(wheel)}"]},
            "e1839a8": {"path": str(mine.relative_to(tmp_path))},  # pipenv's name for a package given without one
        },
    }
    (tmp_path / "Pipfile.lock").write_text(json.dumps(lock))

    python = Environments(tmp_path / "kept", required_modules=()).interpreter(
        WorkerSpec(requirements=tmp_path / "Pipfile"), LABEL
    )

    assert value(python) == "1.0"
    assert subprocess.run([python, "-c", "import mine"], check=True).returncode == 0


def test_a_worker_runs_in_a_created_or_packed_environment(tmp_path: Path, wheels: Path) -> None:
    for name in REQUIRED_MODULES:
        repack(wheels, name)
    (tmp_path / "requirements.txt").write_text("tiny==1.0\n")
    (tmp_path / "says.py").write_text(SERVICE)
    environments = Environments(tmp_path / "kept")
    python = environments.interpreter(WorkerSpec(requirements=tmp_path / "requirements.txt"), LABEL)

    async def ask(interpreter: str) -> str:
        order = Order("says", {}, LABEL, interpreter=interpreter, path=(str(tmp_path),))
        lost = asyncio.Event()
        worker = Worker(order, lambda _: lost.set())
        try:
            await worker.ready
            body, _ = await worker.call(FIRST_CALL)
        finally:
            worker.kill("the test is over")
            await lost.wait()
        return bytes(body).decode()

    prefix = str(Path(python).parents[1])
    assert asyncio.run(ask(python)) == f"1.0 {prefix}"

    packed = tmp_path / "environment.tar.gz"
    with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
        archive.add(prefix, ".")
    again = environments.interpreter(WorkerSpec(requirements=packed), LABEL)

    assert again != python
    assert asyncio.run(ask(again)) == f"1.0 {Path(again).parents[1]}"
