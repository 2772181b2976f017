"""NodeReader: reads the nodes of one predictor, from its `graph` and the rest of the file. Called by graph_file.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.server.repository.names import name_problem
from penstock.server.seldon.parameters import BadParameterError
from penstock.server.seldon.parameters import read as check_parameters

from .mapping import GraphMapping
from .node_classes import ClassNotFoundError, find_class
from .nodes import ABTEST, BUILT_IN, METHODS, TYPES, GraphNode, NodeClass

CLASS_ANNOTATION = "penstock.io/"
"""The prefix of annotations that locate a node's class."""
UNKNOWN = ("", "UNKNOWN_IMPLEMENTATION")
MAX_DEPTH = 32
_KEYS = (
    "name", "type", "implementation", "methods", "endpoint", "children", "parameters", "modelUri", "logger",
    "serviceAccountName", "envSecretRefName", "storageInitializerImage",
)  # fmt: skip
_OWN_KEYS = (*_KEYS, "component", "environment")
_TYPE_NAMES = {bool: "BOOL", int: "INT", float: "DOUBLE"}
_PARAMETER_TYPES = ("INT", "FLOAT", "DOUBLE", "STRING", "BOOL")


class NodeReader:
    """Reads the nodes of one predictor. `compact`: the file has Penstock's own form, where a node has more keys."""

    def __init__(
        self, deployment: str, predictor: str, labels: Mapping[str, str], annotations: Mapping[str, str],
        containers: Mapping[str, GraphMapping], *, compact: bool = False,
    ) -> None:  # fmt: skip
        self.annotations = annotations
        self.compact = compact
        self._containers = containers
        self._environment = {
            "PREDICTOR_ID": predictor,
            "PREDICTOR_LABELS": json.dumps(dict(labels), separators=(",", ":")),
            "SELDON_DEPLOYMENT_ID": deployment,
            "SELDON_EXECUTOR_ENABLED": "true",
        }

    def read(self, mapping: GraphMapping, prefix: str, depth: int = 1) -> GraphNode | None:
        """Read a node and all below it; None if its name is invalid or it is too deep. `prefix` is the model names'."""
        name = mapping.text("name")
        problem = name_problem(name) if name else "it has no name"
        if problem or depth > MAX_DEPTH:
            mapping.mistake(problem or f"the graph is more than {MAX_DEPTH} nodes deep")
            return None
        mapping.label = f"node '{name}'"
        mapping.warn_unknown(_OWN_KEYS if self.compact else _KEYS)
        kind, implementation = mapping.choice("type", TYPES), mapping.text("implementation")
        methods = frozenset(str(item.value) for item in mapping.items("methods"))
        for method in sorted(methods - {*METHODS}):
            mapping.mistake(f"method '{method}' is not one of {', '.join(METHODS)}", "methods")
        children = [self.read(child, prefix, depth + 1) for child in mapping.sections("children", "child")]
        valid_children = tuple(child for child in children if child is not None)
        if self.compact and not kind and not methods and not valid_children and implementation in UNKNOWN:
            kind = "MODEL"
        if implementation not in (*UNKNOWN, *BUILT_IN):
            kind = "MODEL"
        container = self._containers.get(name)
        image = container.text("image") if container is not None else ""
        variables = self._variables(mapping, container)
        _check(mapping, GraphNode(name, "", kind, methods, implementation, valid_children))
        parameters = self._parameters(mapping, implementation)
        if implementation == ABTEST:
            _check_ratio(mapping, parameters)
        if implementation not in BUILT_IN:
            try:
                check_parameters(json.dumps(parameters))
            except BadParameterError as error:
                mapping.mistake(str(error), "parameters")
        environment = variables | self._environment | {
            "PREDICTIVE_UNIT_ID": name, **({"PREDICTIVE_UNIT_IMAGE": image} if image else {}),
            "PREDICTIVE_UNIT_PARAMETERS": json.dumps(parameters, separators=(",", ":")),
        }  # fmt: skip
        return GraphNode(
            name, prefix + name, kind, methods, implementation, valid_children,
            self._code(mapping, kind, implementation, image, variables), tuple(parameters), environment, image,
            mapping.line,
        )  # fmt: skip

    def _code(
        self, mapping: GraphMapping, kind: str, implementation: str, image: str, variables: Mapping[str, str]
    ) -> NodeClass | None:
        """Find the class of a node that has one."""
        name = mapping.text("name")
        location = mapping.text("component") if self.compact else ""
        location = location or self.annotations.get(CLASS_ANNOTATION + name, "")
        if implementation in BUILT_IN:
            if location:
                mapping.mistake(f"{implementation} is built in and must not have a class")
            return None
        if kind in {"", "UNKNOWN_TYPE"} and not mapping.items("methods"):
            return None  # `_check` reports it
        if implementation not in UNKNOWN and not location:
            mapping.mistake(
                f"{implementation} is a prepackaged server, which Penstock does not include: name the class of yours "
                f"that loads the model, with an annotation, {CLASS_ANNOTATION}{name}: FOLDER:Class", "implementation",
            )  # fmt: skip
            return None
        try:
            return find_class(mapping.file.parent, name, location, image, variables)
        except ClassNotFoundError as error:
            mapping.mistake(str(error).removeprefix(f"{mapping.label} "))
            return None

    def _variables(self, mapping: GraphMapping, container: GraphMapping | None) -> dict[str, str]:
        if self.compact:
            return mapping.section("environment").texts()
        variables = {}
        for variable in container.sections("env") if container is not None else []:
            if "valueFrom" in variable:
                variable.warn(f"the variable {variable.text('name')} comes from the cluster and is not set here")
            else:
                variables[variable.text("name")] = variable.text("value")
        return variables

    def _parameters(self, mapping: GraphMapping, implementation: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] = []
        if isinstance(mapping.plain("parameters"), dict) and self.compact:
            values: dict[str, Any] = mapping.plain("parameters")
            for name, value in values.items():
                kind = _TYPE_NAMES.get(type(value), "STRING")
                found.append({"name": name, "value": mapping.section("parameters").text(name), "type": kind})
        else:
            for entry in mapping.sections("parameters"):
                kind = entry.choice("type", _PARAMETER_TYPES) or "STRING"
                found.append({"name": entry.text("name"), "value": entry.text("value"), "type": kind})
        if "modelUri" in mapping:
            path = self._local_path(mapping)
            if implementation not in (*UNKNOWN, *BUILT_IN):
                found.append({"name": "model_uri", "value": path, "type": "STRING"})
            else:
                mapping.warn("modelUri is not fetched: pass the path to the class as a parameter", "modelUri")
        return found

    @staticmethod
    def _local_path(mapping: GraphMapping) -> str:
        """Return the path of a model on this machine."""
        uri = mapping.text("modelUri")
        scheme, separator, path = uri.partition("://")
        if separator and scheme != "file":
            mapping.mistake(
                f"modelUri {uri}: only models on this machine are served: use a path or file://", "modelUri"
            )
            return uri
        return str((mapping.file.parent / (path if separator else uri)).resolve())


