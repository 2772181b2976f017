from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.signature import TensorSpec
from penstock.batching.devices.fallback import CPU_FALLBACK
from penstock.batching.spec import InstanceGroup
from penstock.server.protobuf import model_config_pb2
from penstock.server.repository.fields import gpu
from penstock.server.repository.fields.optimization import PARAMETERS, SESSION_ENTRIES
from penstock.server.repository.model_config import DOCUMENTATION, HINTS, HONOURED, REFUSED
from tests.server.repository.configs import read_text

DOCS = Path(__file__).parents[3] / "docs" / "compatibility-triton.md"


def messages(text: str, gpus: tuple[int, ...] | None = ()) -> list[str]:
    return [finding.message for finding in read_text(text, gpus)[1]]


def fields(descriptor: Any, above: str = "") -> Iterator[str]:
    """All fields of ModelConfig, down to the level at which a decision about them is listed."""
    for field in descriptor.fields:
        name = f"{above}.{field.name}".lstrip(".")
        decided = name in {*REFUSED, *DOCUMENTATION, *HINTS, *HONOURED}
        if decided or field.message_type is None:
            yield name
        else:
            yield from fields(field.message_type, name)


def test_every_field_of_model_config_is_listed_with_a_decision() -> None:
    known = {*REFUSED, *DOCUMENTATION, *HINTS, *HONOURED}

    assert set(fields(model_config_pb2().ModelConfig.DESCRIPTOR)) == known


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('parameters { key: "execution_mode"\nvalue { string_value: "0" } }\nparameters {\nkey: "threads" }', 4),
        ('input { name: "x" data_type: TYPE_FP32 dims: 1 }\ninput { dims: 0\nname: "y" data_type: TYPE_FP32 }', 3),
        ('name: "m"\ninput { name: "x" data_type: TYPE_FP32 dims: 1 }\ninput {\nname: "a=b" }', 4),
    ],
    ids=["a parameter", "a tensor", "one with an odd name"],
)
def test_a_mistake_in_a_repeated_field_has_the_line_of_its_element(text: str, line: int) -> None:
    [finding] = read_text(text)[1]

    assert finding.line == line


@pytest.mark.parametrize(
    "name", [*REFUSED, *DOCUMENTATION, *HINTS, *HONOURED, *PARAMETERS, *SESSION_ENTRIES, *gpu.PARAMETERS, CPU_FALLBACK]
)
def test_every_field_and_parameter_is_in_the_docs(name: str) -> None:
    assert f"| `{name}` |" in DOCS.read_text("utf-8")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("runtime", 'runtime: "x"'),
        (
            "input.is_non_linear_format_io",
            'input { name: "x" data_type: TYPE_FP32 dims: 1 is_non_linear_format_io: true }',
        ),
        ("output.is_shape_tensor", 'output { name: "x" data_type: TYPE_FP32 dims: 1 is_shape_tensor: true }'),
        (
            "ensemble_scheduling.step.model_namespace",
            'ensemble_scheduling { step [ { model_name: "a" model_version: -1 model_namespace: "b" } ] }',
        ),
        ("instance_group.profile", 'instance_group [ { count: 1 }, { profile: "1" } ]'),
        ("instance_group.secondary_devices", "instance_group { secondary_devices { device_id: 1 } }"),
    ],
)
def test_an_unsupported_field_is_rejected_with_its_name_and_line(field: str, text: str) -> None:
    _, findings = read_text("\n\n" + text)

    assert (3, f"field '{field}' is not supported") in [(finding.line, finding.message) for finding in findings]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("optimization.cuda.busy_wait_events", "optimization { cuda { graphs: true busy_wait_events: true } }"),
        ("optimization.eager_batching", "optimization { eager_batching: true }"),
        ("optimization.gather_kernel_buffer_threshold", "optimization { gather_kernel_buffer_threshold: 3 }"),
    ],
)
def test_a_field_without_effect_on_answers_is_a_warning(field: str, text: str) -> None:
    _, (finding,) = read_text("\n\n" + text)

    assert (finding.line, finding.is_mistake) == (3, False)
    assert finding.message.startswith(f"field '{field}' has no effect: ")


