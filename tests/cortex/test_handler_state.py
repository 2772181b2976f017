"""State that a handler keeps from pre_inference to post_inference: every way is found, and requests never mix."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path

import pytest

from penstock.server.hooks.writes import find_global_writes
from tests.cortex.projects import Project, write_iris
from tests.cortex.test_batched_replicas import flood
from tests.live import live_server

_TEXT = Path(__file__).with_name("ways.txt").read_text("utf-8")
WAYS = dict(re.findall(r"(?m)^=== (.+)\n((?:(?!===).*\n?)*)", _TEXT))
LIVE = ("global", "closure", "struct", "np out positional", "logging", "environ", "module function", "lru")
WORDS = """
n = None


def put(x):
    global n
    n = x


def get():
    return n
"""


def handler(way: str) -> str:
    """Write the handler of a way."""
    load, put, get = re.split("--- (?:put|get)\n", WAYS[way])
    return f"""{load}
def pre_inference(sample, signature, metadata):
    n = sample["number"]
{textwrap.indent(put, "    ")}
    return [n, 0, 0, 0]


def post_inference(prediction, signature, metadata):
    return {get}
"""


def test_every_way_in_the_text_file_is_parsed() -> None:
    assert len(WAYS) == _TEXT.count("\n=== ")
    assert all(way.count("--- ") == 2 for way in WAYS.values())


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_keep_state_is_found_by_the_analysis(tmp_path: Path, way: str) -> None:
    (tmp_path / "words.py").write_text(WORDS)
    (tmp_path / "handler.py").write_text(handler(way))

    assert find_global_writes(tmp_path / "handler.py", roots=(tmp_path,), strict=True)


def test_the_analysis_finds_nothing_in_a_handler_without_state() -> None:
    example = Path(__file__).parents[2] / "examples" / "cortex" / "onnx-0.9" / "handler.py"

    assert find_global_writes(example, roots=(example.parent,), strict=True) == []


@pytest.mark.slow
def test_each_request_finds_its_own_state_at_64_connections(tmp_path: Path) -> None:
    project = Project(tmp_path)
    model = write_iris(project.model("m.onnx"), "N")
    project.file("words.py", WORDS)
    paths = {}
    for number, way in enumerate(LIVE):
        project.api(f"way-{number}", model, handler(way))
        paths[way] = f"/iris/way-{number}"
    with live_server(project.folder, dialect="cortex") as live:
        for way, path in paths.items():
            assert asyncio.run(flood(live, path, 300)) == list(range(300)), way
