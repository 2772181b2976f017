"""Worker code needs only numpy and orjson in its Python, and protobuf if calls are in protobuf."""

from __future__ import annotations

import subprocess
import sys

ONLY = """
import sys

class Absent:
    others = {{"penstock", "seldon_core", "numpy", "orjson", {more}}}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in cls.others | sys.stdlib_module_names:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent)
"""
"""Hides all other packages, whatever is installed."""

JSON = """
from penstock.server.seldon.inside.service import SeldonInside
from penstock.server.seldon.messages import CALL, read_answer

class Double:
    def predict(self, X, names):
        return X * 2

service = SeldonInside(Double(), {})
service.on_open()
reply, _ = service.call(CALL, 1, bytes(2) + b'{"data": {"ndarray": [[1]]}}', [])
print(read_answer(reply)[3].decode(), end="")
"""

ALL = """
import importlib, pkgutil
from penstock.server.seldon import inside

names = [module.name for module in pkgutil.iter_modules(inside.__path__)]
for name in names:
    importlib.import_module(f"{inside.__name__}.{name}")
print(len(names) > 10)
"""


def answer_of(more: str, program: str) -> str:
    """Run a program that can also import these packages. Returns: its output."""
    words = [sys.executable, "-c", ONLY.format(more=more) + program]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_a_worker_answers_json_without_protobuf_installed() -> None:
    assert answer_of("", JSON) == '{"data":{"names":["t:0"],"ndarray":[[2]]},"meta":{}}\n'


def test_every_worker_module_can_be_imported_when_protobuf_is_installed() -> None:
    assert answer_of('"google"', ALL) == "True\n"
