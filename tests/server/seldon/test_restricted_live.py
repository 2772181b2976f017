"""Restricted protocols require their header, for a component and for a graph."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from penstock.server.seldon.protos import message_class
from tests.live import live_server

pytestmark = pytest.mark.slow

PATIENCE_S = 30.0
PREDICT = "/seldon.protos.Seldon/Predict"


@pytest.mark.parametrize("path", [".", "graph.yaml"], ids=["component", "graph"])
def test_restricted_predictions_require_the_header_and_health_checks_do_not(path: str, tmp_path: Path) -> None:
    (tmp_path / "Same.py").write_text("class Same:\n    def predict(self, X, names):\n        return X\n")
    (tmp_path / "graph.yaml").write_text("graph: {name: Same}\n")
    group = ("inference:key=secret",)

    with live_server(
        tmp_path / path, dialect="seldon", http_restricted_api=group, grpc_restricted_protocol=group
    ) as live:

        def status(method: str, target: str, **headers: str) -> int:
            body = json.dumps({"strData": "a"}).encode() if method == "POST" else None
            words = {"content-type": "application/json", **headers}
            request = urllib.request.Request(live.url + target, body, words, method=method)
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code

        assert status("POST", "/api/v1.0/predictions") == 403
        assert status("POST", "/api/v1.0/predictions", key="secret") == 200
        assert status("GET", "/health/ping" if path == "." else "/ping") == 200
        message = message_class("SeldonMessage")(strData="a").SerializeToString()
        with grpc.insecure_channel(live.grpc_address) as channel:
            call = channel.unary_unary(PREDICT)
            with pytest.raises(grpc.RpcError, match="This protocol is restricted"):
                call(message, timeout=PATIENCE_S)
            answer = call(message, metadata=(("triton-grpc-protocol-key", "secret"),), timeout=PATIENCE_S)
        assert message_class("SeldonMessage").FromString(answer).strData == "a"
