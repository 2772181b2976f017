"""SeldonService as the Service of a connection, over a fake transport and an engine that answers when told to."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.answering import LARGE_BYTES
from penstock.server.http.service import HttpShared
from penstock.server.listening.listener import Listener
from penstock.server.listening.ports import make_http_port
from penstock.server.restricted import RestrictedApis
from penstock.server.seldon import openapi, pages
from penstock.server.seldon.batching import Sharing
from penstock.server.seldon.current_component import CurrentComponent
from penstock.server.seldon.dialect import Seldon
from penstock.server.seldon.messages import ANSWER, ComponentDescription, Endpoint, PayloadKind
from penstock.server.seldon.service import SeldonService
from penstock.server.settings import Settings
from tests.fakes import fake_model
from tests.server.carrying.test_service import OneModel
from tests.server.http.lane import Answer, Lane, Own, in_chunks, run, turns

JSON = "content-type: application/json"
BODY = b'{"data":{"ndarray":[[1]]}}'
NOT_FOUND = (
    b'{"status":{"code":-1,"info":"404 Not Found: The requested URL was not found on the server. If you entered the '
    b'URL manually please check your spelling and try again.","reason":"MICROSERVICE_INTERNAL_ERROR","status":1}}\n'
)
NOT_ALLOWED = (
    b'{"status":{"code":-1,"info":"405 Method Not Allowed: The method is not allowed for the requested URL.",'
    b'"reason":"MICROSERVICE_INTERNAL_ERROR","status":1}}\n'
)
METADATA = {"name": "m", "versions": ["1"], "custom": {}}


def request_bytes(target: str, body: bytes = b"", *lines: str, method: str = "POST", version: str = "1.1") -> bytes:
    """Write a request with a Content-Length."""
    head = [f"{method} {target} HTTP/{version}", "host: x", f"content-length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


def reply(body: bytes = b"{}\n", status: int = 200, lines: bytes = b"", metrics: bytes = b"") -> bytes:
    """Write a worker's reply."""
    return ANSWER.pack(status, len(lines), len(metrics)) + metrics + lines + body


class SeldonEngine(OneModel):
    """An Engine whose only model is the component's."""

    def answer(self, *replies: bytes) -> None:
        super().answer(*(replies or [reply()] * len(self.held)))

    def fail(self, error: InferError) -> None:
        """Fail the call that was submitted first."""
        call = self.held.pop(0)
        call.error = error
        call.sink.deliver([call])


@dataclass
class Counted:
    """Keeps the metrics it is passed."""

    added: list[tuple[Endpoint, bytes]] = field(default_factory=list)

    def add(self, endpoint: Endpoint, metrics: bytes) -> None:
        self.added.append((endpoint, metrics))


class OwnV2(Own):
    """Answers paths below /v2/own."""

    def claim(self, head: Any) -> Any:
        return "own" if head.path.startswith(b"/v2/own") else None


class Served(Lane):
    """A connection whose Service is SeldonService, beside one that answers paths below /v2/own."""

    def __init__(self, *, strict: bool = True, restricted: RestrictedApis | None = None) -> None:
        self.engine, self.counted = SeldonEngine(), Counted()
        self.descriptions = {"m": ComponentDescription(METADATA, '{"meta":{},"strData":"healthy"}\n', page="{...}\n")}
        self.models = SimpleNamespace(descriptions=self.descriptions, sharing={})
        settings = Settings(model_repository=("x",), dialect="seldon", seldon_strict=strict)
        current = CurrentComponent(cast(Any, self.engine), lambda: "m", cast(Any, self.models))
        self.service = SeldonService(cast(Any, self.engine), current, cast(Any, self.counted), OwnV2(), settings)
        self.service.restricted = restricted or RestrictedApis()
        super().__init__(shared=make_shared(make_http_port(settings, cast(Any, None), self.service, Seldon(settings))))

    async def one(self, raw: bytes, *answers: bytes) -> Answer:
        """Feed one request, have the component answer it if it is called, and read the answer."""
        self.transport.written.clear()
        await self.fed(raw)
        if self.engine.held:
            self.engine.answer(*answers)
        [answer] = self.answers
        return answer

    async def sent(self, raw: bytes) -> Any:
        """Feed one request, and return the call made of it."""
        before = len(self.engine.held)
        await self.fed(raw)
        [call] = self.engine.held[before:]
        self.engine.held.clear()
        self.protocol.answer(200, b"", b"")
        return call


