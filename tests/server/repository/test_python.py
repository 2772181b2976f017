"""Python models on disk: how they are recognized and configured, and that reading them runs none of their code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.backends.loading import LOADERS
from penstock.server.repository.check import check
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.scan import ModelEntry, read_folder

CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
EXPLODES = (
    "raise SystemExit('this code must not run')\nclass TritonPythonModel:\n  def auto_complete_config(config): ...\n"
)


def written(root: Path, config: str | None = CONFIG, toml: str = "", *, name: str = "model.py") -> Path:
    folder = root / "coded"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / name).write_text(EXPLODES)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    if toml:
        (folder / "penstock.toml").write_text(toml)
    return folder


def read(folder: Path) -> ModelEntry:
    entry = read_folder(folder, Defaults())
    assert entry is not None
    return entry


def mistakes(entry: ModelEntry) -> list[str]:
    return [finding.message for finding in entry.findings if finding.is_mistake]


@pytest.mark.parametrize("config", [CONFIG, None, 'name: "coded"', "max_batch_size: 4"])
def test_a_folder_with_a_model_py_is_a_python_model(tmp_path: Path, config: str | None) -> None:
    entry = read(written(tmp_path, config))

    assert mistakes(entry) == []
    (spec,) = entry.specs
    assert (spec.backend, spec.path.name) == ("python", "model.py")


@pytest.mark.parametrize("platform", ["python", "pytorch_libtorch", "onnxruntime_onnx", "tensorflow_graphdef"])
def test_a_python_model_with_code_may_name_any_platform(tmp_path: Path, platform: str) -> None:
    entry = read(written(tmp_path, f"platform: '{platform}'{CONFIG}"))

    assert entry.findings == ()
    (spec,) = entry.specs
    assert (spec.backend, entry.config.platform) == ("python", "")


@pytest.mark.parametrize(
    ("platform", "why"),
    [
        ("pytorch_libtorch", "platform 'pytorch_libtorch' is not supported"),
        ("onnxruntime_onnx", "platform 'onnxruntime_onnx' requires a backend other than 'python'"),
    ],
)
def test_a_python_model_without_code_is_rejected_for_its_platform(tmp_path: Path, platform: str, why: str) -> None:
    folder = written(tmp_path, f"platform: '{platform}'{CONFIG}", name="model.pt")

    assert any(why in each for each in mistakes(read(folder)))


def test_a_folder_with_model_py_and_model_onnx_is_an_onnx_model(tmp_path: Path) -> None:
    folder = written(tmp_path, None)
    (folder / "1" / "model.onnx").write_bytes(b"")

    (spec,) = read(folder).specs
    assert spec.backend == "onnxruntime"


def test_the_file_of_a_python_model_may_have_another_name(tmp_path: Path) -> None:
    entry = read(written(tmp_path, CONFIG + 'default_model_filename: "mine.py"', name="mine.py"))

    assert [spec.path.name for spec in entry.specs] == ["mine.py"]


def test_a_python_model_gets_its_declared_configuration(tmp_path: Path) -> None:
    (spec,) = read(written(tmp_path, CONFIG + 'parameters { key: "mine" value: { string_value: "7" } }')).specs

    declared = json.loads(spec.declared_config)
    assert declared["name"] == "coded"
    assert declared["parameters"] == {"mine": {"string_value": "7"}}
    assert declared["input"][0]["dims"] == [2]
    assert declared["max_batch_size"] == 8


def test_requests_are_not_batched_without_dynamic_batching(tmp_path: Path) -> None:
    (alone,) = read(written(tmp_path / "a")).specs
    (batched,) = read(written(tmp_path / "b", CONFIG + "dynamic_batching {}")).specs

    assert (alone.policy.cap_rows, batched.policy.cap_rows) == (1, None)


def test_a_batch_of_an_iterative_sequence_may_be_full(tmp_path: Path) -> None:
    config = CONFIG + "sequence_batching { iterative_sequence: true oldest {} }"
    (spec,) = read(written(tmp_path / "a", config)).specs
    (capped,) = read(written(tmp_path / "b", config, "[batching]\ncap = 3\n")).specs

    assert (spec.policy.cap_rows, capped.policy.cap_rows) == (8, 3)


@pytest.mark.parametrize(
    "optimization",
    [
        "graph { level: 1 }",
        "priority: PRIORITY_MAX",
        "cuda { graphs: true busy_wait_events: true }",
        "input_pinned_memory { enable: false }",
        'execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } }',
        'execution_accelerators { cpu_execution_accelerator { name: "openvino" } }',
    ],
)
def test_optimization_settings_of_a_python_model_are_a_warning(tmp_path: Path, optimization: str) -> None:
    entry = read(written(tmp_path, CONFIG + f"optimization {{ {optimization} }}"))

    assert [spec.options for spec in entry.specs] == [{}]
    assert mistakes(entry) == []
    assert "field 'optimization' has no effect on a Python model, as in Triton" in [
        finding.message for finding in entry.findings
    ]


@pytest.mark.parametrize(
    ("config", "toml", "text"),
    [
        ("", "[hooks]\nfile = 'hooks.py'\n", "hooks.file does not apply to a Python model"),
        ("", "[padding.x]\naxis = 0\n", "padding does not apply to a Python model"),
        ("", "[batching]\nallowed_sizes = [1, 2]\n", "batching.allowed_sizes does not apply"),
        ("", "[batching]\nsplit = true\n", "batching.split does not apply"),
        ("", "[batching]\ninvariance = 'strict'\n", "batching.invariance does not apply"),
        ("", "[batching]\nexecutor = 'loop'\n", "batching.executor does not apply"),
        ("", "[batching]\nrun_limit_ms = 5\n", "set [worker] timeout_s"),
        ("", "[instances]\ncount = 'auto'\n", 'count = "auto" is for models'),
        ("", "[runtime]\nmem_arena = true\n", "runtime.mem_arena does not apply"),
        (
            "sequence_batching { state [ { input_name: 'a' output_name: 'b' data_type: TYPE_FP32 dims: [1] } ] }", "",
            "sequence_batching.state",
        ),
        ("parameters { key: 'EXECUTION_ENV_PATH' value: { string_value: 'none.tar.gz' } }", "", "does not exist"),
        ("", "[worker]\nrequirements = 'requirements.txt'\n", "worker.requirements: 'requirements.txt' does not exist"),
        ("", "[worker]\nbogus = 1\n", "unknown key worker.bogus"),
    ],
)  # fmt: skip
def test_an_option_that_does_not_apply_to_python_models_is_rejected(
    tmp_path: Path, config: str, toml: str, text: str
) -> None:
    folder = written(tmp_path, CONFIG + config, toml)
    (folder / "hooks.py").write_text("def pre_inference(sample, metadata):\n    return sample\n")

    assert any(text in each for each in mistakes(read(folder)))


def test_worker_options_are_rejected_for_onnx_models(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"")
    (folder / "penstock.toml").write_text("[worker]\ntimeout_s = 3\n")

    assert any("worker.timeout_s is for Python and TensorFlow models" in each for each in mistakes(read(folder)))


def test_the_worker_options_of_a_python_model_are_read(tmp_path: Path) -> None:
    folder = written(
        tmp_path, toml="[worker]\nrequirements = 'r.txt'\ntimeout_s = 3\nmemory_mb = 5\ninterpreter = 'p'\n"
    )
    (folder / "r.txt").write_text("")

    (spec,) = read(folder).specs
    worker = spec.worker
    assert (worker.requirements, worker.timeout_s, worker.memory_bytes) == (folder / "r.txt", 3.0, 5 << 20)
    assert worker.interpreter == "p"


@pytest.mark.parametrize("env_path", ["$$TRITON_MODEL_DIRECTORY/env.tar.gz", "env.tar.gz"])
def test_a_packed_environment_in_the_models_folder_is_found(tmp_path: Path, env_path: str) -> None:
    text = f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{env_path}" }} }}'
    folder = written(tmp_path, None)
    (folder / "env.tar.gz").write_bytes(b"")
    (folder / "config.pbtxt").write_text(CONFIG + text)

    (spec,) = read(folder).specs
    assert spec.worker.requirements == folder / "env.tar.gz"


def test_a_packed_environment_in_the_servers_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "envs/env.tar.gz" } }'
    folder = written(tmp_path / "models", None)
    (folder / "config.pbtxt").write_text(CONFIG + text)
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "env.tar.gz").write_bytes(b"")
    monkeypatch.chdir(tmp_path)

    (spec,) = read(folder).specs
    assert spec.worker.requirements == tmp_path / "envs" / "env.tar.gz"


@pytest.mark.parametrize("config", [CONFIG, None])
def test_check_does_not_run_the_code_of_a_python_model(tmp_path: Path, config: str | None) -> None:
    written(tmp_path, config)

    report = check([tmp_path], LOADERS)

    assert report.exit_status == 0
    assert "coded version 1, python" in str(report)


def test_check_reports_a_preferred_size_above_the_max_batch_size(tmp_path: Path) -> None:
    written(tmp_path, CONFIG + "dynamic_batching { preferred_batch_size: [ 16 ] }")

    assert any(
        "preferred size must be <= max batch size" in each.message for each in check([tmp_path], LOADERS).findings
    )


def test_check_prints_the_worker_options_of_a_python_model(tmp_path: Path) -> None:
    folder = written(tmp_path, toml="[worker]\nrequirements = 'r.txt'\ntimeout_s = 3\nmemory_mb = 5\n")
    (folder / "r.txt").write_text("")

    line = f"  worker     Python: that of the server, environment: {folder}/r.txt, timeout: 3 s, memory: at most 5 MB"
    assert line in str(check([tmp_path], LOADERS)).splitlines()


def test_check_prints_that_auto_complete_config_sets_the_rest(tmp_path: Path) -> None:
    written(tmp_path, None)

    printed = str(check([tmp_path], LOADERS))

    assert "set by its auto_complete_config, which is not run here" in printed
    assert "batching " not in printed


def test_check_reports_that_no_tensors_are_declared(tmp_path: Path) -> None:
    model = written(tmp_path, None) / "1" / "model.py"
    model.write_text("class TritonPythonModel: ...\n")

    (mistake,) = check([tmp_path], LOADERS).mistakes

    assert "has neither inputs nor outputs: declare them in config.pbtxt, or in auto_complete" in mistake.message


def test_check_reports_a_syntax_error_in_the_model(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "1" / "model.py").write_text("\ndef execute(self requests):\n")

    assert [str(each) for each in check([tmp_path], LOADERS).mistakes] == [
        f"{folder}/1/model.py: line 2: invalid syntax"
    ]


@pytest.mark.parametrize(
    ("source", "lacks"),
    [
        ("class TritonPythonModels:\n    pass\n", True), ("# TritonPythonModel\n", True), ("", True),
        ("from x import TritonPythonModel\n", False), ("from x import Model as TritonPythonModel\n", False),
        ("from x import *\n", False), ("import x\nTritonPythonModel = x.Model\n", False),
        ("if 1:\n    class TritonPythonModel:\n        pass\n", False),
        ("globals()['Triton' + 'PythonModel'] = object\n", False), ("def __getattr__(name):\n    ...\n", False),
        ("import x\n@x.serves\nclass Model:\n    pass\n", False),
        ("import sys\nsys.modules[__name__] = object()\n", False),
    ],
)  # fmt: skip
def test_check_reports_a_model_that_certainly_has_no_class(tmp_path: Path, source: str, lacks: bool) -> None:
    folder = written(tmp_path)
    (folder / "1" / "model.py").write_text(source)

    expected = [f"{folder}/1/model.py: has no class TritonPythonModel"] if lacks else []
    assert [str(each) for each in check([tmp_path], LOADERS).mistakes] == expected


def test_check_reports_an_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    folder = written(tmp_path, toml="[worker]\ninterpreter = '/no/python'\n")

    assert [str(each) for each in check([tmp_path], LOADERS).mistakes] == [
        f"{folder}/penstock.toml:2: model 'coded', worker.interpreter: '/no/python' does not exist or is not executable"
    ]