METRIC = 'model_metrics { metric_control { metric_identifier { family: "%s" } histogram_options { buckets: [ %s ] } } }'
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"


@pytest.mark.parametrize(("buckets", "bounds"), [("-1, 0.0, 2.5", (-1, 0, 2.5)), ("7", (7,))])
def test_the_buckets_of_a_histogram_are_read(buckets: str, bounds: tuple[float, ...]) -> None:
    statement, findings = read_text(METRIC % (FIRST_RESPONSE, buckets))

    assert (statement.get("metrics.first_response_ms"), findings) == (bounds, [])


@pytest.mark.parametrize(
    ("control", "text"),
    [
        ("histogram_options { buckets: [ 1 ] }", "metric control must specify 'metric_identifier'"),
        ("metric_identifier { } histogram_options { }", "metric identifier must specify non-empty 'family'"),
        ('metric_identifier { family: "f" }', "metric control must specify 'histogram_options'"),
        (
            'metric_identifier { family: "f" } histogram_options { buckets: [ ] }',
            "histogram options must specify non-empty 'buckets'",
        ),
    ],
)
def test_an_incomplete_metric_control_is_a_mistake(control: str, text: str) -> None:
    """Source: the messages in qa/L0_model_config/model_metrics."""
    _, (finding,) = read_text(f"model_metrics {{ metric_control {{ {control} }} }}")

    assert finding.is_mistake
    assert text in finding.message


@pytest.mark.parametrize("buckets", ["1, 1", "2, 1", "1, inf", "nan"])
def test_histogram_buckets_that_do_not_ascend_are_a_mistake(buckets: str) -> None:
    statement, [finding] = read_text("\n" + METRIC % (FIRST_RESPONSE, buckets))

    assert (finding.line, finding.is_mistake, "each above the one before it" in finding.message) == (2, True, True)
    assert statement.get("metrics.first_response_ms") is None


def test_a_metric_that_is_not_customizable_is_a_warning() -> None:
    _, [finding] = read_text("\n" + METRIC % ("nv_inference_count", "1"))

    assert (finding.line, finding.is_mistake) == (2, False)
    text = "Metric family 'nv_inference_count' in 'metric_identifier' is not a customizable metric in Triton core."
    assert text in finding.message


@pytest.mark.parametrize("batching", ["default_priority_level: 1", "priority_queue_policy { key: 1 value { } }"])
def test_priority_settings_without_priority_levels_are_a_warning(batching: str) -> None:
    stated, [finding] = read_text(f"dynamic_batching {{ {batching} }}")

    name = batching.partition(":")[0].partition(" ")[0]
    text = f"field 'dynamic_batching.{name}' has no effect without 'priority_levels' for m"
    assert (finding.message, finding.is_mistake) == (text, False)
    assert not {"batching.default_priority", "batching.level_policies"} & stated.values.keys()


def test_features_that_are_turned_off_are_accepted() -> None:
    text = "response_cache { enable: false } model_transaction_policy { decoupled: false } dynamic_batching { }"

    assert messages(text) == []


