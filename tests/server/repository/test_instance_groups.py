"""`instance_group` and `optimization.priority`: how they are read, and the messages when they are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.batching.spec import InstanceGroup, ModelSpec, Resource
from penstock.server.protobuf import model_config_pb2
from penstock.server.repository.completed_config import complete_config, to_json
from penstock.server.repository.fields.instances import MISSING_GPU
from penstock.server.repository.gpus import Gpus
from penstock.server.repository.model_config import read as read_config
from tests.server.repository.configs import parse_text, read_values


def groups(text: str, gpus: tuple[int, ...] | None = ()) -> tuple[InstanceGroup, ...]:
    values, messages = read_values(text, gpus)
    assert messages == []
    found: tuple[InstanceGroup, ...] = values["instances"]
    return found


class TestGroups:
    def test_every_device_gets_the_count_of_each_instance_group(self) -> None:
        text = "instance_group [ { kind: KIND_GPU count: 2 gpus: [1, 0, 1] }, { kind: KIND_MODEL }, { count: 3 } ]"
        found = groups(text, (0, 1))

        assert found == (
            InstanceGroup(2, ("cuda:1",)), InstanceGroup(2, ("cuda:0",)), InstanceGroup(1),
            InstanceGroup(3, ("cuda:0",)), InstanceGroup(3, ("cuda:1",)),
        )  # fmt: skip
        assert [group.number for group in found] == [0, 0, 1, 2, 2]

    def test_a_gpu_group_without_gpu_numbers_is_on_all_gpus(self) -> None:
        assert groups("instance_group { kind: KIND_GPU }", (0, 2)) == (
            InstanceGroup(1, ("cuda:0",)),
            InstanceGroup(1, ("cuda:2",)),
        )

    def test_rate_limiter_priority_and_resources_are_read(self) -> None:
        (group,) = groups(
            'instance_group { rate_limiter { priority: 3 resources [ { name: "a" count: 2 }, '
            '{ name: "b" global: true count: 1 }, { name: "a" count: 5 }, { name: "c" } ] } }'
        )

        assert group.rate_priority == 3
        assert group.resources == (Resource("a", 5), Resource("b", 1, shared=True), Resource("c", 0))

    def test_passive_groups_and_host_policies_are_read(self) -> None:
        first, second = groups('instance_group [ { passive: true }, { host_policy: "few" } ]')

        assert (first.passive, second.passive) == (True, False)
        assert (first.host_policy, second.host_policy) == ("", "few")

    @pytest.mark.parametrize(
        ("text", "gpus", "message"),
        [
            ("kind: KIND_CPU gpus: 0", (0,), "m_0 of model m has kind KIND_CPU but specifies one or more GPUs"),
            ("kind: KIND_MODEL gpus: 0", (0,), "m_0 of model m has kind KIND_MODEL but specifies one or more GPUs"),
            ('name: "n" kind: KIND_GPU gpus: [0, 7]', (0, 1), "n of model m specifies invalid or unsupported gpu id 7"),
            ("kind: KIND_GPU gpus: -1", None, "m_0 of model m specifies invalid or unsupported gpu id -1"),
        ],
    )  # fmt: skip
    def test_an_invalid_group_is_rejected_with_tritons_message(
        self, text: str, gpus: tuple[int, ...] | None, message: str
    ) -> None:
        (found,) = read_values(f"instance_group {{ {text} }}", gpus)[1]

        assert found.startswith(f"instance group {message}")

    @pytest.mark.parametrize(
        ("text", "gpus", "message"),
        [
            ("kind: KIND_GPU", (), "m_0 of model m has kind KIND_GPU but no GPUs are available"),
            ("kind: KIND_GPU gpus: 1", (), "m_0 of model m has kind KIND_GPU but no GPUs are available"),
            ("kind: KIND_GPU", None, "m_0 of model m has kind KIND_GPU but specifies no GPUs"),
        ],
    )
    def test_a_missing_gpu_is_recorded_and_is_not_a_mistake_yet(
        self, text: str, gpus: tuple[int, ...] | None, message: str
    ) -> None:
        values, messages = read_values(f"instance_group {{ {text} }}", gpus)

        assert messages == []
        assert values[MISSING_GPU] == f"instance group {message}"
        assert all(device.startswith("cuda:") for group in values["instances"] for device in group.devices)


class TestReportedGroups:
    def report(self, text: str, gpus: tuple[int, ...]) -> list[dict[str, Any]]:
        declared = parse_text(text)
        spec = ModelSpec("m", 1, Path("m"), instances=groups(text, gpus))
        found: list[dict[str, Any]] = to_json(complete_config(declared, spec, "onnxruntime_onnx"))["instance_group"]
        return found

    def test_kinds_names_counts_and_gpus_of_groups_are_completed(self) -> None:
        text = 'instance_group [ { }, { name: "n" kind: KIND_GPU count: 2 }, { kind: KIND_MODEL }, { gpus: 9 } ]'
        found = self.report(text, (0, 1))

        assert [(each["name"], each["kind"], each["count"], each["gpus"]) for each in found] == [
            ("m_0", "KIND_GPU", 1, [0, 1]),
            ("n", "KIND_GPU", 2, [0, 1]),
            ("m_2", "KIND_MODEL", 1, []),
            ("m_3", "KIND_CPU", 1, []),
        ]

    def test_rate_limiter_settings_are_reported_unchanged(self) -> None:
        text = (
            'instance_group { passive: true host_policy: "p" '
            'rate_limiter { priority: 2 resources { name: "R" global: true count: 4 } } }'
        )
        (found,) = self.report(text, ())

        assert (found["kind"], found["passive"], found["host_policy"]) == ("KIND_CPU", True, "p")
        assert found["rate_limiter"] == {"resources": [{"name": "R", "global": True, "count": 4}], "priority": 2}


class TestPriority:
    @pytest.mark.parametrize(
        ("word", "weight"), [("PRIORITY_DEFAULT", None), ("PRIORITY_MAX", 4.0), ("PRIORITY_MIN", 0.25)]
    )
    def test_priority_becomes_a_weight_of_the_device(self, word: str, weight: float | None) -> None:
        values, messages = read_values(f"optimization {{ priority: {word} }}")

        assert messages == []
        assert values.get("device_priority") == weight

    def test_an_unknown_priority_is_rejected(self) -> None:
        config = model_config_pb2().ModelConfig()
        config.optimization.priority = 9
        _, findings = read_config(Path("m"), Path("m/config.pbtxt"), config, {}, Gpus.from_numbers(()))

        assert [finding.message for finding in findings] == [
            "optimization.priority 9 is unknown, known: PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN"
        ]
