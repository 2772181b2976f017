"""Graphs for tests: short definitions of nodes, and an Engine whose models are functions that answer or never do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.server.seldon.graph.message_codecs import JsonCodec, Message
from penstock.server.seldon.graph.nodes import GraphNode, MetaMode, NodeClass, Predictor
from penstock.server.seldon.graph.walk import Walk, WalkContext
from penstock.server.seldon.messages import ANSWER, Endpoint

Answers = Callable[[Endpoint, Any], Any]
"""A node's function: takes the endpoint and the message, and returns an answer; an exception is its failure."""


class Never:
    """The result of a node that never answers."""


class AnsweredError(Exception):
    """Raised by a node to answer with another status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def node(name: str, kind: str = "MODEL", *children: GraphNode, **more: Any) -> GraphNode:
    """Make a node, which has code unless it is built in."""
    code = None if "implementation" in more else NodeClass(Path(), "Class")
    return GraphNode(name, name, kind, children=children, code=code, **more)


class FunctionEngine:
    """Stands in for an Engine. `calls` lists the calls: node, endpoint's name, message."""

    generation = 1

    def __init__(self, models: Mapping[str, Answers]) -> None:
        self.models_ = models
        self.calls: list[tuple[str, str, Any]] = []
        self.cancelled: list[str] = []

    def model(self, name: str, version: str = "") -> Any:
        if name not in self.models_:
            raise InferError(Code.NOT_FOUND, f"no model '{name}'")
        return SimpleNamespace(name=name, healthy=True)

    def submit(self, call: Any) -> None:
        message = json.loads(call.body[2:] or b"null")
        self.calls.append((call.model.name, call.endpoint.name, message))
        try:
            answer, status = self.models_[call.model.name](call.endpoint, message), 200
        except AnsweredError as failed:
            answer, status = {"status": {"info": str(failed), "code": -1}}, failed.status
        except InferError as error:
            call.error = error
            call.sink.deliver([call])
            return
        if answer is Never:
            return
        call.reply = ANSWER.pack(status, 0, 0) + json.dumps(answer, sort_keys=True).encode()
        call.outputs = []
        call.sink.deliver([call])

    def cancel(self, call: Any) -> None:
        self.cancelled.append(call.model.name)


def walk_of(
    graph: GraphNode,
    models: Mapping[str, Answers],
    meta_mode: MetaMode = MetaMode.NONE,
    limit_s: float = 0.0,
    seed: int = 1,
) -> tuple[Walk, FunctionEngine]:
    """Make a walk through a graph, over JSON."""
    engine = FunctionEngine(models)
    context = WalkContext(engine, rng=random.Random(seed))  # type: ignore[arg-type]
    return Walk(context, Predictor("p", graph, meta_mode=meta_mode, rest_limit_s=limit_s), JsonCodec()), engine


def message_from(message: Any) -> Message:
    """Write a message."""
    return Message(json.dumps(message).encode())


def value_of(message: Message) -> Any:
    """Read a message."""
    return json.loads(message.body)
