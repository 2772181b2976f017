# ruff: noqa: E501 - each message is one line
from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from penstock.server.cortex.api import Tracker
from penstock.server.cortex.project import Project, read_project
from penstock.server.cortex.yaml_mapping import alternatives

NEW = """\
- kind: deployment
  name: iris

- kind: api
  name: classifier
  onnx:
    model: s3://bucket/iris.onnx
    request_handler: handler.py
"""
OLD = """\
- kind: deployment
  name: iris

- kind: api
  name: classifier
  model: s3://bucket/iris.onnx
  request_handler: handler.py
"""
COMPUTE = {
    "min_replicas": 1, "max_replicas": 100, "init_replicas": 1, "target_cpu_utilization": 80, "cpu": "200m", "gpu": 0,
    "mem": None,
}  # fmt: skip


def read(folder: Path, text: str) -> Project:
    (folder / "cortex.yaml").write_text(dedent(text), "utf-8")
    return read_project(folder)


def finding_texts(project: Project) -> list[str]:
    """Give the findings without the folder."""
    return [str(finding).replace(f"{project.folder}/", "") for finding in project.findings]


class TestSettings:
    def test_an_api_of_cortex_0_10_is_read_with_all_its_settings(self, tmp_path: Path) -> None:
        project = read(
            tmp_path,
            """
            - {kind: deployment, name: d}
            - kind: api
              name: a
              endpoint: my/place
              tensorflow:
                model: s3://b/k
                request_handler: handlers/h.py
                signature_key: predict
                python_path: lib/
                metadata: {labels: [x, z], rate: 1e-3, deep: {ok: true}}
              tracker: {key: label, model_type: classification}
              compute: {min_replicas: 2, max_replicas: 5, cpu: 0.5, mem: 2Gi, gpu: 1}
            """,
        )

        (api,) = project.apis
        assert finding_texts(project) == []
        assert (project.deployment, api.deployment, api.name, api.endpoint) == ("d", "d", "a", "/my/place")
        assert (api.kind, api.model, api.handler, api.python_path) == ("tensorflow", "s3://b/k", "handlers/h.py", "lib")
        assert (api.signature_key, api.generation, api.line) == ("predict", "0.10", 3)
        assert api.metadata == {"labels": ["x", "z"], "rate": 0.001, "deep": {"ok": True}}
        assert api.tracker == Tracker("classification", "label")
        assert api.compute == COMPUTE | {
            "min_replicas": 2, "max_replicas": 5, "init_replicas": 2, "cpu": "0.5", "gpu": 1, "mem": "2Gi",
        }  # fmt: skip
        assert api.lines == {"model": 7, "request_handler": 8, "python_path": 10, "signature_key": 9, "compute": 13}

    def test_an_api_with_only_required_settings_has_the_defaults(self, tmp_path: Path) -> None:
        (api,) = read(tmp_path, NEW).apis

        assert (api.endpoint, api.kind, api.metadata, api.tracker) == ("/iris/classifier", "onnx", {}, None)
        assert api.compute == COMPUTE
        assert api.settings == {"kind": "onnx", "handler": "handler.py", "relaxed_shapes": False, "tracker": None}

    @pytest.mark.parametrize(
        ("model", "more", "kind"),
        [
            ("s3://b/m.onnx", "", "onnx"),
            ("s3://b/m.zip", "", "tensorflow"),
            ("s3://b/m", "", "tensorflow"),
            ("s3://b/m", "model_format: onnx", "onnx"),
            ("s3://b/m.onnx", "model_format: tensorflow", "tensorflow"),
        ],
    )
    def test_the_model_format_of_cortex_0_9_is_configured_or_follows_from_the_file_name(
        self, model: str, more: str, kind: str, tmp_path: Path
    ) -> None:
        (api,) = read(tmp_path, OLD.replace("s3://bucket/iris.onnx", model) + f"  {more}\n").apis

        assert (api.kind, api.generation, api.handler) == (kind, "0.9", "handler.py")

    def test_the_signature_key_of_cortex_0_9_is_read_from_tf_signature_key(self, tmp_path: Path) -> None:
        (api,) = read(tmp_path, OLD.replace(".onnx", "") + "  tf_signature_key: serve\n").apis

        assert api.signature_key == "serve"

    def test_a_project_can_be_read_by_the_path_of_its_file(self, tmp_path: Path) -> None:
        read(tmp_path, NEW)

        assert read_project(tmp_path / "cortex.yaml") == read_project(tmp_path)

    def test_the_penstock_setting_relaxed_shapes_is_read(self, tmp_path: Path) -> None:
        (api,) = read(tmp_path, NEW + "    relaxed_shapes: true\n").apis

        assert api.settings["relaxed_shapes"] is True

    def test_a_null_optional_setting_is_treated_as_absent(self, tmp_path: Path) -> None:
        project = read(tmp_path, NEW + "    metadata: null\n  tracker:\n  compute:\n    mem: null\n")

        assert finding_texts(project) == []
        assert project.apis[0].compute == COMPUTE

    def test_yaml_anchors_and_merges_are_resolved(self, tmp_path: Path) -> None:
        text = """
            - {kind: deployment, name: d}
            - kind: api
              name: a
              onnx: &same {model: m.onnx, metadata: {x: 1}}
            - kind: api
              name: b
              onnx: {<<: *same, metadata: {x: 2}}
            """

        assert [(api.model, api.metadata["x"]) for api in read(tmp_path, text).apis] == [("m.onnx", 1), ("m.onnx", 2)]


