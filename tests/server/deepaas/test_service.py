"""DeepaasService as the Service of a connection, with a fake transport and an engine that answers on command."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.server.carrying.messages import pack_answer
from penstock.server.deepaas.dialect import Deepaas
from penstock.server.deepaas.messages import METADATA, ModelDescription
from penstock.server.deepaas.service import DeepaasService
from penstock.server.http.service import HttpShared
from penstock.server.listening.ports import make_http_port
from penstock.server.restricted import RestrictedApis
from penstock.server.settings import Settings
from penstock.server.workers.order import WorkerLost
from tests.server.http.lane import Answer, Lane, Own, run, turns
from tests.server.v2.held_engine import HeldEngine

JSON, TEXT = "application/json; charset=utf-8", "text/plain; charset=utf-8"
TROUBLE = b"500 Internal Server Error\n\nServer got itself in trouble"
PREDICT = "/v2/models/m/predict/"
PREDICTED = pack_answer(200, JSON.encode(), b'{"status": "OK", "predictions": 1}')


def request_bytes(target: str, body: bytes = b"", *lines: str, method: str = "GET") -> bytes:
    """Write a request."""
    head = [f"{method} {target} HTTP/1.1", "host: x", f"content-length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


def posted(target: str, body: bytes = b"", *lines: str) -> bytes:
    """Write a POST."""
    return request_bytes(target, body, *lines, method="POST")


@dataclass
class DeepaasEngine(HeldEngine):
    """An Engine with the models `m` and `n`, of which those that are `absent` are not loaded."""

    absent: set[str] = field(default_factory=set)

    def model(self, name: str, version: str = "") -> Model:
        if name in self.absent:
            raise InferError(Code.NOT_FOUND, f"no '{name}'")
        return self.loaded[0]


@dataclass
class Desk:
    """Answers each call with the name of its model."""

    name: str
    description: ModelDescription = field(default_factory=ModelDescription)
    calls: list[tuple[int, bytes]] = field(default_factory=list)
    status: int = 200

    async def call(self, kind: int, body: bytes = b"") -> bytes:
        self.calls.append((kind, body))
        await asyncio.sleep(0)
        return pack_answer(self.status, JSON.encode(), json.dumps({"id": self.name}).encode())


@dataclass
class Jobs:
    """Records its calls."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> bytes:
            self.calls.append((name, *arguments))
            if self.failure is not None:
                raise self.failure
            return pack_answer(200, JSON.encode(), b"[]" if name == "list" else b"{}")

        return call


class Both(Own):
    """Penstock's own protocol: it answers every request."""

    restricted = RestrictedApis()

    def claim(self, head: Any) -> Any:
        return "own"


class Served(Lane):
    """A connection whose Service is DeepaasService, for the models `m` and `n`."""

    def __init__(
        self, restricted: RestrictedApis | None = None, names: tuple[str, ...] = ("m", "n"), **options: Any
    ) -> None:
        settings = Settings(dialect="deepaas", **options)
        self.engine, self.jobs, self.others = DeepaasEngine(), Jobs(), Both()
        self.others.restricted = restricted or RestrictedApis()
        self.desks = {name: Desk(name) for name in names}
        models = SimpleNamespace(desk_of=self.desks.__getitem__, jobs=self.jobs)
        repository = SimpleNamespace(names=lambda: list(names))
        parts = SimpleNamespace(engine=self.engine, inference=self.others, repository=repository)
        self.service = DeepaasService(cast(Any, parts), cast(Any, models), settings)
        listener = make_http_port(settings, cast(Any, None), self.service, Deepaas(settings))
        super().__init__(shared=cast(HttpShared, cast(Any, listener)._config.http_protocol_class.shared))

    async def one(self, raw: bytes, *replies: bytes | Exception) -> Answer:
        """Feed one request, have the worker answer it if it is called, and read the answer."""
        self.transport.written.clear()
        await self.fed(raw)
        for call, reply in zip(list(self.engine.held), replies or (PREDICTED,), strict=False):
            self.engine.held.remove(call)
            if isinstance(reply, Exception):
                call.error = cast(InferError, reply)
            else:
                cast(Any, call).reply, call.outputs = reply, []
            call.sink.deliver([call])
        await turns()
        [answer] = self.answers
        return answer


def answered(raw: bytes, *replies: bytes | Exception, **options: Any) -> Answer:
    """Ask a fresh server once."""

    async def main() -> None:
        served = Served(**options)
        found.append(await served.one(raw, *replies))
        served.service.close()

    found: list[Answer] = []
    run(main)
    return found[0]


def shown(answer: Answer) -> tuple[int, str, bytes]:
    """Return the status, content type and body of an answer."""
    return answer.status, answer.headers.get("content-type", ""), answer.body


