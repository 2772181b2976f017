"""When and how the importable seldon_core is found, and its errors for what it does not support."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import seldon_core

from penstock.server.seldon import importable

FOLDER = Path(importable.__file__).parent
# The names that components in public repositories import, by module.
IMPORTED = {
    "seldon_core": ("Storage", "__version__"),
    "seldon_core.env_utils": ("get_model_name", "get_image_name", "get_deployment_name", "get_predictor_version"),
    "seldon_core.flask_utils": (
        "SeldonMicroserviceException", "get_request", "get_multi_form_data_request", "jsonify", "ANNOTATIONS_FILE",
        "ANNOTATION_GRPC_MAX_MSG_SIZE", "ANNOTATION_REST_TIMEOUT",
    ),
    "seldon_core.metadata": ("validate_model_metadata", "SeldonInvalidMetadataError"),
    "seldon_core.metrics": (
        "SeldonMetrics", "create_counter", "create_gauge", "create_timer", "validate_metrics", "split_image_tag",
        "COUNTER", "GAUGE", "TIMER", "BINS", "DEFAULT_LABELS", "PREDICT_METRIC_METHOD_TAG",
        "FEEDBACK_METRIC_METHOD_TAG", "ROUTER_METRIC_METHOD_TAG", "AGGREGATE_METRIC_METHOD_TAG",
        "HEALTH_METRIC_METHOD_TAG", "INPUT_TRANSFORM_METRIC_METHOD_TAG", "OUTPUT_TRANSFORM_METRIC_METHOD_TAG",
    ),
    "seldon_core.microservice": ("PARAMETERS_ENV_NAME", "parse_parameters", "SeldonMicroserviceException"),
    "seldon_core.proto": ("prediction_pb2",),
    "seldon_core.proto.prediction_pb2": (
        "SeldonMessage", "SeldonMessageList", "DefaultData", "Tensor", "Meta", "Metric", "Status", "Feedback",
        "RequestResponse", "SeldonModelMetadata", "SeldonMessageMetadata", "DESCRIPTOR",
    ),
    "seldon_core.seldon_client": (
        "SeldonClient", "SeldonChannelCredentials", "SeldonCallCredentials", "SeldonClientPrediction",
        "SeldonClientCombine", "SeldonClientFeedback", "SeldonClientException",
    ),
    "seldon_core.storage": ("Storage",),
    "seldon_core.user_model": (
        "SeldonComponent", "SeldonResponse", "SeldonNotImplementedError", "client_predict", "client_class_names",
        "client_custom_metrics", "client_custom_tags", "client_feature_names", "INCLUDE_METRICS_IN_CLIENT_RESPONSE",
    ),
    "seldon_core.utils": (
        "array_to_grpc_datadef", "array_to_list_value", "array_to_rest_datadef", "construct_response",
        "construct_response_json", "extract_feedback_request_parts", "extract_request_parts",
        "extract_request_parts_json", "feedback_to_json", "get_data_from_proto", "get_meta_from_proto", "getenv",
        "getenv_as_bool", "get_request_path", "grpc_datadef_to_array", "json_to_feedback", "json_to_seldon_message",
        "json_to_seldon_messages", "json_to_seldon_model_metadata", "seldon_message_to_json", "seldon_messages_to_json",
    ),
    "seldon_core.version": ("__version__",),
    "seldon_core.wrapper": (
        "get_rest_microservice", "get_metrics_microservice", "get_grpc_server", "SeldonModelGRPC", "METRICS_ENDPOINT",
    ),
}  # fmt: skip

# Further names that components use from modules that they import with a star.
IMPORTED_WITH_A_STAR = {
    "seldon_core.user_model": (
        "np", "json", "logging", "os", "inspect", "logger", "Dict", "Iterable", "List", "Tuple", "Union",
        "SeldonMicroserviceException", "SeldonMetrics", "validate_metrics",
    ),
    "seldon_core.utils": (
        "np", "json", "logging", "os", "sys", "base64", "logger", "Dict", "Iterable", "List", "Optional", "Tuple",
        "Union", "SeldonComponent", "SeldonMicroserviceException", "client_class_names", "client_custom_tags",
        "client_feature_names", "prediction_pb2", "json_format", "any_pb2", "ListValue", "MessageToDict", "ParseDict",
    ),
}  # fmt: skip


def _run(program: str, cwd: Path, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, cwd=cwd, env={**os.environ, **environment},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.parametrize("module", IMPORTED)
def test_every_name_that_components_import_exists(module: str) -> None:
    found = importlib.import_module(module)

    assert [name for name in IMPORTED[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", IMPORTED_WITH_A_STAR)
def test_a_star_import_includes_the_names_that_seldon_core_imports(module: str) -> None:
    found: dict[str, object] = {}
    exec(f"from {module} import *", found)

    assert [name for name in (*IMPORTED[module], *IMPORTED_WITH_A_STAR[module]) if name not in found] == []


def test_the_shims_version_is_that_of_seldon_core() -> None:
    assert seldon_core.__version__ == "1.17.1"


@pytest.mark.parametrize("name", ["seldon_methods", "batch_processor", "gunicorn_utils", "api_tester", "nonsense"])
def test_importing_an_unsupported_module_suggests_installing_seldon_core(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install seldon-core") as caught:
        importlib.import_module(f"seldon_core.{name}")

    assert caught.value.name == f"seldon_core.{name}"


@pytest.mark.parametrize(
    ("module", "name"),
    [("utils", "setup_tracing"), ("microservice", "main"), ("seldon_client", "rest_predict_gateway")],
)
def test_importing_an_unsupported_name_suggests_installing_seldon_core(module: str, name: str) -> None:
    found = importlib.import_module(f"seldon_core.{module}")

    with pytest.raises(ImportError, match="pip install seldon-core"):
        getattr(found, name)
    assert not hasattr(found, "no_name_of_anybody_s")


def test_tf_present_is_true_only_if_tensorflow_has_make_ndarray(monkeypatch: pytest.MonkeyPatch) -> None:
    from seldon_core import imports_helper

    monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))  # a folder of that name
    folder = imports_helper._TF_PRESENT
    monkeypatch.setattr(sys.modules["tensorflow"], "make_ndarray", len, raising=False)

    assert (folder, imports_helper._TF_PRESENT) == (False, True)
    assert not hasattr(imports_helper, "_GCS_PRESENT")


def test_missing_modules_with_a_similar_name_are_not_found() -> None:
    assert importlib.util.find_spec("seldon_core_extras") is None


@pytest.mark.slow
def test_importing_seldon_core_imports_no_heavy_packages(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.append({str(FOLDER)!r})
import seldon_core, seldon_core.metrics, seldon_core.env_utils
from seldon_core.flask_utils import SeldonMicroserviceException
import seldon_core.imports_helper
print([name for name in ("numpy", "google.protobuf", "flask", "grpc", "tensorflow") if name in sys.modules])
from seldon_core.user_model import SeldonComponent
print([name for name in ("google.protobuf", "flask", "grpc", "tensorflow") if name in sys.modules])
"""

    assert _run(program, tmp_path) == "[]\n[]"


