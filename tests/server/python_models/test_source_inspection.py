"""Whether a model.py may define auto_complete_config, as read without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server.python_models.source_inspection import may_complete
from tests.live import live_server
from tests.server.python_models.repositories import ONE, write_model

OWN = "class TritonPythonModel:\n    def execute(self, requests): ...\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.py"


@pytest.mark.parametrize(
    "source",
    [
        OWN,
        '"""Its class must be named TritonPythonModel."""\nimport os\n' + OWN,
        "import triton_python_backend_utils as pb_utils\n" + OWN + "print(pb_utils.Tensor)\n",
        OWN + "class Other(dict): ...\n",
    ],
)
def test_a_plain_class_without_the_method_cannot_complete(file: Path, source: str) -> None:
    file.write_text(source)

    assert not may_complete(file)


@pytest.mark.parametrize(
    "source",
    [
        OWN + "    @staticmethod\n    def auto_complete_config(config): return config\n",
        OWN + "TritonPythonModel.__dict__['auto_complete_config']\n",
        "from base import Base\nclass TritonPythonModel(Base): ...\n",
        "class TritonPythonModel(metaclass=type): ...\n",
        "import wraps\n@wraps.all\n" + OWN,
        "from base import TritonPythonModel\n",
        OWN + "from base import Other as TritonPythonModel\n",
        OWN + "from base import *\n",
        OWN + "TritonPythonModel = make(TritonPythonModel)\n",
        OWN + "TritonPythonModel.more = 1\n",
        OWN + "setattr(TritonPythonModel, 'auto_complete' + '_config', str)\n",
        "if True:\n    class TritonPythonModel: ...\n",
        OWN + OWN,
        OWN + "if True:\n    class TritonPythonModel(base.Base): ...\n",
        OWN + "def make():\n    global TritonPythonModel\n    class TritonPythonModel(base.Base): ...\n",
        OWN + "def TritonPythonModel(): ...\n",
        OWN + "globals()['TritonPythonModel'] = base.Base\n",
        OWN + "base.fill(TritonPythonModel)\n",
        OWN + "More = TritonPythonModel\nMore.more = 1\n",
        OWN + "    exec(open('more.py').read())\n",
        OWN + "    locals().update(base.METHODS)\n",
        OWN + "import sys\nsys.modules[__name__].TritonPythonModel = base.Base\n",
        OWN + "type.__setattr__(base.of(__name__), 'more', 1)\n",
        OWN + "match base.Base:\n    case TritonPythonModel: ...\n",
        OWN + "#" * 20_000,
        "",
    ],
)
def test_a_file_that_may_define_the_method_dynamically_may_complete(file: Path, source: str) -> None:
    file.write_text(source)

    assert may_complete(file)


def test_an_unreadable_file_may_complete(file: Path) -> None:
    assert may_complete(file)
    for wrong in (b"def", b"\0", b"# coding: nothing\n", b"\xff\xfe"):
        file.write_bytes(wrong)
        assert may_complete(file)


@pytest.mark.parametrize(
    ("more", "runs"), [("", 1), ("    auto_complete_config = staticmethod(lambda config: config)\n", 2)]
)
def test_a_model_without_the_method_runs_only_in_its_serving_process(tmp_path: Path, more: str, runs: int) -> None:
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'a').write('ran\\n')\n{OWN}{more}"
    write_model(tmp_path / "models", "m", code, ONE)

    with live_server(tmp_path / "models") as live:
        assert live.server.engine.model("m").ready

    assert ran.read_text() == "ran\n" * runs
