from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.cpus import affinity, cgroup_cpus, decide, parse_cfs, parse_cpu_max, usable_cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("affinity_cpus", "quota", "expected"),
    [(8, None, 8), (8, 4.0, 4), (2, 4.0, 2), (8, 1.5, 1), (8, 3.99, 3), (8, 0.25, 1), (0, None, 1)],
)
def test_the_number_of_cpus_is_the_tighter_limit_rounded_down_to_at_least_one(
    affinity_cpus: int, quota: float | None, expected: int
) -> None:
    assert decide(affinity_cpus, quota) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2.0),
        ("50000 100000", 0.5),
        ("300000", 3.0),
        ("", None),
        ("x y", None),
    ],
)
def test_cpu_max_is_quota_over_period(text: str, expected: float | None) -> None:
    assert parse_cpu_max(text) == expected


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [("-1\n", "100000\n", None), ("150000\n", "100000\n", 1.5), ("100", "0", None), ("", "", None)],
)
def test_a_cfs_quota_of_minus_one_is_no_limit(quota: str, period: str, expected: float | None) -> None:
    assert parse_cfs(quota, period) == expected


@given(st.text(max_size=30))
def test_any_text_of_cpu_max_is_none_or_a_positive_number(text: str) -> None:
    quota = parse_cpu_max(text)

    assert quota is None or quota > 0


def test_cgroup_version_2_uses_the_tightest_limit_of_the_group_and_its_parents(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n", "cpu.max": "400000 100000\n"},
    )

    assert cgroup_cpus(root, "0::/a/b\n") == 1.5


def test_cgroup_version_2_in_a_container_reads_the_visible_root(tmp_path: Path) -> None:
    root = write(tmp_path, {"cpu.max": "400000 100000\n"})

    assert cgroup_cpus(root, "0::/\n") == 4.0
    assert cgroup_cpus(root, "0::/../../kubepods/pod1\n") == 4.0
    assert cgroup_cpus(root, "0::/host/path/that/is/not/here\n") == 4.0


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_cgroup_version_1_reads_the_cpu_controller_at_any_mount(tmp_path: Path, mount: str) -> None:
    root = write(
        tmp_path, {f"{mount}/docker/x/cpu.cfs_quota_us": "250000", f"{mount}/docker/x/cpu.cfs_period_us": "100000"}
    )
    membership = "12:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n3:cpuset:/docker/x\n1:name=systemd:/docker/x\n0::/\n"

    assert cgroup_cpus(root, membership) == 2.5


@pytest.mark.parametrize("membership", ["", "nonsense\n", "0:\n", "0::\n", "::::\n"])
def test_an_unreadable_cgroup_sets_no_limit(tmp_path: Path, membership: str) -> None:
    assert cgroup_cpus(tmp_path, membership) is None


def test_usable_cpus_is_between_one_and_the_affinity_of_the_process() -> None:
    assert 1 <= usable_cpus() <= affinity()
