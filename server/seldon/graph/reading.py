"""Reads a graph file, or a SeldonDeployment manifest, as a Deployment. Called by repository.py and check.py.

Source for the content of a manifest: Seldon Core 1.17.1, the operator's types and checks.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from penstock.server.cortex.yaml_nodes import YamlError, parse
from penstock.server.repository.findings import Finding, MistakeError, MistakesError, read_text

from .mapping import GraphMapping
from .nodes import Deployment, MetaNotes, Predictor
from .units import Units

SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 1 << 20
KIND, GROUP = "SeldonDeployment", "machinelearning.seldon.io/"
ROUTING = "SELDON_ENABLE_ROUTING_INJECTION"
_SMALL = ("name", "namespace", "annotations", "graph")
_PREDICTOR = (
    "name", "graph", "componentSpecs", "replicas", "annotations", "engineResources", "labels", "svcOrchSpec", "traffic",
    "shadow", "ssl", "explainer", "progressDeadlineSeconds", "hpaSpec",
)  # fmt: skip


def is_graph(path: Path) -> bool:
    """Return whether a PATH is a graph: a file with one of these suffixes."""
    return path.suffix in SUFFIXES and not path.is_dir()


def demand(path: Path) -> Deployment:
    """Read a file that must be correct. Raises: MistakesError."""
    deployment = read(path)
    if deployment.mistakes:
        raise MistakesError(deployment.findings)
    return deployment


def read(path: Path) -> Deployment:
    """Read a file, with everything wrong with it among the findings; blocks."""
    file = path.absolute()
    findings: list[Finding] = []
    deployment = Deployment(file)
    try:
        if file.is_file() and file.stat().st_size > MAX_BYTES:
            raise MistakeError(Finding(file, f"has more than {MAX_BYTES} bytes"))
        root = GraphMapping(file, parse(_text(file)), "", findings)
        deployment = _manifest(root) if "kind" in root or "apiVersion" in root else _small(root)
    except MistakeError as error:
        findings.append(error.finding)
    except YamlError as error:
        findings.append(Finding(file, str(error), error.line))
    found = tuple(sorted(findings, key=lambda finding: finding.line))
    return Deployment(file, deployment.name, deployment.namespace, deployment.predictors, found)


def _text(file: Path) -> str:
    """Return the text. JSON may be indented with tabs, unlike YAML; its strings contain none. Raises: MistakeError."""
    text = read_text(file)
    return text.replace("\t", " ") if text.lstrip().startswith("{") else text


def _small(root: GraphMapping) -> Deployment:
    """Read a file of Penstock's own form: a name, annotations, and one graph, with full `meta` in its answers."""
    root.only(_SMALL)
    name = root.text("name", root.file.stem)
    units = Units(name, "default", {}, root.part("annotations").texts(), {}, small=True)
    predictor = _predictor(root, units, "default", alone=True)
    return Deployment(root.file, name, root.text("namespace"), (predictor,) if predictor else ())


def _manifest(root: GraphMapping) -> Deployment:
    version = root.text("apiVersion")
    if root.text("kind") != KIND or not version.startswith(GROUP):
        root.mistake(f"a manifest of kind {KIND} is wanted, of {GROUP}v1 or one of its versions before", "kind")
        return Deployment(root.file)
    metadata, spec = root.part("metadata", "metadata"), root.part("spec", "spec")
    name = metadata.text("name") or spec.text("name", root.file.stem)
    if spec.text("protocol", "seldon") != "seldon":
        spec.mistake(f"protocol {spec.text('protocol')} is not served by a graph, only seldon", "protocol")
    found = spec.parts("predictors", "predictor")
    if not found:
        spec.mistake("there are no predictors")
    annotations = metadata.part("annotations").texts() | spec.part("annotations").texts()
    predictors = [_from_manifest(said, name, annotations, alone=len(found) == 1) for said in found]
    _check_traffic(spec, found)
    read_ = tuple(predictor for predictor in predictors if predictor is not None)
    return Deployment(root.file, name, metadata.text("namespace"), read_)


def _from_manifest(
    said: GraphMapping, deployment: str, annotations: dict[str, str], *, alone: bool
) -> Predictor | None:
    name = said.text("name", "default")
    said.what = f"predictor '{name}'"
    said.only(_PREDICTOR)
    if "explainer" in said:
        said.warn("the explainer is not served", "explainer")
    containers = {
        container.text("name"): container
        for pod in said.parts("componentSpecs")
        for container in pod.part("spec").parts("containers", "container")
    }
    labels = said.part("labels").texts()
    annotations = annotations | said.part("annotations").texts()
    return _predictor(said, Units(deployment, name, labels, annotations, containers), name, alone=alone)


def _predictor(said: GraphMapping, units: Units, name: str, *, alone: bool) -> Predictor | None:
    if "graph" not in said:
        said.mistake("there is no graph")
        return None
    graph = units.read(said.part("graph", "graph"), "" if alone else f"{name}.")
    if graph is None:
        return None
    for twice, count in Counter(node.name for node in graph.all()).items():
        if count > 1:
            said.mistake(f"{count} nodes are called '{twice}': feedback and metrics could not tell them apart", "graph")
    return Predictor(
        name, graph, said.whole("traffic", 100 if alone else 0), said.flag("shadow"),
        units.annotations.get("version", ""), _notes(said, units),
        _limit_s(said, units, "seldon.io/rest-timeout"), _limit_s(said, units, "seldon.io/grpc-timeout"),
    )  # fmt: skip


def _notes(said: GraphMapping, units: Units) -> MetaNotes:
    """Choose the `meta` of answers: all for a small file or if the Java engine was requested, else as configured."""
    if units.small or units.annotations.get("seldon.io/executor") == "false":
        return MetaNotes.ALL
    variables = {each.text("name"): each.text("value") for each in said.part("svcOrchSpec").parts("env")}
    return MetaNotes.ROUTING if variables.get(ROUTING, os.environ.get(ROUTING, "")) else MetaNotes.NONE


def _limit_s(said: GraphMapping, units: Units, key: str) -> float:
    value = units.annotations.get(key, "")
    if not value:
        return 0.0
    if not value.isdecimal():
        said.mistake(f"the annotation {key} is a number of milliseconds, not '{value}'")
        return 0.0
    return int(value) / 1000


def _check_traffic(spec: GraphMapping, found: list[GraphMapping]) -> None:
    shares = [said.whole("traffic", 0) for said in found if not said.flag("shadow")]
    if len(shares) > 1 and sum(shares) != 100:
        spec.mistake(f"the traffic of several predictors makes 100 together, not {sum(shares)}", "predictors")
    elif len(shares) == 1 and shares[0] not in {0, 100}:
        spec.mistake("the traffic of a predictor alone is 100", "predictors")
    elif found and not shares:
        spec.mistake("one predictor must not be a shadow", "predictors")
    names = Counter(said.text("name", "default") for said in found)
    for name, count in names.items():
        if count > 1:
            spec.mistake(f"{count} predictors are called '{name}'", "predictors")