@pytest.mark.slow
def test_running_the_shims_package_prints_its_folder_for_pythonpath(tmp_path: Path) -> None:
    output = _run("import runpy; runpy.run_module('penstock.server.seldon.importable', run_name='__main__')", tmp_path)

    assert output == str(FOLDER)
    assert _run("import seldon_core; print(seldon_core.__file__)", tmp_path, PYTHONPATH=output).startswith(output)


def test_an_installed_seldon_core_is_used_instead_of_the_shim(tmp_path: Path) -> None:
    site = tmp_path / "site"
    package = site / "seldon_core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '1.18.2'")
    (package / "flask_utils.py").write_text("class SeldonMicroserviceException(Exception): status_code = 400")
    (package / "user_model.py").write_text(
        "from seldon_core.flask_utils import SeldonMicroserviceException\n"
        "class SeldonNotImplementedError(SeldonMicroserviceException): pass\n"
        "class SeldonComponent: own = True\n"
        "class SeldonResponse: pass\n"
    )
    program = """
from penstock.server.seldon.inside import seldon_core_classes
import seldon_core
print(seldon_core.__version__, seldon_core_classes.SeldonComponent.own)
"""

    assert _run(program, tmp_path, PYTHONPATH=str(site)) == "1.18.2 True"


@pytest.mark.slow
def test_the_shim_works_in_a_process_where_penstock_is_not_importable(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.append({str(FOLDER)!r})
sys.modules["penstock.server"] = None  # as if it were not installed
try:
    import penstock.server
except ImportError:
    del sys.modules["penstock.server"]
class Absent:
    tried = False
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "penstock" and not cls.tried:
            cls.tried = True
            raise ModuleNotFoundError(name)
for name in [name for name in sys.modules if name.partition(".")[0] == "penstock"]:
    del sys.modules[name]
sys.meta_path.insert(0, Absent)
from seldon_core.utils import json_to_seldon_message, get_data_from_proto
print(get_data_from_proto(json_to_seldon_message({{"data": {{"ndarray": [[1, 2]]}}}})).tolist(), Absent.tried)
"""

    assert _run(program, tmp_path) == "[[1.0, 2.0]] True"