class TestPredictions:
    def test_a_prediction_request_is_passed_to_the_worker_unchanged(self) -> None:
        async def main() -> None:
            served = Served()
            lines = ("Content-Type: application/json", "X-Twice: a", "x-twice: b", "Cookie: c=d")
            await served.fed(posted(PREDICT + "?a=1&a=%20", b'{"n": 1}', *lines))
            [call] = served.engine.held
            line, _, body = cast(Any, call).body.partition(b"\n")
            head = json.loads(line)
            assert (head["method"], head["query"], body) == ("POST", "a=1&a=%20", b'{"n": 1}')
            assert [each for each in head["headers"] if each[0] not in ("host", "content-length")] == [
                ["content-type", "application/json"], ["x-twice", "a"], ["x-twice", "b"], ["cookie", "c=d"],
            ]  # fmt: skip

        run(main)

    def test_the_workers_answer_is_returned(self) -> None:
        assert shown(answered(posted(PREDICT))) == (200, JSON, b'{"status": "OK", "predictions": 1}')

    def test_a_file_answer_has_its_header_lines(self) -> None:
        lines = b'application/zip\r\nContent-Disposition: attachment; filename="x.zip"\r\n'
        answer = answered(posted(PREDICT), pack_answer(200, lines, b"zip"))

        assert shown(answer) == (200, "application/zip", b"zip")
        assert answer.headers["content-disposition"] == 'attachment; filename="x.zip"'

    def test_a_lost_worker_is_answered_with_the_originals_error_text(self) -> None:
        answer = answered(posted(PREDICT), WorkerLost("killed"))

        assert shown(answer) == (500, TEXT, TROUBLE)
        assert "retry-after" not in answer.headers

    def test_a_not_ready_answer_has_a_retry_after_header(self) -> None:
        answer = answered(posted(PREDICT), InferError(Code.NOT_READY, "soon", 2_000_000_000))

        assert shown(answer) == (503, TEXT, b"503: soon")
        assert answer.headers["retry-after"] == "2"

    def test_a_model_that_is_not_loaded_is_answered_as_not_ready(self) -> None:
        async def main() -> None:
            served = Served()
            served.engine.absent = {"m"}
            answer = await served.one(posted(PREDICT))
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            served.engine.absent, served.engine.generation = set(), 2
            assert (await served.one(posted(PREDICT))).status == 200

        run(main)

    def test_a_full_queue_is_answered_with_503(self) -> None:
        async def main() -> None:
            served = Served()
            served.engine.failure = InferError(Code.OVERLOADED, "full")
            assert shown(await served.one(posted(PREDICT))) == (503, TEXT, b"503: full")

        run(main)

    @pytest.mark.parametrize("coding", ["gzip", "GZIP ", "identity", ""])
    def test_a_content_encoding_is_decoded(self, coding: str) -> None:
        async def main() -> None:
            served = Served()
            body = gzip.compress(b"plain") if "zip" in coding.lower() else b"plain"
            await served.fed(posted(PREDICT, body, f"Content-Encoding: {coding}"))
            [call] = served.engine.held
            assert cast(Any, call).body.partition(b"\n")[2] == b"plain"

        run(main)

    def test_an_unknown_content_encoding_is_rejected_unless_the_body_is_empty(self) -> None:
        answer = answered(posted(PREDICT, b"x", "Content-Encoding: br"))

        assert (answer.status, answer.headers["accept-encoding"]) == (501, "gzip, deflate")
        assert answered(posted(PREDICT, b"", "Content-Encoding: br")).status == 200

    def test_a_compressed_body_that_exceeds_the_limit_is_rejected(self) -> None:
        body = gzip.compress(bytes(1000))
        answer = answered(posted(PREDICT, body, "Content-Encoding: gzip"), http_max_input_size=300)

        assert shown(answer) == (413, TEXT, b"Maximum request body size 300 exceeded.")


class TestSizes:
    def test_a_body_above_the_limit_is_rejected_by_its_content_length(self) -> None:
        raw = posted(PREDICT).replace(b"content-length: 0", b"content-length: 301")

        answer = answered(raw, http_max_input_size=300)
        assert shown(answer) == (413, TEXT, b"Maximum request body size 300 exceeded.")
        assert answer.closes

    def test_a_body_of_exactly_the_limit_is_accepted(self) -> None:
        assert answered(posted(PREDICT, bytes(300)), http_max_input_size=300).status == 200

    def test_a_chunked_body_is_rejected_when_it_exceeds_the_limit(self) -> None:
        head = posted(PREDICT).replace(b"content-length: 0", b"transfer-encoding: chunked")

        assert answered(head + b"12d\r\n" + bytes(301), http_max_input_size=300).status == 413

    def test_an_invalid_request_is_answered_with_400_as_text(self) -> None:
        answer = answered(b"GET / HTTP/1.1\r\nbad header\r\n\r\n")

        assert (answer.status, answer.headers["content-type"]) == (400, TEXT)