MISTAKES = [
    ("", 1, "cortex YAML configuration files must contain a list of maps"),
    ("kind: deployment", 1, "cortex YAML configuration files must contain a list of maps"),
    ("- kind: deployment\n  name: d\n- x\n", 3, "cortex YAML configuration files must contain a list of maps"),
    ("- [", 1, "invalid yaml: while parsing a flow node, expected the node content, but found '<stream end>'"),
    ("- {kind: deployment, name: d, 5: x}", 1, "non string key found: 5"),
    ("- kind: api\n  name: a\n  model: m.onnx\n", 1, "cortex.yaml must define a deployment resource"),
    ("- {kind: deployment, name: d}\n- {kind: aip, name: x}", 2, "resource: x: kind: unknown kind \"aip\"; did you mean 'api'?"),
    ("- {kind: deployment, name: d}\n- {name: x}", 2, "resource: x: kind: must be defined"),
    ("- {kind: deployment}", 1, "deployment at index 0: name: must be defined"),
    ("- {kind: deployment, name: 5}", 1, "deployment at index 0: name: 5: invalid type (expected string)"),
    ("- {kind: deployment, name: d}\n- {kind: deployment, name: e}", 2, "deployment: e: deployment resource may only be defined once (also in line 1)"),
    (
        "- {kind: deployment, name: My_App}", 1,
        'deployment: My_App: name: "My_App" must contain only lower case letters, numbers, and dashes, start with a letter, and cannot end with a dash',
    ),
    (f"- {{kind: deployment, name: {'a' * 64}}}", 1, f'deployment: {"a" * 64}: name: "{"a" * 64}" must be no more than 63 characters'),
]  # fmt: skip


