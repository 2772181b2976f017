from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import text_format

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.loading.completion import complete
from penstock.batching.spec import InstanceGroup, ModelSpec
from penstock.server.protobuf import model_config_pb2
from penstock.server.repository.control import ModelControl
from penstock.server.repository.control_options import ControlOptions
from penstock.server.repository.repository import Repository
from tests.server.repository.folders import FakeEngine, make, native

GRAPH = Signature(
    (TensorSpec("x", "FP32", (-1, 4)), TensorSpec("s", "BYTES", (-1, 1))),
    (TensorSpec("y", "FP32", (-1, 3)), TensorSpec("maps", "seq(map(int64,tensor(float)))", ())),
)


def loaded(root: Path, **failures: Exception) -> tuple[Repository, FakeEngine, list[str]]:
    repository, engine = Repository([root]), FakeEngine(GRAPH, failures)
    engine.repository = repository
    reasons = asyncio.run(ModelControl(repository, engine).start())
    return repository, engine, reasons


def config_of(root: Path, graph: Signature = GRAPH) -> tuple[Any, Mapping[str, Any]]:
    repository, engine = Repository([root]), FakeEngine(graph)
    assert [str(finding) for entry in repository.scan()[0] for finding in entry.findings] == []
    assert asyncio.run(ModelControl(repository, engine).start()) == []
    model = engine.served["m"][0]
    return repository.config(model), repository.config_json(model)