class TestServerAnswers:
    @pytest.mark.parametrize(
        ("raw", "status", "field", "value"),
        [
            (request_bytes("/nothing"), 404, "content-type", TEXT),
            (request_bytes(PREDICT), 405, "allow", "POST"),
            (posted("/v2/models/m/predict?x=1"), 308, "location", "/v2/models/m/predict/?x=1"),
            (request_bytes("/ui"), 302, "location", "/api"),
        ],
        ids=["nothing", "not-allowed", "redirect", "ui"],
    )
    def test_urls_are_answered_as_in_the_original(self, raw: bytes, status: int, field: str, value: str) -> None:
        answer = answered(raw)

        assert (answer.status, answer.headers[field]) == (status, value)

    @pytest.mark.parametrize(("target", "status", "size"), [("/ui", 302, 10), (PREDICT, 405, 23), ("/x", 404, 14)])
    def test_an_answer_to_head_has_its_length_and_no_body(self, target: str, status: int, size: int) -> None:
        async def main() -> None:
            served = Served()
            served.feed(request_bytes(target, method="HEAD"))
            head, _, body = bytes(served.transport.written).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert (head.rpartition(b"\r\n")[2], body) == (b"content-length: %d" % size, b"")

        run(main)

    def test_the_versions_answer_contains_the_version_answer(self) -> None:
        assert json.loads(answered(request_bytes("/")).body)["versions"] == [
            json.loads(answered(request_bytes("/v2/")).body)
        ]

    @pytest.mark.parametrize("disabled", ["predict", "train"])
    def test_a_disabled_endpoint_is_answered_with_402(self, disabled: str) -> None:
        settings = {f"deepaas_{disabled}_endpoint": False}
        answers = {
            "predict": answered(posted(PREDICT), **settings),
            "train": answered(request_bytes("/v2/models/m/train/"), **settings),
        }
        refused = answers.pop(disabled)

        assert (refused.status, refused.body) == (402, b"402: Payment Required")
        assert [answer.status for answer in answers.values()] == [200]

    def test_the_debug_endpoint_is_empty_by_default(self) -> None:
        answer = answered(request_bytes("/v2/debug/"))

        assert shown(answer) == (204, "", b"")

    def test_the_debug_endpoint_shows_the_log_if_enabled(self) -> None:
        status, content_type, body = shown(answered(request_bytes("/v2/debug/"), deepaas_debug_endpoint=True))

        assert (status, content_type) == (200, TEXT)
        assert b"--- DEBUG MARKER " in body

    def test_paths_of_penstocks_own_protocol_are_passed_to_penstock(self) -> None:
        assert answered(request_bytes("/v2/models/m/ready")).body == b"own /v2/models/m/ready "
        assert answered(posted("/v2/repository/index", b"{}")).body == b"own /v2/repository/index {}"

    def test_a_request_with_tensors_is_rejected_with_the_predict_path(self) -> None:
        answer = answered(posted("/v2/models/m/infer", b'{"inputs": []}'), deepaas_base_path="/a")

        assert (answer.status, answer.headers["content-type"]) == (501, "application/json")
        assert json.loads(answer.body) == {
            "error": "model 'm' does not accept tensors: POST its arguments to /a/v2/models/m/predict/"
        }

    def test_all_paths_move_under_the_base_path(self) -> None:
        options = {"deepaas_base_path": "/a/"}

        assert answered(posted("/a" + PREDICT), **options).status == 200
        assert answered(posted(PREDICT), **options).status == 404
        assert answered(request_bytes("/a/ui"), **options).headers["location"] == "/a/api"

    def test_restricted_endpoints_require_their_header(self) -> None:
        restricted = RestrictedApis.parse(["inference,metadata:key=secret"])

        assert answered(posted(PREDICT), restricted=restricted).status == 403
        assert answered(request_bytes("/swagger.json"), restricted=restricted).status == 403
        assert answered(posted(PREDICT, b"", "key: secret"), restricted=restricted).status == 200
        assert answered(request_bytes("/"), restricted=restricted).status == 200


