"""The specification's cases for ONNX models, byte for byte, against a live server with a project on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.onnx_models import FLOAT
from tests.clients.models import INT32
from tests.cortex.projects import (
    FLOWER,
    HTML_TYPE,
    JSON,
    JSON_TYPE,
    PROBABILITIES,
    SAMPLE,
    TEXTS,
    Answer,
    Project,
    ask,
    local_probabilities,
    post,
    write_identities,
    write_iris,
    write_not,
    write_picky,
)
from tests.live import live_server

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples" / "cortex"
FLOWER_TENSOR = {"name": "input", "datatype": "FP32", "shape": [1, 4], "data": FLOWER}
SHAPE = 'prediction failed: error: key "input": failed to convert to numpy array: '

FORMS = """
import numpy as np

flower = [5.2, 3.6, 1.4, 0.3]
forms = {
    "float64": np.array(flower),
    "float64 of a row": np.array([flower]),
    "ints": np.array([5, 3, 1, 0]),
    "nested": [flower],
    "column": [[length] for length in flower],
    "tuple": tuple(flower),
    "texts": ["5.2", "3.6", "1.4", "0.3"],
    "by name": {"input": flower, "more": 1},
    "array of texts": np.array(["5.2", "3.6", "1.4", "0.3"]),
    "array of bools": np.array([True, False, True, True]),
    "two rows": [flower, flower],
    "nothing": None,
    "named nothing": {"input": None},
}


def pre_inference(sample, signature, metadata):
    return forms[sample]
"""

RESULTS = """
import datetime
import numpy as np

asked = None
results = {
    "none": None,
    "tuple": (1, 2),
    "set": {1},
    "date": datetime.date(2019, 1, 2),
    "complex": 1 + 2j,
    "text": "a\\u00e9",
    "integer": 7,
    "float32": np.float32(0.1),
    "array": np.array([[1, 2], [3, 4]]),
    "keys": {"b": 1, "a": [float("nan"), float("inf")]},
    "bytes": b"abc",
    "object": object(),
    "mixed keys": {"a": 1, 2: 3},
    "numpy keys": {np.int64(1): 2},
}


def pre_inference(sample, signature, metadata):
    global asked
    asked = sample
    return [5.2, 3.6, 1.4, 0.3]


def post_inference(prediction, signature, metadata):
    return results[asked]
"""

SHOWS_SIGNATURE = """
calls = 0


def pre_inference(sample, signature, metadata):
    global calls
    calls += 1
    metadata["calls"] = metadata.get("calls", 0) + 1
    seen = [(node.name, node.shape, node.type) for node in signature]
    if sample == "raise":
        raise KeyError("gone")
    pre_inference.seen = [type(signature).__name__, seen, sample]
    return {signature[0].name: [5.2, 3.6, 1.4, 0.3]}


def post_inference(prediction, signature, metadata):
    if pre_inference.seen[2] == "late":
        raise ValueError("too late")
    return {
        "pre": pre_inference.seen,
        "post": [type(signature).__name__, [(node.name, node.shape, node.type) for node in signature]],
        "prediction": [type(prediction).__name__, [type(each).__name__ for each in prediction]],
        "metadata": metadata,
    }
"""

EARLY = """
def pre_inference(sample, metadata):
    return sample
"""

MIXED = """
def pre_inference(sample, metadata):
    return {metadata[0].name: sample}


def post_inference(prediction, signature, metadata):
    return [signature[0].name, metadata]
