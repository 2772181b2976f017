"""Reads a graph file, or a SeldonDeployment manifest, as a Deployment. Called by repository.py and check.py.

Source for the content of a manifest: Seldon Core 1.17.1, the operator's types and checks.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.server.repository.findings import Finding, MistakeError, MistakesError, read_text
from penstock.server.yaml_nodes import YamlError, YamlNode, parse_all

from .mapping import GraphMapping
from .node_reader import NodeReader
from .nodes import Deployment, MetaMode, Predictor

SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 1 << 20
KIND, GROUP = "SeldonDeployment", "machinelearning.seldon.io/"
ROUTING = "SELDON_ENABLE_ROUTING_INJECTION"
_COMPACT_KEYS = ("name", "namespace", "annotations", "graph")
_PREDICTOR_KEYS = (
    "name", "graph", "componentSpecs", "replicas", "annotations", "engineResources", "labels", "svcOrchSpec", "traffic",
    "shadow", "ssl", "explainer", "progressDeadlineSeconds", "hpaSpec",
)  # fmt: skip


def is_graph(path: Path) -> bool:
    """Return whether a PATH is a graph: a file with one of these suffixes."""
    return path.suffix in SUFFIXES and not path.is_dir()


def read_valid(path: Path) -> Deployment:
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
        root = GraphMapping(file, _document(file), "", findings)
        deployment = _read_manifest(root) if "kind" in root or "apiVersion" in root else _read_compact(root)
    except MistakeError as error:
        findings.append(error.finding)
    except YamlError as error:
        findings.append(Finding(file, str(error), error.line))
    found = tuple(sorted(findings, key=lambda finding: finding.line))
    return Deployment(file, deployment.name, deployment.namespace, deployment.predictors, found)


def _document(file: Path) -> YamlNode:
    """Return the only document, or the only SeldonDeployment among several. Raises: MistakeError, YamlError."""
    documents = [document for document in parse_all(_text(file)) if document.value is not None]
    if len(documents) > 1:
        documents = [document for document in documents if _kind_of(document) == KIND]
        if len(documents) != 1:
            line = documents[1].line if documents else 0
            raise MistakeError(Finding(file, f"expected one manifest of kind {KIND}, found {len(documents)}", line))
    return documents[0] if documents else YamlNode(None, 1)


def _kind_of(document: YamlNode) -> Any:
    return document.value["kind"].value if isinstance(document.value, dict) and "kind" in document.value else None


def _text(file: Path) -> str:
    """Return the text. JSON may be indented with tabs, unlike YAML; its strings contain none. Raises: MistakeError."""
    text = read_text(file)
    return text.replace("\t", " ") if text.lstrip().startswith("{") else text


def _read_compact(root: GraphMapping) -> Deployment:
    """Read a file of Penstock's own form: a name, annotations, and one graph, with full `meta` in its answers."""
    root.warn_unknown(_COMPACT_KEYS)
    name = root.text("name", root.file.stem)
    reader = NodeReader(name, "default", {}, root.section("annotations").texts(), {}, compact=True)
    predictor = _read_predictor(root, reader, "default", is_only=True)
    return Deployment(root.file, name, root.text("namespace"), (predictor,) if predictor else ())


def _read_manifest(root: GraphMapping) -> Deployment:
    version = root.text("apiVersion")
    if root.text("kind") != KIND or not version.startswith(GROUP):
        root.mistake(f"expected a manifest of kind {KIND}, of {GROUP}v1 or an earlier version", "kind")
        return Deployment(root.file)
    metadata, spec = root.section("metadata", "metadata"), root.section("spec", "spec")
    name = metadata.text("name") or spec.text("name", root.file.stem)
    if spec.text("protocol", "seldon") != "seldon":
        spec.mistake(
            f"protocol {spec.text('protocol')} is not supported: a graph is served only with protocol seldon",
            "protocol",
        )
    mappings = spec.sections("predictors", "predictor")
    if not mappings:
        spec.mistake("there are no predictors")
    annotations = metadata.section("annotations").texts() | spec.section("annotations").texts()
    predictors = [
        _read_manifest_predictor(mapping, name, annotations, is_only=len(mappings) == 1) for mapping in mappings
    ]
    _check_traffic(spec, mappings)
    valid_predictors = tuple(predictor for predictor in predictors if predictor is not None)
    return Deployment(root.file, name, metadata.text("namespace"), valid_predictors)


