"""Nodes: the content of a graph file, parsed and checked. Made by graph_file.py; walked by walk.py.

Source for the methods called for each type: Seldon Core 1.17.1, the executor.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.server.repository.findings import Finding
from penstock.server.seldon.messages import Endpoint

TYPES = ("MODEL", "ROUTER", "COMBINER", "TRANSFORMER", "OUTPUT_TRANSFORMER", "UNKNOWN_TYPE")
METHODS = ("TRANSFORM_INPUT", "TRANSFORM_OUTPUT", "ROUTE", "AGGREGATE", "SEND_FEEDBACK")
ABTEST, SIMPLE_MODEL, SIMPLE_ROUTER, AVERAGE = "RANDOM_ABTEST", "SIMPLE_MODEL", "SIMPLE_ROUTER", "AVERAGE_COMBINER"
BUILT_IN = (ABTEST, SIMPLE_MODEL, SIMPLE_ROUTER, AVERAGE)


class MetaMode(enum.Enum):
    """What is written into the `meta` of an answer. NONE: only what the nodes return, as in the executor."""

    NONE = "none"
    ROUTING = "routing"
    ALL = "all"
    """Routing, request path and puid, as in the Java engine."""


@dataclass(frozen=True, slots=True)
class NodeClass:
    """The place of a node's class: a folder, and `Name` or `package.module.Class` in it."""

    folder: Path
    component: str


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node. `model` is its name in the Engine; `code` is None if it is built in or only passes messages on.

    `implementation` names a built-in node. `parameters` are those of its class, as in JSON. `environment` has the
    variables for its worker.
    """

    name: str
    model: str
    type: str
    methods: frozenset[str] = frozenset()
    implementation: str = ""
    children: tuple[GraphNode, ...] = ()
    code: NodeClass | None = None
    parameters: tuple[Mapping[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    image: str = ""
    line: int = 0

    @property
    def input_endpoint(self) -> Endpoint | None:
        """The Endpoint called with its input, None if there is none."""
        if self.type == "TRANSFORMER" or "TRANSFORM_INPUT" in self.methods:
            return Endpoint.TRANSFORM_INPUT
        return Endpoint.PREDICT if self.type == "MODEL" else None

    @property
    def is_router(self) -> bool:
        """Whether it is called to choose the next child."""
        return self.type == "ROUTER" or "ROUTE" in self.methods

    @property
    def is_combiner(self) -> bool:
        """Whether it is called to merge its children's messages."""
        return self.type == "COMBINER" or "AGGREGATE" in self.methods

    @property
    def transforms_output(self) -> bool:
        """Whether it is called with its output."""
        return self.type == "OUTPUT_TRANSFORMER" or "TRANSFORM_OUTPUT" in self.methods

    @property
    def takes_feedback(self) -> bool:
        """Whether feedback is sent to it."""
        return self.type in {"MODEL", "ROUTER"} or "SEND_FEEDBACK" in self.methods

    def all(self) -> Iterator[GraphNode]:
        """Yield it and all nodes below it."""
        yield self
        for child in self.children:
            yield from child.all()


@dataclass(frozen=True, slots=True)
class Predictor:
    """One graph. `weight` is its share of the requests. A `shadow` receives a copy of each; its answers are dropped.

    Units: the limits are seconds for one call of a node, 0 for none.
    """

    name: str
    graph: GraphNode
    weight: int = 100
    shadow: bool = False
    version: str = ""
    meta_mode: MetaMode = MetaMode.NONE
    rest_limit_s: float = 0.0
    grpc_limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """The content of one file. If `findings` has mistakes, `predictors` are those that could be read."""

    file: Path
    name: str = ""
    namespace: str = ""
    predictors: tuple[Predictor, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def nodes(self) -> list[GraphNode]:
        """All nodes with code: each is a model of the Engine."""
        return [node for predictor in self.predictors for node in predictor.graph.all() if node.code is not None]

    @property
    def mistakes(self) -> list[Finding]:
        """The findings that prevent it from being served."""
        return [finding for finding in self.findings if finding.is_mistake]

    def find(self, name: str) -> GraphNode | None:
        """Return the node of a name, from the first predictor that has one."""
        every = (node for predictor in self.predictors for node in predictor.graph.all())
        return next((node for node in every if node.name == name), None)
