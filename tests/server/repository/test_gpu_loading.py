"""From a model's files to the session on a GPU: the Loader reads the options that the repository writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.loading.opening import close_model, open_model
from penstock.batching.model import Model
from penstock.server.repository.completed_config import complete_config, to_json
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.gpus import Gpus, GpuSources
from penstock.server.repository.scan import ModelEntry, read_folder
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_session import FakeGround, fake_cuda_loader
from tests.backends.onnx_models import contract_model
from tests.server.repository.folders import make, native


def read(root: Path, config: str = "", toml: str = "", **defaults: Any) -> ModelEntry:
    make(root, "m/1/model.onnx", m=config)
    contract_model("rows", root / "m" / "1" / "model.onnx")
    native(root, "m", toml)
    entry = read_folder(root / "m", Defaults(gpus=Gpus.from_numbers((0, 1)), **defaults))
    assert entry is not None
    assert entry.findings == ()
    return entry


@contextmanager
def opened(entry: ModelEntry, ground: FakeGround) -> Iterator[Model]:
    model = open_model(entry.specs[0], {"onnxruntime": fake_cuda_loader(ground)}, lambda *_: None)
    try:
        yield model
    finally:
        close_model(model)


def reported(entry: ModelEntry, model: Model) -> Any:
    return to_json(complete_config(entry.config, model.spec, model.platform))["instance_group"]


def test_the_cuda_options_of_a_model_reach_the_cuda_provider(tmp_path: Path) -> None:
    toml = (
        '[batching]\nmax_batch_size = 4\n[instances]\ndevices = ["cuda:1"]\n'
        '[runtime]\ngpu_graphs = true\ngpu_memory = "64 MiB"\n[runtime.cuda]\nuse_tf32 = false\n'
    )
    entry, ground = read(tmp_path, toml=toml, gpu_limits={1: 0.9}), FakeGround(FakeRuntime())
    with opened(entry, ground) as model:
        (provider, options), *_ = ground.providers[-1]
        (group,) = reported(entry, model)

    assert provider == "CUDAExecutionProvider"
    assert {name: options[name] for name in ("device_id", "use_tf32", "enable_cuda_graph", "gpu_mem_limit")} == {
        "device_id": "1", "use_tf32": "0", "enable_cuda_graph": "1", "gpu_mem_limit": str(64 << 20),
    }  # fmt: skip
    assert (group["kind"], group["count"], group["gpus"]) == ("KIND_GPU", 1, [1])


def test_all_instances_on_all_gpus_are_reported_in_the_declared_group(tmp_path: Path) -> None:
    entry, ground = read(tmp_path, "instance_group { kind: KIND_GPU count: 2 }"), FakeGround(FakeRuntime())
    with opened(entry, ground) as model:
        (group,) = reported(entry, model)
        sessions = sorted(options["device_id"] for ((_, options), *_) in ground.providers)

    assert sessions == ["0", "0", "1", "1"]
    assert (group["name"], group["kind"], group["count"], group["gpus"]) == ("m_0", "KIND_GPU", 2, [0, 1])


def test_a_model_is_not_served_when_its_cuda_provider_does_not_start(tmp_path: Path) -> None:
    entry = read(tmp_path, "instance_group { kind: KIND_GPU gpus: 0 }")
    with pytest.raises(InferError, match="device 'cuda:0' cannot be used") as caught, opened(
        entry, FakeGround(FakeRuntime(), starts=False)
    ):  # fmt: skip
        pass

    assert caught.value.code is Code.UNSUPPORTED


def test_a_model_with_cpu_fallback_runs_on_the_cpu_when_cuda_does_not_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = read(tmp_path, "instance_group { kind: KIND_GPU count: 2 }", "[runtime]\ncpu_fallback = true")
    with opened(entry, FakeGround(FakeRuntime(), starts=False)) as model:
        (group,) = reported(entry, model)
        fallback = model.spec.fallback_reason

    assert fallback.startswith("device 'cuda:0' cannot be used")
    assert (group["kind"], group["count"], group["gpus"]) == ("KIND_CPU", 1, [])
    assert len([record for record in caplog.records if "model 'm' falls back to the CPU" in record.getMessage()]) == 1


class TestImplicitFallback:
    """A model that names no GPU is served on the CPU when the GPU does not work: it never requested one."""

    @pytest.mark.parametrize(
        ("config", "toml"),
        [("", ""), ("instance_group { count: 2 }", ""), ("", "[instances]\ncount = 2")],
        ids=["nothing said", "KIND_AUTO", "penstock.toml"],
    )
    def test_a_model_without_a_named_gpu_runs_on_the_cpu_when_cuda_does_not_start(
        self, tmp_path: Path, config: str, toml: str
    ) -> None:
        entry = read(tmp_path, config, toml)
        with opened(entry, FakeGround(FakeRuntime(), starts=False)) as model:
            (group,) = reported(entry, model)

        assert model.spec.fallback_reason
        assert (group["kind"], group["count"], group["gpus"]) == ("KIND_CPU", 1, [])

    @pytest.mark.parametrize(
        ("config", "toml"),
        [
            ("instance_group { kind: KIND_GPU }", ""),
            ("", '[instances]\ndevices = ["cuda:0"]'),
            ("", "[runtime]\ncpu_fallback = false"),
            ("", "[runtime.cuda]\nuse_tf32 = false"),
            ("", "[runtime]\ngpu_graphs = true"),
        ],
    )
    def test_a_model_that_requests_a_gpu_is_not_served_when_cuda_does_not_start(
        self, tmp_path: Path, config: str, toml: str
    ) -> None:
        entry = read(tmp_path, config, toml)
        with pytest.raises(InferError) as caught, opened(entry, FakeGround(FakeRuntime(), starts=False)):
            pass

        assert caught.value.code is Code.UNSUPPORTED

    def test_devices_on_the_command_line_turn_off_the_implicit_cpu_fallback(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx")
        gpus = Gpus(("cuda:0",), sources=GpuSources(FakeRuntime, str, lambda: True, lambda: True))
        entry = read_folder(tmp_path / "m", Defaults(gpus=gpus))

        assert entry is not None
        assert entry.specs[0].options == {"penstock.gpu_graphs": "auto"}

    def test_the_configuration_of_a_model_on_working_gpus_does_not_mention_the_fallback(self, tmp_path: Path) -> None:
        entry = read(tmp_path)
        with opened(entry, FakeGround(FakeRuntime())) as model:
            config = to_json(complete_config(entry.config, model.spec, model.platform))

        assert [(each["kind"], each["gpus"]) for each in config["instance_group"]] == [("KIND_GPU", [0, 1])]
        assert config["parameters"] == {}


@pytest.mark.parametrize("toml", ["[runtime]\ngpu_memory = 16\n", "[batching]\nmax_batch_size = 4\n"])
def test_a_model_too_large_for_gpu_memory_does_not_fall_back_to_the_cpu(tmp_path: Path, toml: str) -> None:
    entry = read(tmp_path, "instance_group { kind: KIND_GPU gpus: 0 }", toml, cpu_fallback=True, gpu_limits={0: 0.0})
    with pytest.raises(InferError) as caught, opened(entry, FakeGround(FakeRuntime())):
        pass

    assert caught.value.code is Code.OVERLOADED
