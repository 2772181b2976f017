"""Nodes: what a graph file says, read and checked. Made by reading.py; walked by walk.py.

Source of which method is called for which type: Seldon Core 1.17.1, the executor.
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


class MetaNotes(enum.Enum):
    """What is written into the `meta` of an answer. NONE: what the nodes have, as the executor left it."""

    NONE = "none"
    ROUTING = "routing"
    ALL = "all"
    """Routing, request path and puid, as the Java engine did."""


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Where a node's class is: a folder, and `Name` or `package.module.Class` in it."""

    folder: Path
    component: str


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node. `model` is its name in the Engine; `code` None: it is built in (`implementation`), or only passes on.

    `parameters` are those of its class, as JSON. `environment` has the variables that its worker is to have.
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
    def into(self) -> Endpoint | None:
        """What is called with what comes in."""
        if self.type == "TRANSFORMER" or "TRANSFORM_INPUT" in self.methods:
            return Endpoint.TRANSFORM_INPUT
        return Endpoint.PREDICT if self.type == "MODEL" else None

    @property
    def routes(self) -> bool:
        """Whether it is asked which child is next."""
        return self.type == "ROUTER" or "ROUTE" in self.methods

    @property
    def aggregates(self) -> bool:
        """Whether it makes one message of its children's."""
        return self.type == "COMBINER" or "AGGREGATE" in self.methods

    @property
    def out(self) -> bool:
        """Whether it is called with what goes out."""
        return self.type == "OUTPUT_TRANSFORMER" or "TRANSFORM_OUTPUT" in self.methods

    @property
    def takes_feedback(self) -> bool:
        """Whether it is told of feedback."""
        return self.type in {"MODEL", "ROUTER"} or "SEND_FEEDBACK" in self.methods

    def all(self) -> Iterator[GraphNode]:
        """Give it, and all nodes under it."""
        yield self
        for child in self.children:
            yield from child.all()


@dataclass(frozen=True, slots=True)
class Predictor:
    """One graph. `weight`: its share of the requests; `shadow`: it has a copy of each, and nobody its answers.

    Units: the limits are seconds for one call of a node, 0 for none.
    """

    name: str
    graph: GraphNode
    weight: int = 100
    shadow: bool = False
    version: str = ""
    notes: MetaNotes = MetaNotes.NONE
    rest_limit_s: float = 0.0
    grpc_limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """What one file says. With mistakes among `findings`, `predictors` are those that could be read."""

    file: Path
    name: str = ""
    namespace: str = ""
    predictors: tuple[Predictor, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def nodes(self) -> list[GraphNode]:
        """All nodes that have code: each is a model of the Engine."""
        return [node for predictor in self.predictors for node in predictor.graph.all() if node.code is not None]

    @property
    def mistakes(self) -> list[Finding]:
        """What keeps it from being served."""
        return [finding for finding in self.findings if finding.mistake]

    def find(self, name: str) -> GraphNode | None:
        """Find a node by its name, in the first predictor that has one."""
        every = (node for predictor in self.predictors for node in predictor.graph.all())
        return next((node for node in every if node.name == name), None)
