from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Backend
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.server.repository.check import check
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.gpus import Gpus
from tests.fakes import FakeBackend
from tests.server.repository.folders import make, native

GRAPH = Signature(
    (TensorSpec("x", "FP32", (-1, 4)),),
    (TensorSpec("y", "FP32", (-1, 3)), TensorSpec("maps", "seq(map(int64,tensor(float)))", ())),
)


class Loads:
    """A Loader that fails for the given models."""

    def __init__(self, *broken: str, graph: Signature = GRAPH, **also: str) -> None:
        self.broken = broken
        self.graph = graph
        self.also = also
        self.backends: list[FakeBackend] = []

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> Backend:
        if path.parent.parent.name in self.broken:
            raise InferError(Code.INVALID, "onnx runtime error 7: no graph")
        backend = FakeBackend(self.graph, lambda inputs: [np.zeros((1, 3)), []])
        vars(backend).update(self.also)
        self.backends.append(backend)
        return backend


def test_check_prints_the_versions_that_would_be_served(tmp_path: Path) -> None:
    make(tmp_path, "m/1/model.onnx")
    (tmp_path / "m" / "handler.py").write_text("def pre_inference(sample, metadata):\n    return sample\n")
    native(
        tmp_path,
        "m",
        "[batching]\nmax_batch_size = 8\npreferred = [4]\ncap = 6\nmax_queue_delay_us = 50\n"
        '[hooks]\nfile = "handler.py"\n'
        "[runtime]\nintra_op_threads = 2\n",
    )
    loads = Loads()
    report = check([tmp_path], {"onnxruntime": loads})

    assert str(report) == (
        f"m version 1, onnxruntime, {tmp_path}/m/1/model.onnx\n"
        "  inputs     x: FP32 [-1, 4]\n"
        "  outputs    y: FP32 [-1, 3]\n"
        "             maps: seq(map(int64,tensor(float))), for hooks only; a ZipMap: to export a tensor in its place, "
        "pass options={'zipmap': False} to skl2onnx, or zipmap=False to onnxmltools' convert_lightgbm\n"
        "  batching   up to 8 rows, preferred 4, waits up to 50 us, capped at 6, queue of 1024 rows\n"
        "  instances  1 on cpu\n"
        "  runtime    intra_op_thread_count 2\n"
        f"  hooks      {tmp_path.resolve()}/m/handler.py (pre_inference), timeout: 30 s\n"
        "             replicas: one instance for all requests: globals are never written\n"
        "\n"
        "1 version would be served, 0 mistakes"
    )
    assert report.exit_status == 0
    assert all(backend.closed for backend in loads.backends)


def test_check_prints_targets_sizes_and_measured_instances(tmp_path: Path) -> None:
    make(tmp_path, "m/1/model.onnx")
    native(
        tmp_path,
        "m",
        "[batching]\nlatency_target_ms = 12.5\nallowed_sizes = [1, 8]\nsplit = true\n"
        'invariance = "strict"\nrun_limit_ms = 2000\n[instances]\ncount = "auto"\nmemory_budget_mb = 512\n',
    )

    printed = str(check([tmp_path], {"onnxruntime": Loads()}))

    assert (
        "  batching   up to 8 rows, cap learned, only of [1, 8] rows, larger requests are split, strictly invariant, "
        "to be answered within 12.5 ms, runs end after 2000 ms, queue of 1024 rows\n"
        "  instances  auto on cpu, at most 512 MB\n"
    ) in printed


def test_check_prints_the_padding_of_inputs(tmp_path: Path) -> None:
    graph = Signature(
        (TensorSpec("ids", "INT64", (-1, -1)), TensorSpec("mask", "INT64", (-1, -1))),
        (TensorSpec("y", "FP32", (-1, -1, 8)),),
    )
    make(tmp_path, "m/1/model.onnx")
    native(tmp_path, "m", '[padding.ids]\naxis = 0\nbuckets = [16, 64]\nmask = "mask"\noutputs = { y = 0 }\n')
    report = check([tmp_path], {"onnxruntime": Loads(graph=graph)})

    assert report.mistakes == []
    assert "  padding    ids: axis 0 to [16, 64] with 0, mask mask\n" in str(report)


