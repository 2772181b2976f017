"""Replies of workers are decoded, by the server and by a walk."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.server.seldon.graph.message_codecs import JsonCodec, MessageCodec, ProtoCodec
from penstock.server.seldon.graph.nodes import Predictor
from penstock.server.seldon.graph.walk import NodeFailed, Walk, WalkContext
from penstock.server.seldon.inside.answers import encode_reply
from penstock.server.seldon.inside.component import Component
from penstock.server.seldon.messages import Endpoint, read_answer

from .graphs import message_from, node

LINES = b"text/plain\r\nx-reason: none\r\n"
COUNTED: list[Any] = ["calls", "COUNTER", 1, None]


def replied(status: int, *, recorded: list[Any], lines: bytes) -> bytes:
    """Return a reply as a worker encodes it."""
    component = Component(object())
    component.recorded = recorded
    return encode_reply(component, status, b"{}", lines)


@pytest.mark.parametrize("lines", [b"", LINES], ids=["no lines", "lines"])
@pytest.mark.parametrize("recorded", [[], [COUNTED]], ids=["no metrics", "metrics"])
def test_a_reply_is_decoded_into_its_status_metrics_headers_and_body(recorded: list[Any], lines: bytes) -> None:
    status, metrics, found, body = read_answer(replied(418, recorded=recorded, lines=lines))

    assert (status, found, body) == (418, lines, b"{}")
    assert json.loads(metrics or b"[]") == recorded


@pytest.mark.parametrize("lines", [b"", LINES], ids=["no lines", "lines"])
@pytest.mark.parametrize(("codec", "status"), [(JsonCodec(), 203), (ProtoCodec(), 2)], ids=["json", "proto"])
def test_a_node_that_answers_with_a_status_other_than_ok_fails_with_metrics_counted(
    codec: MessageCodec, status: int, lines: bytes
) -> None:
    counted = []

    def submit(call: Any) -> None:
        call.reply, call.outputs = replied(status, recorded=[COUNTED], lines=lines), []
        call.sink.deliver([call])

    engine: Any = SimpleNamespace(
        submit=submit, cancel=lambda call: None, model=lambda name: SimpleNamespace(name=name, healthy=True)
    )
    context = WalkContext(
        engine, report_metrics=lambda model, endpoint, metrics: counted.append((model, endpoint, json.loads(metrics)))
    )

    with pytest.raises(NodeFailed) as failed:
        asyncio.run(Walk(context, Predictor("p", node("m")), codec).predict(message_from({}), "id"))

    assert counted == [("m", Endpoint.PREDICT, [COUNTED])]
    message = failed.value.message
    assert (failed.value.status, message.body) == (status, b"{}")
    assert message.content_type == (b"text/plain" if lines else b"application/json")