"""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    project = Project(tmp_path_factory.mktemp("cortex"))
    fixed = write_iris(project.model("fixed.onnx"))
    free = write_iris(project.model("free.onnx"), None)
    named = write_iris(project.model("named.onnx"), "N")
    project.api("classifier", fixed, (EXAMPLES / "onnx-0.10" / "handler.py").read_text())
    project.api("fixed", fixed)
    project.api("free", free)
    project.api("named", named)
    project.api("forms", free, FORMS)
    project.api("forms-fixed", fixed, FORMS)
    project.api("relaxed", free, FORMS, _relaxed_shapes=True)
    project.api("results", named, RESULTS)
    project.api("seen", fixed, SHOWS_SIGNATURE, _metadata={"labels": ["a"], "depth": 2})
    project.api("early", named, EARLY)
    project.api("mixed", free, MIXED)
    project.api("maps", write_iris(project.model("maps.onnx"), mapped=True))
    several: dict[str, tuple[int, list[int | str | None]]] = {
        "a": (FLOAT, [1, 2]),
        "c": (FLOAT, ["N", 2]),
        "i": (INT32, [2]),
    }
    project.api("several", write_identities(project.model("several.onnx"), several))
    project.api("texts", write_identities(project.model("texts.onnx"), {"x": (TEXTS, [2])}))
    project.api("bools", write_not(project.model("bools.onnx")))
    project.api("picky", write_picky(project.model("picky.onnx")))
    project.api("elsewhere", named, endpoint="/some/where/else")
    with live_server(project.folder, dialect="cortex") as live:
        yield live.http_port


@pytest.fixture(scope="module")
def probabilities(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The probabilities of FLOWER in the answers."""
    return local_probabilities(tmp_path_factory.mktemp("probabilities"))


@pytest.fixture(scope="module")
def expected_body(probabilities: list[float]) -> bytes:
    """The answer for a flower without hooks."""
    return b"[[0],[[" + ",".join(map(repr, probabilities)).encode() + b"]]]\n"


def predict(port: int, api: str, value: Any) -> Answer:
    return post(port, f"/iris/{api}", value)


def failed(answer: Answer) -> str:
    """Give the text of a failed prediction."""
    assert (answer.line, answer.headers["content-type"]) == ("HTTP/1.1 406 NOT ACCEPTABLE", HTML_TYPE)
    return answer.body.decode()


@pytest.mark.parametrize("api", ["named", "early"])
@pytest.mark.parametrize("names", [["nix"], ["label", "nix"]])
def test_an_unknown_output_is_rejected_over_v2(port: int, api: str, names: list[str]) -> None:
    body = {"inputs": [FLOWER_TENSOR], "outputs": [{"name": name} for name in names]}
    answer = ask(port, "POST", f"/v2/models/{api}/infer", json.dumps(body).encode(), JSON, check=False)

    assert "400" in answer.line
    text = f"[request id: <id_unknown>] unexpected inference output 'nix' for model '{api}'"
    assert json.loads(answer.body) == {"error": text}


class TestSeedOfCortex010:
    def test_c1_a_sample_is_answered_with_its_label(self, port: int) -> None:
        assert predict(port, "classifier", SAMPLE).triple == (200, b'"iris-setosa"\n', JSON_TYPE)

    def test_c3_without_a_json_content_type_the_sample_is_none(self, port: int) -> None:
        answer = ask(port, "POST", "/iris/classifier", json.dumps(SAMPLE).encode())

        assert failed(answer) == (
            "prediction failed: error: handler.py: pre_inference request handler: 'NoneType' object is not "
            "subscriptable: runtime exception"
        )

    @pytest.mark.parametrize("body", [b"{bad", b""])
    def test_c4_a_body_that_is_not_json_is_malformed(self, port: int, body: bytes) -> None:
        answer = ask(port, "POST", "/iris/classifier", body, JSON)

        assert answer.triple == (400, b"malformed json", HTML_TYPE)
        assert answer.line == "HTTP/1.1 400 BAD REQUEST"

    def test_c5_an_exception_of_a_hook_is_in_the_error(self, port: int) -> None:
        assert failed(predict(port, "classifier", {"sepal_length": 5.2})) == (
            "prediction failed: error: handler.py: pre_inference request handler: 'sepal_width': runtime exception"
        )