def test_padding_of_an_unknown_input_is_a_mistake(tmp_path: Path) -> None:
    make(tmp_path, "m/1/model.onnx")
    native(tmp_path, "m", "[padding.idz]\naxis = 0\n")
    [finding] = check([tmp_path], {"onnxruntime": Loads()}).mistakes

    assert "idz" in finding.message


def test_every_mistake_is_reported_with_its_file_and_line(tmp_path: Path) -> None:
    make(
        tmp_path,
        "bad_file/1/model.onnx",
        "bad_field/1/model.onnx",
        "bad_shape/1/model.onnx",
        "bad_hook/1/model.onnx",
        "notes/readme",
        bad_field='\nruntime: "r"',
        bad_shape='max_batch_size: 4 input { name: "q" data_type: TYPE_FP32 dims: 4 }',
    )
    (tmp_path / "bad_hook" / "handler.py").write_text("\ndef pre_inference(a):\n    pass\n")
    native(tmp_path, "bad_hook", '[hooks]\nfile = "handler.py"\n')
    report = check([tmp_path], {"onnxruntime": Loads("bad_file")})
    lines = str(report).splitlines()

    assert f"{tmp_path}/bad_field/config.pbtxt:2: field 'runtime' is not supported" in lines
    assert f"{tmp_path}/bad_file/1/model.onnx: onnx runtime error 7: no graph" in lines
    assert f"{tmp_path}/bad_shape/config.pbtxt:1: unexpected inference input 'q', allowed inputs are: x" in lines
    assert any(line.startswith(f"{tmp_path}/bad_hook/handler.py:2: ") for line in lines)
    assert any(line.startswith(f"{tmp_path}/notes: warning: is not a model") for line in lines)
    assert lines[-1] == "0 versions would be served, 4 mistakes, 1 warning"
    assert report.exit_status == 1


def test_check_does_not_run_the_code_of_a_hook(tmp_path: Path) -> None:
    make(tmp_path, "m/1/model.onnx")
    (tmp_path / "m" / "handler.py").write_text("raise RuntimeError\ndef pre_inference(sample, metadata): ...\n")
    native(tmp_path, "m", '[hooks]\nfile = "handler.py"\n')

    assert check([tmp_path], {"onnxruntime": Loads()}).findings == []


def test_an_unknown_backend_is_a_mistake(tmp_path: Path) -> None:
    make(tmp_path, "m/1/model.onnx")
    native(tmp_path, "m", '[model]\nbackend = "other"\n')

    assert check([tmp_path], {"onnxruntime": Loads()}).exit_status == 1


def test_a_mistake_found_after_loading_has_the_line_of_its_key(tmp_path: Path) -> None:
    make(tmp_path, "m/1/model.onnx")
    native(tmp_path, "m", "[batching]\nsplit = true\n\n[padding.x]\naxis = 0\n")
    free = Signature((TensorSpec("x", "FP32", (-1, -1)), TensorSpec("x.y", "FP32", (-1, 2))), GRAPH.outputs[:1])

    report = check([tmp_path], {"onnxruntime": Loads()})
    native(tmp_path, "m", "[padding.x]\naxis = 0\n[padding.'x.y']\naxis = 0\n")
    other = check([tmp_path], {"onnxruntime": Loads(graph=free)})

    file = tmp_path / "m" / "penstock.toml"
    text = "model 'm', padding.x.axis: axis 0 is fixed at 4, and only a free axis can be padded"
    assert [str(finding) for finding in report.mistakes] == [f"{file}:5: {text}"]
    text = "model 'm', padding.x.y.axis: axis 0 is fixed at 2, and only a free axis can be padded"
    assert [str(finding) for finding in other.mistakes] == [f"{file}:4: {text}"]