class TestMistakes:
    @pytest.mark.parametrize(("text", "line", "message"), MISTAKES)
    def test_a_mistake_in_the_file_is_reported_with_its_line(
        self, text: str, line: int, message: str, tmp_path: Path
    ) -> None:
        assert f"cortex.yaml:{line}: {message}" in finding_texts(read(tmp_path, text))

    @pytest.mark.parametrize(
        ("more", "line", "message"),
        [
            ("    metadta: {}\n", 9, "onnx: key \"metadta\" is not supported; did you mean 'metadata'?"),
            ("  signature_key: x\n", 9, 'key "signature_key" is not supported'),
            ("    metadata: [1]\n", 9, "onnx: metadata: [1]: invalid type (expected map)"),
            ("    metadata: {1: a}\n", 9, None),
            ("    python_path: ''\n", 9, "onnx: python_path: cannot be empty"),
            ("    relaxed_shapes: 1\n", 9, "onnx: relaxed_shapes: 1: invalid type (expected boolean)"),
            ("  endpoint: /a b\n", 9, "endpoint: \"/a b\" must consist of lower case alphanumeric characters, '/', '-', '_', or '.'"),
            ("  endpoint: a//b\n", 9, 'endpoint: "a//b" cannot contain adjacent slashes'),
            ("  endpoint: /\n", 9, 'endpoint: "/" is not allowed (a path must be specified)'),
            ("  tracker: {model_type: clasification}\n", 9, 'tracker: model_type: invalid value (got "clasification", must be "classification" or "regression"); did you mean \'classification\'?'),
            ("  tracker: x\n", 9, 'tracker: "x": invalid type (expected map)'),
            ("  compute:\n    min_replicas: 0\n", 10, "compute: min_replicas: 0 must be greater than 0"),
            ("  compute:\n    gpu: -1\n", 10, "compute: gpu: -1 must be greater than or equal to 0"),
            ("  compute:\n    gpu: one\n", 10, 'compute: gpu: "one": invalid type (expected integer)'),
            ("  compute: {target_cpu_utilization: 101}\n", 9, "compute: target_cpu_utilization: 101 must be less than or equal to 100"),
            ("  compute: {cpu: -1}\n", 9, 'compute: cpu: "-1" must be greater than or equal to 0'),
            ("  compute: {mem: 2GB}\n", 9, "compute: mem: \"2GB\": quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"),
            ("  compute: {cpu: [1]}\n", 9, "compute: cpu: [1]: invalid type (expected string)"),
            ("  compute: {min_replicas: 3, max_replicas: 2}\n", 9, "compute: min_replicas: min_replicas cannot be greater than max_replicas (3 > 2)"),
            ("  compute: {init_replicas: 3, max_replicas: 2}\n", 9, "compute: init_replicas: init_replicas cannot be greater than max_replicas (3 > 2)"),
            ("  compute: {init_replicas: 1, min_replicas: 2}\n", 9, "compute: init_replicas: init_replicas cannot be less than min_replicas (1 < 2)"),
            ("  tensorflow: {model: x}\n", 9, 'tensorflow: specified ("tensorflow" and "onnx"), please specify only one model format ("tensorflow", "onnx", or "predictor")'),
            ("  model: x\n", 9, 'model: "model" is of Cortex 0.9 and "onnx" of 0.10: an API is written in one of the two'),
        ],
    )  # fmt: skip
    def test_a_mistake_in_an_api_is_reported_with_its_line(
        self, more: str, line: int, message: str | None, tmp_path: Path
    ) -> None:
        expected = f"api: classifier: {message}" if message is not None else "non string key found: 1"

        assert finding_texts(read(tmp_path, NEW + more)) == [f"cortex.yaml:{line}: {expected}"]

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ("", 'please specify a model format ("tensorflow", "onnx", or "predictor")'),
            ("  onnx: {}\n", "onnx: model: must be defined"),
            ("  onnx: {model: null}\n", "onnx: model: cannot be null"),
            ("  onnx: {model: 5}\n", "onnx: model: 5: invalid type (expected string)"),
            ("  onnx: {model: ''}\n", "onnx: model: cannot be empty"),
            ("  onnx: m.onnx\n", 'onnx: "m.onnx": invalid type (expected map)'),
            ("  onnx: {model: m.zip}\n", "onnx: model: zip files are not supported for ONNX models"),
            ("  tensorflow: {model: m, relaxed_shapes: true}\n", 'tensorflow: key "relaxed_shapes" is not supported'),
            ("  predictor: {path: p.py}\n", 'predictor: predictor APIs are not supported: write the model as onnx or tensorflow, with a request_handler, or migrate the predictor as in docs/cortex.md, "Later versions"'),
            ("  model: m.onnx\n  model_format: onx\n", "model_format: invalid value (got \"onx\", must be \"tensorflow\" or \"onnx\"); did you mean 'onnx'?"),
            ("  model: m.zip\n  model_format: onnx\n", "model: zip files are not supported for ONNX models"),
            ("  model: m.onnx\n  tf_signature_key: x\n", "tf_signature_key: is for tensorflow models, and this one is onnx"),
            ("  model: m\n  relaxed_shapes: yes\n", "relaxed_shapes: is for onnx models, and this one is tensorflow"),
            ("  request_handler: h.py\n", "model: must be defined"),
        ],
    )  # fmt: skip
    def test_a_mistake_in_the_model_of_an_api_is_reported(self, more: str, message: str, tmp_path: Path) -> None:
        project = read(tmp_path, f"- {{kind: deployment, name: d}}\n- kind: api\n  name: a\n{more}")

        assert [text.partition(": ")[2] for text in finding_texts(project)] == [f"api: a: {message}"]

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("- {kind: deployment, name: d}\n- kind: api\n  name: a\n  predictor: {type: onnx, path: p.py, model: m.onnx}", 2),
            ("- name: a\n  predictor: {type: tensorflow, path: p.py}\n  autoscaling: {min_replicas: 1}", 1),
            ("- name: a\n  kind: RealtimeAPI\n  predictor: {type: python, path: p.py}", 1),
            ("- name: a\n  kind: BatchAPI\n  handler: {type: python, path: p.py}", 1),
            ("- name: a\n  kind: AsyncAPI\n  pod: {containers: []}", 1),
            ("- name: a\n  kind: TrafficSplitter\n  apis: []", 1),
        ],
    )  # fmt: skip
    def test_an_api_of_a_later_cortex_version_is_reported_by_that_error_alone(
        self, text: str, line: int, tmp_path: Path
    ) -> None:
        (message,) = finding_texts(read(tmp_path, text))

        assert message.startswith(f"cortex.yaml:{line}: APIs of Cortex 0.12 or later are not supported")
        assert message.endswith('docs/cortex.md, "Later versions", describes how to migrate them')

    def test_all_mistakes_are_reported_together_in_the_order_of_the_file(self, tmp_path: Path) -> None:
        project = read(tmp_path, NEW + "    x: 1\n  y: 2\n  compute: {cpu: z}\n- kind: api\n  name: B\n  onnx: {}\n")

        assert [finding.line for finding in project.mistakes] == [9, 10, 11, 13, 14]

    def test_an_api_name_that_is_used_twice_is_reported(self, tmp_path: Path) -> None:
        project = read(tmp_path, NEW + "- kind: api\n  name: classifier\n  onnx: {model: m}\n")

        assert finding_texts(project) == [
            'cortex.yaml:10: api: classifier: name: name "classifier" must be unique across apis (also in line 4)'
        ]

    def test_an_endpoint_that_is_used_twice_is_reported(self, tmp_path: Path) -> None:
        more = "- kind: api\n  name: b\n  endpoint: iris/classifier/\n  onnx: {model: m}\n"

        (text,) = finding_texts(read(tmp_path, NEW + more))

        message = 'endpoint "/iris/classifier" must be unique across apis: classifier (line 4) has the same one'
        assert text == f"cortex.yaml:11: api: b: endpoint: {message}"

    def test_a_finding_names_its_api(self, tmp_path: Path) -> None:
        (finding,) = read(tmp_path, NEW + "  x: 1\n").findings

        assert finding.model == "classifier"


