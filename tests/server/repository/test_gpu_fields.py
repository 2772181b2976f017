"""What config.pbtxt says of GPUs: accelerators, graphs, pinned memory and the parameters, and how it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.repository.fields import accelerators
from penstock.server.repository.fields.accelerators import CUDA, OPTIONS, TENSORRT
from penstock.server.repository.gpus import Gpus
from penstock.server.repository.model_config import read as read_config
from penstock.server.repository.pbtxt import model_config_pb2


def read(text: str) -> tuple[dict[str, Any], list[str]]:
    config = text_format.Parse(text, model_config_pb2().ModelConfig())
    stated, findings = read_config(Path("m"), Path("m/config.pbtxt"), config, {}, Gpus.from_numbers((0, 1)))
    return dict(stated.values), [finding.message for finding in findings]


def accelerator(name: str, **parameters: str) -> str:
    said = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
    return f'optimization {{ execution_accelerators {{ gpu_execution_accelerator {{ name: "{name}" {said} }} }} }}'


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


class TestAccelerators:
    def test_what_cuda_is_told(self) -> None:
        values, messages = read(accelerator("cuda", cudnn_conv_use_max_workspace="0", use_tf32="TRUE", sdpa_kernel="3"))

        assert messages == []
        assert {name: value for name, value in values.items() if "cuda" in name} == {
            "runtime.cuda": True,
            "runtime.cuda.cudnn_conv_use_max_workspace": "0",
            "runtime.cuda.use_tf32": "1",
            "runtime.cuda.sdpa_kernel": "3",
        }

    @pytest.mark.parametrize(
        ("said", "options"),
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
    def test_tritons_names_for_tensorrt_become_onnx_runtimes(
        self, said: dict[str, str], options: dict[str, str]
    ) -> None:
        values, messages = read(accelerator("tensorrt", **said))

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
    def test_what_cannot_be_is_refused(self, text: str, message: str) -> None:
        (found,) = read(text)[1]

        assert found.startswith(message)

    def test_graphs_are_asked_for_as_cudas_parameter_too(self) -> None:
        assert read(accelerator("cuda", enable_cuda_graph="1"))[0]["runtime.gpu_graphs"] == "1"

    def test_what_is_said_twice_must_be_the_same(self) -> None:
        both = parameter("cudnn_conv_algo_search", "1")

        assert read(accelerator("cuda", cudnn_conv_algo_search="HEURISTIC") + both)[1] == []
        assert read(accelerator("cuda", cudnn_conv_algo_search="DEFAULT") + both)[1] == [
            "runtime.cuda.cudnn_conv_algo_search is set twice with different values: DEFAULT and HEURISTIC"
        ]

    @settings(max_examples=60, deadline=None)
    @given(st.sampled_from([CUDA, TENSORRT]), st.data())
    def test_any_value_is_taken_as_onnx_runtime_reads_it_or_refused(self, provider: str, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*OPTIONS[provider], "precision_mode", "max_workspace_size_bytes", "zzz"]))
        values = st.one_of(st.text(max_size=8), st.sampled_from(["1", "false", "-1", "x:1x2"]), st.integers().map(str))
        value = data.draw(values)
        for option, taken, wrong in accelerators.read(provider, {name: value}):
            assert wrong or (option in OPTIONS[provider] and OPTIONS[provider][option](taken) == taken)


class TestParameters:
    @pytest.mark.parametrize(
        ("name", "value", "said", "as_"),
        [
            ("cudnn_conv_algo_search", "0", "runtime.cuda.cudnn_conv_algo_search", "EXHAUSTIVE"),
            ("arena_extend_strategy", "1", "runtime.cuda.arena_extend_strategy", "kSameAsRequested"),
            ("gpu_mem_limit", "4294967200", "runtime.cuda.gpu_mem_limit", "4294967200"),
            ("do_copy_in_default_stream", "1", "runtime.cuda.do_copy_in_default_stream", "1"),
            ("penstock.cpu_fallback", "true", "runtime.cpu_fallback", "1"),
            ("penstock.cpu_fallback", "0", "runtime.cpu_fallback", "0"),
        ],
    )
    def test_those_that_triton_has_deprecated_and_ours(self, name: str, value: str, said: str, as_: str) -> None:
        values, messages = read(parameter(name, value))

        assert messages == []
        assert values[said] == as_
        assert "runtime.cuda" not in values  # none of them asks for a GPU

    @pytest.mark.parametrize("backend", ["tensorflow", "python"])
    def test_any_kind_of_model_may_fall_back(self, backend: str) -> None:
        values, messages = read(f'backend: "{backend}"' + parameter("penstock.cpu_fallback", "true"))

        assert messages == []
        assert values["runtime.cpu_fallback"] == "1"

    def test_a_wrong_value_is_told_what_is_taken(self) -> None:
        assert read(parameter("cudnn_conv_algo_search", "3"))[1] == [
            "parameter 'cudnn_conv_algo_search' must be one of 0 (EXHAUSTIVE), 1 (HEURISTIC), 2 (DEFAULT), not '3'"
        ]


class TestGraphs:
    def test_they_are_asked_for_with_the_rows_they_are_for(self) -> None:
        values, messages = read(
            "max_batch_size: 8 optimization { cuda { graphs: true output_copy_stream: true "
            "graph_spec [ { batch_size: 4 }, { batch_size: 1 }, { batch_size: 4 } ] } }"
        )

        assert messages == []
        assert values["runtime.gpu_graphs"] == "1"
        assert values["runtime.gpu_rows"] == (1, 4)

    def test_of_a_model_that_says_no_rows_those_of_one_row_may_be_named(self) -> None:
        values, messages = read("optimization { cuda { graphs: true graph_spec [ { batch_size: 1 }, { } ] } }")

        assert messages == []
        assert values["runtime.gpu_rows"] == (1,)

    def test_there_are_none_where_cuda_is_said_without_them(self) -> None:
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
    def test_what_they_cannot_be_is_a_hint_too(self, cuda: str, message: str) -> None:
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
    def test_the_shapes_that_a_graph_is_for_are_a_hint(self, field: str, spec: str) -> None:
        text = f"max_batch_size: 8 optimization {{ cuda {{ graphs: true graph_spec {{ batch_size: 4 {spec} }} }} }}"
        values, (found,) = read(text)

        assert values["runtime.gpu_rows"] == (4,)
        assert found.startswith(f"optimization.cuda.graph_spec.{field} has no effect: ")


class TestPinnedMemory:
    @pytest.mark.parametrize("side", ["input_pinned_memory", "output_pinned_memory"])
    def test_either_side_keeps_all_from_being_pinned(self, side: str) -> None:
        values, messages = read(f"optimization {{ {side} {{ enable: false }} }}")

        assert messages == []
        assert values["runtime.pinned"] == "0"

    def test_a_permission_says_nothing(self) -> None:
        assert "runtime.pinned" not in read("optimization { input_pinned_memory { enable: true } }")[0]

    def test_a_tensorflow_models_is_a_hint(self) -> None:
        text = 'platform: "tensorflow_savedmodel" optimization { input_pinned_memory { enable: false } }'
        values, messages = read(text)

        assert messages == ["field 'optimization.input_pinned_memory' has no effect on a TensorFlow model"]
        assert "runtime.pinned" not in values