def test_a_mistake_found_after_loading_has_the_line_of_the_named_field(tmp_path: Path) -> None:
    tensors = "input { name: 'x' data_type: TYPE_FP32 dims: 4 }\noutput { name: 'y' data_type: TYPE_FP32 dims: 3 }\n"
    control = "name: 'STRAT' control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }"
    with_control = f"max_batch_size: 4\n{tensors}sequence_batching {{\n control_input {{ {control} }} }}"
    maps = "input_map { key: 'x' value: 'in' }\n output_map { key: 'z' value: 'out' }"
    ends = "input { name: 'in' data_type: TYPE_FP32 dims: 4 }\noutput { name: 'out' data_type: TYPE_FP32 dims: 3 }"
    step = f"step {{ model_name: 'fine' model_version: -1\n {maps} }}"
    ensemble = f"platform: 'ensemble'\nmax_batch_size: 4\n{ends}\nensemble_scheduling {{ {step} }}"
    make(tmp_path, "told/1/model.onnx", "fine/1/model.onnx", told=with_control, made=ensemble)
    (tmp_path / "made" / "1").mkdir()

    of_ensemble, of_control = sorted(check([tmp_path], {"onnxruntime": Loads()}).findings, key=str)

    assert (of_control.path.parent.name, of_control.line) == ("told", 5)
    assert "sequence control 'STRAT'" in of_control.message
    assert (of_ensemble.path.parent.name, of_ensemble.line) == ("made", 7)
    assert "non-existing output z in model fine" in of_ensemble.message


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("data_type: TYPE_INT32 dims: 4 zero_data: true", "data-type is 'INT32'"),
        ("data_type: TYPE_FP32 dims: 5 zero_data: true", "unexpected shape for input 'x'"),
        ("data_type: TYPE_FP32 dims: 4 input_data_file: 'gone'", "m/warmup/gone: No such file or directory"),
    ],
)
def test_a_warmup_sample_that_does_not_fit_the_model_is_a_mistake(tmp_path: Path, value: str, why: str) -> None:
    sample = f"name: 's' batch_size: 1\n inputs {{ key: 'x' value {{ {value} }} }}"
    make(tmp_path, "m/1/model.onnx", m=f"max_batch_size: 4\nmodel_warmup {{\n {sample} }}")

    (finding,) = check([tmp_path], {"onnxruntime": Loads()}).mistakes

    assert (finding.path.name, finding.line) == ("config.pbtxt", 3)
    assert "warmup sample 's'" in finding.message
    assert why in finding.message


def test_ensembles_that_depend_on_each_other_are_a_mistake(tmp_path: Path) -> None:
    ends = "input { name: 'in' data_type: TYPE_FP32 dims: 4 } output { name: 'out' data_type: TYPE_FP32 dims: 4 }"
    maps = "input_map { key: 'in' value: 'in' } output_map { key: 'out' value: 'out' }"
    for name, other in (("one", "two"), ("two", "one")):
        step = f"step {{ model_name: '{other}' model_version: -1 {maps} }}"
        make(tmp_path, **{name: f"platform: 'ensemble'\n{ends}\nensemble_scheduling {{ {step} }}"})
        (tmp_path / name / "1").mkdir()

    mistakes = check([tmp_path], {}).mistakes

    texts = ["circular dependency between ensembles: one -> ... -> two -> one",
             "circular dependency between ensembles: two -> ... -> one -> two"]  # fmt: skip
    assert [finding.message for finding in mistakes] == texts
    assert [finding.line for finding in mistakes] == [3, 3]


