from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from penstock.server.doctor.machine import read_machine

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc folder with 16 GiB of memory, 12 of them available."""
    _write(tmp_path / "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\n")
    _write(tmp_path / "proc/self/cgroup", "0::/box\n")
    _write(tmp_path / "proc/sys/net/core/somaxconn", "4096\n")
    _write(tmp_path / "proc/sys/kernel/osrelease", "6.1.0\n")
    return tmp_path / "proc"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_container_limits_are_read_from_cgroup_version_2(proc: Path, tmp_path: Path) -> None:
    cgroup = tmp_path / "cgroup"
    _write(cgroup / "cgroup.controllers", "cpu memory\n")
    _write(cgroup / "box/cpu.max", "150000 100000\n")
    _write(cgroup / "memory.max", f"{2 * GIB}\n")
    _write(cgroup / "memory.current", f"{GIB}\n")

    machine = read_machine(proc, cgroup, tmp_path)

    assert (machine.cgroup, machine.quota_cpus, machine.usable_cpus) == (2, 1.5, 1)
    assert (machine.memory_bytes, machine.memory_limit_bytes, machine.free_bytes) == (16 * GIB, 2 * GIB, GIB)
    assert (machine.somaxconn, machine.kernel.split()[-1]) == (4096, "6.1.0")
    assert machine.limits["open files"].soft is None or machine.limits["open files"].soft > 0


def test_container_limits_are_read_from_cgroup_version_1(proc: Path, tmp_path: Path) -> None:
    cgroup = tmp_path / "cgroup"
    _write(proc / "self/cgroup", "4:cpu,cpuacct:/\n9:memory:/\n")
    _write(cgroup / "cpu,cpuacct/cpu.cfs_quota_us", "50000\n")
    _write(cgroup / "cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    _write(cgroup / "memory/memory.limit_in_bytes", "9223372036854771712\n")

    machine = read_machine(proc, cgroup, tmp_path)

    assert (machine.cgroup, machine.quota_cpus, machine.memory_limit_bytes) == (1, 0.5, None)


@pytest.mark.parametrize(
    ("words", "prefix", "slow"),
    [
        ("'--prefix=/root/.pyenv/versions/3.11.7' '--enable-shared'", "/root/.pyenv/versions/3.11.7", True),
        ("'--enable-optimizations' '--with-lto'", "/usr/local", False),
        ("'--prefix=/usr' '--with-dtrace'", "/usr", False),
        (None, "/opt/python", False),
    ],
    ids=["of pyenv", "of an image", "of Debian", "that does not say"],
)
def test_a_python_compiled_without_optimizations_is_slow(
    words: str | None, prefix: str, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"CONFIG_ARGS": words}.get)
    monkeypatch.setattr(sys, "base_prefix", prefix)

    assert read_machine(tmp_path, tmp_path, tmp_path).slow_python is slow


def test_facts_whose_files_are_missing_are_left_out(tmp_path: Path) -> None:
    machine = read_machine(tmp_path / "none", tmp_path / "nor this", tmp_path / "nor that")

    assert (machine.cgroup, machine.quota_cpus, machine.memory_bytes, machine.shm_bytes) == (0, None, None, None)


@pytest.mark.parametrize("text", ["", "max\n", "a word\n", "-1\n", "\xff\n"])
def test_a_proc_or_cgroup_file_with_unexpected_text_is_ignored(text: str, proc: Path, tmp_path: Path) -> None:
    _write(proc / "sys/net/core/somaxconn", text)
    _write(proc / "meminfo", f"MemTotal: {text}")
    _write(tmp_path / "cgroup/memory.max", text)

    machine = read_machine(proc, tmp_path / "cgroup", tmp_path)

    assert (machine.somaxconn, machine.memory_bytes, machine.memory_limit_bytes) == (None, None, None)
