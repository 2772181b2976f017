"""The specification's cases for TensorFlow models, against a live server with a project on disk."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cortex.projects import HTML_TYPE, JSON, JSON_TYPE, PROBABILITIES, SAMPLE, Answer, Project, ask, post
from tests.live import live_server
from tests.savedmodels import install

pytestmark = pytest.mark.slow

LABELS = ["iris-setosa", "iris-versicolor", "iris-virginica"]
IRIS = f"""
labels = {LABELS}


def post_inference(prediction, signature, metadata):
    return labels[int(prediction["class_ids"][0])]
"""
SHOWS_SIGNATURE = """
seen = None


def pre_inference(sample, metadata):
    global seen
    seen = metadata
    return {name: sample[name] for name in metadata["predict"]["inputs"]}


def post_inference(prediction, signature, metadata):
    return {"pre": seen, "post": signature, "type": type(signature).__name__, "metadata": metadata}
"""
IMAGE = """
import base64

import numpy as np


def pre_inference(sample, signature, metadata):
    (name,) = signature["serving_default"]["inputs"]
    pixels = np.frombuffer(base64.b64decode(sample["image"]), np.uint8)
    return {name: (pixels.reshape(1, 28, 28, 1) / 255).astype(np.float32)}


def post_inference(prediction, signature, metadata):
    return {"digit": int(prediction["digit"][0]), "scores": len(prediction["scores"])}
