"""GraphMetrics: the orchestrator's Prometheus series: the duration of requests, and of the node calls they consist of.

Counted by service.py, rpc.py and walk.py, once for each; rendered on the metrics page.
Source: Seldon Core 1.17.1, the executor, whose names, labels and buckets these are. It also had each as a summary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from penstock.server.seldon.messages import Endpoint
from penstock.server.telemetry.exposition import decimal, histogram_lines, label_value

from .nodes import GraphNode, Predictor

SERVER, CLIENT = "seldon_api_executor_server_requests_seconds", "seldon_api_executor_client_requests_seconds"
EDGES = ("0.005", "0.01", "0.025", "0.05", "0.075", "0.1", "0.25", "0.5", "0.75", "1", "2.5", "5", "7.5", "10")
_BOUNDS_NS = tuple(int(float(edge) * 1e9) for edge in EDGES)
_HEADS = {
    SERVER: "How long requests of a graph took.",
    CLIENT: "How long the calls of its nodes took.",
}
_METHODS = {
    Endpoint.PREDICT: ("/predict", "/seldon.protos.Model/Predict"),
    Endpoint.FEEDBACK: ("/send-feedback", "/seldon.protos.Model/SendFeedback"),
    Endpoint.TRANSFORM_INPUT: ("/transform-input", "/seldon.protos.Transformer/TransformInput"),
    Endpoint.TRANSFORM_OUTPUT: ("/transform-output", "/seldon.protos.OutputTransformer/TransformOutput"),
    Endpoint.ROUTE: ("/route", "/seldon.protos.Router/Route"),
    Endpoint.AGGREGATE: ("/aggregate", "/seldon.protos.Combiner/Aggregate"),
    Endpoint.HEALTH: ("/health/status", "/health/status"),
}
"""The label of a call, over HTTP and over gRPC."""
GRPC_CODES = (
    "OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound", "AlreadyExists", "PermissionDenied",
    "ResourceExhausted", "FailedPrecondition", "Aborted", "OutOfRange", "Unimplemented", "Internal", "Unavailable",
    "DataLoss", "Unauthenticated",
)  # fmt: skip


class GraphMetrics:
    """All series of one server, each a histogram. Threads: the event loop's."""

    def __init__(self, deployment: str) -> None:
        self.deployment = deployment
        self._series: dict[tuple[str, ...], list[int]] = {}

    def count_request(self, predictor: Predictor, service: str, method: str, code: str, duration_ns: int) -> None:
        """Count one request of the graph."""
        self._count((SERVER, predictor.name, predictor.version, service, method, code), duration_ns)

    def count_call(
        self, predictor: Predictor, node: GraphNode, endpoint: Endpoint, status: int, duration_ns: int
    ) -> None:
        """Count one call of a node. `status` is HTTP's, or gRPC's, which are smaller; a negative one is not counted."""
        if status < 0:
            return
        http = status > len(GRPC_CODES)
        service = _METHODS[endpoint][not http]
        method, code = ("post", str(status)) if http else ("unary", GRPC_CODES[status])
        image, _, version = node.image.partition(":")
        key = (CLIENT, predictor.name, predictor.version, service, method, code, node.name, image, version)
        self._count(key, duration_ns)

    def _count(self, key: tuple[str, ...], duration_ns: int) -> None:
        counts = self._series.get(key)
        if counts is None:
            counts = self._series[key] = [0] * (len(EDGES) + 2)
        counts[bisect_left(_BOUNDS_NS, duration_ns)] += 1
        counts[-1] += duration_ns

    def render(self) -> Iterator[str]:
        """Return the lines for the metrics page."""
        for name in (SERVER, CLIENT):
            keys = [key for key in self._series if key[0] == name]
            if keys:
                yield f"# HELP {name} {_HEADS[name]}"
                yield f"# TYPE {name} histogram"
            for key in keys:
                yield from self._lines(key, self._series[key])

    def _lines(self, key: tuple[str, ...], counts: list[int]) -> Iterator[str]:
        name, predictor, version, service, method, code, *node = key
        labels_by_name = {
            "code": code, "deployment_name": self.deployment, "method": method,
            **dict(zip(("model_name", "model_image", "model_version"), node, strict=False)),
            "predictor_name": predictor, "predictor_version": version, "service": service,
        }  # fmt: skip
        labels = ",".join(f'{label}="{label_value(value)}"' for label, value in sorted(labels_by_name.items()))
        yield from histogram_lines(name, labels, EDGES, counts[:-1], decimal(counts[-1], 9))