class TestSeedOfCortex09:
    def test_c2_a_sample_is_answered_with_its_class_and_probabilities(
        self, tmp_path: Path, probabilities: list[float]
    ) -> None:
        project = Project(tmp_path)
        write_iris(project.model("m.onnx"), swapped=True)
        handler = (EXAMPLES / "onnx-0.9" / "handler.py").read_text()
        project.api("classifier", "models/m.onnx", handler, old=True)
        with live_server(project.folder, dialect="cortex") as live:
            answer = post(live.http_port, "/iris/classifier", SAMPLE)

        assert answer.status == 200
        assert answer.json["class_index"] == 0
        assert answer.json["class_label"] == "iris-setosa"
        assert answer.json["probabilities"] == pytest.approx(PROBABILITIES, abs=1e-6)
        numbers = ",".join(map(repr, probabilities))
        assert answer.body.decode() == (
            f'{{"class_index":0,"class_label":"iris-setosa","probabilities":[{numbers}]}}\n'
        )


class TestConversion:
    @pytest.mark.parametrize("api", ["fixed", "free", "named"])
    @pytest.mark.parametrize("value", [{"input": FLOWER}, FLOWER, [FLOWER], {"input": [FLOWER], "more": 1}])
    def test_c7_lists_in_any_form_are_converted_to_the_input(
        self, port: int, expected_body: bytes, api: str, value: Any
    ) -> None:
        assert predict(port, api, value).triple == (200, expected_body, JSON_TYPE)

    @pytest.mark.parametrize(("value", "size"), [([1, 2], 2), (None, 1), ([FLOWER, FLOWER], 8)])
    def test_c8_c10_a_wrong_number_of_values_is_rejected(self, port: int, value: Any, size: int) -> None:
        for api in ("fixed", "free", "named"):
            assert failed(predict(port, api, value)) == f"{SHAPE}cannot reshape array of size {size} into shape (1,4)"

    @pytest.mark.parametrize("value", [{"inputs": [1, 2, 3, 4]}, {}, {"input": None}])
    def test_c9_a_missing_key_is_in_the_error(self, port: int, value: Any) -> None:
        assert failed(predict(port, "fixed", value)) == 'prediction failed: error: missing key "input"'

    @pytest.mark.parametrize("api", ["forms", "forms-fixed"])
    @pytest.mark.parametrize(
        "form", ["float64", "float64 of a row", "nested", "column", "tuple", "texts", "by name"]
    )  # fmt: skip
    def test_c12_the_result_of_pre_inference_can_have_many_forms(
        self, port: int, expected_body: bytes, api: str, form: str
    ) -> None:
        assert predict(port, api, form).triple == (200, expected_body, JSON_TYPE)

    def test_c12_an_array_of_integers_is_cast(self, port: int) -> None:
        assert predict(port, "forms", "ints").json[0] == [0]

    @pytest.mark.parametrize(("form", "found"), [("array of texts", "<U3"), ("array of bools", "bool")])
    def test_c13_arrays_of_other_kinds_are_rejected(self, port: int, form: str, found: str) -> None:
        assert failed(predict(port, "forms", form)) == f"{SHAPE}expected dtype 'float32' but found '{found}'"

    @pytest.mark.parametrize("form", ["nothing", "named nothing", "two rows"])
    def test_a_hook_result_that_does_not_fit_fails_only_its_own_request(self, port: int, form: str) -> None:
        assert failed(predict(port, "forms", form)).startswith("prediction failed: error: ")
        assert predict(port, "forms", "tuple").status == 200

    @pytest.mark.parametrize("value", [[1, 2], "a", None, 3])
    def test_c17_a_model_with_several_inputs_requires_a_dictionary(self, port: int, value: Any) -> None:
        assert failed(predict(port, "several", value)) == (
            'prediction failed: error: expected sample to be a dictionary with keys "a", "c", "i"'
        )

    def test_several_inputs_are_cast_and_the_failing_one_is_in_the_error(self, port: int) -> None:
        value = {"a": [1, "2.5"], "c": [[3, True]], "i": [6.9, "7"]}
        assert predict(port, "several", value).json == [[[1.0, 2.5]], [[3.0, 1.0]], [6, 7]]
        assert (
            failed(predict(port, "several", {"a": [1, 2], "i": [1, 2]})) == 'prediction failed: error: missing key "c"'
        )
        assert failed(predict(port, "several", value | {"c": [1]})) == (
            'prediction failed: error: key "c": failed to convert to numpy array: cannot reshape array of size 1 into '
            "shape (1,2)"
        )

    def test_the_error_for_a_single_input_given_by_name_does_not_name_it(self, port: int) -> None:
        assert failed(predict(port, "fixed", {"input": [1]})) == (
            "prediction failed: error: failed to convert to numpy array: cannot reshape array of size 1 into shape "
            "(1,4)"
        )

    def test_c19_text_inputs_are_answered_as_text(self, port: int) -> None:
        answer = ask(port, "POST", "/iris/texts", '["x","ñ"]'.encode(), JSON)

        assert answer.triple == (200, b'[["x","\\u00f1"]]\n', JSON_TYPE)

    def test_c20_numbers_are_converted_to_booleans(self, port: int) -> None:
        assert predict(port, "bools", [True, 0]).triple == (200, b"[[false,true]]\n", JSON_TYPE)

    def test_c21_map_outputs_are_answered_with_string_keys(self, port: int, probabilities: list[float]) -> None:
        entries = ",".join(f'"{number}":{probability!r}' for number, probability in enumerate(probabilities))

        assert predict(port, "maps", FLOWER).triple == (200, f"[[0],[{{{entries}}}]]\n".encode(), JSON_TYPE)

    def test_relaxed_shapes_accept_several_rows(self, port: int) -> None:
        assert predict(port, "relaxed", "two rows").json[0] == [0, 0]

    def test_a_sample_on_which_the_model_fails_is_a_failed_prediction(self, port: int) -> None:
        assert predict(port, "picky", [1]).json == [[[8]]]
        assert failed(predict(port, "picky", [70])).startswith("prediction failed: ")
        assert predict(port, "picky", [2]).json == [[[9]]]