class TestWarnings:
    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ("  tracker: {key: x}\n", "tracker: model_type is missing: predictions are not counted"),
            ("  endpoint: /v2/models\n", "endpoint: hides what this server itself has at /v2/models"),
            ("  endpoint: healthz\n", "endpoint: hides what this server itself has at /healthz"),
            ("  name: classifier\n", "name: is given twice; the last value applies"),
        ],
    )
    def test_a_suspicious_setting_is_a_warning_and_the_api_is_read(
        self, more: str, message: str, tmp_path: Path
    ) -> None:
        project = read(tmp_path, NEW + more)

        assert finding_texts(project) == [f"cortex.yaml:9: warning: api: classifier: {message}"]
        assert [api.name for api in project.apis] == ["classifier"]

    def test_tags_of_cortex_0_9_are_ignored_with_a_warning(self, tmp_path: Path) -> None:
        project = read(tmp_path, OLD + "  tags: {team: x}\n")

        assert [finding.is_mistake for finding in project.findings] == [False]


def test_the_example_in_the_docs_is_read_without_findings(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "cortex.md").read_text("utf-8")

    project = read(tmp_path, page.partition("```yaml\n")[2].partition("```")[0])

    assert finding_texts(project) == []
    assert [(api.name, api.generation, api.kind) for api in project.apis] == [
        ("classifier", "0.10", "onnx"), ("older", "0.9", "tensorflow"),
    ]  # fmt: skip


class TestProjectFile:
    def test_a_missing_file_is_reported(self, tmp_path: Path) -> None:
        assert finding_texts(read_project(tmp_path)) == ["cortex.yaml: cannot be read: No such file or directory"]

    def test_a_file_that_is_not_utf8_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "cortex.yaml").write_bytes(b"\xff")

        assert finding_texts(read_project(tmp_path)) == ["cortex.yaml: is not UTF-8 (byte 0)"]

    def test_a_file_that_is_too_large_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "cortex.yaml").write_bytes(b"#" * (2 << 20))

        assert finding_texts(read_project(tmp_path)) == ["cortex.yaml: has more than 262144 bytes"]


@pytest.mark.parametrize(
    ("words", "text"), [(["a"], '"a"'), (["a", "b"], '"a" or "b"'), (["a", "b", "c"], '"a", "b", or "c"')]
)
def test_alternatives_are_listed_as_cortex_listed_them(words: list[str], text: str) -> None:
    assert alternatives(words) == text