def test_check_prints_levels_caching_steps_and_sequences(tmp_path: Path) -> None:
    control = "name: 'z' control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }"
    ends = "input { name: 'x' data_type: TYPE_FP32 dims: 4 } output { name: 'y' data_type: TYPE_FP32 dims: 3 }"
    maps = "input_map { key: 'x' value: 'x' } output_map { key: 'y' value: 'y' }"
    step = f"step {{ model_name: 'fine' model_version: -1 {maps} }}"
    levels = "priority_levels: 3 default_priority_level: 2"
    make(
        tmp_path, "fine/1/model.onnx", "told/1/model.onnx",
        fine=f"dynamic_batching {{ {levels} }} response_cache {{ enable: true }} instance_group {{ passive: true }}",
        made=f"platform: 'ensemble' max_batch_size: 4 {ends} ensemble_scheduling {{ {step} }}",
        told=f"max_batch_size: 4 {ends} sequence_batching {{ control_input {{ {control} }} }}",
    )  # fmt: skip
    (tmp_path / "made" / "1").mkdir()
    graph = Signature((*GRAPH.inputs, TensorSpec("z", "FP32", (-1, 1))), GRAPH.outputs)
    loads = {name: Loads(graph=graph if name == "told" else GRAPH) for name in ("fine", "told")}

    printed = str(check([tmp_path], {"onnxruntime": lambda path, *more: loads[path.parent.parent.name](path, *more)}))

    assert "up to 64 rows, cap learned, 3 levels, 2 by default, queue of 4096 rows\n" in printed
    assert "  answers    cached, with --cache-config\n  instances  1 on cpu, passive\n" in printed
    assert "  batching   up to 4 rows\n  steps      fine latest\n" in printed
    assert "  sequences  direct, expire after 1 s, controls z\n" in printed


DECLARED = (
    'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] } output { name: "y" data_type: TYPE_FP32 dims: [ -1, 3 ] }'
)


@pytest.mark.parametrize(
    ("config", "toml", "rows", "why"),
    [
        (None, "[batching]\nmax_batch_size = 0\n", 4, "max_batch_size is 0"),
        (f"max_batch_size: 0 {DECLARED}", None, 4, "max_batch_size is unset or 0"),
        (DECLARED.partition("output")[0], None, 4, "the declared dims include every axis"),
        (None, None, 0, "default-max-batch-size is 0"),
    ],
)
def test_check_prints_why_batching_is_off(
    tmp_path: Path, config: str | None, toml: str | None, rows: int, why: str
) -> None:
    make(tmp_path, "m/1/model.onnx", **({} if config is None else {"m": config}))
    if toml is not None:
        native(tmp_path, "m", toml)

    printed = str(check([tmp_path], {"onnxruntime": Loads()}, Defaults(max_batch_rows=rows)))

    assert f"  batching   none: {why}\n" in printed


@pytest.mark.parametrize(
    ("inputs", "output", "which"),
    [
        (((4,),), TensorSpec("y", "FP32", (3,)), "'x0' is [4]"),
        (((-1, 4), (2, -1)), TensorSpec("y", "FP32", (-1, 3)), "'x1' is [2, -1]"),
        (((-1, 4),), TensorSpec("label", "INT64", (1,)), "'label' is [1]"),  # as onnxmltools exports LightGBM models
        (((-1, 4), ()), TensorSpec("y", "FP32", (-1, 3)), "'x1' is [], a scalar or of unknown rank"),
        (((-1, 4),), TensorSpec("y", "seq(tensor(float))", ()), "'y' is seq(tensor(float))"),
    ],
)
def test_check_names_the_tensor_that_leaves_a_model_without_a_batch_axis(
    tmp_path: Path, inputs: tuple[tuple[int, ...], ...], output: TensorSpec, which: str
) -> None:
    make(tmp_path, "m/1/model.onnx", m="max_batch_size: 0")
    graph = Signature(tuple(TensorSpec(f"x{at}", "FP32", shape) for at, shape in enumerate(inputs)), (output,))

    printed = str(check([tmp_path], {"onnxruntime": Loads(graph=graph)}, Defaults(max_batch_rows=0)))

    assert f"  batching   none: the model has no batch axis: {which}\n" in printed