def test_all_supported_fields_are_read() -> None:
    stated, findings = read_text(
        """
name: "m" platform: "onnxruntime_onnx" backend: "onnxruntime" default_model_filename: "net.onnx"
max_batch_size: 16
version_policy { specific { versions: [3, 1] } }
input { name: "x" data_type: TYPE_STRING dims: [ -1, 2 ] optional: true }
output { name: "y" data_type: TYPE_BF16 dims: 3 }
dynamic_batching { preferred_batch_size: [8, 4] max_queue_delay_microseconds: 100
  default_queue_policy { max_queue_size: 5 default_timeout_microseconds: 9 allow_timeout_override: true } }
instance_group [ { count: 2 kind: KIND_GPU gpus: [0, 1] }, { kind: KIND_CPU } ]
optimization { graph { level: 1 } input_pinned_memory { enable: true }
  execution_accelerators { gpu_execution_accelerator { name: "cuda" parameters { key: "gpu_mem_limit" value: "9" } } } }
parameters { key: "intra_op_thread_count" value { string_value: "3" } }
parameters { key: "enable_mem_arena" value { string_value: "TRUE" } }
parameters { key: "memory.enable_memory_arena_shrinkage" value { string_value: "cpu:0" } }
""",
        gpus=(0, 1),
    )

    assert findings == []
    assert stated.values == {
        "model.backend": "onnxruntime",
        "model.file": "net.onnx",
        "model.versions": ("specific", (1, 3)),
        "batching.max_batch_size": 16,
        "batching.has_scheduler": True,
        "batching.preferred": (4, 8),
        "batching.max_queue_delay_us": 100,
        "batching.default_timeout_us": 9,
        "batching.max_queue_requests": 5,
        "batching.allow_timeout_override": True,
        "inputs": (TensorSpec("x", "BYTES", (-1, 2), optional=True),),
        "outputs": (TensorSpec("y", "BF16", (3,)),),
        "instances": (InstanceGroup(2, ("cuda:0",)), InstanceGroup(2, ("cuda:1",)), InstanceGroup(1, ("cpu",))),
        "instances.devices_configured": True,
        "runtime.graph_level": "extended",
        "runtime.cuda": True,
        "runtime.cuda.gpu_mem_limit": "9",
        "runtime.intra_op_threads": "3",
        "runtime.mem_arena": "1",
        "runtime.entries": {"memory.enable_memory_arena_shrinkage": "cpu:0"},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name: "other"', "unexpected directory name 'm' for model 'other', directory name must equal model name"),
        ('platform: "tensorrt_plan"', "platform 'tensorrt_plan' is not supported, known: onnxruntime_onnx"),
        (
            'metric_tags { key: "a b" value: "c" }',
            "metric tag 'a b' cannot be a label: letters, digits and _ only",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { } input { name: "x" is_shape_tensor: true }',
            "input 'x' of ensemble 'm' cannot be a shape tensor",
        ),
        ('backend: "pytorch"', "unable to find backend library for backend 'pytorch', known: onnxruntime, tensorflow"),
        (
            'default_model_filename: "../net.onnx"',
            "'../net.onnx' is not the name of a file in the version's folder",
        ),
        ("max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
        ("version_policy { latest { } }", "version_policy.latest.num_versions must be 1 or more"),
        ("version_policy { specific { versions: 0 } }", "version_policy.specific.versions must be integers above 0"),
        ("input { data_type: TYPE_FP32 dims: 1 }", "model input must specify 'name' for m"),
        ('output { name: "y" dims: 1 }', "model output 'y' must specify 'data_type' for m"),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: 0 }',
            "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: 1 } input { name: "x" data_type: TYPE_FP32 dims: 1 }',
            "input 'x' is declared more than once",
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: 1 format: FORMAT_NCHW }',
            "model input NHWC/NCHW require 3 dims for m",
        ),
        ("dynamic_batching { preferred_batch_size: 0 }", "dynamic batching preferred size must be positive for m"),
        (
            "dynamic_batching { priority_levels: 2 }",
            "default priority level must be in range [1, 2] for m",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
            "default priority level must be in range [1, 2] for m",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy {key: 3 value {}} }",
            "priority queue policy must have priority level in range [1, 2] for m",
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            (
                "dynamic_batching { preserve_ordering: true "
                "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 } }"
            ),
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
        (
            "instance_group { kind: KIND_CPU gpus: 0 }",
            "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
        ("instance_group { count: -1 }", "instance group 0: count must be from 1 to 1024"),
        ("instance_group { count: 1025 }", "instance group 0: count must be from 1 to 1024"),
        ("optimization { graph { level: 3 } }", "optimization.graph.level 3 is unknown, known: -1, 0, 1, 2"),
        (
            'parameters { key: "intra_op_thread_count" value { string_value: "many" } }',
            "parameter 'intra_op_thread_count' must be an integer from 0 to 4096, not 'many'",
        ),
        ('output { name: "y" data_type: TYPE_FP32 dims: 1 label_filename: "/etc/x" }', "'/etc/x' is outside"),
    ],
)
def test_an_invalid_field_is_rejected_with_its_message(text: str, message: str) -> None:
    assert any(found.startswith(message) for found in messages(text)), messages(text)


