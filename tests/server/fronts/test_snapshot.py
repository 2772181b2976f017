"""A front end receives a model as the engine has it: specs of every kind survive a round trip."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.node import Node
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.spec import (
    BatchPolicy,
    BatchTensor,
    Control,
    EnsembleSpec,
    HookSpec,
    InstanceGroup,
    ModelSpec,
    PaddedAxis,
    QueuePolicy,
    Resource,
    Sample,
    SampleInput,
    SequenceSpec,
    State,
    Step,
    WorkerSpec,
)
from penstock.server.fronts import snapshot
from penstock.server.fronts.model_table import read_model, write_model
from tests.fakes import fake_model

X = TensorSpec("x", "FP32", (-1, 4), axes=("rows", ""), reshape=(2, 2), ragged=True)
Y = TensorSpec("y", "seq(map(int64,tensor(float)))", (-1,), optional=True, is_shape=True)
MOMENTS = {"day": dt.date(2026, 11, 22), "at": dt.datetime(2026, 11, 22, 8, tzinfo=dt.UTC), "hour": dt.time(8, 1)}
KINDS = {
    "plain": ModelSpec("m", 1, Path("m.onnx")),
    "batched": ModelSpec(
        "m", 2, Path("/a/b"), inputs=(X,), outputs=(Y,), signature=Signature((X,), (Y,), batched=True),
        binding_signature=Signature((X,), (Y,)),
        policy=BatchPolicy(
            8, (2, 4), 100, cap_rows=3, allowed_rows=(1, 8), level_policies={1: QueuePolicy(3, False, 2, True)}
        ),
        padding=(
            PaddedAxis("x", 0, (16, 32), float("inf"), "mask", {"y": 1}), PaddedAxis("x", 1, value=-1),
        ),
        metric_tags=(("a", "b"),), labels={"y": ("cat", "dog")}, options={"threads": "2"},
    ),
    "instances": ModelSpec(
        "m", 1, Path("m"),
        instances=(InstanceGroup(2, ("cpu", "cuda:0"), True, (Resource("r", 3, True),), 2, "cpu", number=4),),
    ),
    "sequences": ModelSpec(
        "m", 1, Path("m"),
        sequence=SequenceSpec(
            False, controls=(Control("start", "start", "FP32", (0, 1)), Control("id", "corrid", "UINT64")),
            states=(State("i", "o", "FP32", (-1, 2), Path("state"), (1, 2)), State("j", "p", "BYTES", ())),
            min_utilization=0.5,
        ),
    ),
    "ensemble": ModelSpec(
        "e", 1, Path("e"), instances=(), ensemble=EnsembleSpec((Step("m", "", {"x": "a"}, {"y": "b"}),), 4)
    ),
    "samples": ModelSpec(
        "m", 1, Path("m"),
        samples=(Sample("s", 1, 2, {"x": SampleInput("FP32", (), Path("f")), "z": SampleInput("BYTES", (), "zero")}),),
        batch_inputs=(BatchTensor("b", "BATCH_ELEMENT_COUNT", "FP32", ("x",)),),
    ),
    "hooks": ModelSpec(
        "m", 1, Path("m"), cached=True, decoupled=True, device_priority=0.5,
        hooks=HookSpec(
            Path("handler.py"), "per-thread", 2.5, {"labels": ["a", {"deep": [1, 2.5, None, True]}]} | MOMENTS, 2,
            WorkerSpec("python3", Path("requirements.txt"), ("lib",), {"A": "b"}, 3.0, 1 << 30),
        ),
    ),
    "replicas": ModelSpec("m", 1, Path("m"), hooks=HookSpec(Path("handler.py"), 3)),
    "python": ModelSpec("m", 1, Path("m"), "python", declared_config='{"name": "m"}', worker=WorkerSpec(timeout_s=1)),
}  # fmt: skip


def there_and_back(value: Any) -> Any:
    return snapshot.read(type(value), json.loads(json.dumps(snapshot.write(value))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_of_any_kind_survives_a_round_trip(kind: str) -> None:
    spec = KINDS[kind]

    again = there_and_back(spec)

    assert again == spec
    assert repr(again) == repr(spec)  # fields that are not compared, and numbers' types


def test_axes_and_group_numbers_survive_a_round_trip() -> None:
    assert there_and_back(KINDS["batched"]).inputs[0].axes == ("rows", "")
    assert there_and_back(KINDS["instances"]).instances[0].number == 4


FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.dates() | st.times(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(metadata=st.dictionaries(st.text(), FREE, max_size=3))
def test_hook_metadata_survives_a_round_trip(metadata: Mapping[str, Any]) -> None:
    assert there_and_back(HookSpec(Path("h.py"), metadata=metadata)).metadata == metadata


@pytest.mark.parametrize(
    "spoilt",
    [
        {"version": "1"}, {"version": True}, {"cached": 1}, {"name": None}, {"padding": {}}, {"more": 1},
        {"policy": {}}, {"labels": [["y"]]}, {"hooks": []},
    ],
)  # fmt: skip
def test_an_invalid_snapshot_is_rejected_when_read(spoilt: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        snapshot.read(ModelSpec, snapshot.write(KINDS["batched"]) | spoilt)


def test_hook_metadata_that_json_cannot_hold_is_rejected_when_written() -> None:
    with pytest.raises(TypeError):
        snapshot.write(HookSpec(Path("h.py"), metadata={"code": object()}))


def test_a_front_ends_model_has_the_description_of_the_engines_model() -> None:
    model = fake_model()
    model.platform = "onnxruntime_onnx"
    model.node_inputs = [Node("x", "tensor(float)", ["N", 4, None])]

    again = read_model(json.loads(json.dumps(write_model(model))))

    assert (again.name, again.version, again.platform) == (model.name, model.version, model.platform)
    assert (again.spec, again.signature) == (model.spec, model.signature)
    assert [(node.name, node.type, node.shape) for node in again.node_inputs] == [
        ("x", "tensor(float)", ["N", 4, None])
    ]
    assert not again.instances
