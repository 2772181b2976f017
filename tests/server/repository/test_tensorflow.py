"""TensorFlow models on disk: how they are recognized, where the SavedModel is, and how they are configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.devices.fallback import CPU_FALLBACK
from penstock.batching.loading.completion import complete
from penstock.batching.spec import ModelSpec
from penstock.server.repository.changes import fingerprint_files
from penstock.server.repository.check import check
from penstock.server.repository.completed_config import complete_config, to_json
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.fields.optimization import SHARE_COUNT, TENSORFLOW_PARAMETERS
from penstock.server.repository.repository import Repository
from penstock.server.repository.scan import ModelEntry, list_names, locate, read_folder, scan
from tests.fakes import FakeBackend
from tests.server.repository.folders import make, native

DOCS = Path(__file__).parents[3] / "docs" / "compatibility-triton.md"
PB = "saved_model.pb"
GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 3)),))
KNOWN_PARAMETERS = ", ".join((*TENSORFLOW_PARAMETERS, SHARE_COUNT, CPU_FALLBACK))


def read(root: Path, name: str = "m", defaults: Defaults | None = None) -> ModelEntry:
    entry = read_folder(root / name, defaults or Defaults())
    assert entry is not None
    return entry


def mistakes(entry: ModelEntry) -> list[tuple[int, str]]:
    return [(finding.line, finding.message) for finding in entry.findings if finding.is_mistake]


def only(entry: ModelEntry) -> ModelSpec:
    assert mistakes(entry) == []
    (spec,) = entry.specs
    return spec


def parameters(**values: str) -> str:
    return "".join(
        f'\nparameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' for name, value in values.items()
    )


SAVED = "m/1/model.savedmodel/saved_model.pb"
SERVING = "m/1/saved_model.pb"
PLATFORM = 'platform: "tensorflow_savedmodel"'


class TestRecognition:
    @pytest.mark.parametrize(
        "config",
        [
            PLATFORM,
            'backend: "tensorflow"',
            'platform: "tensorflow_savedmodel" backend: "tensorflow"',
            'backend: "python" platform: "tensorflow_savedmodel"',
            'default_model_filename: "model.savedmodel"',
            "max_batch_size: 8",
            None,
        ],
    )
    @pytest.mark.parametrize("layout", [SAVED, SERVING])
    def test_a_savedmodel_is_recognized_with_tritons_configurations_or_without_one(
        self, tmp_path: Path, config: str | None, layout: str
    ) -> None:
        spec = only(read(make(tmp_path, layout, **({} if config is None else {"m": config}))))

        assert spec.backend == "tensorflow"
        assert spec.path == (tmp_path / layout).parent

    def test_the_savedmodels_folder_may_have_another_name(self, tmp_path: Path) -> None:
        text = f'{PLATFORM} default_model_filename: "mine"'

        assert only(read(make(tmp_path, "m/1/mine/saved_model.pb", m=text))).path == tmp_path / "m" / "1" / "mine"

    def test_a_savedmodel_may_be_in_text_format(self, tmp_path: Path) -> None:
        assert only(read(make(tmp_path, "m/1/saved_model.pbtxt"))).path == tmp_path / "m" / "1"

    def test_penstock_toml_may_select_the_tensorflow_backend(self, tmp_path: Path) -> None:
        make(tmp_path, SAVED, "m/1/model.onnx")
        native(tmp_path, "m", '[model]\nbackend = "tensorflow"\n')

        assert only(read(tmp_path)).backend == "tensorflow"

    def test_a_folder_with_a_savedmodel_and_model_onnx_is_an_onnx_model(self, tmp_path: Path) -> None:
        assert only(read(make(tmp_path, SAVED, "m/1/model.onnx"))).backend == "onnxruntime"

    def test_versions_may_have_tritons_or_tensorflow_servings_layout(self, tmp_path: Path) -> None:
        make(tmp_path, SAVED, "m/1700000000/saved_model.pb", m="version_policy { all {} }")

        assert [spec.path.relative_to(tmp_path).parts for spec in read(tmp_path).specs] == [
            ("m", "1", "model.savedmodel"),
            ("m", "1700000000"),
        ]

    def test_a_python_model_with_platform_tensorflow_savedmodel_stays_a_python_model(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.py", SAVED, m='backend: "python" platform: "tensorflow_savedmodel"')

        assert only(read(tmp_path)).backend == "python"

    def test_only_the_latest_version_is_served_by_default(self, tmp_path: Path) -> None:
        make(tmp_path, SAVED, "m/2/model.savedmodel/saved_model.pb")

        assert [spec.version for spec in read(tmp_path).specs] == [2]

    @pytest.mark.parametrize("config", ['platform: "tensorflow_graphdef"', "", 'backend: "tensorflow"'])
    def test_a_graphdef_is_rejected_with_an_alternative(self, tmp_path: Path, config: str) -> None:
        entry = read(make(tmp_path, "m/1/model.graphdef", m=config))

        (mistake,) = mistakes(entry)
        assert mistake[1] == (
            "platform 'tensorflow_graphdef' is not supported: save the graph as a SavedModel and set "
            "tensorflow_savedmodel (docs/tensorflow.md, GraphDefs)"
        )
        assert "GraphDefs" in (DOCS.parent / "tensorflow.md").read_text("utf-8")

    def test_a_contradictory_platform_and_backend_are_rejected_with_tritons_message(self, tmp_path: Path) -> None:
        entry = read(make(tmp_path, SAVED, m=f'{PLATFORM}\nbackend: "onnxruntime"'))

        assert mistakes(entry) == [
            (1, "unexpected 'platform' and 'backend' pair, got:tensorflow_savedmodel, onnxruntime")
        ]

    def test_a_missing_configured_folder_is_reported_with_the_folders_found(self, tmp_path: Path) -> None:
        (mistake,) = mistakes(read(make(tmp_path, SAVED, m=f'{PLATFORM} default_model_filename: "mine"')))

        assert mistake[1] == "there is no mine, which the configuration names (found model.savedmodel)"

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("m/1/model.savedmodel/other.pb", "model.savedmodel is not a SavedModel: there is no saved_model.pb in it"),
            ("m/1/frozen.pb", "there is no SavedModel: neither model.savedmodel nor saved_model.pb (found frozen.pb"),
        ],
    )
    def test_a_missing_savedmodel_is_reported_with_the_files_found(self, tmp_path: Path, file: str, text: str) -> None:
        (mistake,) = mistakes(read(make(tmp_path, file, m=PLATFORM)))

        assert text in mistake[1]


class TestPaths:
    def test_a_tensorflow_serving_folder_is_a_repository(self, tmp_path: Path) -> None:
        make(tmp_path, "half/1/saved_model.pb", "half/1/variables/variables.index", "twice/00000123/saved_model.pb")
        found, _ = scan([tmp_path], Defaults())

        assert [(entry.name, len(entry.specs)) for entry in found] == [("half", 1)]

    def test_the_folder_of_one_model_is_not_a_repository(self, tmp_path: Path) -> None:
        make(tmp_path, SERVING)
        _, findings = scan([tmp_path / "m"], Defaults())

        assert [finding.message for finding in findings] == [
            f"is the folder of one model; pass the folder that contains it: {tmp_path}"
        ]

    def test_one_version_is_not_a_repository(self, tmp_path: Path) -> None:
        make(tmp_path, SERVING)
        _, findings = scan([tmp_path / "m" / "1"], Defaults())

        assert [finding.message for finding in findings] == [
            f"is one version of a model; pass the folder that contains the model's folder: {tmp_path}"
        ]

    def test_a_savedmodel_in_a_repository_needs_a_version(self, tmp_path: Path) -> None:
        make(tmp_path, "m/saved_model.pb")
        _, (found, *_) = scan([tmp_path], Defaults())

        assert found.message == "is a SavedModel without a version: move its files to a subfolder 1"

    @pytest.mark.parametrize("folder", ["flowers", "flowers.savedmodel"])
    def test_a_single_savedmodel_is_served(self, tmp_path: Path, folder: str) -> None:
        make(tmp_path, f"{folder}/saved_model.pb")
        (tmp_path / "flowers.toml").write_text('[runtime]\nsignature = "mine"\n[batching]\nmax_batch_size = 3\n')
        path = tmp_path / folder
        (found,), findings = scan([path], Defaults())

        assert findings == []
        spec = only(found)
        assert (spec.name, spec.version, spec.path, spec.backend) == ("flowers", 1, path, "tensorflow")
        assert spec.options == {"TF_SIGNATURE_DEF": "mine"}
        assert spec.policy.max_batch_rows == 3
        assert list_names([path]) == ["flowers"]
        assert locate([path], "flowers") == [path]
        assert locate([path], "variables") == []

    def test_the_toml_beside_a_savedmodel_is_part_of_its_fingerprint(self, tmp_path: Path) -> None:
        make(tmp_path, "flowers/saved_model.pb")
        repository = Repository([tmp_path / "flowers"])
        before = repository.fingerprint("flowers")
        (tmp_path / "flowers.toml").write_text("[batching]\n")

        assert repository.fingerprint("flowers") != before


@pytest.mark.parametrize("file", ["variables/variables.index", "assets/words.txt", "assets.extra/deep/er/x", PB])
def test_a_change_within_a_savedmodel_changes_its_fingerprint(tmp_path: Path, file: str) -> None:
    place = make(tmp_path, SAVED, f"m/1/model.savedmodel/{file}") / "m"
    before = fingerprint_files([place])
    (place / "1" / "model.savedmodel" / file).write_text("other")

    assert fingerprint_files([place]) != before


class TestParameters:
    def test_tritons_parameters_reach_the_loader(self, tmp_path: Path) -> None:
        text = PLATFORM + parameters(
            TF_SIGNATURE_DEF="predict", TF_GRAPH_TAG="serve", TF_NUM_INTRA_THREADS="2", TF_NUM_INTER_THREADS="3",
            TF_USE_PER_SESSION_THREADS="yes", MAX_SESSION_SHARE_COUNT="4",
        )  # fmt: skip

        assert only(read(make(tmp_path, SAVED, m=text))).options == {
            "TF_SIGNATURE_DEF": "predict",
            "TF_GRAPH_TAG": "serve",
            "intra_op_thread_count": "2",
            "inter_op_thread_count": "3",
            "TF_USE_PER_SESSION_THREADS": "1",
        }

    def test_empty_and_zero_parameters_set_nothing(self, tmp_path: Path) -> None:
        text = PLATFORM + parameters(TF_SIGNATURE_DEF="", TF_NUM_INTRA_THREADS="0")

        assert only(read(make(tmp_path, SAVED, m=text))).options == {}

    @pytest.mark.parametrize(
        ("name", "value", "text"),
        [
            ("MAX_SESSION_SHARE_COUNT", "0", "must be positive number for TensorFlow model 'm'"),
            ("MAX_SESSION_SHARE_COUNT", "x", "must be positive number for TensorFlow model 'm'"),
            ("TF_NUM_INTRA_THREADS", "-1", "must be an integer from 0 to 4096, not '-1'"),
            ("TF_USE_PER_SESSION_THREADS", "2", "must be true or false, not '2'"),
            ("TF_INIT_OPS_FILE", "init.json", "is for GraphDefs: a SavedModel names its own initialization"),
            ("intra_op_thread_count", "2", f"is not supported for TensorFlow models, known: {KNOWN_PARAMETERS}"),
        ],
    )
    def test_an_invalid_parameter_is_rejected_with_its_name_and_line(
        self, tmp_path: Path, name: str, value: str, text: str
    ) -> None:
        entry = read(make(tmp_path, SAVED, m=PLATFORM + parameters(**{name: value})))

        assert mistakes(entry) == [(2, f"parameter '{name}' {text}")]

    @pytest.mark.parametrize("name", [*TENSORFLOW_PARAMETERS, SHARE_COUNT])
    def test_every_tensorflow_parameter_is_in_the_docs(self, name: str) -> None:
        assert f"| `{name}` |" in DOCS.read_text("utf-8")

    def test_different_signatures_in_the_two_files_are_a_mistake(self, tmp_path: Path) -> None:
        make(tmp_path, SAVED, m=PLATFORM + parameters(TF_SIGNATURE_DEF="a"))
        native(tmp_path, "m", '[runtime]\nsignature = "b"\n')

        assert mistakes(read(tmp_path)) == [(2, "runtime.signature is b here and a in config.pbtxt:2")]

    @given(st.text(st.characters(codec="utf-8", exclude_characters='"\\\n', exclude_categories=("Cc", "Cs"))))
    def test_a_signature_may_have_any_name(self, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
        root = make(tmp_path_factory.mktemp("r"), SAVED, m=PLATFORM + parameters(TF_SIGNATURE_DEF=name))

        assert only(read(root)).options == ({"TF_SIGNATURE_DEF": name} if name else {})


class TestOptimization:
    @pytest.mark.parametrize(
        "text",
        [
            "graph { level: 0 }",
            "graph { level: -1 }",
            'execution_accelerators { gpu_execution_accelerator { name: "gpu_io" } }',
            "input_pinned_memory { enable: true }",
            "input_pinned_memory { enable: false }",
            "graph { level: 1 }",
            "cuda { graphs: true }",
        ],
    )
    def test_optimization_without_effect_on_answers_is_accepted(self, tmp_path: Path, text: str) -> None:
        assert only(read(make(tmp_path, SAVED, m=f"{PLATFORM} optimization {{ {text} }}"))).options == {}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                'execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } }',
                "execution accelerator 'tensorrt' is not supported for TensorFlow models",
            ),
            (
                'execution_accelerators { gpu_execution_accelerator { name: "auto_mixed_precision" } }',
                "execution accelerator 'auto_mixed_precision' is not supported for TensorFlow models",
            ),
            (
                'execution_accelerators { gpu_execution_accelerator { name: "cuda" } }',
                "unknown Execution Accelerator 'cuda' is requested",
            ),
            (
                'execution_accelerators { cpu_execution_accelerator { name: "openvino" } }',
                "field 'optimization.execution_accelerators.cpu_execution_accelerator' is not supported",
            ),
        ],
    )
    def test_an_unsupported_accelerator_is_rejected_with_its_name_and_line(
        self, tmp_path: Path, text: str, message: str
    ) -> None:
        ((line, mistake),) = mistakes(read(make(tmp_path, SAVED, m=f"{PLATFORM}\noptimization {{ {text} }}")))

        assert line == 2
        assert mistake.startswith(message)


class TestPenstockToml:
    def test_the_worker_options_of_a_tensorflow_model_reach_its_loader(self, tmp_path: Path) -> None:
        make(tmp_path, SAVED, "m/requirements.txt")
        native(
            tmp_path, "m",
            '[worker]\ninterpreter = "python3"\nrequirements = "requirements.txt"\nmemory_mb = 900\ntimeout_s = 2.5\n',
        )  # fmt: skip

        spec = only(read(tmp_path))
        assert spec.options == {
            "worker.interpreter": "python3",
            "worker.requirements": str(tmp_path / "m" / "requirements.txt"),
            "worker.memory_mb": "900",
            "worker.timeout_s": "2.5",
        }
        assert spec.worker.interpreter == "python3"

    def test_a_gpu_memory_fraction_turns_memory_growth_off(self, tmp_path: Path) -> None:
        make(tmp_path, SAVED)
        native(tmp_path, "m", "[runtime]\ngpu_memory_fraction = 0.5\n")

        assert only(read(tmp_path)).options == {"gpu_memory_fraction": "0.5", "allow_growth": "0"}

    def test_the_servers_tensorflow_defaults_apply_to_models_without_settings(self, tmp_path: Path) -> None:
        defaults = Defaults(tensorflow_options={"gpu_memory_fraction": "0.25"}, tensorflow_rows=7)
        make(tmp_path, SAVED, "n/1/saved_model.pb")
        native(tmp_path, "m", "[runtime]\ngpu_memory_fraction = 0\n")

        assert only(read(tmp_path, "m", defaults)).options == {"gpu_memory_fraction": "0.0"}
        spec = only(read(tmp_path, "n", defaults))
        assert spec.options == {"gpu_memory_fraction": "0.25", "allow_growth": "0"}
        assert complete(spec, GRAPH).policy.max_batch_rows == 7

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[runtime]\nmem_arena = true", "runtime.mem_arena does not apply to a TensorFlow model: it is for ONNX"),
            ('[runtime]\ngraph_level = "all"', "runtime.graph_level does not apply to a TensorFlow model: it is for"),
            (
                '[batching]\nexecutor = "loop"',
                "batching.executor does not apply to a TensorFlow model: it runs in its own",
            ),
            (
                "[runtime]\ngpu_memory_fraction = 2",
                "runtime.gpu_memory_fraction must be a number from 0 to 1, not 2 (integer)",
            ),
        ],
    )
    def test_an_option_that_does_not_apply_to_tensorflow_models_is_rejected(
        self, tmp_path: Path, text: str, message: str
    ) -> None:
        make(tmp_path, SAVED)
        native(tmp_path, "m", text)

        ((line, mistake),) = mistakes(read(tmp_path))
        assert line == 2
        assert mistake.startswith(message)

    def test_a_tensorflow_option_is_rejected_for_an_onnx_model(self, tmp_path: Path) -> None:
        make(tmp_path, "m/1/model.onnx")
        native(tmp_path, "m", '[runtime]\nsignature = "x"\n')

        assert mistakes(read(tmp_path)) == [(2, "runtime.signature is for TensorFlow models")]


class TestReportedConfiguration:
    def report(self, root: Path) -> dict[str, Any]:
        entry = read(root)
        spec = complete(only(entry), GRAPH)
        return to_json(complete_config(entry.config, spec, "tensorflow_savedmodel"))

    def test_the_reported_configuration_is_like_tritons(self, tmp_path: Path) -> None:
        report = self.report(
            make(tmp_path, SAVED, m=PLATFORM + parameters(TF_NUM_INTRA_THREADS="2", TF_SIGNATURE_DEF="p"))
        )

        assert (report["platform"], report["backend"]) == ("tensorflow_savedmodel", "tensorflow")
        assert report["default_model_filename"] == "model.savedmodel"
        assert report["max_batch_size"] == 64
        assert report["dynamic_batching"]["preferred_batch_size"] == [64]
        assert report["parameters"] == {
            "TF_NUM_INTRA_THREADS": {"string_value": "2"},
            "TF_SIGNATURE_DEF": {"string_value": "p"},
        }
        assert [each["name"] for each in report["input"]] == ["x"]

    def test_partly_declared_tensors_are_completed(self, tmp_path: Path) -> None:
        tensors = 'input { name: "x" format: FORMAT_NCHW dims: [ 4, 5, 6 ] }\noutput { name: "y" data_type: TYPE_FP32 }'
        make(tmp_path, SAVED, m=f"{PLATFORM}\n{tensors}")
        graph = Signature((TensorSpec("x", "FP16", (-1, -1, -1, -1)),), GRAPH.outputs)
        entry = read(tmp_path)
        report = to_json(complete_config(entry.config, complete(only(entry), graph), "tensorflow_savedmodel"))

        (x,), (y,) = report["input"], report["output"]
        assert (x["data_type"], x["dims"], x["format"]) == ("TYPE_FP16", [4, 5, 6], "FORMAT_NCHW")
        assert (y["data_type"], y["dims"]) == ("TYPE_FP32", [3])

    def test_settings_of_penstock_toml_are_reported_as_triton_parameters(self, tmp_path: Path) -> None:
        make(tmp_path, SERVING)
        native(tmp_path, "m", '[runtime]\nintra_op_threads = 2\nsignature = "p"\n')
        report = self.report(tmp_path)

        assert report["parameters"].keys() == {"TF_NUM_INTRA_THREADS", "TF_SIGNATURE_DEF"}
        assert report["default_model_filename"] == "saved_model.pb"


class TestChecking:
    """`penstock check` with a fake Loader. tests/clients/test_tensorflow.py loads real models."""

    def found(self, root: Path, message: str = "", code: Code = Code.INVALID) -> list[str]:
        def load(path: Path, device: str, options: Any) -> Any:
            if message:
                raise InferError(code, message)
            return FakeBackend(GRAPH, lambda inputs: [])

        report = check([root], {"tensorflow": load})
        return [str(finding).removeprefix(f"{root}/") for finding in report.mistakes] or str(report).splitlines()

    def test_an_unknown_signature_in_config_pbtxt_is_reported_with_its_line(self, tmp_path: Path) -> None:
        text = "the model has no signature 'nope': it has 'predict'"
        make(tmp_path, SAVED, m=PLATFORM + parameters(TF_SIGNATURE_DEF="nope"))

        assert self.found(tmp_path, text) == [f"m/config.pbtxt:2: {text}"]

    def test_an_unknown_signature_in_penstock_toml_is_reported_with_its_line(self, tmp_path: Path) -> None:
        text = "the model has no signature 'nope': it has 'predict'"
        make(tmp_path, SAVED)
        native(tmp_path, "m", '[runtime]\n\nsignature = "nope"\n')

        assert self.found(tmp_path, text) == [f"m/penstock.toml:3: {text}"]

    @pytest.mark.parametrize("config", [None, PLATFORM])
    def test_a_savedmodel_that_fails_to_load_is_reported_with_its_folder(
        self, tmp_path: Path, config: str | None
    ) -> None:
        make(tmp_path, SAVED, **({} if config is None else {"m": config}))

        assert self.found(tmp_path, "TensorFlow is not installed: pip install", Code.UNSUPPORTED) == [
            "m/1/model.savedmodel: TensorFlow is not installed: pip install"
        ]

    def test_a_missing_interpreter_is_reported_with_its_line(self, tmp_path: Path) -> None:
        make(tmp_path, SAVED)
        native(tmp_path, "m", '[worker]\ninterpreter = "/no/python"\n')

        assert self.found(tmp_path) == [
            "m/penstock.toml:2: model 'm', worker.interpreter: '/no/python' does not exist or is not executable"
        ]

    @pytest.mark.parametrize(
        ("config", "found"),
        [
            ('input { name: "x" }', "  inputs     x: FP32 [-1, 4]"),
            ('input { name: "x" format: FORMAT_NHWC }', "  inputs     x: FP32 [-1, 4]"),
            ('output { name: "y" data_type: TYPE_FP32 }', "  outputs    y: FP32 [-1, 3]"),
            ('input { name: "x" dims: [ -1, 4 ] }', "  batching   none: the declared dims include every axis"),
            ('input { name: "z" }', "unable to load model 'm', configuration expects 2 inputs, model provides 1"),
            ('input { name: "x" data_type: TYPE_INT8 }', "m/config.pbtxt:2: unable to load model 'm', configuration"),
        ],
    )
    def test_a_tensor_of_a_tensorflow_model_may_be_partly_declared(
        self, tmp_path: Path, config: str, found: str
    ) -> None:
        make(tmp_path, SAVED, m=f"{PLATFORM}\n{config}")

        assert any(found in line for line in self.found(tmp_path))

    @pytest.mark.parametrize("config", ['backend: "onnxruntime"', 'platform: "onnxruntime_onnx"', 'backend: "python"'])
    def test_a_partly_declared_tensor_is_a_mistake_for_other_backends(self, tmp_path: Path, config: str) -> None:
        make(tmp_path, "m/1/model.onnx", m=f'{config}\ninput {{ name: "x" dims: 4 }}')

        assert (2, "model input 'x' must specify 'data_type' for m") in mistakes(read(tmp_path))

    def test_check_prints_a_valid_tensorflow_model(self, tmp_path: Path) -> None:
        make(tmp_path, SAVED, m=PLATFORM + parameters(TF_SIGNATURE_DEF="predict"))
        native(tmp_path, "m", "[worker]\nmemory_mb = 900\n")

        assert self.found(tmp_path) == [
            f"m version 1, tensorflow, {tmp_path}/m/1/model.savedmodel",
            "  inputs     x: FP32 [-1, 4]",
            "  outputs    y: FP32 [-1, 3]",
            "  batching   up to 64 rows, cap learned, queue of 4096 rows",
            "  instances  1 on cpu",
            "  runtime    TF_SIGNATURE_DEF predict",
            "  worker     Python: that of the server, memory: at most 900 MB",
            "",
            "1 version would be served, 0 mistakes",
        ]
