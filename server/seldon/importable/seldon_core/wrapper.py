"""A component for users' own tests: as a Flask app, `get_rest_microservice(...).test_client()`, or over gRPC.

It gives a server's answers, through the same code. Needs Flask, or grpcio. Source: seldon-core 1.17.1.
"""

from __future__ import annotations

import json
import os
from typing import Any

from .env_utils import get_model_name
from .flask_utils import ANNOTATION_GRPC_MAX_MSG_SIZE
from .utils import getenv, getenv_as_bool, json_to_seldon_model_metadata

PRED_UNIT_ID = get_model_name("0")
METRICS_ENDPOINT = getenv("PREDICTIVE_UNIT_METRICS_ENDPOINT", default="/metrics")
PAYLOAD_PASSTHROUGH = getenv_as_bool("PAYLOAD_PASSTHROUGH", default=False)
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def get_rest_microservice(user_model: Any, seldon_metrics: Any) -> Any:
    """Make the app of a component, which counts its metrics."""
    from flask import Flask, Response, request

    from penstock.server.seldon.inside.component import Component
    from penstock.server.seldon.inside.endpoints import Rest
    from penstock.server.seldon.inside.metadata import metadata_of
    from penstock.server.seldon.messages import Endpoint, PayloadKind, read_answer
    from penstock.server.seldon.paths import purpose_of

    rest, metadata = Rest(Component(user_model)), metadata_of(user_model, os.environ)
    app = Flask(__name__, static_folder=None)

    def answer(path: str = "") -> Any:
        purpose = purpose_of(request.method.encode(), f"/{path}".encode(), strict=True)
        if not isinstance(purpose, Endpoint):
            status, body, kind = _page(purpose, metadata)
            return Response(body, status, {"Access-Control-Allow-Origin": "*"}, content_type=kind)
        said = {"method": request.method, "type": request.content_type or "", "query": request.query_string.decode()}
        reply = rest.answer(purpose, PayloadKind.HTTP, json.dumps(said).encode() + b"\n" + request.get_data())
        status, metrics, said_lines, body = read_answer(reply)
        if metrics:
            _count(seldon_metrics, purpose, json.loads(metrics))
        lines = said_lines.decode("latin-1").split("\r\n")
        headers = {"Access-Control-Allow-Origin": "*", **dict(line.split(": ", 1) for line in lines[1:] if line)}
        return Response(body, status, headers, content_type=lines[0] or "application/json")

    for rule in ("/", "/<path:path>"):
        app.add_url_rule(rule, "answer", answer, methods=_METHODS, provide_automatic_options=False)
    return app


def get_metrics_microservice(seldon_metrics: Any) -> Any:
    """Make an app that serves the page of metrics."""
    from flask import Flask, Response

    app = Flask(__name__, static_folder=None)

    def metrics() -> Any:
        page, kind = seldon_metrics.generate_metrics()
        return Response(page, mimetype=kind)

    app.add_url_rule(METRICS_ENDPOINT, "metrics", metrics)
    return app


def _page(purpose: str, metadata: Any) -> tuple[int, bytes, str]:
    """Return an answer that needs no component: the status, the body, its type."""
    from penstock.server.seldon import openapi, pages, paths

    kind, text = pages.JSON.decode(), pages.TEXT.decode()
    if purpose == paths.PING:
        return 200, b"pong", text
    if purpose == paths.METADATA:
        return (500, pages.NO_METADATA, kind) if metadata is None else (200, pages.encode_json(metadata), kind)
    if purpose == paths.OPENAPI:
        return 200, openapi.page(), kind
    if purpose == paths.OPTIONS:
        return 200, b"", text
    return 500, pages.NOT_FOUND if purpose == paths.NOT_FOUND else pages.NOT_ALLOWED, kind


def _count(seldon_metrics: Any, endpoint: Any, rows: list[list[Any]]) -> None:
    made = [{"key": key, "type": kind, "value": value, "tags": tags or {}} for key, kind, value, tags in rows]
    seldon_metrics.update(made, endpoint.label)


class SeldonModelGRPC:
    """A component as the servicer of all services. Exceptions of its methods propagate."""

    def __init__(self, user_model: Any, seldon_metrics: Any) -> None:
        from penstock.server.seldon.inside.component import Component
        from penstock.server.seldon.inside.metadata import metadata_of

        self.user_model = user_model
        self.seldon_metrics = seldon_metrics
        self.metadata_data = metadata_of(user_model, os.environ)
        self._component = Component(user_model)

    def _called(self, name: str, request: Any) -> Any:
        from penstock.server.seldon.inside.protobuf import call_endpoint
        from penstock.server.seldon.messages import Endpoint

        from .proto import prediction_pb2

        component, endpoint = self._component, Endpoint[name]
        try:
            body = call_endpoint(component, endpoint, request)
        finally:
            recorded, component.recorded = component.recorded, []
            if recorded:
                _count(self.seldon_metrics, endpoint, recorded)
        if body is None:
            raise TypeError("the component returned no message")
        return prediction_pb2.SeldonMessage.FromString(body)

    def Predict(self, request_grpc: Any, context: Any) -> Any:  # noqa: N802 - the names of the RPCs
        return self._called("PREDICT", request_grpc)

    def SendFeedback(self, feedback_grpc: Any, context: Any) -> Any:  # noqa: N802
        return self._called("FEEDBACK", feedback_grpc)

    def TransformInput(self, request_grpc: Any, context: Any) -> Any:  # noqa: N802
        return self._called("TRANSFORM_INPUT", request_grpc)

    def TransformOutput(self, request_grpc: Any, context: Any) -> Any:  # noqa: N802
        return self._called("TRANSFORM_OUTPUT", request_grpc)

    def Route(self, request_grpc: Any, context: Any) -> Any:  # noqa: N802
        return self._called("ROUTE", request_grpc)

    def Aggregate(self, request_grpc: Any, context: Any) -> Any:  # noqa: N802
        return self._called("AGGREGATE", request_grpc)

    def Metadata(self, request_grpc: Any, context: Any) -> Any:  # noqa: N802
        return json_to_seldon_model_metadata(self.metadata_data)

    def ModelMetadata(self, request_grpc: Any, context: Any) -> Any:  # noqa: N802
        return json_to_seldon_model_metadata(self.metadata_data)

    def GraphMetadata(self, request_grpc: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError("GraphMetadata not available on the Model level.")


def get_grpc_server(
    user_model: Any,
    seldon_metrics: Any,
    annotations: dict[str, str] | None = None,
    trace_interceptor: Any = None,
    num_threads: int = 1,
) -> Any:
    """Make grpcio's server for a component, without a port yet, and without reflection."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    from .proto import prediction_pb2, prediction_pb2_grpc

    options: list[tuple[str, int]] = [("grpc.so_reuseport", 1)]
    most = (annotations or {}).get(ANNOTATION_GRPC_MAX_MSG_SIZE)
    if most is not None:
        options += [(f"grpc.max_{way}message_length", int(most)) for way in ("", "send_", "receive_")]
    interceptors = [] if trace_interceptor is None else [trace_interceptor]
    server = grpc.server(ThreadPoolExecutor(num_threads), interceptors=interceptors, options=options)
    servicer = SeldonModelGRPC(user_model, seldon_metrics)
    for name in prediction_pb2.DESCRIPTOR.services_by_name:
        getattr(prediction_pb2_grpc, f"add_{name}Servicer_to_server")(servicer, server)
    return server