def _read_manifest_predictor(
    mapping: GraphMapping, deployment: str, annotations: dict[str, str], *, is_only: bool
) -> Predictor | None:
    name = mapping.text("name", "default")
    mapping.label = f"predictor '{name}'"
    mapping.warn_unknown(_PREDICTOR_KEYS)
    if "explainer" in mapping:
        mapping.warn("the explainer is not served", "explainer")
    containers = {
        container.text("name"): container
        for pod in mapping.sections("componentSpecs")
        for container in pod.section("spec").sections("containers", "container")
    }
    labels = mapping.section("labels").texts()
    annotations = annotations | mapping.section("annotations").texts()
    return _read_predictor(
        mapping, NodeReader(deployment, name, labels, annotations, containers), name, is_only=is_only
    )


def _read_predictor(mapping: GraphMapping, reader: NodeReader, name: str, *, is_only: bool) -> Predictor | None:
    if "graph" not in mapping:
        mapping.mistake("there is no graph")
        return None
    graph = reader.read(mapping.section("graph", "graph"), "" if is_only else f"{name}.")
    if graph is None:
        return None
    for duplicate, count in Counter(node.name for node in graph.all()).items():
        if count > 1:
            mapping.mistake(
                f"{count} nodes are named '{duplicate}': feedback and metrics cannot distinguish them", "graph"
            )
    return Predictor(
        name, graph, mapping.integer("traffic", 100 if is_only else 0), mapping.flag("shadow"),
        reader.annotations.get("version", ""), _meta_mode(mapping, reader),
        _limit_s(mapping, reader, "seldon.io/rest-timeout"), _limit_s(mapping, reader, "seldon.io/grpc-timeout"),
    )  # fmt: skip


def _meta_mode(mapping: GraphMapping, reader: NodeReader) -> MetaMode:
    """Choose the `meta` of answers: all for a small file or if the Java engine was requested, else as configured."""
    if reader.compact or reader.annotations.get("seldon.io/executor") == "false":
        return MetaMode.ALL
    variables = {each.text("name"): each.text("value") for each in mapping.section("svcOrchSpec").sections("env")}
    return MetaMode.ROUTING if variables.get(ROUTING, os.environ.get(ROUTING, "")) else MetaMode.NONE


def _limit_s(mapping: GraphMapping, reader: NodeReader, key: str) -> float:
    value = reader.annotations.get(key, "")
    if not value:
        return 0.0
    if not value.isdecimal():
        mapping.mistake(f"the annotation {key} must be a number of milliseconds, not '{value}'")
        return 0.0
    return int(value) / 1000


def _check_traffic(spec: GraphMapping, predictors: list[GraphMapping]) -> None:
    shares = [mapping.integer("traffic", 0) for mapping in predictors if not mapping.flag("shadow")]
    if len(shares) > 1 and sum(shares) != 100:
        spec.mistake(f"the traffic of the predictors must add up to 100, not {sum(shares)}", "predictors")
    elif len(shares) == 1 and shares[0] not in {0, 100}:
        spec.mistake("the traffic of a single predictor must be 100", "predictors")
    elif predictors and not shares:
        spec.mistake("at least one predictor must not be a shadow", "predictors")
    names = Counter(mapping.text("name", "default") for mapping in predictors)
    for name, count in names.items():
        if count > 1:
            spec.mistake(f"{count} predictors are named '{name}'", "predictors")
