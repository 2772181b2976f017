from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import WorkerSpec
from penstock.server.cortex import environment
from penstock.server.cortex.environment import EXCLUSIVE_WORKERS, Needs, needs_of, roots_of

Ask = Callable[..., Needs]

READS = "def pre_inference(sample, signature, metadata):\n    return sample\n"
KEEPS = "last = None\ndef pre_inference(sample, signature, metadata):\n    global last\n    last = sample\n"


@pytest.fixture(autouse=True)
def _packages_and_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this Python has requests and numpy, but none of the other packages, and that there are 4 CPUs."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in {"requests", "numpy"} or None)
    monkeypatch.setattr(environment, "usable_cpus", lambda: 4)


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    def needs_in(source: str, files: dict[str, str] | None = None, handler: str = "handler.py") -> Needs:
        for name, text in {handler: source, **(files or {})}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(textwrap.dedent(text))
        needs = needs_of(tmp_path, tmp_path / handler, (tmp_path,))
        assert needs.worker == WorkerSpec(requirements=needs.requirements, packages=needs.packages)
        assert (needs.workers is None) == (not needs.reasons)
        return needs

    return needs_in


# -- handlers that run in the server ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        READS,
        KEEPS,
        "import requests, json, numpy as np\nlabels = requests.get('https://example.com').text.split()\n" + READS,
        "from PIL import Image\nfrom io import BytesIO\nread = lambda sample: Image.open(BytesIO(sample))\n" + READS,
        "import logging\nlogger = logging.getLogger('x')\n" + READS,
        "def pre_inference(sample:\n",
    ],
)
def test_a_handler_without_special_needs_runs_in_the_server(ask: Ask, source: str) -> None:
    assert ask(source).reasons == ()


def test_an_empty_requirements_file_needs_no_workers(ask: Ask) -> None:
    assert ask(READS, {"requirements.txt": "# boto3\n\n"}).reasons == ()


# -- reasons for workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("config = '/mnt/project/config.json'\n" + READS, "its files refer to /mnt, where the project is"),
        ("import sys\nsys.path.append('/mnt/project')\n" + READS, "its files refer to /mnt, where the project is"),
        ("labels = open('labels.txt').read()\n" + READS, "it may open files, with the project as its folder"),
        ("from pathlib import Path\nx = Path('x')\n" + READS, "it may open files, with the project as its folder"),
        ("import numpy as np\nx = np.load('mean.npy')\n" + READS, "it may open files, with the project as its folder"),
        ("import x\ny = x.Thing('there/labels.txt')\n" + READS, "it may open files, with the project as its folder"),
        ("import tensorflow as tf\n" + READS, "it imports tensorflow, which the server's process must not import"),
        ("from torch import nn\n" + READS, "it imports torch, which the server's process must not import"),
        ("import boto3\n" + READS, "it imports boto3, which the server's Python lacks"),
        ("def f():\n    from botocore import x\n", "it imports botocore, which the server's Python lacks"),
        (
            "import logging.config\nlogging.config.dictConfig({})\n" + READS,
            "it calls dictConfig, which would change the server's logging",
        ),
        ("import subprocess\n" + READS, "it starts programs, with the project as their folder"),
        ("import json\ndef pre_inference(sample, metadata):\n    json.x = sample\n", "it may keep json (handler.py:3)"),
    ],
)  # fmt: skip
def test_a_handler_with_special_needs_runs_in_workers(ask: Ask, source: str, reason: str) -> None:
    assert reason in ask(source, {"there/labels.txt": "a"}).reasons


def test_the_needs_of_imported_project_modules_are_found(ask: Ask) -> None:
    needs = ask("from parts import clean\n" + READS, {"parts/__init__.py": "from .deep import clean\n",
                "parts/deep.py": "import msgpack\ndef clean(x): return x\n"})  # fmt: skip

    assert needs.reasons == ("it imports msgpack, which the server's Python lacks",)
    assert needs.packages == ("msgpack",)


def test_a_module_of_the_project_is_not_taken_for_a_package(ask: Ask) -> None:
    assert ask("import dill, boto3\n" + READS, {"dill.py": "", "boto3/__init__.py": ""}).reasons == ()