def _check(mapping: GraphMapping, node: GraphNode) -> None:
    """Report what cannot be intended."""
    count = len(node.children)
    if node.implementation == ABTEST and count != 2:
        mapping.mistake(f"{ABTEST} chooses between two children, but there {'is' if count == 1 else 'are'} {count}")
    if node.implementation in BUILT_IN:
        return
    if (not node.type and "type" in mapping.values) or node.methods - {*METHODS}:
        return  # a mistake that is reported, and what it calls is not known
    calls = (
        node.input_endpoint is not None
        or node.is_router
        or node.is_combiner
        or node.transforms_output
        or node.takes_feedback
    )
    if not calls and node.implementation in ("", "UNKNOWN_IMPLEMENTATION"):
        mapping.mistake("none of its methods would be called: set its type or its methods")
    if node.is_router and not count:
        mapping.warn("a router without children is never called")
    if count > 1 and not node.is_router and not node.is_combiner:
        mapping.warn("it neither routes nor combines: all children are called, and the first one's answer is used")


def _check_ratio(mapping: GraphMapping, parameters: list[dict[str, str]]) -> None:
    for value in (each["value"] for each in parameters if each["name"] == "ratioA"):
        try:
            is_valid = 0 <= float(value) <= 1
        except ValueError:
            is_valid = False
        if not is_valid:
            mapping.mistake(f"ratioA must be a number from 0 to 1, not '{value}'", "parameters")
