"""Units: the nodes of one predictor, from its `graph` and the rest of the file. Called by reading.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.server.repository.names import name_problem
from penstock.server.seldon.parameters import BadParameterError
from penstock.server.seldon.parameters import read as check_parameters

from .mapping import GraphMapping
from .nodes import ABTEST, BUILT_IN, METHODS, TYPES, GraphNode, NodeClass
from .places import PlaceError, code_of

PLACE = "penstock.io/"
"""The prefix of annotations that locate a node's class."""
UNKNOWN = ("", "UNKNOWN_IMPLEMENTATION")
MAX_DEPTH = 32
_KEYS = (
    "name", "type", "implementation", "methods", "endpoint", "children", "parameters", "modelUri", "logger",
    "serviceAccountName", "envSecretRefName", "storageInitializerImage",
)  # fmt: skip
_OWN_KEYS = (*_KEYS, "component", "environment")
_KINDS = {bool: "BOOL", int: "INT", float: "DOUBLE"}
_PARAMETER_TYPES = ("INT", "FLOAT", "DOUBLE", "STRING", "BOOL")


class Units:
    """What all nodes of one predictor share. `small`: the file has Penstock's own form, where a node has more keys."""

    def __init__(
        self, deployment: str, predictor: str, labels: Mapping[str, str], annotations: Mapping[str, str],
        containers: Mapping[str, GraphMapping], *, small: bool = False,
    ) -> None:  # fmt: skip
        self.annotations = annotations
        self.small = small
        self._containers = containers
        self._environment = {
            "PREDICTOR_ID": predictor,
            "PREDICTOR_LABELS": json.dumps(dict(labels), separators=(",", ":")),
            "SELDON_DEPLOYMENT_ID": deployment,
            "SELDON_EXECUTOR_ENABLED": "true",
        }

    def read(self, said: GraphMapping, prefix: str, depth: int = 1) -> GraphNode | None:
        """Read a node and all below it; None if its name is invalid or it is too deep. `prefix` is the model names'."""
        name = said.text("name")
        problem = name_problem(name) if name else "it has no name"
        if problem or depth > MAX_DEPTH:
            said.mistake(problem or f"there are more than {MAX_DEPTH} nodes under each other")
            return None
        said.what = f"node '{name}'"
        said.only(_OWN_KEYS if self.small else _KEYS)
        kind, implementation = said.word("type", TYPES), said.text("implementation")
        methods = frozenset(str(item.value) for item in said.items("methods"))
        for method in sorted(methods - {*METHODS}):
            said.mistake(f"method '{method}' is none of {', '.join(METHODS)}", "methods")
        children = [self.read(child, prefix, depth + 1) for child in said.parts("children", "child")]
        made = tuple(child for child in children if child is not None)
        if self.small and not kind and not methods and not made and implementation in UNKNOWN:
            kind = "MODEL"
        if implementation not in (*UNKNOWN, *BUILT_IN):
            kind = "MODEL"
        container = self._containers.get(name)
        image = container.text("image") if container is not None else ""
        variables = self._variables(said, container)
        _check(said, GraphNode(name, "", kind, methods, implementation, made))
        parameters = self._parameters(said, implementation)
        if implementation == ABTEST:
            _check_ratio(said, parameters)
        if implementation not in BUILT_IN:
            try:
                check_parameters(json.dumps(parameters))
            except BadParameterError as error:
                said.mistake(str(error), "parameters")
        environment = variables | self._environment | {
            "PREDICTIVE_UNIT_ID": name, **({"PREDICTIVE_UNIT_IMAGE": image} if image else {}),
            "PREDICTIVE_UNIT_PARAMETERS": json.dumps(parameters, separators=(",", ":")),
        }  # fmt: skip
        return GraphNode(
            name, prefix + name, kind, methods, implementation, made,
            self._code(said, kind, implementation, image, variables), tuple(parameters), environment, image, said.line,
        )  # fmt: skip

    def _code(
        self, said: GraphMapping, kind: str, implementation: str, image: str, variables: Mapping[str, str]
    ) -> NodeClass | None:
        """Find the class of a node that has one."""
        name = said.text("name")
        place = said.text("component") if self.small else ""
        place = place or self.annotations.get(PLACE + name, "")
        if implementation in BUILT_IN:
            if place:
                said.mistake(f"{implementation} is built in, and needs no class")
            return None
        if kind in {"", "UNKNOWN_TYPE"} and not said.items("methods"):
            return None  # `_check` reports it
        if implementation not in UNKNOWN and not place:
            said.mistake(
                f"{implementation} is a prepackaged server, which is not a part of Penstock: say which class of yours "
                f"loads the model, with an annotation, {PLACE}{name}: FOLDER:Class", "implementation",
            )  # fmt: skip
            return None
        try:
            return code_of(said.file.parent, name, place, image, variables)
        except PlaceError as error:
            said.mistake(str(error).removeprefix(f"{said.what} "))
            return None

    def _variables(self, said: GraphMapping, container: GraphMapping | None) -> dict[str, str]:
        if self.small:
            return said.part("environment").texts()
        variables = {}
        for each in container.parts("env") if container is not None else []:
            if "valueFrom" in each:
                each.warn(f"the variable {each.text('name')} is taken from the cluster, and is not set here")
            else:
                variables[each.text("name")] = each.text("value")
        return variables

    def _parameters(self, said: GraphMapping, implementation: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] = []
        if isinstance(said.plain("parameters"), dict) and self.small:
            given: dict[str, Any] = said.plain("parameters")
            for name, value in given.items():
                kind = _KINDS.get(type(value), "STRING")
                found.append({"name": name, "value": said.part("parameters").text(name), "type": kind})
        else:
            for each in said.parts("parameters"):
                kind = each.word("type", _PARAMETER_TYPES) or "STRING"
                found.append({"name": each.text("name"), "value": each.text("value"), "type": kind})
        if "modelUri" in said:
            place = self._local(said)
            if implementation not in (*UNKNOWN, *BUILT_IN):
                found.append({"name": "model_uri", "value": place, "type": "STRING"})
            else:
                said.warn("modelUri is not fetched: give the class its path, as a parameter", "modelUri")
        return found

    @staticmethod
    def _local(said: GraphMapping) -> str:
        """Return the path of a model on this machine."""
        place = said.text("modelUri")
        scheme, separator, rest = place.partition("://")
        if separator and scheme != "file":
            said.mistake(f"modelUri {place}: only what is on this machine is served: a path, or file://", "modelUri")
            return place
        return str((said.file.parent / (rest if separator else place)).resolve())


def _check(said: GraphMapping, node: GraphNode) -> None:
    """Report what cannot be intended."""
    count = len(node.children)
    if node.implementation == ABTEST and count != 2:
        said.mistake(f"{ABTEST} chooses between two children, and there {'is' if count == 1 else 'are'} {count}")
    if node.implementation in BUILT_IN:
        return
    calls = node.into is not None or node.routes or node.aggregates or node.out or node.takes_feedback
    if not calls and node.implementation in ("", "UNKNOWN_IMPLEMENTATION"):
        said.mistake("nothing is called of it: give it a type, or say which methods it has")
    if node.routes and not count:
        said.warn("a router without children is never asked")
    if count > 1 and not node.routes and not node.aggregates:
        said.warn("it neither routes nor combines: all children are called, and the first one's answer is taken")


def _check_ratio(said: GraphMapping, parameters: list[dict[str, str]]) -> None:
    for value in (each["value"] for each in parameters if each["name"] == "ratioA"):
        try:
            fits = 0 <= float(value) <= 1
        except ValueError:
            fits = False
        if not fits:
            said.mistake(f"ratioA is a number from 0 to 1, not '{value}'", "parameters")