class TestStates:
    def test_all_versions_that_load_are_ready(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx", "b/2/model.onnx", b="version_policy { all { } }")
        repository, _, reasons = loaded(tmp_path)

        assert reasons == []
        assert repository.ready()
        assert repository.index() == [
            {"name": "a", "version": "1", "state": "READY"},
            {"name": "b", "version": "1", "state": "READY"},
            {"name": "b", "version": "2", "state": "READY"},
        ]

    @pytest.mark.parametrize("path", ["m", "m/1"])
    @pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
    def test_a_path_inside_a_repository_makes_the_server_not_ready(
        self, tmp_path: Path, path: str, mode: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        repository = Repository([make(tmp_path, "m/1/model.onnx", "m/config.pbtxt") / path])
        control = ModelControl(repository, FakeEngine(GRAPH), ControlOptions(mode, poll_interval_s=0))
        (reason,) = asyncio.run(control.start())

        assert reason.endswith(f": {tmp_path}")  # the path that should have been given
        assert caplog.messages == [reason]
        assert not repository.ready()
        assert repository.ready(strict=False)

    def test_an_empty_repository_is_ready_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        repository, _, reasons = loaded(tmp_path)

        assert reasons == []
        assert repository.ready()
        assert caplog.messages == [f"{tmp_path}: warning: contains no models"]

    @pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
    @pytest.mark.parametrize("beside", [True, False], ids=["models", "empty"])
    def test_a_folder_that_is_not_a_model_or_is_unreadable_does_not_affect_readiness(
        self, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, *, beside: bool
    ) -> None:
        make(tmp_path, "lost+found/x", "bad\nname/1/model.onnx", *(["m/1/model.onnx"] if beside else []))
        iterate = Path.iterdir

        def refused(path: Path) -> Iterator[Path]:
            if path.name == "lost+found":
                raise PermissionError(13, "Permission denied")
            return iterate(path)

        monkeypatch.setattr(Path, "iterdir", refused)
        repository = Repository([tmp_path])
        asyncio.run(ModelControl(repository, FakeEngine(GRAPH), ControlOptions(mode, poll_interval_s=0)).start())

        assert repository.ready()

    def test_a_new_model_is_in_the_index_while_it_waits_for_its_second_poll(self, tmp_path: Path) -> None:
        repository = Repository([make(tmp_path, "m/1/model.onnx")])
        control = ModelControl(repository, FakeEngine(GRAPH), ControlOptions("poll", poll_interval_s=0))

        async def look() -> None:
            await control.start()
            make(tmp_path, "new/1/model.onnx")
            await control.poll()

        asyncio.run(look())

        assert [each["name"] for each in repository.index()] == ["m", "new"]
        assert ("new", "1") not in {each[:2] for each in repository.readiness()}
        assert repository.ready()

    @pytest.mark.parametrize("mode", ["poll", "explicit"])
    def test_the_server_becomes_ready_when_a_wrong_path_is_repaired(self, tmp_path: Path, mode: str) -> None:
        root = make(tmp_path / "models", "1/model.onnx", "config.pbtxt")
        repository = Repository([root])
        control = ModelControl(repository, FakeEngine(GRAPH), ControlOptions(mode, poll_interval_s=0))

        async def mend() -> None:
            await control.start()
            assert not repository.ready()
            shutil.rmtree(root)
            make(root, "m/1/model.onnx")
            await (control.load("m") if mode == "explicit" else control.poll())

        asyncio.run(mend())

        assert repository.ready()

    def test_a_model_has_the_state_loading_during_its_load(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx")
        repository, engine, _ = loaded(tmp_path)

        assert engine.indexes == [{"name": "a", "version": "1", "state": "LOADING"}]
        assert repository.index(ready=True) == repository.index()

    def test_the_server_is_not_ready_before_loading_has_ended(self, tmp_path: Path) -> None:
        repository = Repository([make(tmp_path, "a/1/model.onnx")])

        assert not repository.ready()
        assert not repository.ready(strict=False)

    @pytest.mark.parametrize(
        ("failure", "reason"),
        [(InferError(Code.INVALID, "no good"), "no good"), (ValueError("oops"), "ValueError: oops")],
    )
    def test_a_model_that_fails_to_load_is_unavailable_with_a_reason(
        self, tmp_path: Path, failure: Exception, reason: str
    ) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx")
        repository, engine, reasons = loaded(tmp_path, a=failure)

        assert reasons == [f"model 'a' version 1: {reason}"]
        assert not repository.ready()
        assert repository.ready(strict=False)
        assert repository.index()[0] == {"name": "a", "version": "1", "state": "UNAVAILABLE", "reason": reason}
        assert repository.index(ready=True) == [{"name": "b", "version": "1", "state": "READY"}]
        assert list(engine.served) == ["b"]

    def test_a_model_with_a_mistake_is_unavailable_with_its_file_and_line(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "b/1/model.onnx", a='runtime: "r"')
        repository, _, reasons = loaded(tmp_path)
        reason = "config.pbtxt:1: field 'runtime' is not supported"

        assert reasons == [f"model 'a': {reason}"]
        assert repository.index()[0] == {"name": "a", "state": "UNAVAILABLE", "reason": reason}

    def test_a_path_that_does_not_exist_is_reported(self, tmp_path: Path) -> None:
        _, _, reasons = loaded(tmp_path / "gone")

        assert reasons == [f"{tmp_path}/gone: does not exist"]

    def test_versions_that_load_are_served_when_another_version_fails(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1/model.onnx", "a/2/model.onnx", a="version_policy { all { } }")
        repository, engine, reasons = loaded(tmp_path, a2=InferError(Code.INVALID, "no good"))

        assert reasons == ["model 'a' version 2: no good"]
        assert [row["state"] for row in repository.index()] == ["READY", "UNAVAILABLE"]
        assert [model.version for model in engine.served["a"]] == ["1"]

    def test_at_most_max_concurrent_loads_models_load_in_parallel(self, tmp_path: Path) -> None:
        make(tmp_path, *(f"m{number}/1/model.onnx" for number in range(9)))
        repository, engine = Repository([tmp_path]), FakeEngine(GRAPH)

        async def start() -> None:
            engine.gate = asyncio.Event()
            starting = asyncio.create_task(
                ModelControl(repository, engine, ControlOptions(max_concurrent_loads=3)).start()
            )
            async with asyncio.timeout(10):
                while engine.now < 3:
                    await asyncio.to_thread(lambda: None)
            engine.gate.set()
            await starting

        asyncio.run(start())

        assert engine.most == 3


class TestConfig:
    def test_a_missing_configuration_is_completed(self, tmp_path: Path) -> None:
        config, document = config_of(make(tmp_path, "m/1/model.onnx"))

        assert document["name"] == "m"
        assert document["platform"] == "onnxruntime_onnx"
        assert document["backend"] == "onnxruntime"
        assert document["max_batch_size"] == 64
        assert document["version_policy"] == {"latest": {"num_versions": 1}}
        assert document["default_model_filename"] == "model.onnx"
        assert [(tensor["name"], tensor["data_type"], tensor["dims"]) for tensor in document["input"]] == [
            ("x", "TYPE_FP32", [4]),
            ("s", "TYPE_STRING", [1]),
        ]
        assert [(tensor["name"], tensor["dims"]) for tensor in document["output"]] == [("y", [3])]
        assert document["dynamic_batching"]["preferred_batch_size"] == [64]
        assert document["dynamic_batching"]["max_queue_delay_microseconds"] == 0
        assert document["instance_group"][0] == {
            "name": "m_0",
            "kind": "KIND_CPU",
            "count": 1,
            "gpus": [],
            "secondary_devices": [],
            "profile": [],
            "passive": False,
            "host_policy": "",
        }
        assert config.max_batch_size == 64

    def test_the_measured_instance_count_is_reported(self, tmp_path: Path) -> None:
        root = make(tmp_path, "m/1/model.onnx")
        native(root, "m", '[instances]\ncount = "auto"\n')
        repository, engine = Repository([root]), FakeEngine(GRAPH)
        assert asyncio.run(ModelControl(repository, engine).start()) == []
        model = engine.served["m"][0]
        assert model.spec.instances == (InstanceGroup(0),)
        model.spec = replace(model.spec, instances=(InstanceGroup(3),))

        assert [group["count"] for group in repository.config_json(model)["instance_group"]] == [3]

    def test_a_group_without_a_count_is_one_instance(self, tmp_path: Path) -> None:
        _, document = config_of(make(tmp_path, "m/1/model.onnx", m="instance_group { kind: KIND_CPU }"))

        assert [group["count"] for group in document["instance_group"]] == [1]

    def test_unset_sections_are_absent_from_the_configuration(self, tmp_path: Path) -> None:
        _, document = config_of(make(tmp_path, "m/1/model.onnx"))

        assert (
            document.keys()
            & {
                "sequence_batching",
                "ensemble_scheduling",
                "model_transaction_policy",
                "response_cache",
            }
            == set()
        )

    def test_pinned_memory_is_reported_as_on_as_in_triton(self, tmp_path: Path) -> None:
        _, document = config_of(make(tmp_path, "m/1/model.onnx"))

        assert document["optimization"] == {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        }

    @pytest.mark.parametrize("size", [0, 1])
    def test_a_model_that_is_not_batched_has_no_dynamic_batching(self, tmp_path: Path, size: int) -> None:
        make(tmp_path, "m/1/model.onnx")
        native(tmp_path, "m", f"[batching]\nmax_batch_size = {size}\n")
        _, document = config_of(tmp_path)

        assert "dynamic_batching" not in document
        assert document["max_batch_size"] == size
        assert document["input"][0]["dims"] == ([4] if size else [-1, 4])

    @pytest.mark.parametrize(("size", "preferred"), [(0, []), (1, [1])])
    def test_declared_dynamic_batching_is_reported(self, tmp_path: Path, size: int, preferred: list[int]) -> None:
        make(tmp_path, "m/1/model.onnx", m="dynamic_batching { }")
        native(tmp_path, "m", f"[batching]\nmax_batch_size = {size}\n")
        _, document = config_of(tmp_path)

        assert document["dynamic_batching"]["preferred_batch_size"] == preferred

    def test_declared_fields_are_reported_unchanged(self, tmp_path: Path) -> None:
        make(
            tmp_path,
            "m/1/model.onnx",
            "m/labels.txt",
            m="""
max_batch_size: 8
input { name: "s" data_type: TYPE_STRING dims: 1 }
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 3 label_filename: "labels.txt" }
dynamic_batching { max_queue_delay_microseconds: 5 default_queue_policy { max_queue_size: 9 } }
instance_group { name: "mine" count: 2 kind: KIND_CPU }
parameters { key: "intra_op_thread_count" value { string_value: "2" } }
""",
        )
        _, document = config_of(tmp_path)

        assert [tensor["name"] for tensor in document["input"]] == ["x", "s"]
        assert document["output"][0]["label_filename"] == "labels.txt"
        assert document["instance_group"][0]["name"] == "mine"
        assert document["dynamic_batching"]["max_queue_delay_microseconds"] == 5
        assert document["dynamic_batching"]["default_queue_policy"] == {
            "timeout_action": "REJECT",
            "default_timeout_microseconds": 0,
            "allow_timeout_override": False,
            "max_queue_size": 9,
        }
        assert document["parameters"] == {"intra_op_thread_count": {"string_value": "2"}}

    def test_settings_of_penstock_toml_are_reported_as_triton_fields(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx")
        native(
            tmp_path,
            "m",
            "[model]\nversions = [1]\n[batching]\nmax_queue_delay_us = 3\ndefault_timeout_us = 4\n"
            '[runtime]\nexecution_mode = "parallel"\ngraph_level = "basic"\n',
        )
        _, document = config_of(tmp_path)

        assert document["version_policy"] == {"specific": {"versions": [1]}}
        assert document["dynamic_batching"]["max_queue_delay_microseconds"] == 3
        assert document["dynamic_batching"]["default_queue_policy"]["default_timeout_microseconds"] == 4
        assert document["parameters"] == {"execution_mode": {"string_value": "1"}}
        assert document["optimization"]["graph"] == {"level": -1}

    @pytest.mark.parametrize(
        "graph",
        [
            GRAPH,
            replace(GRAPH, outputs=(TensorSpec("y", "INT64", (-1,)),)),
            Signature((TensorSpec("x", "FP16", (2, -1)),), (TensorSpec("y", "BF16", ()),)),
        ],
    )
    def test_a_completed_configuration_is_unchanged_when_read_and_completed_again(
        self, tmp_path: Path, graph: Signature
    ) -> None:
        first, _ = config_of(make(tmp_path / "before", "m/1/model.onnx"), graph)
        second, _ = config_of(make(tmp_path / "after", "m/1/model.onnx", m=text_format.MessageToString(first)), graph)

        assert second == first

    def test_a_model_from_outside_the_repository_has_a_configuration(self, tmp_path: Path) -> None:
        spec = complete(ModelSpec("other", 1, Path("x")), GRAPH)
        model: Any = SimpleNamespace(name="other", spec=spec, platform="fake")

        assert isinstance(Repository([tmp_path]).config(model), model_config_pb2().ModelConfig)