class TestAnswers:
    @pytest.mark.parametrize(
        ("name", "body"),
        [
            ("none", b"null\n"), ("tuple", b"[1,2]\n"), ("set", b"[1]\n"), ("date", b'"2019-01-02"\n'),
            ("complex", b"[1.0,2.0]\n"), ("text", b'"a\\u00e9"\n'), ("integer", b"7\n"),
            ("float32", b"0.10000000149011612\n"), ("array", b"[[1,2],[3,4]]\n"),
            ("keys", b'{"a":[NaN,Infinity],"b":1}\n'),
        ],
    )  # fmt: skip
    def test_c23_a_hook_can_return_any_value_that_json_can_represent(self, port: int, name: str, body: bytes) -> None:
        assert predict(port, "results", name).triple == (200, body, JSON_TYPE)

    @pytest.mark.parametrize(("name", "named"), [("bytes", "bytes"), ("object", "object")])
    def test_c24_the_type_of_a_result_that_json_cannot_represent_is_in_the_error(
        self, port: int, name: str, named: str
    ) -> None:
        answer = predict(port, "results", name)

        assert answer.line == "HTTP/1.1 500 INTERNAL SERVER ERROR"
        assert named in answer.json["error"]

    @pytest.mark.parametrize("name", ["mixed keys", "numpy keys"])
    def test_keys_that_cannot_be_sorted_or_encoded_are_an_error(self, port: int, name: str) -> None:
        answer = predict(port, "results", name)

        assert answer.status == 500
        assert list(answer.json) == ["error"]


