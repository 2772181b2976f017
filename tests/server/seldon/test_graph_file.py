"""Graph files: how manifests and small files are read, and which mistakes are reported."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from textwrap import dedent

import pytest

from penstock.server.repository.findings import MistakesError
from penstock.server.seldon.graph.graph_file import is_graph, read, read_valid
from penstock.server.seldon.graph.nodes import Deployment, MetaMode

MANIFEST = """\
apiVersion: machinelearning.seldon.io/v1
kind: SeldonDeployment
metadata:
  name: iris
  namespace: seldon
spec:
  predictors:
  - name: main
    annotations: {version: v7}
    labels: {version: v1}
    componentSpecs:
    - spec:
        containers:
        - name: router
          image: reg.io/org/bandit:0.1
        - name: a
          image: reg.io/org/forest:1.3
          env:
          - {name: LEVEL, value: "3"}
        - name: b
          image: reg.io/org/forest:1.4
    graph:
      name: router
      type: ROUTER
      endpoint: {type: REST}
      parameters:
      - {name: epsilon, value: "0.1", type: FLOAT}
      children:
      - {name: a, type: MODEL}
      - {name: b, type: MODEL, children: []}
"""


def make_deployment(folder: Path, text: str, classes: Iterable[str] = ()) -> Deployment:
    """Read a file beside folders that hold classes: `folder/Name`, or `Name` beside the file."""
    for place in classes:
        path = folder / f"{place}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"class {path.stem}:\n    pass\n")
    file = folder / "graph.yaml"
    file.write_text(dedent(text))
    return read(file)


def mistakes_of(deployment: Deployment) -> list[str]:
    """Return the findings as text, without the folder."""
    return [str(finding).removeprefix(f"{deployment.file.parent}/") for finding in deployment.findings]


ALL = ("bandit/Bandit", "forest/Forest")


def test_a_path_ending_in_yaml_yml_or_json_is_a_graph(tmp_path: Path) -> None:
    names = ["g.yaml", "g.yml", "g.json", "Model.py", "folder"]
    assert [is_graph(tmp_path / name) for name in names] == [True, True, True, False, False]
    (tmp_path / "folder.yaml").mkdir()
    assert not is_graph(tmp_path / "folder.yaml")


def test_a_manifests_nodes_take_their_classes_from_the_folders_of_their_images(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path, MANIFEST, ALL)
    assert mistakes_of(deployment) == []
    assert (deployment.name, deployment.namespace) == ("iris", "seldon")
    (predictor,) = deployment.predictors
    assert (predictor.name, predictor.version, predictor.weight) == ("main", "v7", 100)
    router, a, b = deployment.nodes
    assert [(node.name, node.model, node.type) for node in (router, a, b)] == [
        ("router", "router", "ROUTER"), ("a", "a", "MODEL"), ("b", "b", "MODEL"),
    ]  # fmt: skip
    assert [node.code.component for node in (router, a, b) if node.code] == ["Bandit", "Forest", "Forest"]
    assert b.code is not None
    assert b.code.folder == tmp_path / "forest"
    assert predictor.graph.children == (a, b)


def test_a_nodes_worker_has_the_environment_variables_of_its_container(tmp_path: Path) -> None:
    router, a, _ = make_deployment(tmp_path, MANIFEST, ALL).nodes
    assert a.environment == {
        "LEVEL": "3",
        "PREDICTIVE_UNIT_ID": "a",
        "PREDICTIVE_UNIT_IMAGE": "reg.io/org/forest:1.3",
        "PREDICTIVE_UNIT_PARAMETERS": "[]",
        "PREDICTOR_ID": "main",
        "PREDICTOR_LABELS": '{"version":"v1"}',
        "SELDON_DEPLOYMENT_ID": "iris",
        "SELDON_EXECUTOR_ENABLED": "true",
    }
    parameters = [{"name": "epsilon", "value": "0.1", "type": "FLOAT"}]
    assert json.loads(router.environment["PREDICTIVE_UNIT_PARAMETERS"]) == parameters
    assert list(router.parameters) == parameters


@pytest.mark.parametrize(
    ("more", "meta_mode"),
    [
        ("", MetaMode.NONE),
        ("    svcOrchSpec: {env: [{name: SELDON_ENABLE_ROUTING_INJECTION, value: 'true'}]}\n", MetaMode.ROUTING),
        ("    annotations: {seldon.io/executor: 'false'}\n", MetaMode.ALL),
    ],
    ids=["executor", "routing", "engine"],
)
def test_a_manifest_selects_the_meta_mode(tmp_path: Path, more: str, meta_mode: MetaMode) -> None:
    text = MANIFEST.replace("    annotations: {version: v7}\n", more)
    assert make_deployment(tmp_path, text, ALL).predictors[0].meta_mode is meta_mode


def test_a_manifest_sets_limits_in_milliseconds(tmp_path: Path) -> None:
    text = MANIFEST.replace("{version: v7}", "{seldon.io/rest-timeout: '1500', seldon.io/grpc-timeout: '20'}")
    (predictor,) = make_deployment(tmp_path, text, ALL).predictors
    assert (predictor.rest_limit_s, predictor.grpc_limit_s) == (1.5, 0.02)


OTHERS = "---\napiVersion: v1\nkind: Secret\n---\n"


@pytest.mark.parametrize(("before", "after"), [("---\n", "---\n"), (OTHERS, ""), ("", OTHERS)])
def test_other_documents_in_a_manifests_file_are_ignored(tmp_path: Path, before: str, after: str) -> None:
    deployment = make_deployment(tmp_path, before + MANIFEST + after, ["bandit/Bandit", "forest/Forest"])

    assert mistakes_of(deployment) == []
    assert [node.name for node in deployment.nodes] == ["router", "a", "b"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            MANIFEST + OTHERS + MANIFEST,
            f":{MANIFEST.count(chr(10)) + 5}: expected one manifest of kind SeldonDeployment, found 2",
        ),
        (OTHERS + "graph: {name: m}\n", ": expected one manifest of kind SeldonDeployment, found 0"),
    ],
)
def test_a_file_with_several_documents_must_have_one_deployment(tmp_path: Path, text: str, wanted: str) -> None:
    (line,) = mistakes_of(make_deployment(tmp_path, text, ["m/Model"]))
    assert line.endswith(wanted)


def test_an_annotation_sets_the_folder_and_class_of_a_node(tmp_path: Path) -> None:
    text = MANIFEST.replace("{version: v7}", "{penstock.io/a: 'other:pkg.Tree', penstock.io/b: Plain}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pkg.py").write_text("class Tree: pass\n")
    _, a, b = make_deployment(tmp_path, text, [*ALL, "Plain"]).nodes
    assert [(node.code.folder, node.code.component) for node in (a, b) if node.code] == [
        (tmp_path / "other", "pkg.Tree"), (tmp_path, "Plain"),
    ]  # fmt: skip


def test_the_folder_of_a_nodes_name_takes_precedence_over_the_folder_of_its_image(tmp_path: Path) -> None:
    _, a, b = make_deployment(tmp_path, MANIFEST, [*ALL, "a/Mine"]).nodes
    assert [node.code.component for node in (a, b) if node.code] == ["Mine", "Forest"]


def test_model_name_in_the_s2i_file_selects_one_of_several_classes(tmp_path: Path) -> None:
    (tmp_path / "forest" / ".s2i").mkdir(parents=True)
    (tmp_path / "forest" / ".s2i" / "environment").write_text("API_TYPE=REST\nMODEL_NAME=Oak\n")
    _, a, _ = make_deployment(tmp_path, MANIFEST, [*ALL, "forest/Oak"]).nodes
    assert a.code is not None
    assert a.code.component == "Oak"


def test_models_of_several_predictors_are_named_after_their_predictor(tmp_path: Path) -> None:
    deployment = make_deployment(
        tmp_path,
        """\
        apiVersion: machinelearning.seldon.io/v1alpha2
        kind: SeldonDeployment
        metadata: {name: d}
        spec:
          predictors:
          - {name: blue, traffic: 75, graph: {name: m, type: MODEL}}
          - {name: green, traffic: 25, graph: {name: m, type: MODEL}}
          - {name: dark, shadow: true, graph: {name: m, type: MODEL}}
        """,
        ["m/Model"],
    )
    assert mistakes_of(deployment) == []
    assert [(each.name, each.weight, each.shadow) for each in deployment.predictors] == [
        ("blue", 75, False), ("green", 25, False), ("dark", 0, True),
    ]  # fmt: skip
    assert [node.model for node in deployment.nodes] == ["blue.m", "green.m", "dark.m"]


SMALL = """\
name: small
graph:
  name: ab
  implementation: RANDOM_ABTEST
  parameters: {ratioA: 0.25}
  children:
  - name: first
    component: models:Model
    parameters: {depth: 3, rate: 0.5, quick: true, title: oak}
    environment: {LEVEL: 3}
  - name: Second
