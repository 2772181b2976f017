"""What perf/seldon.py sends."""

from __future__ import annotations

import json

from penstock.perf.seldon import FLOWER, body, message
from penstock.server.seldon import protos


def test_both_wires_carry_the_same_row() -> None:
    sent = protos.message_class("SeldonMessage").FromString(message())

    assert json.loads(body()) == {"data": {"ndarray": [FLOWER]}}
    assert (list(sent.data.tensor.shape), list(sent.data.tensor.values)) == ([1, 4], FLOWER)
