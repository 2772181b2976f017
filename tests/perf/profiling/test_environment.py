"""The environment: a made-up machine, and what is said of it."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.profiling import environment
from penstock.perf.profiling.environment import fingerprint, machine, sharing, versions


def no_gpus() -> tuple[list[dict[str, Any]], str]:
    raise ImportError("no pynvml")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9\n\nprocessor\t: 1\nmodel name\t: other\n")
    (folder / "meminfo").write_text("MemTotal:       2048 kB\nMemFree: 5 kB\n")
    return folder


def test_a_machine_is_described_by_what_is_known(proc: Path, tmp_path: Path) -> None:
    gpu = {"name": "NVIDIA H200", "uuid": "GPU-1", "memory_bytes": 5}

    description = machine(proc, tmp_path / "none", lambda: ([gpu], "580.1"))

    assert (description["cpu"], description["memory_bytes"]) == ("AMD EPYC 9", 2048 * 1024)
    assert (description["gpus"], description["gpu_driver"]) == ([gpu], "580.1")
    assert description["cores"] >= description["usable_cores"] >= 1
    assert not {"cgroup_cpus", "cgroup_memory_bytes"} & description.keys()
    json.dumps(description)


def test_a_machine_without_gpus_or_proc_is_described_by_the_rest(tmp_path: Path) -> None:
    description = machine(tmp_path, tmp_path, no_gpus)

    assert not {"gpus", "gpu_driver", "memory_bytes"} & description.keys()
    assert description["kernel"]


def test_a_driver_that_hangs_is_skipped(proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_GPU_TIMEOUT_S", 0.01)
    hang = threading.Event()

    def hanging() -> tuple[list[dict[str, Any]], str]:
        hang.wait()
        return [], ""

    assert "gpus" not in machine(proc, tmp_path, hanging)
    hang.set()


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        (
            "0::/a/b\n",
            {"a/memory.max": "4096\n", "a/b/memory.max": "max\n", "a/b/cpu.max": "150000 100000"},
            (1.5, 4096),
        ),
        ("0::/a\n", {"a/memory.max": "max\n"}, (None, None)),
        ("0::/../../pod\n", {"memory.max": "8192"}, (None, 8192)),
        ("5:memory:/x\n1:name=systemd:/x\n", {"memory/x/memory.limit_in_bytes": "1024"}, (None, 1024)),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, (None, None)),
    ],
    ids=["v2", "no limit", "of a container", "v1", "v1 without"],
)
def test_cgroup_limits_are_reported(
    proc: Path, tmp_path: Path, membership: str, files: dict[str, str], limits: tuple[float | None, int | None]
) -> None:
    (proc / "self" / "cgroup").write_text(membership)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)

    description = machine(proc, tmp_path / "cgroup", no_gpus)

    assert (description.get("cgroup_cpus"), description.get("cgroup_memory_bytes")) == limits


def test_versions_include_this_program_its_dependencies_and_the_server() -> None:
    description = versions({"name": "triton", "version": "2.47.0", "extensions": []})

    assert description.keys() == {"python", "penstock", "numpy", "uvloop", "server"}
    assert description["server"] == "triton 2.47.0"
    assert "server" not in versions({})


def test_the_cores_shared_with_the_server_are_counted() -> None:
    assert sharing({0, 1, 2}, {1, 2, 3}) == "client and server share 2 cores"
    assert sharing({0}, {0}) == "client and server share 1 core"
    assert sharing({0}, {1}) == "client and server have cores of their own"


configs = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        items = list(value.items())
        order.shuffle(items)
        return {name: shuffled(each, order) for name, each in items}
    return [shuffled(each, order) for each in value] if isinstance(value, list) else value


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=5), configs, max_size=4), st.integers())
def test_a_fingerprint_does_not_depend_on_the_order_of_names(config: dict[str, Any], seed: int) -> None:
    assert fingerprint(config) == fingerprint(shuffled(config, random.Random(seed)))


def test_a_fingerprint_changes_with_any_value_and_is_stable_across_releases() -> None:
    config = {"name": "iris", "max_batch_size": 64, "input": [{"dims": [4]}]}

    assert fingerprint(config) == "47b47564572ed054"
    assert fingerprint({**config, "max_batch_size": 32}) != fingerprint(config)
    assert fingerprint({**config, "input": [{"dims": [5]}]}) != fingerprint(config)