"""


def test_a_small_file_is_a_graph_in_meta_mode_all(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path, SMALL, ["models/Model", "Second"])
    assert mistakes_of(deployment) == []
    (predictor,) = deployment.predictors
    assert (deployment.name, predictor.name, predictor.meta_mode) == ("small", "default", MetaMode.ALL)
    first, second = deployment.nodes
    assert [(node.type, node.code.folder, node.code.component) for node in (first, second) if node.code] == [
        ("MODEL", tmp_path / "models", "Model"), ("MODEL", tmp_path, "Second"),
    ]  # fmt: skip
    assert [(each["name"], each["value"], each["type"]) for each in first.parameters] == [
        ("depth", "3", "INT"), ("rate", "0.5", "DOUBLE"), ("quick", "true", "BOOL"), ("title", "oak", "STRING"),
    ]  # fmt: skip
    assert first.environment["LEVEL"] == "3"


def test_a_graph_without_a_name_is_named_after_its_file(tmp_path: Path) -> None:
    assert make_deployment(tmp_path, "graph: {name: m}\n", ["m/Model"]).name == "graph"


MISTAKES = {
    "not yaml": ("graph: [", "graph.yaml:1: invalid yaml"),
    "another kind": (
        "apiVersion: apps/v1\nkind: Deployment\n", "graph.yaml:2: expected a manifest of kind SeldonDeployment",
    ),
    "no graph": ("name: a\n", "graph.yaml:1: there is no graph"),
    "no name": ("graph: {type: MODEL}\n", "graph.yaml:1: graph: it has no name"),
    "bad type": (
        "graph:\n  name: m\n  type: MODL\n",
        ("graph.yaml:3: node 'm': type 'MODL' is not one of MODEL, ROUTER, COMBINER, TRANSFORMER, OUTPUT_TRANSFORMER, "
        "UNKNOWN_TYPE; did you mean 'MODEL'?"),
    ),
    "bad method": (
        "graph:\n  name: m\n  methods: [PREDICT]\n",
        "graph.yaml:3: node 'm': method 'PREDICT' is not one of TRANSFORM_INPUT",
    ),
    "bad key": ("graph:\n  name: m\n  typ: MODEL\n", "graph.yaml:3: warning: node 'm': unknown key 'typ'"),
    "no class": (
        "graph: {name: nowhere}\n",
        ("graph.yaml:1: node 'nowhere': has no class: put it in a folder 'nowhere' beside this file, or set its "
        "location with an annotation, penstock.io/nowhere: FOLDER:Class"),
    ),
    "no folder": ("graph:\n  name: m\n  component: gone:Model\n", "gone: no such folder"),
    "no module": ("graph:\n  name: m\n  component: m:Gone\n", "m has no module 'Gone' for the component 'Gone'"),
    "no class's name": (
        "graph: {name: m, component: 'm:..'}\n", "'..' is not a class: expected Name or package.module.Class",
    ),
    "which class": (
        "graph: {name: two}\n",
        "two: the class cannot be determined: it has One, Two: set MODEL_NAME=Class in two/.s2i",
    ),
    "prepackaged": (
        "graph: {name: m, implementation: SKLEARN_SERVER, modelUri: gs://a}\n",
        "SKLEARN_SERVER is a prepackaged server, which Penstock does not include",
    ),
    "elsewhere": (
        "graph: {name: m, implementation: SKLEARN_SERVER, modelUri: 's3://b/m', component: 'm:Model'}\n",
        "modelUri s3://b/m: only models on this machine are served: use a path or file://",
    ),
    "ab test of one": (
        "graph:\n  name: r\n  implementation: RANDOM_ABTEST\n  children: [{name: m}]\n",
        "graph.yaml:1: node 'r': RANDOM_ABTEST chooses between two children, but there is 1",
    ),
    "ratio": (
        ("graph:\n  name: r\n  implementation: RANDOM_ABTEST\n  parameters:\n  - {name: ratioA, value: '2'}\n"
        "  children: [{name: m}, {name: m2, component: 'm:Model'}]\n"),
        "graph.yaml:4: node 'r': ratioA must be a number from 0 to 1, not '2'",
    ),
    "ratio, by name": (
        ("graph:\n  name: r\n  implementation: RANDOM_ABTEST\n  parameters: {ratioA: half}\n"
        "  children: [{name: m}, {name: m2, component: 'm:Model'}]\n"),
        "graph.yaml:4: node 'r': ratioA must be a number from 0 to 1, not 'half'",
    ),
    "parameters": (
        "graph:\n  name: m\n  parameters:\n  - {name: a, value: x, type: INT}\n",
        "graph.yaml:3: node 'm': Bad model parameter: a with value x can't be parsed as a INT",
    ),
    "twice": (
        "graph:\n  name: m\n  children:\n  - {name: m}\n",
        "graph.yaml:1: 2 nodes are named 'm': feedback and metrics cannot distinguish them",
    ),
    "name that is a yes": ("graph: {name: y}\n", "YAML reads this name as a boolean: put it in quotes"),
    "many and none": (
        "graph:\n  name: t\n  type: TRANSFORMER\n  children: [{name: m}, {name: n2, component: 'm:Model'}]\n",
        "graph.yaml:1: warning: node 't': it neither routes nor combines: all children are called",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["bad type", "bad method"])
def test_a_word_that_is_not_known_is_the_only_mistake_reported(tmp_path: Path, name: str) -> None:
    deployment = make_deployment(tmp_path, MISTAKES[name][0], ["m/Model"])

    assert [line for line in mistakes_of(deployment) if "not one of" not in line] == []


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_graph_file_are_reported_with_their_line(tmp_path: Path, name: str) -> None:
    text, expected = MISTAKES[name]
    deployment = make_deployment(tmp_path, text, ["m/Model", "two/One", "two/Two"])
    assert any(expected in line for line in mistakes_of(deployment)), mistakes_of(deployment)


@pytest.mark.parametrize(
    ("predictors", "expected"),
    [
        ("[]", "there are no predictors"),
        ("[{name: a, traffic: 50, graph: {name: m, type: MODEL}}, {name: b, graph: {name: m, type: MODEL}}]",
         "the traffic of the predictors must add up to 100, not 50"),
        ("[{name: a, traffic: 50, graph: {name: m, type: MODEL}}]", "the traffic of a single predictor must be 100"),
        ("[{name: a, shadow: true, graph: {name: m, type: MODEL}}]", "at least one predictor must not be a shadow"),
        ("[{name: a, graph: {name: m}}]", "node 'm': none of its methods would be called: set its type"),
        ("[{name: a, annotations: {seldon.io/rest-timeout: soon}, graph: {name: m, type: MODEL}}]",
         "the annotation seldon.io/rest-timeout must be a number of milliseconds, not 'soon'"),
    ],
    ids=["none", "sum", "alone", "shadows", "nothing called", "limit"],
)  # fmt: skip
def test_mistakes_in_predictors_are_reported(tmp_path: Path, predictors: str, expected: str) -> None:
    text = f"apiVersion: machinelearning.seldon.io/v1\nkind: SeldonDeployment\nspec:\n  predictors: {predictors}\n"
    assert any(expected in line for line in mistakes_of(make_deployment(tmp_path, text, ["m/Model"])))


def test_read_valid_rejects_a_file_with_mistakes(tmp_path: Path) -> None:
    make_deployment(tmp_path, "graph: {name: nowhere, type: ROUTR}\n")
    with pytest.raises(MistakesError, match="has no class"):
        read_valid(tmp_path / "graph.yaml")


def test_a_class_that_replaces_a_prepackaged_server_receives_model_uri(tmp_path: Path) -> None:
    text = "graph: {name: m, implementation: SKLEARN_SERVER, modelUri: 'file://model', component: 'm:Model'}\n"
    (node,) = make_deployment(tmp_path, text, ["m/Model"]).nodes
    assert node.type == "MODEL"
    assert list(node.parameters) == [{"name": "model_uri", "value": str(tmp_path / "model"), "type": "STRING"}]


def test_a_graph_more_than_32_nodes_deep_is_a_mistake(tmp_path: Path) -> None:
    text = "{name: m0, component: 'm:Model', type: MODEL}"
    for number in range(1, 40):
        text = f"{{name: m{number}, component: 'm:Model', type: MODEL, children: [{text}]}}"
    assert any(
        "more than 32 nodes deep" in line
        for line in mistakes_of(make_deployment(tmp_path, f"graph: {text}\n", ["m/Model"]))
    )