@pytest.mark.parametrize(
    ("toml", "reported"),
    [
        ("", True),
        ("[batching]\nmax_batch_size = 2\n", True),
        ("[batching]\nmax_batch_size = 1\n", False),
        ("[batching]\nmax_batch_size = 0\n", False),
        ('[batching]\ninvariance = "strict"\n', False),
    ],
)
def test_a_dynamically_quantized_model_is_reported_as_not_invariant_when_batched(
    tmp_path: Path, toml: str, reported: bool
) -> None:
    # `--invariance` cannot test models with free axes, such as text encoders
    make(tmp_path, "m/1/model.onnx")
    native(tmp_path, "m", toml)

    printed = str(check([tmp_path], {"onnxruntime": Loads(shared_scale="DynamicQuantizeLinear")}))

    assert ("  invariance not invariant: DynamicQuantizeLinear takes its scale from all rows" in printed) is reported


def test_a_dynamically_quantized_model_with_free_axes_is_reported_as_not_invariant(tmp_path: Path) -> None:
    make(tmp_path, "m/1/model.onnx")
    graph = Signature((TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, 3)),))
    loads = Loads(graph=graph, shared_scale="DynamicQuantizeLinear")

    printed = str(check([tmp_path], {"onnxruntime": loads}, invariance=True))

    assert "  invariance not invariant: DynamicQuantizeLinear takes its scale from all rows" in printed


def test_check_prints_why_an_ensemble_is_not_batched(tmp_path: Path) -> None:
    ends = DECLARED.replace('"x"', '"a"').replace('"y"', '"b"')
    maps = 'input_map { key: "x" value: "a" } output_map { key: "y" value: "b" }'
    step = f'step {{ model_name: "m" model_version: -1 {maps} }}'
    make(tmp_path, "m/1/model.onnx", made=f"platform: 'ensemble' {ends} ensemble_scheduling {{ {step} }}")
    (tmp_path / "made" / "1").mkdir()

    printed = str(check([tmp_path], {"onnxruntime": Loads()}))

    assert "  batching   none: max_batch_size is unset or 0\n  steps      m latest\n" in printed


class NoGpu(Loads):
    """A Loader of an ONNX Runtime whose GPU does not work."""

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> Backend:
        if device != "cpu":
            raise InferError(Code.UNSUPPORTED, f"device '{device}' was asked for, but there is no cuDNN")
        return super().__call__(path, device, options)


class TestGpus:
    def checked(self, root: Path, **defaults: Any) -> str:
        make(root, "m/1/model.onnx", m="instance_group { kind: KIND_GPU count: 2 }\n")
        return str(check([root], {"onnxruntime": NoGpu()}, Defaults(gpus=Gpus.from_numbers((0, 1)), **defaults)))

    def test_a_gpu_that_does_not_work_is_a_mistake_with_its_file_and_line(self, tmp_path: Path) -> None:
        report = self.checked(tmp_path)

        assert f"{tmp_path}/m/config.pbtxt:1: device 'cuda:0' was asked for, but there is no cuDNN" in report
        assert report.endswith("0 versions would be served, 1 mistake")

    def test_a_model_that_falls_back_to_the_cpu_is_a_warning(self, tmp_path: Path) -> None:
        report = self.checked(tmp_path, cpu_fallback=True)

        assert "  instances  1 on cpu\n" in report
        assert "  fallback   on the CPU: device 'cuda:0' was asked for, but there is no cuDNN\n" in report
        assert f"{tmp_path}/m/config.pbtxt:1: warning: is served on the CPU: device 'cuda:0'" in report
        assert report.endswith("1 version would be served, 0 mistakes, 1 warning")

    def test_check_prints_the_gpus_and_options_of_a_model(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx")
        native(tmp_path, "m", '[runtime]\ngpu_memory = "2 GiB"\n')
        report = str(check([tmp_path], {"onnxruntime": Loads()}, Defaults(gpus=Gpus.from_numbers((0, 1)))))

        assert "  instances  1 on cuda:0; 1 on cuda:1\n" in report
        assert "  runtime    penstock.gpu_graphs auto, penstock.gpu_memory_bytes 2147483648\n" in report