@pytest.mark.parametrize(
    "name",
    [
        "intra_op_threads",
        "INTRA_OP_THREAD_COUNT",
        "TF_NUM_INTRA_THREADS",
        "enable_cpu_mem_arena",
        "penstock.x",
        "TRITON_BATCH_STRATEGY_PATH",
    ],
)
def test_a_parameter_similar_to_a_known_one_is_rejected(name: str) -> None:
    assert messages(f'parameters {{ key: "{name}" value {{ string_value: "1" }} }}')[0].startswith(
        f"parameter '{name}' is not supported, known: intra_op_thread_count"
    )


@pytest.mark.parametrize("name", ["metadata", "zzz", "EXECUTION_PROVIDERS"])
def test_an_unknown_parameter_is_a_warning(name: str) -> None:
    _, [finding] = read_text(f'max_batch_size: 8\nparameters {{ key: "{name}" value {{ string_value: "1" }} }}')

    assert not finding.is_mistake
    assert finding.line == 2
    assert finding.message == f"parameter '{name}' is informational: it changes nothing here"


@pytest.mark.parametrize(("gpus", "device"), [((), "cpu"), ((0,), "cuda:0")])
def test_kind_auto_uses_the_gpus_of_the_machine(gpus: tuple[int, ...], device: str) -> None:
    stated, _ = read_text("instance_group { kind: KIND_AUTO }", gpus)

    assert stated.values["instances"] == (InstanceGroup(1, (device,)),)


def test_gpus_are_left_to_the_runtime_when_the_machine_is_unknown() -> None:
    stated, findings = read_text("instance_group [ { kind: KIND_GPU gpus: 1 }, { count: 2 } ]", None)

    assert findings == []
    assert stated.values["instances"] == (InstanceGroup(1, ("cuda:1",)), InstanceGroup(2, ("cpu",)))


def test_a_missing_label_file_is_a_mistake_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("setosa\n")
    text = "\n".join(
        f'output {{ name: "{name}" data_type: TYPE_FP32 dims: 3 label_filename: "{file}" }}'
        for name, file in (("x", "labels.txt"), ("y", "lables.txt"))
    )

    (finding,) = read_text(text, folder=tmp_path)[1]

    assert (finding.line, finding.message) == (2, "'lables.txt' does not exist")


def test_labels_are_read_from_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("setosa\nversicolor \n\nvirginica\n")
    text = 'output { name: "y" data_type: TYPE_FP32 dims: 3 label_filename: "labels.txt" }'
    stated, findings = read_text(text, folder=tmp_path)

    assert findings == []
    assert stated.values["labels"] == {"y": ("setosa", "versicolor", "", "virginica")}


def test_ten_thousand_inputs_are_read_in_linear_time() -> None:
    tensors = " ".join(f'input {{ name: "x{number}" data_type: TYPE_FP32 dims: 1 }}' for number in range(10_000))
    start = time.process_time()

    assert len(read_text(tensors)[0].get("inputs", ())) == 10_000
    # comparing every pair took a minute
    assert time.process_time() - start < 5.0
