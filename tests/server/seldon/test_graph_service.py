"""GraphService as the Service of a connection, over a fake transport, and the time limits of shadows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.server.http.limits import Limits
from penstock.server.http.service import HttpShared
from penstock.server.seldon.exposition import Exposition
from penstock.server.seldon.graph.graph import Graph
from penstock.server.seldon.graph.message_codecs import JsonCodec, Message, MessageCodec, ProtoCodec
from penstock.server.seldon.graph.nodes import Deployment, Predictor
from penstock.server.seldon.graph.service import GraphService
from tests.server.http.lane import Lane, Own, run, turns

from .graphs import AnsweredError, Answers, FunctionEngine, Never, node

REQUEST = b"POST /api/v1.0/predictions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


def graph_of(models: dict[str, Answers], *predictors: Predictor) -> Graph:
    """Make a Graph of these predictors."""
    deployment = Deployment(Path("graph.yaml"), "d", predictors=predictors)
    repository: Any = SimpleNamespace(deployment=deployment, served=deployment)
    crews: Any = SimpleNamespace(descriptions={}, sharing={})
    engine: Any = FunctionEngine(models)
    return Graph(engine, repository, crews, Exposition({}))


STATUSES = [(204, 204), (304, 304), (418, 418), (100, 500), (199, 500), (1000, 500)]


@pytest.mark.parametrize(("status", "sent"), STATUSES)
def test_a_node_that_fails_with_any_status_does_not_corrupt_the_next_answer(status: int, sent: int) -> None:
    def failing(endpoint: Any, message: Any) -> Any:
        if statuses:
            raise AnsweredError(statuses.pop(), "so it is")
        return {"strData": "next", "meta": {}}

    async def main() -> None:
        service = GraphService(graph_of({"m": failing}, Predictor("p", node("m"))), Own(), Limits())
        lane = Lane(shared=HttpShared(service, Limits()))
        lane.feed(REQUEST)
        await turns()
        lane.feed(REQUEST)
        await turns()
        failed, following = lane.answers

        assert (failed.status, b"so it is" in failed.body) == (sent, sent not in (204, 304))
        assert (following.status, following.body) == (200, b'{"meta": {}, "strData": "next"}')

    statuses = [status]
    run(main)


@pytest.mark.parametrize(("codec", "waits"), [(JsonCodec(), True), (ProtoCodec(), False)])
def test_a_shadow_request_has_the_time_limit_of_its_protocol(codec: MessageCodec, waits: bool) -> None:
    async def main() -> None:
        shadow = Predictor("s", node("m"), shadow=True, rest_limit_s=0.0, grpc_limit_s=1e-9)
        graph = graph_of({"m": lambda *_: Never}, shadow)
        graph.shadow(Message(b"{}"), "id", codec)
        await turns()
        engine: Any = graph.context.engine

        assert (len(engine.calls), engine.cancelled) == (1, [] if waits else ["m"])

    asyncio.run(main())