def make_shared(listener: Listener) -> HttpShared:
    """Return what the connections of a port share."""
    return cast(HttpShared, cast(Any, listener)._config.http_protocol_class.shared)


def status_of(answer: Answer) -> dict[str, Any]:
    """Read the error of an answer."""
    assert answer.headers["content-type"] == "application/json"
    status = json.loads(answer.body)["status"]
    assert (status["code"], status["status"]) == (-1, 1)
    return cast(dict[str, Any], status)


class TestCalls:
    def test_a_call_and_its_answer_are_passed_on_unchanged(self) -> None:
        async def main() -> None:
            served = Served()
            await served.fed(request_bytes("/predict", BODY, JSON))
            [call] = served.engine.held
            assert (call.endpoint, call.body) == (Endpoint.PREDICT, bytes((Endpoint.PREDICT, PayloadKind.JSON)) + BODY)  # type: ignore[attr-defined]
            served.engine.answer(reply(b'{"meta":{}}\n'))

            [answer] = served.answers
            assert (answer.status, answer.body) == (200, b'{"meta":{}}\n')
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["access-control-allow-origin"] == "*"
            assert not answer.closes

        run(main)

    @pytest.mark.parametrize(
        "line",
        [
            JSON, "content-type: application/json; charset=utf-8", "content-type: APPLICATION/JSON",
            "content-type: application/vnd.me+json",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("target", ["/predict", "/api/v1.0/predictions?x=1", "//predict", "/%70redict"])
    def test_a_json_body_is_sent_to_the_worker_without_its_head(self, line: str, target: str) -> None:
        async def main() -> None:
            assert (await Served().sent(request_bytes(target, BODY, line))).body[:2] == bytes(
                (Endpoint.PREDICT, PayloadKind.JSON)
            )

        run(main)

    @pytest.mark.parametrize(
        ("method", "target", "line", "expected_head"),
        [
            ("GET", '/predict?json={"a":1}', "x: y", {"method": "GET", "type": "", "query": 'json={"a":1}'}),
            ("POST", "/predict?json=1", JSON, {"method": "POST", "type": "application/json", "query": "json=1"}),
            ("POST", "/predict?j%73on=1", JSON, {"method": "POST", "type": "application/json", "query": "j%73on=1"}),
            ("POST", "/route", "content-type: text/plain", {"method": "POST", "type": "text/plain", "query": ""}),
            ("GET", "/predict", JSON, {"method": "GET", "type": "application/json", "query": ""}),
        ],
    )
    def test_other_bodies_are_sent_to_the_worker_with_method_type_and_query(
        self, method: str, target: str, line: str, expected_head: dict[str, str]
    ) -> None:
        async def main() -> None:
            call = await Served().sent(request_bytes(target.replace('"', "%22"), b"body", line, method=method))
            head, _, body = call.body[2:].partition(b"\n")

            expected_head["query"] = expected_head["query"].replace('"', "%22")
            assert (call.body[1], json.loads(head), body) == (PayloadKind.HTTP, expected_head, b"body")

        run(main)

    def test_requests_that_differ_only_in_their_query_are_distinguished(self) -> None:
        async def main() -> None:
            served = Served()
            queries = [
                json.loads((await served.sent(request_bytes(f"/predict?json={query}"))).body[2:])["query"]
                for query in (1, 2, 1, 22)
            ]

            assert queries == ["json=1", "json=2", "json=1", "json=22"]

        run(main)

    def test_a_component_sets_the_status_content_type_and_headers_of_an_answer(self) -> None:
        async def main() -> None:
            lines = b"text/plain\r\nx-mine: 1\r\n"
            answer = await Served().one(request_bytes("/predict", BODY, JSON), reply(b"no", 402, lines))

            assert (answer.status, answer.body, answer.headers["content-type"]) == (402, b"no", "text/plain")
            assert (answer.headers["x-mine"], answer.headers["access-control-allow-origin"]) == ("1", "*")

        run(main)

    def test_a_component_may_set_access_control_allow_origin(self) -> None:
        async def main() -> None:
            served = Served()
            lines = b"text/plain\r\nAccess-Control-Allow-Origin: https://only.me\r\n"
            answer = await served.one(request_bytes("/predict", BODY, JSON), reply(b"", 200, lines))

            assert answer.headers["access-control-allow-origin"] == "https://only.me"
            assert served.transport.written.lower().count(b"access-control-allow-origin") == 1

        run(main)

    def test_metrics_are_counted_and_removed_from_the_answer(self) -> None:
        async def main() -> None:
            served = Served()
            error_reply = reply(b"no", 402, b"text/plain\r\nx-mine: 1\r\n", b"[[1]]")
            answer = await served.one(request_bytes("/route", BODY, JSON), error_reply)

            assert (answer.body, answer.headers["x-mine"]) == (b"no", "1")
            assert served.counted.added == [(Endpoint.ROUTE, b"[[1]]")]

        run(main)

    def test_chunked_and_compressed_bodies_are_decoded(self) -> None:
        async def main() -> None:
            served = Served()
            chunked = in_chunks("/predict", BODY[:3], BODY[3:]).replace(b"host: x", b"host: x\r\n" + JSON.encode())
            gzipped = request_bytes("/predict", gzip.compress(BODY), JSON, "content-encoding: GZIP")
            deflated = request_bytes("/predict", zlib.compress(BODY), JSON, "content-encoding: deflate")

            assert [(await served.sent(raw)).body[2:] for raw in (chunked, gzipped, deflated)] == [BODY] * 3

        run(main)

    @pytest.mark.parametrize("coding", ["gzip", "deflate", "identity", "br", "x"])
    def test_an_uncompressed_body_is_accepted_whatever_its_content_encoding(self, coding: str) -> None:
        async def main() -> None:
            assert (await Served().sent(request_bytes("/predict", BODY, JSON, f"content-encoding: {coding}"))).body[
                2:
            ] == BODY

        run(main)

    def test_a_truncated_compressed_body_is_rejected_as_bad_data(self) -> None:
        async def main() -> None:
            served = Served()
            cut = gzip.compress(BODY)[:-9]
            answer = await served.one(request_bytes("/predict", cut, JSON, "content-encoding: gzip"))

            assert answer.status == 400
            assert status_of(answer)["reason"] == "MICROSERVICE_BAD_DATA"

        run(main)

    def test_a_large_successful_answer_is_compressed_if_the_client_accepts_gzip(self) -> None:
        async def main() -> None:
            served = Served()
            raw = request_bytes("/predict", BODY, JSON, "accept-encoding: gzip")
            answer = await served.one(raw, reply(b"a" * 1000))

            assert (answer.headers["content-encoding"], gzip.decompress(answer.body)) == ("gzip", b"a" * 1000)
            assert "content-encoding" not in (await served.one(raw, reply(b"a" * 1000, 500))).headers
            assert "content-encoding" not in (await served.one(raw, reply(b"a"))).headers

        run(main)

    def test_a_head_request_is_answered_without_a_body(self) -> None:
        async def main() -> None:
            served = Served()
            await served.fed(request_bytes("/predict?json=1", method="HEAD"))
            served.engine.answer(reply(b"12345"))

            assert b"content-length: 5\r\n" in served.transport.written
            assert served.transport.written.endswith(b"\r\n\r\n")

        run(main)

    def test_calls_after_a_reload_go_to_the_new_model(self) -> None:
        async def main() -> None:
            served = Served()
            raw = request_bytes("/predict", BODY, JSON)
            assert (await served.sent(raw)).model is served.engine.loaded[0]
            served.engine.loaded, served.engine.generation = [fake_model()], 2

            assert (await served.sent(raw)).model is served.engine.loaded[0]

        run(main)

    @pytest.mark.parametrize("size", [0, LARGE_BYTES])
    def test_a_call_that_may_share_a_batch_is_read_into_an_array(self, size: int) -> None:
        async def main() -> None:
            served = Served()
            served.models.sharing["m"] = Sharing(ComponentDescription(batches=True), 8)
            await served.sent(request_bytes("/route", BODY, JSON))
            served.feed(request_bytes("/predict", b" " * size + BODY, JSON))
            async with asyncio.timeout(5):
                while not served.engine.held:  # noqa: ASYNC110 - a thread tells nobody
                    await asyncio.sleep(0)

            assert cast(Any, served.engine.held[0]).inputs[0].tolist() == [[1]]

        run(main)


class TestRejections:
    def test_a_call_to_a_missing_component_is_not_ready(self) -> None:
        async def main() -> None:
            served = Served()
            served.engine.present = False
            raw = request_bytes("/predict", BODY, JSON)
            answer = await served.one(raw)

            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert "is not ready" in status_of(answer)["info"]
            served.engine.present = True
            assert (await served.one(raw)).status == 200

        run(main)

    @pytest.mark.parametrize(
        ("error", "status", "again", "reason"),
        [
            (InferError(Code.OVERLOADED, "full"), 503, "1", "MICROSERVICE_INTERNAL_ERROR"),
            (InferError(Code.NOT_READY, "has ended"), 503, "1", "MICROSERVICE_INTERNAL_ERROR"),
            (InferError(Code.EXPIRED, "took longer"), 503, None, "MICROSERVICE_INTERNAL_ERROR"),
            (InferError(Code.INTERNAL, "broke"), 500, None, "MICROSERVICE_INTERNAL_ERROR"),
            (InferError(Code.INVALID, "is too large"), 400, None, "MICROSERVICE_BAD_DATA"),
        ],
        ids=lambda value: value.code.name if isinstance(value, InferError) else "",
    )
    def test_server_errors_have_the_same_json_form_as_component_errors(
        self, error: InferError, status: int, again: str | None, reason: str
    ) -> None:
        async def main() -> None:
            served = Served()
            await served.fed(request_bytes("/predict", BODY, JSON))
            served.engine.fail(error)
            served.engine.failure = error
            later, refused = await served.fed(request_bytes("/predict", BODY, JSON))

            for answer in (later, refused):
                assert (answer.status, answer.headers.get("retry-after")) == (status, again)
                assert (status_of(answer)["info"], status_of(answer)["reason"]) == (error.message, reason)
                assert answer.headers["access-control-allow-origin"] == "*"

        run(main)

    def test_an_unexpected_exception_is_logged_and_answered_with_a_request_id(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def main() -> None:
            served = Served()
            served.engine.failure = ValueError("secret")
            answer = await served.one(request_bytes("/predict", BODY, JSON, "x-request-id: me"))

            assert (answer.status, status_of(answer)["info"]) == (500, "internal error, request id me")

        run(main)
        assert "secret" in caplog.text

    def test_a_large_body_is_rejected_early_when_the_queue_is_full(self) -> None:
        async def main() -> None:
            served = Served()
            served.engine.refusal = InferError(Code.OVERLOADED, "full")
            answer = await served.one(request_bytes("/predict", b" " * 100_000, JSON))

            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert (await served.one(request_bytes("/nope", b" " * 100_000, JSON))).body == NOT_ALLOWED
            served.engine.present, served.engine.generation = False, 2
            assert (
                "is not ready" in status_of(await served.one(request_bytes("/predict", b" " * 100_000, JSON)))["info"]
            )

        run(main)

    def test_the_call_of_a_disconnected_client_is_cancelled_but_its_metrics_are_counted(self) -> None:
        async def main() -> None:
            served = Served()
            await served.fed(request_bytes("/predict", BODY, JSON))
            [call] = served.engine.held
            served.transport.lose(None)
            await turns()

            assert served.engine.cancelled == [call]
            served.engine.answer(reply(metrics=b"[[1]]"))
            assert (served.answers, served.counted.added) == ([], [(Endpoint.PREDICT, b"[[1]]")])

        run(main)

    def test_restricted_groups_require_their_header(self) -> None:
        async def main() -> None:
            restricted = RestrictedApis.parse(["inference,metadata:key=secret"])
            served = Served(restricted=restricted)
            assert (await served.one(request_bytes("/health/ping", method="GET"))).status == 200
            assert (await served.one(request_bytes("/predict", BODY, JSON, "key: secret"))).status == 200
            for target, method in (("/predict", "POST"), ("/%70redict", "POST"), ("/metadata", "GET")):
                served = Served(restricted=restricted)
                answer = await served.one(request_bytes(target, BODY, JSON, method=method))
                assert (answer.status, "expecting header 'key'" in status_of(answer)["info"]) == (403, True)

        run(main)

    def test_a_draining_server_answers_pending_calls_and_closes_the_connection(self) -> None:
        async def main() -> None:
            served = Served()
            await served.fed(request_bytes("/predict", BODY, JSON))
            served.protocol.shutdown()
            served.engine.answer()
            [answer] = served.answers

            assert (answer.status, answer.closes) == (200, True)

        run(main)


class TestPages:
    def test_a_ping_is_answered_even_without_the_component(self) -> None:
        async def main() -> None:
            served = Served()
            served.engine.present = False
            answer = await served.one(request_bytes("/health/ping", method="GET"))

            assert (answer.status, answer.body) == (200, b"pong")
            assert answer.headers["content-type"] == "text/html; charset=utf-8"

        run(main)

    @pytest.mark.parametrize("path", ["/health/status", "/api/v1.0/health/status"])
    def test_health_is_answered_without_a_call_when_the_answer_is_precomputed(self, path: str) -> None:
        async def main() -> None:
            answer = await Served().one(request_bytes(path, method="GET"))

            assert (answer.status, answer.body) == (200, b'{"meta":{},"strData":"healthy"}\n')

        run(main)

    def test_health_of_a_component_with_a_health_method_is_a_call(self) -> None:
        async def main() -> None:
            served = Served()
            served.descriptions["m"] = ComponentDescription()
            call = await served.sent(request_bytes("/health/status", method="GET"))

            assert (call.endpoint, call.body[0]) == (Endpoint.HEALTH, Endpoint.HEALTH)

        run(main)

    def test_health_is_not_answered_as_healthy_without_a_running_worker(self) -> None:
        async def main() -> None:
            served = Served()
            served.engine.loaded[0].instances.append(cast(Any, Lost()))
            assert (await served.sent(request_bytes("/health/status", method="GET"))).endpoint is Endpoint.HEALTH
            served.engine.present, served.engine.generation = False, 2
            served.transport.written.clear()
            assert (await served.one(request_bytes("/health/status", method="GET"))).status == 503

        run(main)

    @pytest.mark.parametrize("path", ["/metadata", "/api/v1.0/metadata"])
    def test_metadata_is_answered_from_the_components_description(self, path: str) -> None:
        async def main() -> None:
            served = Served()
            raw = request_bytes(path, method="GET")
            assert (await served.one(raw)).body == b"{...}\n"
            served.descriptions["m"] = ComponentDescription(None)
            answer = await served.one(raw)
            assert answer.status == 500
            assert answer.body == pages.failure("Model metadata unavailable", "MICROSERVICE_BAD_METADATA")
            served.descriptions.clear()
            assert (await served.one(raw)).status == 503

        run(main)

    def test_unknown_paths_and_methods_are_answered_with_500_when_strict_is_on(self) -> None:
        async def main() -> None:
            served = Served()
            for raw, body in (
                (request_bytes("/nope", method="GET"), NOT_FOUND),
                (request_bytes("/api/v1.0/predictions", method="GET"), NOT_FOUND),
                (request_bytes("/predict", method="DELETE"), NOT_ALLOWED),
                (request_bytes("/nope", BODY, JSON), NOT_ALLOWED),
                (request_bytes("/health/status", BODY, JSON), NOT_ALLOWED),
            ):
                answer = await served.one(raw)
                assert (answer.status, answer.body) == (500, body)
                assert served.transport.written.startswith(b"HTTP/1.1 500 INTERNAL SERVER ERROR\r\n")

        run(main)

    def test_unknown_paths_and_methods_are_answered_with_404_and_405_when_strict_is_off(self) -> None:
        async def main() -> None:
            served = Served(strict=False)
            assert (await served.one(request_bytes("/nope", BODY, JSON))).status == 404
            answer = await served.one(request_bytes("/predict", method="DELETE"))
            assert (answer.status, answer.body) == (405, NOT_ALLOWED)
            assert answer.headers["allow"] == "OPTIONS, GET, POST, HEAD"

        run(main)

    def test_options_requests_are_answered_with_the_allowed_methods(self) -> None:
        async def main() -> None:
            answer = await Served().one(request_bytes("/predict", method="OPTIONS"))

            assert (answer.status, answer.body, answer.headers["allow"]) == (200, b"", "OPTIONS, GET, POST, HEAD")
            assert answer.headers["content-type"] == "text/html; charset=utf-8"

        run(main)

    def test_cross_origin_requests_are_allowed_from_any_origin(self) -> None:
        async def main() -> None:
            lines = (
                "origin: http://a",
                "access-control-request-method: post",
                "access-control-request-headers: x-b, x-a",
            )
            headers = (await Served().one(request_bytes("/predict", b"", *lines, method="OPTIONS"))).headers

            assert headers["access-control-allow-origin"] == "http://a"
            assert headers["access-control-allow-headers"] == "x-a, x-b"
            assert headers["access-control-allow-methods"] == "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
            assert headers["vary"] == "Origin"
            headers = (await Served().one(request_bytes("/predict", BODY, JSON, *lines))).headers
            assert headers["access-control-allow-origin"] == "http://a"
            assert "access-control-allow-methods" not in headers

        run(main)

    def test_penstock_paths_are_passed_to_their_own_service(self) -> None:
        async def main() -> None:
            served = Served()
            assert (await served.one(request_bytes("/v2/own", b"x"))).body == b"own /v2/own x"
            assert (await served.one(request_bytes("/v2/other", b"x"))).body == b"app /v2/other x"

        run(main)


class Lost:
    """An Instance that cannot run."""

    failure = InferError(Code.NOT_READY, "has ended")


class TestOpenApi:
    def test_the_document_is_served(self) -> None:
        async def main() -> None:
            answer = await Served().one(request_bytes("/seldon.json", method="GET"))

            assert json.loads(answer.body) == openapi.document()
            assert answer.headers["content-disposition"] == "inline; filename=seldon.json"

        run(main)

    def test_every_path_and_method_in_the_document_is_answered(self) -> None:
        async def main() -> None:
            served = Served()
            for path, methods in openapi.document()["paths"].items():
                for method in methods:
                    answer = await served.one(request_bytes(path, b"", JSON, method=method.upper()))
                    assert answer.status == 200, path

        run(main)

    def test_schema_references_resolve_and_operation_ids_are_unique(self) -> None:
        document = openapi.document()
        text = json.dumps(document)
        names = [part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]]
        operations = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]

        assert set(names) == set(document["components"]["schemas"])
        assert len(set(operations)) == len(operations)
        assert all(
            each["responses"]["200"]["description"] for way in document["paths"].values() for each in way.values()
        )
