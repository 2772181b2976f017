"""The settings for what models share: resources, host policies and devices."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from penstock.server.options.sharing import make_devices, parse_host_policies, parse_resources
from penstock.server.settings import SettingError, Settings, resolve


class TestResources:
    def test_a_resource_applies_to_every_device_or_to_one(self) -> None:
        assert parse_resources(["R1:10", "R2:5:0", " R2 : 8 : 1 "]) == {("R1", None): 10, ("R2", 0): 5, ("R2", 1): 8}

    def test_the_smallest_count_of_a_repeated_resource_applies(self) -> None:
        assert parse_resources(["R1:10", "R1:3", "R1:5", "R1:9:0"]) == {("R1", None): 3, ("R1", 0): 9}

    @pytest.mark.parametrize("entry", ["R1", "", ":3", "R1:", "R1:x", "R1:-1", "R1:1:", "R1:1:-1", "R1:1:2:3", "R1:²"])
    def test_an_invalid_resource_is_a_setting_error_with_the_message_of_triton(self, entry: str) -> None:
        text = (
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {entry}"
        )
        with pytest.raises(SettingError, match=re.escape(text)):
            Settings(rate_limit_resource=(entry,))


class TestHostPolicies:
    def test_a_host_policy_names_cpus(self) -> None:
        policies = parse_host_policies(["cpu,cpu-cores=0-1", "few,cpu-cores=2-2,4-5"])

        assert policies == {"cpu": {0, 1}, "few": {2, 4, 5}}

    @pytest.mark.parametrize("entry", ["cpu", "cpu,cpu-cores", "cpu,cpu-cores=", ",cpu-cores=0-1", "cpu,=1"])
    def test_an_invalid_host_policy_is_a_setting_error_with_the_message_of_triton(self, entry: str) -> None:
        text = f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {entry}"
        with pytest.raises(SettingError, match=re.escape(text)):
            Settings(host_policy=(entry,))

    @pytest.mark.parametrize("value", ["1", "a-b", "3-1", "0-", "-3", "0-99999", "0-1,", "0--1"])
    def test_cpu_cores_that_are_not_ranges_are_rejected(self, value: str) -> None:
        text = "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got "
        with pytest.raises(ValueError, match=re.escape(text)):
            parse_host_policies([f"cpu,cpu-cores={value}"])

    def test_an_unsupported_host_policy_setting_is_rejected_by_name(self) -> None:
        with pytest.raises(ValueError, match="the setting 'numa-nodes' is not supported, known: cpu-cores, numa-node"):
            parse_host_policies(["cpu,numa-nodes=0"])

    @pytest.mark.parametrize(
        ("cpulist", "cpus"), [("0-2\n", {0, 1, 2}), ("0-1,4,6-7\n", {0, 1, 4, 6, 7}), ("3\n", {3}), ("\n", set())]
    )
    def test_a_numa_node_stands_for_its_cpus_unless_cpu_cores_are_named(
        self, tmp_path: Path, cpulist: str, cpus: set[int]
    ) -> None:
        (tmp_path / "node1").mkdir()
        (tmp_path / "node1" / "cpulist").write_text(cpulist)
        entries = ["few,numa-node=1", "one,cpu-cores=5-5", "one,numa-node=1"]

        assert parse_host_policies(entries, tmp_path) == {"few": cpus, "one": {5}}

    @pytest.mark.parametrize("node", ["7", "x", "-1", "1/../node1"])
    def test_a_numa_node_that_does_not_exist_is_rejected(self, tmp_path: Path, node: str) -> None:
        with pytest.raises(ValueError, match=f"the NUMA node '{re.escape(node)}' does not exist"):
            parse_host_policies([f"cpu,numa-node={node}"], tmp_path)

    def test_a_host_policy_is_rejected_on_a_system_that_cannot_bind_threads(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(os, "sched_setaffinity")
        with pytest.raises(ValueError, match="this system cannot bind threads to CPUs"):
            parse_host_policies(["cpu,cpu-cores=0-1"])


class TestDevices:
    def test_devices_have_a_rate_limiter_only_if_enabled(self) -> None:
        off, on = (make_devices(Settings(rate_limit=mode)) for mode in ("off", "execution_count"))

        assert off.limiter is None
        assert on.limiter is not None

    def test_the_rate_limit_resource_flag_may_be_repeated(self) -> None:
        settings = resolve({"rate_limit": "execution_count", "rate_limit_resource": ["R1:1", "R2:2:0"]}, {})

        assert settings.rate_limit_resource == ("R1:1", "R2:2:0")
