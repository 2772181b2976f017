"""Each peer is fully described: what is installed, what is run, how it is asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.perf.peers import environments, peer, roster, serving
from penstock.perf.peers.environments import Environment

NAMES = ["penstock", "pytriton", "mlserver", "kserve", "mosec", "litserve", "bentoml", "ray-serve"]


def test_all_peers_are_listed_with_penstock_first() -> None:
    assert list(roster.PEERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_versions_are_pinned_and_all_use_the_same_runtime(name: str) -> None:
    requirements = environments.requirements(roster.PEERS[name], roster.RUNTIME)

    assert all(re.fullmatch(r"[a-z-]+(\[[a-z]+\])?==\d+(\.\d+)+", each) for each in requirements)
    assert not requirements or requirements[-1].startswith("onnxruntime==")
    assert bool(requirements) == (name != "penstock")


@pytest.mark.parametrize("name", NAMES)
def test_all_placeholders_of_a_command_line_are_filled_in(name: str, tmp_path: Path) -> None:
    chosen = roster.PEERS[name]
    placeholders = serving.places(Environment(tmp_path / "bin" / "python", {}), "iris", tmp_path)
    words = [word.format_map(placeholders) for word in (*chosen.command, chosen.ready, *chosen.environ.values())]

    assert words[0].startswith(str(tmp_path / "bin"))
    assert not [word for word in words if "{" in word]
    assert len({placeholders["http"], placeholders["grpc"], placeholders["metrics"]}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_programs_of_peers_are_valid_python(name: str) -> None:
    for file, text in roster.PEERS[name].files.items():
        if file.endswith(".py"):
            compile(text, file, "exec")


@pytest.mark.parametrize("name", NAMES)
def test_programs_of_peers_read_only_known_variables(name: str) -> None:
    output = peer.variables("model.onnx", dict.fromkeys(("model", "http", "grpc", "metrics"), "1")) | {"TMPDIR": ""}
    read = re.findall(r'os\.environ\["(\w+)"\](?! =)', "".join(roster.PEERS[name].files.values()))

    assert set(read) <= set(output)


def test_penstock_is_given_only_ports() -> None:
    flags = [word for word in roster.OURS.command if word.startswith("--")]

    assert flags == ["--http-port", "--grpc-port", "--metrics-port"]
    assert roster.OURS.environ == {}