def test_a_pickled_handler_needs_dill(ask: Ask) -> None:
    needs = ask("", handler="handler.pickle")

    assert needs.packages == ("dill",)
    assert "it imports dill, which the server's Python lacks" in needs.reasons


def test_hidden_large_and_binary_files_are_not_searched(ask: Ask) -> None:
    files = {
        ".git/config.txt": "/mnt",
        "venv/site-packages/x.py": "/mnt",
        "model.onnx": "/mnt",
        "big.txt": "/mnt" * 99999,
    }

    assert ask(READS, files).reasons == ()


def test_strings_that_cannot_be_file_names_are_ignored(ask: Ask) -> None:
    assert ask(f"'{'説明。' * 60}./'\n" + READS).reasons == ()


def test_an_unreadable_file_is_skipped(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "secret.txt":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)

    assert ask(READS, {"secret.txt": "/mnt"}).reasons == ()


# -- packages --------------------------------------------------------------------------------------------------


def test_packages_that_cortex_had_preinstalled_and_the_code_imports_are_added_to_the_requirements(
    ask: Ask, tmp_path: Path
) -> None:
    needs = ask("import requests, boto3, numpy, PIL\n" + READS, {"requirements.txt": "pillow\n"})

    assert needs.requirements == tmp_path / "requirements.txt"
    assert needs.packages == ("boto3", "requests")
    assert needs.reasons[0] == "requirements.txt lists packages to install"


@pytest.mark.parametrize(
    "line", ["Boto3", "boto3==1.9", "boto3[crt]>=1", "boto3 ; python_version > '3'", "  boto3  # x"]
)
def test_a_package_named_in_the_requirements_is_not_added(ask: Ask, line: str) -> None:
    assert ask("import boto3, dill\n" + READS, {"requirements.txt": f"boto3-stubs\n{line}\n"}).packages == ("dill",)


@pytest.mark.parametrize("line", ["tensorflow", "tensorflow-gpu==2.15", "tensorflow_cpu"])
def test_another_build_of_tensorflow_in_the_requirements_counts_as_tensorflow(ask: Ask, line: str) -> None:
    assert ask("import tensorflow\n" + READS, {"requirements.txt": f"{line}\n"}).packages == ()


def test_a_pipfile_is_used_as_requirements(ask: Ask, tmp_path: Path) -> None:
    needs = ask("import boto3\n" + READS, {"Pipfile": '[packages]\n"boto3" = "*"\n'})

    assert (needs.requirements, needs.packages) == (tmp_path / "Pipfile", ())


def test_installed_packages_and_torch_are_not_added_without_requirements(ask: Ask) -> None:
    needs = ask("import requests, torch\n" + READS)

    assert (needs.requirements, needs.packages) == (None, ())


# -- the number of workers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (READS, 4),
        (KEEPS, EXCLUSIVE_WORKERS),
        ("import torch\n" + KEEPS, 4),
        ("def pre_inference(sample, metadata):\n    open('x', 'w').write(sample)\n", 1),
    ],
)
def test_the_number_of_workers_follows_from_the_state_that_the_handler_keeps(ask: Ask, source: str, count: int) -> None:
    assert ask(source, {"requirements.txt": "pillow\n"}).workers == count


# -- folders of modules ----------------------------------------------------------------------------------------


def test_the_roots_are_the_project_and_its_python_path(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()

    assert roots_of(tmp_path, "") == (tmp_path,)
    assert roots_of(tmp_path, ".") == (tmp_path,)
    assert roots_of(tmp_path, "src/") == (tmp_path, tmp_path / "src")


@pytest.mark.parametrize("folder", ["none", "..", "/tmp", "handler.py"])
def test_a_python_path_that_is_not_a_folder_of_the_project_is_rejected(tmp_path: Path, folder: str) -> None:
    (tmp_path / "handler.py").write_text("")

    with pytest.raises(InferError, match=f"python_path: {folder}: no such folder in the project") as refused:
        roots_of(tmp_path, folder)
    assert refused.value.code is Code.INVALID


def test_finding_the_needs_does_not_run_the_handler(ask: Ask, tmp_path: Path) -> None:
    ask("open('ran', 'w')\nraise SystemExit\n" + READS)

    assert not (tmp_path / "ran").exists()