class TestHooks:
    def test_hooks_get_the_input_and_output_descriptions_of_the_runtime(self, port: int) -> None:
        found = predict(port, "seen", [1, "two", {"three": None}]).json

        assert found["pre"] == ["list", [["input", [1, 4], "tensor(float)"]], [1, "two", {"three": None}]]
        assert found["post"] == [
            "list", [["label", [1], "tensor(int64)"], ["probabilities", [1, 3], "tensor(float)"]],
        ]  # fmt: skip
        assert found["prediction"] == ["list", ["ndarray", "ndarray"]]

    def test_metadata_comes_from_the_project_and_persists_between_calls(self, port: int) -> None:
        first, second = (predict(port, "seen", "x").json["metadata"] for _ in range(2))

        assert first["labels"] == ["a"]
        assert first["depth"] == 2
        assert second["calls"] == first["calls"] + 1

    def test_the_arguments_of_each_hook_decide_its_generation(self, port: int) -> None:
        assert predict(port, "mixed", FLOWER).json == ["label", {}]

    def test_the_error_of_a_hook_exception_names_the_hook(self, port: int) -> None:
        assert failed(predict(port, "seen", "raise")) == (
            "prediction failed: error: seen.py: pre_inference request handler: 'gone': runtime exception"
        )
        assert failed(predict(port, "seen", "late")) == (
            "prediction failed: error: seen.py: post_inference request handler: too late: runtime exception"
        )


class TestSignatures:
    @pytest.mark.parametrize(("api", "rows"), [("fixed", "1"), ("free", "null"), ("named", '"N"')])
    def test_c14_the_signature_is_served_on_its_own_page(self, port: int, api: str, rows: str) -> None:
        body = f'{{"signature":{{"input":{{"shape":[{rows},4],"type":"float32"}}}}}}\n'.encode()

        assert ask(port, "GET", f"/iris/{api}/signature").triple == (200, body, JSON_TYPE)

    def test_c15_a_get_of_the_endpoint_returns_instructions_and_the_signature(self, port: int) -> None:
        answer = ask(port, "GET", "/iris/fixed")

        assert (answer.status, answer.headers["content-type"]) == (200, JSON_TYPE)
        assert answer.body == (
            b'{"message":"make a prediction by sending a post request to this endpoint with a json sample",'
            b'"model_signature":{"input":{"shape":[1,4],"type":"float32"}}}\n'
        )

    def test_a_text_input_has_type_object_in_the_signature(self, port: int) -> None:
        assert ask(port, "GET", "/iris/texts/signature").json == {"signature": {"x": {"shape": [2], "type": "object"}}}


class TestPaths:
    def test_a_configured_endpoint_replaces_the_default_path(self, port: int, expected_body: bytes) -> None:
        assert post(port, "/some/where/else", FLOWER).triple == (200, expected_body, JSON_TYPE)
        assert ask(port, "GET", "/some/where/else/signature").status == 200
        assert post(port, "/iris/elsewhere", FLOWER).status == 500

    def test_unknown_paths_and_methods_are_answered_500(self, port: int) -> None:
        for path in ("/", "/iris/nothing", "/predict"):
            answer = post(port, path, 1)
            assert (answer.line, answer.headers["content-type"]) == ("HTTP/1.1 500 INTERNAL SERVER ERROR", JSON_TYPE)
            assert answer.body == (
                b'{"error":"404 Not Found: The requested URL was not found on the server. If you entered the URL '
                b'manually please check your spelling and try again."}\n'
            )
        assert ask(port, "PUT", "/iris/fixed").triple == (
            500, b'{"error":"405 Method Not Allowed: The method is not allowed for the requested URL."}\n', JSON_TYPE,
        )  # fmt: skip

    def test_a_single_api_is_also_served_at_predict(self, tmp_path: Path, expected_body: bytes) -> None:
        project = Project(tmp_path)
        write_iris(project.model("m.onnx"))
        project.api("classifier", "models/m.onnx")
        with live_server(project.folder, dialect="cortex") as live:
            assert post(live.http_port, "/predict", FLOWER).body == expected_body
            assert ask(live.http_port, "GET", "/predict/signature").status == 200
            assert ask(live.http_port, "GET", "/healthz").triple == (200, b'{"ok":true}\n', JSON_TYPE)
            assert ask(live.http_port, "GET", "/v2/models/classifier", check=False).status == 200
