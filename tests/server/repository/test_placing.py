"""The devices of a model, the options its Loader gets for them, and what happens when its GPU does not exist."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.cuda_budget import Budget
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec
from penstock.server.repository.completed_config import complete_config, to_json
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.fields.accelerators import PATH_OPTIONS
from penstock.server.repository.gpus import Gpus, GpuSources
from penstock.server.repository.mirrors import make_defaults
from penstock.server.repository.parsed_config import ParsedConfig
from penstock.server.repository.placing import ANY_DEVICE, place_model
from penstock.server.repository.scan import ModelEntry, read_folder, scan
from penstock.server.settings import Settings
from tests.server.repository.folders import make, native

NONE, TWO, UNTOLD = Gpus.from_numbers(()), Gpus.from_numbers((0, 1)), Gpus.from_numbers(None)
NO_DRIVER = Gpus(sources=GpuSources(lambda: None, lambda: "no NVIDIA driver", lambda: True, lambda: False))
KIND_GPU = "instance_group { kind: KIND_GPU }"
KIND_CPU = "instance_group { kind: KIND_CPU }"
WAY_OUT = "; set --cpu-fallback=true to serve it on the CPU"
CUDA = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "cuda" } } }'
TENSORRT = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }'


def read(root: Path, config: str | None = None, toml: str = "", gpus: Gpus = TWO, **defaults: Any) -> ModelEntry:
    make(root, "m/1/model.onnx", **({} if config is None else {"m": config}))
    if toml:
        native(root, "m", toml)
    entry = read_folder(root / "m", Defaults(gpus=gpus, **defaults))
    assert entry is not None
    return entry


def spec_of(entry: ModelEntry) -> ModelSpec:
    assert [str(finding) for finding in entry.findings if finding.is_mistake] == []
    return entry.specs[0]


def devices(entry: ModelEntry) -> list[tuple[int, str]]:
    return [(group.count, device) for group in spec_of(entry).instances for device in group.devices]


def instance_groups(entry: ModelEntry, spec: ModelSpec) -> list[tuple[str, int, list[int]]]:
    config = to_json(complete_config(entry.config, spec, "onnxruntime_onnx"))
    return [(each["kind"], each["count"], each["gpus"]) for each in config["instance_group"]]


class TestDefaults:
    @pytest.mark.parametrize(
        ("config", "toml", "found"),
        [
            (None, "", [(1, "cuda:0"), (1, "cuda:1")]),
            ("", "", [(1, "cuda:0"), (1, "cuda:1")]),
            ("instance_group { count: 2 }", "", [(2, "cuda:0"), (2, "cuda:1")]),
            ("instance_group { count: 2 }", "[instances]\ncount = 2", [(2, "cuda:0"), (2, "cuda:1")]),
            (None, "[instances]\ncount = 3", [(3, "cuda:0"), (3, "cuda:1")]),
            (None, '[instances]\ncount = "auto"\ndevices = ["cuda:1"]', [(0, "cuda:1")]),
            ("instance_group { kind: KIND_CPU }", "", [(1, "cpu")]),
            (None, '[instances]\ndevices = ["cpu"]', [(1, "cpu")]),
        ],
    )
    def test_a_model_without_a_device_is_on_every_gpu(
        self, tmp_path: Path, config: str | None, toml: str, found: list[tuple[int, str]]
    ) -> None:
        assert devices(read(tmp_path, config, toml)) == found

    @pytest.mark.parametrize("config", [None, "", "instance_group { count: 1 }"])
    def test_a_model_without_a_device_is_on_the_cpu_when_there_is_no_gpu(
        self, tmp_path: Path, config: str | None
    ) -> None:
        entry = read(tmp_path, config, gpus=NONE)

        assert devices(entry) == [(1, "cpu")]
        assert spec_of(entry).options == {}
        assert spec_of(entry).fallback_reason == ""

    def test_a_single_file_model_is_on_every_gpu(self, tmp_path: Path) -> None:
        (tmp_path / "net.onnx").touch()
        (entry,), _ = scan([tmp_path / "net.onnx"], Defaults(gpus=TWO))

        assert devices(entry) == [(1, "cuda:0"), (1, "cuda:1")]

    def test_the_command_line_may_name_the_default_devices(self, tmp_path: Path) -> None:
        assert devices(read(tmp_path, gpus=Gpus(("cpu",)))) == [(1, "cpu")]

    def test_a_default_device_that_does_not_exist_is_a_mistake(self, tmp_path: Path) -> None:
        entry = read(tmp_path, gpus=Gpus(("cuda:3",), sources=NO_DRIVER._sources))

        assert entry.specs == ()
        assert "device 'cuda:3' does not exist: there is no GPU: no NVIDIA driver" in str(entry.findings[0])

    @pytest.mark.parametrize(
        ("config", "toml"), [("instance_group { count: 2 }", ""), (None, "[instances]\ncount = 2")]
    )
    def test_a_missing_default_device_is_a_mistake_for_a_model_with_an_instance_count(
        self, tmp_path: Path, config: str | None, toml: str
    ) -> None:
        entry = read(tmp_path, config, toml, Gpus(("cuda:3",), sources=NO_DRIVER._sources))

        assert [finding.message.partition(": ")[0] for finding in entry.findings] == ["device 'cuda:3' does not exist"]

    def test_a_model_that_names_the_cpu_does_not_query_the_driver(self, tmp_path: Path) -> None:
        def never() -> Any:
            raise AssertionError("the driver was asked")

        gpus = Gpus(sources=GpuSources(never, str, lambda: True, lambda: False))

        assert devices(read(tmp_path, "instance_group { kind: KIND_CPU }", gpus=gpus)) == [(1, "cpu")]

    def test_the_settings_become_the_defaults_for_placing(self) -> None:
        found = make_defaults(Settings(default_device="cuda:1", cpu_fallback=True, model_load_gpu_limit=("1:0.5",)))

        assert found.gpus.default("onnxruntime") == ("cuda:1",)
        assert found.cpu_fallback
        assert found.gpu_limits == {1: 0.5}


class TestMissingGpu:
    @pytest.mark.parametrize(
        ("config", "toml", "gpus", "reason"),
        [
            (KIND_GPU, "", NO_DRIVER,
             "instance group m_0 of model m has kind KIND_GPU but no GPUs are available: no NVIDIA driver"),
            ("instance_group { kind: KIND_GPU gpus: 0 }", "", NONE,
             "instance group m_0 of model m has kind KIND_GPU but no GPUs are available"),
            (KIND_GPU, "", UNTOLD, "instance group m_0 of model m has kind KIND_GPU but specifies no GPUs"),
            (None, '[instances]\ndevices = ["cuda:0"]', NONE, "device 'cuda:0' does not exist: there is no GPU"),
            (None, '[instances]\ndevices = ["cuda:2"]', TWO,
             "device 'cuda:2' does not exist: there is cuda:0, cuda:1"),
            (CUDA, "", NO_DRIVER,
             "execution accelerator 'cuda' requires an instance_group with a GPU: no NVIDIA driver"),
            (CUDA + " instance_group { kind: KIND_GPU }", "", NO_DRIVER,
             "instance group m_0 of model m has kind KIND_GPU but no GPUs are available: no NVIDIA driver"),
            (KIND_CPU, "[runtime.cuda]\nuse_tf32 = 0", TWO,
             "execution accelerator 'cuda' requires an instance_group with a GPU"),
            (TENSORRT, "", NONE, "execution accelerator 'tensorrt' requires an instance_group with a GPU"),
            (None, "[runtime]\ngpu_graphs = true", NONE, "CUDA graphs requires an instance_group with a GPU"),
        ],
    )  # fmt: skip
    def test_a_missing_requested_gpu_is_a_mistake_with_its_reason_and_line(
        self, tmp_path: Path, config: str | None, toml: str, gpus: Gpus, reason: str
    ) -> None:
        entry = read(tmp_path, config, toml, gpus)
        (finding,) = entry.findings

        assert entry.specs == ()
        assert (finding.is_mistake, finding.message.removesuffix(WAY_OUT), finding.line > 0) == (True, reason, True)

    @pytest.mark.parametrize(
        ("toml", "gpus", "suggested"),
        [
            ("", NO_DRIVER, True),
            ("", NONE, True),
            ("[runtime]\ncpu_fallback = false", NONE, False),
            ("", UNTOLD, False),
        ],
    )
    def test_a_missing_gpu_suggests_cpu_fallback_unless_the_model_disallows_it(
        self, tmp_path: Path, toml: str, gpus: Gpus, suggested: bool
    ) -> None:
        (finding,) = read(tmp_path, KIND_GPU, toml, gpus).findings

        assert finding.message.endswith(WAY_OUT) is suggested

    def test_a_wrong_gpu_number_is_a_mistake_despite_cpu_fallback(self, tmp_path: Path) -> None:
        (finding,) = read(tmp_path, None, '[instances]\ndevices = ["cuda:2"]', TWO, cpu_fallback=True).findings

        assert (finding.is_mistake, WAY_OUT in finding.message) == (True, False)

    @pytest.mark.parametrize("says", ["configuration", "penstock.toml", "command line"])
    def test_a_model_falls_back_to_the_cpu_with_a_warning_when_allowed(self, tmp_path: Path, says: str) -> None:
        allowed = 'parameters { key: "penstock.cpu_fallback" value { string_value: "true" } }'
        entry = read(
            tmp_path,
            KIND_GPU + (allowed if says == "configuration" else ""),
            "[runtime]\ncpu_fallback = true" if says == "penstock.toml" else "",
            NO_DRIVER,
            cpu_fallback=says == "command line",
        )
        spec, (finding,) = spec_of(entry), entry.findings
        reason = "instance group m_0 of model m has kind KIND_GPU but no GPUs are available: no NVIDIA driver"

        assert devices(entry) == [(1, "cpu")]
        assert spec.fallback_reason == reason
        assert str(finding).endswith(f"warning: is served on the CPU: {reason}")
        assert instance_groups(entry, spec) == [("KIND_CPU", 1, [])]
        assert to_json(complete_config(entry.config, spec, ""))["parameters"]["penstock.cpu_fallback"] == {
            "string_value": "true"
        }

    def test_a_model_may_disallow_the_cpu_fallback_of_the_command_line(self, tmp_path: Path) -> None:
        entry = read(tmp_path, KIND_GPU, "[runtime]\ncpu_fallback = false", NONE, cpu_fallback=True)

        assert entry.specs == ()

    def test_an_accelerator_without_a_gpu_falls_back_to_the_cpu(self, tmp_path: Path) -> None:
        spec = spec_of(read(tmp_path, CUDA, gpus=NONE, cpu_fallback=True))

        assert spec.instances == (InstanceGroup(),)
        assert spec.fallback_reason == "execution accelerator 'cuda' requires an instance_group with a GPU"

    def test_automatic_graphs_do_not_require_a_gpu(self, tmp_path: Path) -> None:
        entry = read(tmp_path, None, '[runtime]\ngpu_graphs = "auto"', NONE)

        assert devices(entry) == [(1, "cpu")]

    @pytest.mark.parametrize(("group", "gpus"), [("", NO_DRIVER), (" instance_group { kind: KIND_CPU }", TWO)])
    def test_graphs_in_a_model_config_on_the_cpu_are_a_warning(self, tmp_path: Path, group: str, gpus: Gpus) -> None:
        entry = read(tmp_path, "optimization { cuda { graphs: true } }" + group, gpus=gpus)
        (finding,) = entry.findings

        assert devices(entry) == [(1, "cpu")]
        assert spec_of(entry).fallback_reason == ""
        assert str(finding).endswith("warning: optimization.cuda.graphs has no effect: the model runs on the CPU")

    @pytest.mark.parametrize("gpus", [TWO, NO_DRIVER])
    @pytest.mark.parametrize(("accelerator", "name"), [(CUDA, "cuda"), (TENSORRT, "tensorrt")])
    def test_accelerators_in_a_model_config_on_the_cpu_are_a_warning(
        self, tmp_path: Path, accelerator: str, name: str, gpus: Gpus
    ) -> None:
        entry = read(tmp_path, f"{accelerator}\n{KIND_CPU}", gpus=gpus)
        (finding,) = entry.findings

        assert devices(entry) == [(1, "cpu")]
        assert (spec_of(entry).fallback_reason, spec_of(entry).options) == ("", {})
        assert str(finding).endswith(
            f"config.pbtxt:1: warning: execution accelerator '{name}' has no effect: the model runs on the CPU"
        )

    def test_a_list_of_gpus_with_a_wrong_number_is_a_mistake_despite_cpu_fallback(self, tmp_path: Path) -> None:
        entry = read(tmp_path, None, '[instances]\ndevices = ["cuda:0", "cuda:2"]', TWO, cpu_fallback=True)

        assert entry.specs == ()

    def test_instances_already_on_the_cpu_are_kept_in_a_fallback(self, tmp_path: Path) -> None:
        config = "instance_group [ { kind: KIND_GPU count: 4 }, { kind: KIND_CPU count: 3 } ]"
        entry = read(tmp_path, config, gpus=NONE, cpu_fallback=True)

        assert devices(entry) == [(1, "cpu"), (3, "cpu")]
        assert instance_groups(entry, spec_of(entry)) == [("KIND_CPU", 1, []), ("KIND_CPU", 3, [])]

    def test_a_gpu_number_is_left_to_the_runtime_when_the_gpus_are_unknown(self, tmp_path: Path) -> None:
        entry = read(tmp_path, "instance_group { kind: KIND_GPU gpus: 3 }", gpus=UNTOLD)

        assert devices(entry) == [(1, "cuda:3")]

    @pytest.mark.parametrize("backend", ["tensorflow", "python"])
    def test_tensorflow_and_python_models_fail_and_fall_back_like_onnx_models(
        self, tmp_path: Path, backend: str
    ) -> None:
        make(tmp_path, "m/1/model.savedmodel/saved_model.pb", "m/1/model.py", m=f'backend: "{backend}" {KIND_GPU}')
        closed = read_folder(tmp_path / "m", Defaults(gpus=NONE))
        opened = read_folder(tmp_path / "m", Defaults(gpus=NONE, cpu_fallback=True))
        there = read_folder(tmp_path / "m", Defaults(gpus=TWO, cpu_fallback=True))

        assert closed is not None
        assert opened is not None
        assert there is not None
        assert (closed.specs, devices(opened), devices(there)) == ((), [(1, "cpu")], [(1, "cuda:0"), (1, "cuda:1")])
        assert spec_of(there).options["penstock.cpu_fallback"] == "1"


class TestOptions:
    def options(self, root: Path, config: str = "", toml: str = "", **defaults: Any) -> dict[str, str]:
        return dict(spec_of(read(root, config, toml, **defaults)).options)

    def test_a_model_without_a_configuration_may_fall_back_to_the_cpu(self, tmp_path: Path) -> None:
        assert self.options(tmp_path) == {"penstock.cpu_fallback": "1", "penstock.gpu_graphs": "auto"}

    def test_a_model_that_names_its_gpu_gets_automatic_graphs_and_no_fallback(self, tmp_path: Path) -> None:
        assert spec_of(read(tmp_path, KIND_GPU)).options == {"penstock.gpu_graphs": "auto"}

    def test_all_gpu_options_reach_the_loader(self, tmp_path: Path) -> None:
        toml = (
            '[runtime]\ncpu_fallback = true\ngpu_graphs = true\ngpu_memory = "1 GiB"\npinned = false\n'
            "[runtime.cuda]\nuse_tf32 = false\n[runtime.tensorrt]\ntrt_fp16_enable = true\n"
            "[batching]\nmax_batch_size = 6"
        )

        assert self.options(tmp_path, "", toml, gpu_limits={1: 0.5, 0: 0.75}) == {
            "penstock.cpu_fallback": "1",
            "penstock.gpu_memory_bytes": "1073741824",
            "penstock.pinned": "0",
            "penstock.tensorrt": "1",
            "penstock.gpu_limit": "0:0.75,1:0.5",
            "penstock.rows": "1,2,3,4,6",
            "cuda.use_tf32": "0",
            "tensorrt.trt_fp16_enable": "1",
            "tensorrt.trt_cuda_graph_enable": "1",
        }

    @pytest.mark.parametrize(("toml_value", "graphs"), [("true", "1"), ("false", "0"), ('"auto"', "auto")])
    def test_graphs_without_tensorrt_are_an_option_of_the_binding(
        self, tmp_path: Path, toml_value: str, graphs: str
    ) -> None:
        assert self.options(tmp_path, "", f"[runtime]\ngpu_graphs = {toml_value}")["penstock.gpu_graphs"] == graphs

    def test_the_memory_options_are_read_back_by_the_budget(self, tmp_path: Path) -> None:
        toml = '[runtime]\ngpu_graphs = "auto"\ngpu_memory = 4096\n[batching]\nmax_batch_size = 3'
        options = self.options(tmp_path, "", toml, gpu_limits={1: 0.5})
        budget = Budget.from_options(1, options)

        assert (budget.budget_bytes, budget.limit, Budget.from_options(0, options).limit) == (4096, 0.5, 1.0)

    @pytest.mark.parametrize(
        ("config", "toml", "rows"),
        [
            (f"max_batch_size: 8 {TENSORRT}", "", "1,2,3,4,6,8"),
            ("max_batch_size: 8 optimization { cuda { graphs: true } }", "", "1,2,3,4,6,8"),
            ("max_batch_size: 8 optimization { cuda { graphs: true graph_spec [ { batch_size: 3 } ] } }", "", "3,8"),
            ("max_batch_size: 1 optimization { cuda { graphs: true } }", "", "1"),
            ("max_batch_size: 5", '[runtime]\ngpu_graphs = "auto"', None),
            ("", "[batching]\nallowed_sizes = [2, 5]", "2,5"),
            ("max_batch_size: 8", "", None),
            ("max_batch_size: 8 optimization { cuda { graphs: false } }", "", None),
        ],
    )
    def test_graphs_and_profiles_are_built_for_the_configured_rows(
        self, tmp_path: Path, config: str, toml: str, rows: str | None
    ) -> None:
        assert self.options(tmp_path, config, toml).get("penstock.rows") == rows

    @settings(max_examples=40)
    @given(st.integers(0, 2**20), st.booleans())
    def test_the_rows_of_profiles_ascend_to_the_max_batch_size(self, most: int, configured: bool) -> None:
        policy = BatchPolicy(max_batch_rows=most) if configured else BatchPolicy(default_max_batch_rows=max(1, most))
        stated = ParsedConfig(Path("m"), {"runtime.tensorrt": True})
        spec, findings = place_model(ModelSpec("m", 1, Path("m"), policy=policy), stated, Defaults(gpus=TWO))
        rows = [int(word) for word in spec.options.get("penstock.rows", "").split(",") if word]

        assert findings == []
        assert rows == sorted(set(rows))
        assert rows[-1:] == ([most] if configured and most else [max(1, most)] if not configured else [])


class TestRequests:
    @pytest.mark.parametrize("name", sorted(PATH_OPTIONS))
    def test_a_configuration_in_a_request_may_not_name_files(self, tmp_path: Path, name: str) -> None:
        text = TENSORRT.replace("} } }", f'parameters {{ key: "{name}" value: "/etc/x" }} }} }} }}')
        entry = read(tmp_path, text)
        parsed = read_folder(tmp_path / "m", Defaults(gpus=TWO), entry.config)

        assert spec_of(entry).options[f"tensorrt.{name}"] == "/etc/x"
        assert parsed is not None
        assert [finding.message for finding in parsed.findings] == [
            f"parameter '{name}' names a path on the server's machine and cannot be set by a request"
        ]


class TestReportedConfiguration:
    def test_undeclared_groups_are_reported_as_one_group_for_all_gpus(self, tmp_path: Path) -> None:
        entry = read(tmp_path, None, "[instances]\ncount = 2")

        assert instance_groups(entry, spec_of(entry)) == [("KIND_GPU", 2, [0, 1])]

    def test_single_instances_of_a_gpu_are_reported_as_the_declared_group(self, tmp_path: Path) -> None:
        entry = read(tmp_path, "instance_group { count: 2 }")
        one = [replace(group, count=1) for group in spec_of(entry).instances for _ in range(group.count)]
        spec = replace(spec_of(entry), instances=tuple(one))

        assert instance_groups(entry, spec) == [("KIND_GPU", 2, [0, 1])]

    def test_a_fallback_during_the_load_is_reported_as_a_cpu_group(self, tmp_path: Path) -> None:
        entry = read(tmp_path, KIND_GPU, cpu_fallback=True)
        spec = replace(spec_of(entry), instances=(InstanceGroup(),), fallback_reason="no cuDNN")

        assert instance_groups(entry, spec) == [("KIND_CPU", 1, [])]

    @pytest.mark.parametrize(("config", "pinned"), [("", (True, True)), (
        "optimization { input_pinned_memory { enable: false } }", (False, False),
    )])  # fmt: skip
    def test_pinned_memory_is_reported(self, tmp_path: Path, config: str, pinned: tuple[bool, bool]) -> None:
        entry = read(tmp_path, config)
        optimization = to_json(complete_config(entry.config, spec_of(entry), ""))["optimization"]

        assert (optimization["input_pinned_memory"]["enable"], optimization["output_pinned_memory"]["enable"]) == pinned


@settings(max_examples=60)
@given(
    st.sampled_from([None, (), (0,), (0, 3)]),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["cpu", "cuda:0", "cuda:3"])), max_size=3),
    st.sampled_from([{}, {"runtime.cuda": True}, {"runtime.gpu_graphs": "auto"}]),
    st.booleans(),
)
def test_any_model_is_placed_on_existing_devices_or_is_a_mistake(
    gpus: tuple[int, ...] | None, instance_groups: list[tuple[int, str]], options: dict[str, Any], allowed: bool
) -> None:
    from penstock.server.repository.placing import resolve_devices

    groups = tuple(InstanceGroup(count, (device,)) for count, device in instance_groups)
    values = {**options, **({"instances": groups} if groups else {})}
    stated = resolve_devices(ParsedConfig(Path("m"), values), "onnxruntime", Gpus.from_numbers(gpus))
    spec, findings = place_model(
        ModelSpec("m", 1, Path("m")), stated, Defaults(gpus=Gpus.from_numbers(gpus), cpu_fallback=allowed)
    )
    used = {device for group in spec.instances for device in group.devices}

    assert ANY_DEVICE not in used
    assert any(finding.is_mistake for finding in findings) <= (not allowed or bool(instance_groups and gpus))
    if not findings:
        assert gpus is None or used <= {"cpu", *(f"cuda:{number}" for number in gpus)}
        assert "runtime.cuda" not in options or used != {"cpu"}
    if spec.fallback_reason:
        assert used == {"cpu"}
