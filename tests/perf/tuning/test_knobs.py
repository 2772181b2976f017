from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.tuning import knobs
from penstock.perf.tuning.knobs import ORIGINAL, Bounds, Setting
from penstock.perf.tuning.pbtxt import parse_pbtxt, to_pbtxt
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.overrides import read_config
from penstock.server.repository.scan import read_model

CONFIG: dict[str, Any] = {
    "name": "m",
    "platform": "onnxruntime_onnx",
    "backend": "onnxruntime",
    "max_batch_size": 64,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3], "label_filename": "labels.txt"}],
    "dynamic_batching": {"preferred_batch_size": [64], "max_queue_delay_microseconds": 0},
    "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 1}],
    "parameters": {},
}
TWO_CORES = Bounds(cores=2, rows_in_flight=16)


def settings_of(
    name: str, config: dict[str, Any] = CONFIG, bounds: Bounds = TWO_CORES, at: Setting = ORIGINAL
) -> list[dict[str, int]]:
    settings_by_axis = {
        axis.name: axis.settings for axis in knobs.axes(knobs.reloadable(config), knobs.KNOBS, bounds, at)
    }
    return [dict(setting) for setting in settings_by_axis.get(name, ())]


def test_instances_times_threads_is_at_most_twice_the_cores() -> None:
    assert settings_of("instance_count and intra_op_threads") == [
        {"intra_op_threads": 1},
        {"instance_count": 2},
        {"instance_count": 2, "intra_op_threads": 1},
    ]
    many = settings_of("instance_count and intra_op_threads", bounds=Bounds(cores=12))
    assert all(each.get("instance_count", 1) * each.get("intra_op_threads", 12) <= 24 for each in many)
    assert {"instance_count": 12, "intra_op_threads": 2} in many


def test_no_preferred_size_exceeds_half_of_the_rows_in_flight() -> None:
    sizes = {each.get("preferred_batch_size") for each in settings_of("max_queue_delay and preferred_batch_size")}

    assert sizes == {None, 4, 8}


def test_no_delay_exceeds_half_of_the_target() -> None:
    bounds = Bounds(cores=2, target_us=900)

    delays = {
        each.get("max_queue_delay") for each in settings_of("max_queue_delay and preferred_batch_size", bounds=bounds)
    }

    assert delays == {None, 100}


def test_the_largest_batch_is_only_raised() -> None:
    assert settings_of("max_batch_size") == [{"max_batch_size": 128}, {"max_batch_size": 256}]


def test_the_search_continues_from_the_current_setting() -> None:
    at = (("instance_count", 2),)

    assert {"instance_count": 2, "max_batch_size": 128} in settings_of("max_batch_size", at=at)
    assert settings_of("instance_count and intra_op_threads", at=at) == [
        {"instance_count": 2, "intra_op_threads": 1},
        {},  # as it is
        {"intra_op_threads": 1},
    ]


@pytest.mark.parametrize(
    ("change", "remaining"),
    [
        ({"max_batch_size": 1}, {"instance_count", "intra_op_threads"}),
        ({"sequence_batching": {}}, {"instance_count", "intra_op_threads"}),
        ({"backend": "python"}, {"instance_count", "max_batch_size", "max_queue_delay", "preferred_batch_size"}),
        ({"instance_group": [{"kind": "KIND_GPU", "gpus": [0]}], "max_batch_size": 0}, {"instance_count"}),
        ({"instance_group": [{"count": 1}, {"count": 2}], "max_batch_size": 0}, {"intra_op_threads"}),
    ],
)
def test_knobs_that_a_model_lacks_are_left_alone(change: dict[str, Any], remaining: set[str]) -> None:
    assert set(knobs.KNOBS) - knobs.unavailable_knobs(CONFIG | change).keys() == remaining


def test_fields_that_servers_complete_are_not_sent_back() -> None:
    assert "preferred_batch_size" not in knobs.reloadable(CONFIG)["dynamic_batching"]
    returned = CONFIG | {"dynamic_batching": {"preferred_batch_size": [32], "max_queue_delay_microseconds": 50}}
    assert knobs.reloadable(returned) == returned


settings_drawn = st.fixed_dictionaries({}, optional={knob: st.integers(1, 64) for knob in knobs.KNOBS}).map(
    lambda returned: knobs.with_values(ORIGINAL, returned.items())
)


@given(settings_drawn)
def test_a_written_configuration_is_read_back(setting: Setting) -> None:
    config = knobs.apply_setting(knobs.reloadable(CONFIG), setting)

    again = parse_pbtxt(to_pbtxt(config, "why\nhow"))

    assert all(knobs.value_of(again, ORIGINAL, knob) == value for knob, value in setting)
    assert read_config("m", json.dumps(again)) == read_config("m", json.dumps(config))
    assert again["output"][0]["label_filename"] == "labels.txt"


def test_penstock_toml_states_the_same_setting(tmp_path: Path) -> None:
    setting = knobs.with_values(ORIGINAL, dict.fromkeys(knobs.KNOBS, 2).items())
    native, triton = tmp_path / "native" / "m", tmp_path / "triton" / "m"
    for folder, name, text in (
        (native, "penstock.toml", knobs.to_penstock_toml(setting)),
        (triton, "config.pbtxt", to_pbtxt(knobs.apply_setting({"backend": "onnxruntime"}, setting))),
    ):
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.onnx").touch()
        (folder / name).write_text(text, "utf-8")

    returned = [read_model([folder.parent], "m", Defaults()) for folder in (native, triton)]

    assert [[str(each) for each in entry.findings] for entry in returned if entry] == [[], []]
    (one,), (other,) = (entry.specs for entry in returned if entry)
    assert (one.policy, one.options) == (other.policy, other.options)
    assert [(group.count, group.devices) for group in one.instances] == [(2, ("cpu",))]
    assert [(group.count, group.devices) for group in other.instances] == [(2, ("cpu",))]