"""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, savedmodels: Path) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("cortex")
    project = Project(folder / "project")
    install(savedmodels / "iris", folder / "export" / "1523423423", triton=False)
    shutil.make_archive(str(project.model("iris")), "zip", folder / "export")
    install(savedmodels / "corrupt", project.model("export") / "deep" / "9", triton=False)
    install(savedmodels / "iris", project.model("export") / "deep" / "1523423423", triton=False)
    install(savedmodels / "iris_keys", project.model("iris_keys") / "1", triton=False)
    project.api("plain", "models/iris.zip", kind="tensorflow")
    project.api("classifier", project.model("export"), IRIS, old=True, model_format="tensorflow")
    project.api("seen", project.model("iris_keys"), SHOWS_SIGNATURE, kind="tensorflow")
    install(savedmodels / "image_fixed", project.model("image") / "1", triton=False)
    project.api("image", project.model("image"), IMAGE, kind="tensorflow", _signature_key="serving_default")
    project.api("keyed", project.model("iris_keys"), kind="tensorflow", _signature_key="classification")
    with live_server(project.folder, dialect="cortex") as live:
        yield live.http_port


def predict(port: int, api: str, value: Any) -> Answer:
    return post(port, f"/iris/{api}", value)


def failed(answer: Answer) -> str:
    """Give the text of a failed prediction."""
    assert (answer.line, answer.headers["content-type"]) == ("HTTP/1.1 406 NOT ACCEPTABLE", HTML_TYPE)
    return answer.body.decode()


class TestAnswers:
    @pytest.mark.parametrize("rows", [1, 3])
    def test_c25_outputs_are_flat_and_numbers_are_written_as_protobuf_writes_them(self, port: int, rows: int) -> None:
        sample = SAMPLE if rows == 1 else {name: [length] * rows for name, length in SAMPLE.items()}
        answer = predict(port, "plain", sample)
        found = answer.json

        assert list(found) == ["class_ids", "classes", "isbig", "logits", "probabilities"]
        assert (found["class_ids"], found["classes"]) == (["0"] * rows, ["MA=="] * rows)
        assert found["isbig"] == [True] * rows
        assert found["logits"] == pytest.approx([2.5000002, 2.0700002, -1.0000005] * rows, abs=1e-5)
        assert found["probabilities"] == pytest.approx(PROBABILITIES * rows, abs=1e-6)
        assert answer.body.startswith(b'{"class_ids":["0"')

    def test_c26_a_handler_reads_the_class_from_its_text(self, port: int) -> None:
        assert predict(port, "classifier", SAMPLE).triple == (200, b'"iris-setosa"\n', JSON_TYPE)

    def test_hooks_get_a_dictionary_of_all_signatures(self, port: int) -> None:
        found = predict(port, "seen", SAMPLE).json

        assert found["pre"] == found["post"], "metadata is the signature for a hook of 0.9"
        assert (found["type"], found["metadata"]) == ("dict", {})
        assert set(found["pre"]) >= {"predict", "serving_default", "classification"}
        signature = found["pre"]["predict"]
        assert signature["methodName"] == "tensorflow/serving/predict"
        assert signature["inputs"]["sepal_width"] == {
            "name": "sepal_width:0", "dtype": "DT_DOUBLE", "tensorShape": {"dim": [{"size": "-1"}]},
        }  # fmt: skip

    def test_the_configured_signature_key_is_used(self, port: int) -> None:
        assert set(predict(port, "keyed", SAMPLE).json) == {"classes", "scores"}


class TestFailures:
    def test_an_unknown_output_is_rejected_over_v2(self, port: int) -> None:
        tensor = {"datatype": "FP64", "shape": [1], "data": [1.0]}
        body = {"inputs": [{"name": name, **tensor} for name in SAMPLE], "outputs": [{"name": "nix"}]}
        answer = ask(port, "POST", "/v2/models/plain/infer", json.dumps(body).encode(), JSON, check=False)

        assert "unexpected inference output 'nix' for model 'plain'" in json.loads(answer.body)["error"]

    def test_c28_a_missing_key_is_in_the_error(self, port: int) -> None:
        text = failed(predict(port, "plain", {"sepal_length": [5.2]}))

        assert text in {f'prediction failed: error: missing key "{name}"' for name in list(SAMPLE)[1:]}

    @pytest.mark.parametrize("body", [b"{bad", b""])
    def test_c29_a_body_that_is_not_json_is_malformed(self, port: int, body: bytes) -> None:
        assert ask(port, "POST", "/iris/plain", body, JSON).triple == (400, b"Malformed JSON", HTML_TYPE)

    def test_the_error_for_an_unknown_key_is_the_bare_key(self, port: int) -> None:
        assert failed(predict(port, "plain", SAMPLE | {"zz": 1})) == "prediction failed: 'zz'"

    def test_the_error_for_a_value_of_the_wrong_type_has_the_expected_shape(self, port: int) -> None:
        assert failed(predict(port, "plain", SAMPLE | {"petal_width": "a"})) == (
            "prediction failed: error: key \"petal_width\": expected shape [-1]: Expected float64, got 'a' of type "
            "'str' instead."
        )

    def test_a_sample_with_inconsistent_rows_fails_only_its_own_request(self, port: int) -> None:
        sample = {name: [length] * 2 for name, length in SAMPLE.items()} | {"sepal_width": [1.0]}

        assert failed(predict(port, "plain", sample)).startswith("prediction failed: ")
        assert predict(port, "plain", SAMPLE).status == 200


class TestImages:
    def test_images_of_many_clients_share_batches_although_the_graph_fixes_one_row(self, port: int) -> None:
        images = [base64.b64encode(bytes((i * 7 + k) % 256 for k in range(784))).decode() for i in range(64)]
        alone = [predict(port, "image", {"image": image}).json for image in images[:4]]
        with ThreadPoolExecutor(32) as clients:
            answers = list(clients.map(lambda image: predict(port, "image", {"image": image}), images))
        stats = json.loads(ask(port, "GET", "/v2/models/image/stats", check=False).body)["model_stats"][0]

        assert [answer.status for answer in answers] == [200] * len(images)
        assert [answer.json for answer in answers[:4]] == alone
        assert alone[0]["scores"] == 10
        assert stats["execution_count"] < stats["inference_count"]


class TestPages:
    def test_the_signature_page_has_the_selected_signature_with_tensorflow_type_names(self, port: int) -> None:
        inputs = ",".join(f'"{name}":{{"shape":[-1],"type":"float64"}}' for name in sorted(SAMPLE))

        assert ask(port, "GET", "/iris/plain/signature").triple == (
            200, f'{{"signature":{{{inputs}}}}}\n'.encode(), JSON_TYPE,
        )  # fmt: skip


class TestFolders:
    def test_the_highest_version_below_a_folder_is_served(self, port: int) -> None:
        assert predict(port, "classifier", SAMPLE).status == 200

    def test_a_zip_archive_is_served(self, port: int) -> None:
        assert predict(port, "plain", SAMPLE).status == 200


class TestStart:
    def test_models_that_cannot_be_served_are_logged_and_the_others_are_served(
        self, tmp_path: Path, savedmodels: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        project = Project(tmp_path / "project")
        for name in ("iris", "keras", "no_variables", "corrupt"):
            install(savedmodels / name, project.model(name) / "1", triton=False)
            project.api(name.replace("_", "-"), project.model(name), kind="tensorflow")
        project.api("wrong-key", project.model("keras"), kind="tensorflow", _signature_key="nothing")
        with live_server(project.folder, dialect="cortex") as live:
            statuses = [
                predict(live.http_port, name, SAMPLE).status for name in ("iris", "keras", "corrupt", "wrong-key")
            ]

        assert statuses == [200, 503, 503, 503]
        for words in (
            "no signature 'nothing': it has 'serve', 'serving_default'", "several signatures",
            "without variables/variables.index", "Cannot parse file 'saved_model.pb'",
        ):  # fmt: skip
            assert words in caplog.text
