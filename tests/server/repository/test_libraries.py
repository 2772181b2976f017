"""The libraries of custom operators that a model names, and where they are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from penstock.backends.loading import LOADERS
from penstock.backends.onnx_providers import options_with_prefix
from penstock.server.protobuf import model_config_pb2
from penstock.server.repository.check import check
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.scan import ModelEntry, read_folder, scan
from tests.backends.onnx_models import contract_model
from tests.server.repository.folders import make, native

TOML = '[model]\nversions = "all"\n[runtime]\ncustom_op_libraries = ["a.so", "ops/b.so"]\n'


def read(root: Path, config_text: str | None = None) -> ModelEntry:
    config = None if config_text is None else text_format.Parse(config_text, model_config_pb2().ModelConfig())
    entry = read_folder(root / "m", Defaults(), config)
    assert entry is not None
    return entry


def mistakes(entry: ModelEntry) -> list[tuple[int, int, str]]:
    return [(finding.version, finding.line, finding.message) for finding in entry.findings if finding.is_mistake]


def places(entry: ModelEntry) -> list[list[str]]:
    return [list(options_with_prefix(spec.options, "custom_op_library.").values()) for spec in entry.specs]


def test_a_relative_library_path_is_resolved_in_the_models_folder_then_in_the_versions(tmp_path: Path) -> None:
    make(tmp_path, "m/1/model.onnx", "m/2/model.onnx", "m/a.so", "m/1/a.so", "m/1/ops/b.so", "m/2/ops/b.so")
    native(tmp_path, "m", TOML)

    folder = tmp_path / "m"
    assert places(read(tmp_path)) == [[f"{folder}/a.so", f"{folder}/{version}/ops/b.so"] for version in (1, 2)]


def test_a_version_without_its_library_is_left_out_with_the_line_of_the_mistake(tmp_path: Path) -> None:
    make(tmp_path, "m/1/model.onnx", "m/2/model.onnx", "m/a.so", "m/1/ops/b.so")
    native(tmp_path, "m", TOML)
    entry = read(tmp_path)

    text = "the library of custom operators 'ops/b.so' is neither in the model's folder nor in its version's"
    assert mistakes(entry) == [(2, 4, text)]
    assert [spec.version for spec in entry.specs] == [1]


def test_an_absolute_library_path_is_used_and_not_revealed_when_missing(tmp_path: Path) -> None:
    operations = f'\nmodel_operations {{ op_library_filename: "{tmp_path}/ops/a.so" }}'
    make(tmp_path, "m/1/model.onnx", "ops/a.so", m=operations)
    assert places(read(tmp_path)) == [[f"{tmp_path}/ops/a.so"]]
    (tmp_path / "ops" / "a.so").unlink()

    assert mistakes(read(tmp_path)) == [(1, 2, "the library of custom operators 'a.so' does not exist")]


def test_the_library_of_a_single_file_model_is_found_beside_the_file(tmp_path: Path) -> None:
    make(tmp_path, "net.onnx", "a.so")
    (tmp_path / "net.toml").write_text('[runtime]\ncustom_op_libraries = ["a.so"]\n')
    entries, _ = scan([tmp_path / "net.onnx"], Defaults())

    assert places(entries[0]) == [[f"{tmp_path}/a.so"]]


@pytest.mark.parametrize("value", ['"a.so"', "[]", "[1]", '[""]'])
def test_a_value_that_is_not_a_list_of_paths_is_rejected(tmp_path: Path, value: str) -> None:
    make(tmp_path, "m/1/model.onnx")
    native(tmp_path, "m", f"[runtime]\ncustom_op_libraries = {value}\n")

    [(_, line, text)] = mistakes(read(tmp_path))
    assert line == 2
    assert "must be a list of strings, not " in text


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        ('backend: "python"', "field 'model_operations' is not supported for Python models: "),
        ('platform: "ensemble" ensemble_scheduling { }', "model_operations should not be specified for ensemble 'm'"),
    ],
)
def test_op_library_filename_is_rejected_for_other_models(tmp_path: Path, config: str, wrong: str) -> None:
    make(tmp_path, "m/1/x", "m/a.so", m=f'{config}\nmodel_operations {{ op_library_filename: "a.so" }}')
    entry = read(tmp_path)

    assert (2, wrong) in [(line, text[: len(wrong)]) for _, line, text in mistakes(entry)]
    assert entry.specs == ()


def test_custom_op_libraries_is_rejected_for_a_python_model(tmp_path: Path) -> None:
    make(tmp_path, "m/1/x", "m/a.so")
    native(tmp_path, "m", '[model]\nbackend = "python"\n[runtime]\ncustom_op_libraries = ["a.so"]\n')
    message = "runtime.custom_op_libraries does not apply to a Python model: it does not run"

    assert any(line == 4 and text.startswith(message) for _, line, text in mistakes(read(tmp_path)))


@pytest.mark.parametrize("by_triton", [True, False])
def test_a_tensorflow_model_may_name_libraries(tmp_path: Path, by_triton: bool) -> None:
    config = 'model_operations { op_library_filename: "a.so" }' if by_triton else ""
    make(tmp_path, "m/1/model.savedmodel/saved_model.pb", "m/a.so", m=f'platform: "tensorflow_savedmodel"\n{config}')
    if not by_triton:
        native(tmp_path, "m", '[runtime]\ncustom_op_libraries = ["a.so"]\n')

    assert places(read(tmp_path)) == [[f"{tmp_path}/m/a.so"]]


class TestRequests:
    def test_a_configuration_in_a_request_may_not_name_a_library(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx", "m/a.so", "secret.so")
        native(tmp_path, "m", f'[runtime]\ncustom_op_libraries = ["{tmp_path}/secret.so"]\n')
        entry = read(tmp_path, 'model_operations { op_library_filename: "a.so" }')

        [(_, _, text)] = mistakes(entry)
        assert text.startswith("field 'model_operations' names a path on the server's machine and")
        assert entry.specs == ()

    def test_libraries_of_penstock_toml_apply_to_a_configuration_in_a_request(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx", "m/a.so")
        native(tmp_path, "m", '[runtime]\ncustom_op_libraries = ["a.so"]\n')

        assert places(read(tmp_path, "max_batch_size: 4")) == [[f"{tmp_path}/m/a.so"]]


def test_check_reports_the_line_of_a_file_that_is_not_a_library(tmp_path: Path) -> None:
    make(tmp_path, "m/1/model.onnx", m='\nmodel_operations {\n  op_library_filename: "a.so"\n}')
    contract_model("rows", tmp_path / "m" / "1" / "model.onnx")
    (tmp_path / "m" / "a.so").write_text("no library")
    [finding] = check([tmp_path], LOADERS).findings

    assert str(finding).startswith(f"{tmp_path}/m/config.pbtxt:3: option 'custom_op_library': 'a.so' could not be reg")
