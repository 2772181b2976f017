"""ONNX models with `runtime.isolated`: the options of their process, and the resulting ModelSpec."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backends.loading import LOADERS
from penstock.batching.spec import ModelSpec
from penstock.server.environments.environments import Environments
from penstock.server.isolated.loader import with_isolated
from penstock.server.repository.check import check
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.scan import ModelEntry, read_folder, scan
from tests.backends.onnx_models import contract_model

ISOLATED = "[runtime]\nisolated = true\n"
LIMITS = "[worker]\nmemory_mb = 900\ntimeout_s = 2.5\n"


def entry(root: Path, toml: str, name: str = "model.onnx") -> ModelEntry:
    folder = root / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / name).write_bytes(b"")
    (folder / "penstock.toml").write_text(toml)
    found = read_folder(folder, Defaults())
    assert found is not None
    return found


def parameters_of(spec: ModelSpec) -> dict[str, str]:
    return {name: value for name, value in spec.options.items() if name == "isolated" or name.startswith("worker.")}


def test_the_limits_of_an_isolated_models_process_reach_its_loader(tmp_path: Path) -> None:
    (spec,) = entry(tmp_path, ISOLATED + LIMITS).specs

    assert parameters_of(spec) == {"isolated": "1", "worker.memory_mb": "900", "worker.timeout_s": "2.5"}
    assert (spec.backend, spec.worker.memory_bytes, spec.worker.timeout_s) == ("onnxruntime", 900 << 20, 2.5)


def test_a_single_file_model_may_be_isolated(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    (tmp_path / "m.toml").write_text(ISOLATED + LIMITS)

    ((found,), _) = scan([tmp_path / "m.onnx"], Defaults())

    (spec,) = found.specs
    assert parameters_of(spec) == {"isolated": "1", "worker.memory_mb": "900", "worker.timeout_s": "2.5"}


def test_a_model_with_isolated_set_to_false_stays_in_the_server(tmp_path: Path) -> None:
    (spec,) = entry(tmp_path, ISOLATED.replace("true", "false")).specs

    assert parameters_of(spec) == {"isolated": "0"}


@pytest.mark.parametrize(
    ("toml", "name", "text"),
    [
        (LIMITS, "model.onnx", "worker.memory_mb is for Python and TensorFlow models, and ONNX models with runtime."),
        (ISOLATED + "[worker]\ninterpreter = 'p'\n", "model.onnx", "worker.interpreter is for Python and TensorFlow"),
        (ISOLATED + "[batching]\nexecutor = 'loop'\n", "model.onnx", "batching.executor does not apply with runtime."),
        (ISOLATED, "model.py", "runtime.isolated does not apply to a Python model"),
        (ISOLATED, "saved_model.pb", "runtime.isolated does not apply to a TensorFlow model"),
    ],
)  # fmt: skip
def test_a_worker_option_that_does_not_apply_is_a_mistake(tmp_path: Path, toml: str, name: str, text: str) -> None:
    backends = {"model.py": "python", "saved_model.pb": "tensorflow"}
    model = f"[model]\nbackend = '{backends[name]}'\n" if name in backends else ""
    findings = entry(tmp_path, toml + model, name).findings

    assert any(text in finding.message for finding in findings if finding.is_mistake), findings


def test_check_loads_an_isolated_model_in_a_process_and_prints_its_worker(tmp_path: Path) -> None:
    entry(tmp_path, ISOLATED + LIMITS)
    contract_model("rows", tmp_path / "m" / "1" / "model.onnx")

    loaders = with_isolated(LOADERS, Environments(tmp_path / "environments").interpreter)
    report = str(check([tmp_path], loaders, Defaults()))

    assert "  worker     Python: that of the server, timeout: 2.5 s, memory: at most 900 MB" in report
    assert "1 version would be served, 0 mistakes" in report