class TestDelegatedAnswers:
    def test_metadata_is_answered_by_the_desk_with_its_link(self) -> None:
        async def main() -> None:
            served = Served(deepaas_base_path="/a")
            assert shown(await served.one(request_bytes("/a/v2/models/n/"))) == (200, JSON, b'{"id": "n"}')
            assert served.desks["n"].calls == [(METADATA, b"/a/v2/models/n")]

        run(main)

    def test_a_disconnected_client_cancels_its_call_to_the_desk(self) -> None:
        given_up: list[int] = []

        async def call(kind: int, body: bytes = b"") -> bytes:
            try:
                await asyncio.Event().wait()
            finally:
                given_up.append(kind)
            return b""

        async def main() -> None:
            served = Served()
            served.desks["m"].call = call  # type: ignore[method-assign]
            await served.fed(request_bytes("/v2/models/m/"))
            assert given_up == []
            served.transport.lose(None)
            await turns()
            assert given_up == [METADATA]

        run(main)

    def test_models_are_listed_in_order(self) -> None:
        assert answered(request_bytes("/v2/models/")).body == b'{"models": [{"id": "m"}, {"id": "n"}]}'

    def test_a_model_that_could_not_be_loaded_is_not_listed(self) -> None:
        async def main() -> None:
            served = Served()
            served.engine.absent = {"m"}
            assert (await served.one(request_bytes("/v2/models/"))).body == b'{"models": [{"id": "n"}]}'
            assert "/v2/models/m/" not in json.loads((await served.one(request_bytes("/swagger.json"))).body)["paths"]

        run(main)

    def test_a_server_without_loaded_models_is_not_ready(self) -> None:
        async def main() -> None:
            served = Served()
            served.engine.absent = {"m", "n"}
            for target in ("/v2/models/", "/swagger.json", "/openapi3.json", "/api"):
                assert (await served.one(request_bytes(target))).status == 503

        run(main)

    def test_a_model_with_failing_metadata_fails_the_list_of_models(self) -> None:
        async def main() -> None:
            served = Served()
            served.desks["n"].status = 500
            assert (await served.one(request_bytes("/v2/models/"))).status == 500

        run(main)

    @pytest.mark.parametrize(
        ("method", "target", "expected"),
        [
            ("GET", "", ("list", "m")),
            ("GET", "ab", ("get", "m", "ab")),
            ("DELETE", "ab", ("delete", "m", "ab")),
            ("GET", "ab/log", ("log", "m", "ab")),
            ("GET", "ab/progress", ("progress", "m", "ab")),
            ("GET", "ab/page", ("page", "m", "ab")),
        ],
    )
    def test_training_requests_are_passed_to_the_jobs(self, method: str, target: str, expected: Any) -> None:
        async def main() -> None:
            served = Served()
            assert (await served.one(request_bytes(f"/v2/models/m/train/{target}", method=method))).status == 200
            assert served.jobs.calls == [expected]

        run(main)

    def test_a_training_is_started_with_the_decoded_request(self) -> None:
        async def main() -> None:
            served = Served()
            body = gzip.compress(b"body")
            await served.one(posted("/v2/models/m/train/?sleep=3", body, "Content-Encoding: gzip"))
            [(method, name, request)] = served.jobs.calls
            line, _, body = request.partition(b"\n")
            assert (method, name, body) == ("start", "m", b"body")
            assert json.loads(line)["query"] == "sleep=3"

        run(main)

    def test_internal_errors_are_answered_with_the_originals_error_text(self) -> None:
        async def main() -> None:
            served = Served()
            served.jobs.failure = KeyError("oh")
            assert shown(await served.one(request_bytes("/v2/models/m/train/"))) == (500, TEXT, TROUBLE)
            served.jobs.failure = InferError(Code.OVERLOADED, "too many")
            assert shown(await served.one(request_bytes("/v2/models/m/train/"))) == (503, TEXT, b"503: too many")

        run(main)

    def test_swagger_openapi_and_the_api_page_are_served(self) -> None:
        assert json.loads(answered(request_bytes("/swagger.json")).body)["swagger"] == "2.0"
        assert json.loads(answered(request_bytes("/openapi3.json")).body)["openapi"] == "3.0.3"
        page = answered(request_bytes("/api"))
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert b'action="/v2/models/n/predict/"' in page.body

    def test_the_api_page_shows_a_model_with_failing_metadata(self) -> None:
        async def main() -> None:
            served = Served()
            served.desks["n"].status = 500
            answer = await served.one(request_bytes("/api"))
            assert (answer.status, b'action="/v2/models/n/predict/"' in answer.body) == (200, True)

        run(main)

    def test_without_documentation_there_is_no_api_page(self) -> None:
        assert answered(request_bytes("/api"), deepaas_doc_endpoint=False).status == 404
        assert answered(request_bytes("/swagger.json"), deepaas_doc_endpoint=False).status == 200
