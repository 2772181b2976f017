"""The GPU fields of config.pbtxt: accelerators, graphs, pinned memory and parameters, and how mistakes are rejected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.repository.fields import accelerators
from penstock.server.repository.fields.accelerators import CUDA, OPTIONS, TENSORRT
from tests.server.repository.configs import read_values


def read(text: str) -> tuple[dict[str, Any], list[str]]:
    return read_values(text, (0, 1))


def accelerator(name: str, **parameters: str) -> str:
    fields = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
    return f'optimization {{ execution_accelerators {{ gpu_execution_accelerator {{ name: "{name}" {fields} }} }} }}'


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


class TestAccelerators:
    def test_parameters_of_the_cuda_accelerator_become_options_of_its_provider(self) -> None:
        values, messages = read(accelerator("cuda", cudnn_conv_use_max_workspace="0", use_tf32="TRUE", sdpa_kernel="3"))

        assert messages == []
        assert {name: value for name, value in values.items() if "cuda" in name} == {
            "runtime.cuda": True,
            "runtime.cuda.cudnn_conv_use_max_workspace": "0",
            "runtime.cuda.use_tf32": "1",
            "runtime.cuda.sdpa_kernel": "3",
        }

    @pytest.mark.parametrize(
        ("parameters", "options"),
        [
            ({}, {}),
            ({"precision_mode": "FP32"}, {}),
            ({"precision_mode": "FP16"}, {"trt_fp16_enable": "1"}),
            ({"precision_mode": "BF16"}, {"trt_bf16_enable": "1"}),
            ({"precision_mode": "INT8"}, {"trt_int8_enable": "1"}),
            ({"max_workspace_size_bytes": "1073741824"}, {"trt_max_workspace_size": "1073741824"}),
            ({"int8_calibration_table_name": "t"}, {"trt_int8_calibration_table_name": "t"}),
            ({"int8_use_native_calibration_table": "true"}, {"trt_int8_use_native_calibration_table": "1"}),
            ({"trt_engine_cache_enable": "1", "trt_engine_cache_path": "/c"},
             {"trt_engine_cache_enable": "1", "trt_engine_cache_path": "/c"}),
            ({"trt_auxiliary_streams": "-1"}, {"trt_auxiliary_streams": "-1"}),
            ({"trt_profile_opt_shapes": "x:8x3x224x224,y:8"}, {"trt_profile_opt_shapes": "x:8x3x224x224,y:8"}),
        ],
    )  # fmt: skip
    def test_tritons_tensorrt_parameters_become_onnx_runtime_options(
        self, parameters: dict[str, str], options: dict[str, str]
    ) -> None:
        values, messages = read(accelerator("tensorrt", **parameters))

        assert messages == []
        assert values["runtime.tensorrt"] is True
        assert {f"runtime.tensorrt.{name}": value for name, value in options.items()}.items() <= values.items()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (accelerator("auto"), "unknown Execution Accelerator 'auto' is requested, known: cuda, tensorrt"),
            (accelerator("openvino"), "unknown Execution Accelerator 'openvino' is requested, known: cuda, tensorrt"),
            (accelerator("cuda", use_tf23="1"),
             "unknown parameter 'use_tf23' is provided for CUDA Execution Accelerator, the nearest known is 'use_tf32"),
            (accelerator("tensorrt", trt_fp61_enable="1"),
             "unknown parameter 'trt_fp61_enable' is provided for TensorRT Execution Accelerator, the nearest known"),
            (accelerator("tensorrt", precision_mode="FP8"), "unsupported precision mode 'FP8' is requested"),
            (accelerator("cuda", device_id="1"),
             "parameter 'device_id' cannot be set for CUDA Execution Accelerator: instance_group selects the GPUs"),
            (accelerator("cuda", cudnn_conv_algo_search="FAST"),
             "parameter 'cudnn_conv_algo_search' must be one of EXHAUSTIVE, HEURISTIC, DEFAULT, not 'FAST'"),
            (accelerator("cuda", do_copy_in_default_stream="0"),
             "parameter 'do_copy_in_default_stream' must be true: copies on a separate stream would race"),
            (accelerator("tensorrt", max_workspace_size_bytes="1 GiB"),
             "parameter 'max_workspace_size_bytes' must be an integer from 0 to 18446744073709551615, not '1 GiB'"),
            (accelerator("tensorrt", trt_profile_min_shapes="1x3"),
             "parameter 'trt_profile_min_shapes' must be input shapes"),
            ('optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }',
             "field 'optimization.execution_accelerators.cpu_execution_accelerator' is not supported: ONNX Runtime's"),
        ],
    )  # fmt: skip
    def test_an_invalid_accelerator_is_rejected(self, text: str, message: str) -> None:
        (found,) = read(text)[1]

        assert found.startswith(message)

    def test_the_cuda_parameter_enable_cuda_graph_turns_graphs_on(self) -> None:
        assert read(accelerator("cuda", enable_cuda_graph="1"))[0]["runtime.gpu_graphs"] == "1"

    def test_an_option_set_twice_must_have_the_same_value(self) -> None:
        both = parameter("cudnn_conv_algo_search", "1")

        assert read(accelerator("cuda", cudnn_conv_algo_search="HEURISTIC") + both)[1] == []
        assert read(accelerator("cuda", cudnn_conv_algo_search="DEFAULT") + both)[1] == [
            "runtime.cuda.cudnn_conv_algo_search is set twice with different values: DEFAULT and HEURISTIC"
        ]

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from([CUDA, TENSORRT]), st.data())
    def test_any_accelerator_value_is_converted_or_rejected(self, provider: str, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*OPTIONS[provider], "precision_mode", "max_workspace_size_bytes", "zzz"]))
        values = st.one_of(st.text(max_size=8), st.sampled_from(["1", "false", "-1", "x:1x2"]), st.integers().map(str))
        value = data.draw(values)
        for option, converted, wrong in accelerators.read(provider, {name: value}):
            assert wrong or (option in OPTIONS[provider] and OPTIONS[provider][option](converted) == converted)


class TestParameters:
    @pytest.mark.parametrize(
        ("name", "value", "key", "as_"),
        [
            ("cudnn_conv_algo_search", "0", "runtime.cuda.cudnn_conv_algo_search", "EXHAUSTIVE"),
            ("arena_extend_strategy", "1", "runtime.cuda.arena_extend_strategy", "kSameAsRequested"),
            ("gpu_mem_limit", "4294967200", "runtime.cuda.gpu_mem_limit", "4294967200"),
            ("do_copy_in_default_stream", "1", "runtime.cuda.do_copy_in_default_stream", "1"),
            ("penstock.cpu_fallback", "true", "runtime.cpu_fallback", "1"),
            ("penstock.cpu_fallback", "0", "runtime.cpu_fallback", "0"),
        ],
    )
    def test_deprecated_triton_parameters_and_penstock_parameters_are_read(
        self, name: str, value: str, key: str, as_: str
    ) -> None:
        values, messages = read(parameter(name, value))

        assert messages == []
        assert values[key] == as_
        assert "runtime.cuda" not in values  # none of them requests a GPU

    @pytest.mark.parametrize("backend", ["tensorflow", "python"])
    def test_cpu_fallback_is_accepted_for_every_backend(self, backend: str) -> None:
        values, messages = read(f'backend: "{backend}"' + parameter("penstock.cpu_fallback", "true"))

        assert messages == []
        assert values["runtime.cpu_fallback"] == "1"

    def test_a_wrong_parameter_value_is_rejected_with_the_valid_values(self) -> None:
        assert read(parameter("cudnn_conv_algo_search", "3"))[1] == [
            "parameter 'cudnn_conv_algo_search' must be one of 0 (EXHAUSTIVE), 1 (HEURISTIC), 2 (DEFAULT), not '3'"
        ]


class TestGraphs:
    def test_graphs_are_read_with_the_batch_sizes_of_their_specs(self) -> None:
        values, messages = read(
            "max_batch_size: 8 optimization { cuda { graphs: true output_copy_stream: true "
            "graph_spec [ { batch_size: 4 }, { batch_size: 1 }, { batch_size: 4 } ] } }"
        )

        assert messages == []
        assert values["runtime.gpu_graphs"] == "1"
        assert values["runtime.gpu_rows"] == (1, 4)

    def test_graphs_of_a_model_without_a_max_batch_size_may_be_for_one_row(self) -> None:
        values, messages = read("optimization { cuda { graphs: true graph_spec [ { batch_size: 1 }, { } ] } }")

        assert messages == []
        assert values["runtime.gpu_rows"] == (1,)

    def test_a_cuda_section_without_graphs_turns_graphs_off(self) -> None:
        assert read("optimization { cuda { } }")[0]["runtime.gpu_graphs"] == "0"

    @pytest.mark.parametrize(
        ("cuda", "message"),
        [
            ("graph_spec { batch_size: 4 }", "optimization.cuda.graph_spec has no effect without optimization.cuda.gr"),
            ("graphs: true graph_spec { batch_size: 9 }",
             "optimization.cuda.graph_spec.batch_size 9 has no effect: it must be from 0 to the max batch size, 8"),
            ("graphs: true graph_spec { batch_size: -1 }",
             "optimization.cuda.graph_spec.batch_size -1 has no effect: it must be from 0 to the max batch size, 8"),
        ],
    )  # fmt: skip
    def test_an_invalid_graph_spec_is_reported_as_having_no_effect(self, cuda: str, message: str) -> None:
        values, (found,) = read(f"max_batch_size: 8 optimization {{ cuda {{ {cuda} }} }}")

        assert found.startswith(message)
        assert "runtime.gpu_rows" not in values

    @pytest.mark.parametrize(
        ("field", "spec"),
        [
            ("input", 'input { key: "x" value { dim: 3 } }'),
            ("graph_lower_bound", "graph_lower_bound { batch_size: 2 }"),
        ],
    )
    def test_the_shapes_of_a_graph_spec_are_reported_as_having_no_effect(self, field: str, spec: str) -> None:
        text = f"max_batch_size: 8 optimization {{ cuda {{ graphs: true graph_spec {{ batch_size: 4 {spec} }} }} }}"
        values, (found,) = read(text)

        assert values["runtime.gpu_rows"] == (4,)
        assert found.startswith(f"optimization.cuda.graph_spec.{field} has no effect: ")


class TestPinnedMemory:
    @pytest.mark.parametrize("side", ["input_pinned_memory", "output_pinned_memory"])
    def test_disabling_pinned_memory_on_either_side_disables_it_for_the_model(self, side: str) -> None:
        values, messages = read(f"optimization {{ {side} {{ enable: false }} }}")

        assert messages == []
        assert values["runtime.pinned"] == "0"

    def test_enabling_pinned_memory_sets_nothing(self) -> None:
        assert "runtime.pinned" not in read("optimization { input_pinned_memory { enable: true } }")[0]

    def test_pinned_memory_of_a_tensorflow_model_is_reported_as_having_no_effect(self) -> None:
        text = 'platform: "tensorflow_savedmodel" optimization { input_pinned_memory { enable: false } }'
        values, messages = read(text)

        assert messages == ["field 'optimization.input_pinned_memory' has no effect on a TensorFlow model"]
        assert "runtime.pinned" not in values
