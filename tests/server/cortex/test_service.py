"""CortexService as the Service of a connection, over a fake transport, with hooks that answer on request."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.server.cortex.api import Api, Tracker
from penstock.server.cortex.claims import is_debug
from penstock.server.cortex.service import CortexService
from penstock.server.hooks.runner import Hooks
from penstock.server.http.limits import Limits
from penstock.server.http.service import HttpShared
from penstock.server.restricted import RestrictedApis
from tests.fakes import fake_model
from tests.server.http.lane import Lane, Own, in_chunks, run, turns
from tests.server.v2.held_engine import HeldEngine

API = Api(Path("project"), "iris", "m", "/iris/m", "onnx", "model.onnx")
JSON = "content-type: application/json"
ROW = b"[[1, 2, 3, 4]]"
NOT_FOUND = (
    b'{"error":"404 Not Found: The requested URL was not found on the server. If you entered the URL manually please '
    b'check your spelling and try again."}\n'
)
NOT_ALLOWED = b'{"error":"405 Method Not Allowed: The method is not allowed for the requested URL."}\n'


def request_bytes(path: str, body: bytes = b"", *lines: str, method: str = "POST", version: str = "1.1") -> bytes:
    """Write a request with a Content-Length."""
    head = [f"{method} {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


@dataclass
class HeldHooks:
    """Answers with `answer` or `error` once `open` is set, and records the calls."""

    answer: bytes = b'"iris-setosa"\n'
    error: Exception | None = None
    calls: list[tuple[Any, str, Mapping[str, Any]]] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    yields: bool = False

    def start(self, promise: Any, *arguments: Any, nbytes: int) -> asyncio.Task[None]:
        async def keep() -> None:
            try:
                answer = await self.predict(*arguments)
            except Exception as error:  # noqa: BLE001 - as a HookedRequest
                promise.set_exception(error)
            else:
                promise.set_result(answer)

        return asyncio.ensure_future(keep())

    async def predict(self, sample: Any, request_id: str, terms: Any, parameters: Mapping[str, Any]) -> bytes:
        self.calls.append((sample, request_id, parameters))
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return self.answer


class CortexEngine(HeldEngine):
    """An Engine with one model, or with none."""

    absent: InferError | None = None

    def model(self, name: str, version: str = "") -> Model:
        if self.absent is not None:
            raise self.absent
        return super().model(name, version)


class Served(Lane):
    """A connection whose Service is CortexService, beside one that answers paths below /v2/own."""

    def __init__(self, *apis: Api, held: bool = False, limits: Limits | None = None) -> None:
        self.engine, self.hooks = CortexEngine(), HeldHooks()
        if not held:
            self.hooks.open.set()
        self.repository = SimpleNamespace(apis={api.name: api for api in apis or (API,)})
        self.ready = True
        self.beside = OwnV2()
        self.service = CortexService(
            cast(Any, self.engine), self.repository, lambda model: cast(Any, self.hooks), limits or Limits(),
            self.beside, lambda: self.ready,
        )  # fmt: skip
        super().__init__(shared=HttpShared(self.service, limits or Limits(), uppercase=True))

    async def one(self, raw: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Feed one request, and read its answer."""
        self.transport.written.clear()
        [answer] = await self.fed(raw)
        assert answer.headers["access-control-allow-origin"] == "*"
        return answer.status, answer.body, answer.headers

    @property
    def counted(self) -> list[int]:
        """The counts of 2XX, 4XX and 5XX."""
        statuses = self.service.prediction_metrics.for_api(next(iter(self.repository.apis.values()))).status_counts
        return [statuses[1], statuses[3], statuses[4]]


class OwnV2(Own):
    """Answers paths below /v2/own."""

    def claim(self, head: Any) -> Any:
        return "own" if head.path.startswith(b"/v2/own") else None

    def abandon(self, connection: Any) -> None:
        self.abandoned += 1
        if connection.task is not None:
            connection.task.cancel()


class TestPredictions:
    def test_a_prediction_is_answered_with_the_encoded_answer_of_the_hooks(self) -> None:
        async def main() -> None:
            served = Served()
            status, body, headers = await served.one(request_bytes("/iris/m", b'{"a": 1}', JSON, "x-request-id: me"))

            assert (status, body, headers["content-type"]) == (200, b'"iris-setosa"\n', "application/json")
            assert headers["access-control-allow-headers"] == "*"
            assert served.hooks.calls == [({"a": 1}, "me", {})]
            assert served.counted == [1, 0, 0]

        run(main)

    @pytest.mark.parametrize("path", ["/predict", "/iris%2fm", "/iris/m?x=1&debug=no"])
    def test_a_single_api_is_served_at_several_paths(self, path: str) -> None:
        async def main() -> None:
            assert (await Served().one(request_bytes(path, b"1", JSON)))[0] == 200

        run(main)

    def test_a_body_without_a_json_content_type_is_read_as_none(self) -> None:
        async def main() -> None:
            served = Served()
            for line in ("content-type: text/plain", "x: y", "content-type: application/x-www-form-urlencoded"):
                await served.one(request_bytes("/iris/m", b"{bad", line))

            assert [sample for sample, _, _ in served.hooks.calls] == [None] * 3

        run(main)

    @pytest.mark.parametrize(("kind", "text"), [("onnx", b"malformed json"), ("tensorflow", b"Malformed JSON")])
    @pytest.mark.parametrize("body", [b"", b"{bad"])
    def test_a_body_that_is_not_valid_json_is_rejected_as_malformed(self, kind: str, text: bytes, body: bytes) -> None:
        async def main() -> None:
            served = Served(replace(API, kind=kind))
            status, answer, headers = await served.one(request_bytes("/iris/m", body, JSON))

            assert (status, answer, headers["content-type"]) == (400, text, "text/html; charset=utf-8")
            assert served.transport.written.startswith(b"HTTP/1.1 400 BAD REQUEST\r\n")
            assert served.counted == [0, 1, 0]

        run(main)

    def test_chunked_and_compressed_bodies_are_accepted(self) -> None:
        async def main() -> None:
            served = Served()
            chunked = in_chunks("/iris/m", b'{"a"', b": 1}").replace(b"host: x", b"host: x\r\n" + JSON.encode())
            await served.one(chunked)
            await served.one(request_bytes("/iris/m", gzip.compress(b'{"a": 1}'), JSON, "content-encoding: gzip"))

            assert [sample for sample, _, _ in served.hooks.calls] == [{"a": 1}] * 2
            assert (await served.one(request_bytes("/iris/m", b"junk", JSON, "content-encoding: gzip")))[0] == 400

        run(main)

    def test_an_answer_is_compressed_for_a_client_that_accepts_gzip(self) -> None:
        async def main() -> None:
            served = Served()
            served.hooks.answer = b'"' + b"a" * 1000 + b'"\n'
            _, body, headers = await served.one(request_bytes("/iris/m", b"1", JSON, "accept-encoding: gzip"))

            assert headers["content-encoding"] == "gzip"
            assert gzip.decompress(body) == served.hooks.answer

        run(main)

    def test_large_bodies_are_parsed_outside_the_event_loop(self) -> None:
        async def main() -> None:
            served = Served()
            sample = ["x" * 1000] * 400
            served.feed(request_bytes("/iris/m", json.dumps(sample).encode(), JSON))
            async with asyncio.timeout(5):
                while not served.answers:  # noqa: ASYNC110 - the thread sets no event
                    await asyncio.sleep(0)

            assert served.hooks.calls[0][0] == sample

        run(main)

    @pytest.mark.parametrize(
        ("code", "status", "text"),
        [
            (Code.INVALID, 406, b"prediction failed: it is so"),
            (Code.INTERNAL, 406, b"prediction failed: it is so"),
            (Code.OVERLOADED, 503, b"prediction failed: it is so"),
            (Code.NOT_READY, 503, b"prediction failed: it is so"),
            (Code.EXPIRED, 503, b"prediction failed: it is so"),
            (Code.UNKNOWN, 500, b'{"error":"it is so"}\n'),
        ],
    )
    def test_the_status_of_a_failed_prediction_follows_from_the_error_code(
        self, code: Code, status: int, text: bytes
    ) -> None:
        async def main() -> None:
            served = Served()
            served.hooks.error = InferError(code, "it is so")
            found, body, headers = await served.one(request_bytes("/iris/m", b"1", JSON))

            assert (found, body) == (status, text)
            assert headers["content-type"] == ("application/json" if status == 500 else "text/html; charset=utf-8")
            assert ("retry-after" in headers) == (code in {Code.OVERLOADED, Code.NOT_READY})
            assert served.counted == [0, int(status == 406), int(status >= 500)]

        run(main)

    def test_an_internal_error_is_answered_with_a_request_id(self) -> None:
        async def main() -> None:
            served = Served()
            served.hooks.error = ZeroDivisionError("secret")
            status, body, _ = await served.one(request_bytes("/iris/m", b"1", JSON))

            assert status == 500
            assert json.loads(body)["error"].startswith("internal error, request id ")

        run(main)

    def test_a_prediction_is_answered_503_until_its_model_is_loaded(self) -> None:
        async def main() -> None:
            served = Served()
            served.engine.absent = InferError(Code.NOT_FOUND, "model 'm' is not loaded")
            for raw in (request_bytes("/iris/m", b"1", JSON), request_bytes("/iris/m/signature", method="GET")):
                status, body, _ = await served.one(raw)
                assert status == 503
                assert body.startswith(b"prediction failed: API 'm' is not ready")
            served.engine.absent = None
            served.engine.generation += 1

            assert (await served.one(request_bytes("/iris/m", b"1", JSON)))[0] == 200

        run(main)

    def test_a_large_body_is_rejected_early_when_the_queue_is_full(self) -> None:
        async def main() -> None:
            served = Served()
            served.engine.refusal = InferError(Code.OVERLOADED, "full")
            await served.one(request_bytes("/iris/m", b"1", JSON))
            status, body, _ = await served.one(request_bytes("/iris/m", b'"' + b"a" * 100_000 + b'"', JSON))

            assert (status, body) == (503, b"prediction failed: full")

        run(main)

    def test_a_full_queue_of_an_unloaded_model_rejects_no_requests(self) -> None:
        async def main() -> None:
            served = Served()
            await served.one(request_bytes("/iris/m", b"1", JSON))
            (old,), served.engine.loaded = served.engine.loaded, [fake_model()]
            served.engine.generation += 1
            served.engine.early_rejection = lambda model: InferError(Code.NOT_READY, "gone") if model is old else None  # type: ignore[method-assign]

            assert (await served.one(request_bytes("/iris/m", b"1" + b" " * 100_000, JSON)))[0] == 200

        run(main)

    def test_a_request_is_cancelled_when_its_client_disconnects(self) -> None:
        async def main() -> None:
            served = Served(held=True)
            await served.fed(request_bytes("/iris/m", b"1", JSON))
            served.transport.lose(None)
            await turns()

            assert served.engine.loaded[0].hold_count == 0
            assert served.beside.abandoned == 1
            assert served.counted == [0, 0, 0]

        run(main)

    def test_pipelined_requests_are_answered_in_order(self) -> None:
        async def main() -> None:
            served = Served(held=True)
            pipelined = (
                request_bytes("/iris/m", b"1", JSON)
                + request_bytes("/nothing", method="GET")
                + request_bytes("/iris/m", b"2", JSON)
            )
            assert await served.fed(pipelined) == []
            served.hooks.open.set()
            await turns()

            assert served.statuses == [200, 500, 200]

        run(main)

    @pytest.mark.parametrize("apis", [{}, {"m": replace(API, tracker=Tracker("classification"))}])
    def test_a_request_in_flight_is_answered_by_the_api_as_it_was_when_the_request_came(
        self, apis: dict[str, Api]
    ) -> None:
        async def main() -> None:
            served = Served(held=True)
            other = Lane(shared=served.shared)
            served.feed(request_bytes("/iris/m", b"1", JSON))
            await turns()
            served.repository.apis = apis
            other.feed(request_bytes("/iris/m", b"1", JSON))  # the same head, which has another meaning now
            await turns()
            served.hooks.open.set()
            await turns()

            assert (served.statuses, served.bodies) == ([200], [b'"iris-setosa"\n'])

        run(main)

    def test_the_connection_closes_after_a_prediction_over_http_1_0(self) -> None:
        async def main() -> None:
            served = Served()
            status, _, headers = await served.one(request_bytes("/iris/m", b"1", JSON, version="1.0"))

            assert (status, headers["connection"]) == (200, "close")

        run(main)


class TestSmallPredictions:
    """Predictions of small samples, with the hooks of a model without a handler file."""

    @staticmethod
    async def served() -> Served:
        served = Served()
        served.engine.loaded[0].max_request_rows = 8
        served.hooks = cast(Any, await Hooks.load(cast(Any, served.engine), served.engine.loaded[0]))
        return served

    def test_a_small_prediction_is_answered_without_a_task_when_its_batch_is_done(self) -> None:
        async def main() -> None:
            served = await self.served()
            assert await served.fed(request_bytes("/iris/m", ROW, JSON)) == []
            tasks = len(asyncio.all_tasks())
            served.engine.let_go()

            assert served.bodies == [b"[[[1.0,2.0,3.0,4.0]]]"]
            assert (tasks, served.protocol.task, served.counted) == (1, None, [1, 0, 0])

        run(main)

    def test_pipelined_predictions_run_one_after_the_other(self) -> None:
        async def main() -> None:
            served = await self.served()
            await served.fed(request_bytes("/iris/m", ROW, JSON) * 2)
            for _ in range(2):
                assert len(served.engine.held) == 1
                served.engine.let_go()

            assert served.statuses == [200, 200]

        run(main)

    def test_a_prediction_is_cancelled_when_its_client_disconnects(self) -> None:
        async def main() -> None:
            served = await self.served()
            await served.fed(request_bytes("/iris/m", ROW, JSON))
            [cancelled] = served.engine.held
            served.transport.lose(None)
            await turns()

            assert served.engine.cancelled == [cancelled]
            assert (served.answers, served.counted) == ([], [0, 0, 0])

        run(main)

    def test_a_malformed_tracker_line_is_answered_500(self) -> None:
        async def main() -> None:
            served = Served(replace(API, tracker=Tracker("classification")))
            served.hooks.answer = b"no JSON\n1"
            await served.fed(request_bytes("/iris/m", b"1", JSON))

            assert (served.statuses, served.counted) == ([500], [0, 0, 1])

        run(main)

    def test_a_prediction_whose_hooks_yield_runs_on_a_task(self) -> None:
        async def main() -> None:
            served = Served(held=True)
            served.hooks.yields = True
            await served.fed(request_bytes("/iris/m", b"1", JSON))
            assert isinstance(served.protocol.task, asyncio.Task)
            served.hooks.open.set()
            await turns()

            assert served.statuses == [200]

        run(main)


class TestTracking:
    def test_the_tracker_line_is_counted_and_removed_from_the_answer(self) -> None:
        async def main() -> None:
            served = Served(replace(API, tracker=Tracker("classification")))
            served.hooks.answer = b'{"class":"iris-setosa"}\n"iris-setosa"\n'
            status, body, _ = await served.one(request_bytes("/iris/m", b"1", JSON))

            assert (status, body) == (200, b'"iris-setosa"\n')
            assert served.hooks.calls[0][2] == {"tracked": True}
            assert served.service.prediction_metrics.for_api(served.repository.apis["m"]).class_counts == {
                "iris-setosa": 1
            }

        run(main)

    def test_only_predictions_are_counted(self) -> None:
        async def main() -> None:
            served = Served()
            for path, method in (("/iris/m", "GET"), ("/nothing", "POST"), ("/healthz", "GET"), ("/iris/m", "PUT")):
                await served.one(request_bytes(path, method=method))

            assert served.counted == [0, 0, 0]

        run(main)


class TestDebug:
    @pytest.mark.parametrize(
        "query", ["debug=true", "debug=TRUE", "a=b&debug=True", "%64ebug=true", "debug=true&debug=no"]
    )
    def test_debug_is_requested_by_a_query_in_any_case(self, query: str) -> None:
        async def main() -> None:
            served = Served()
            await served.one(request_bytes(f"/iris/m?{query}", b"1", JSON))

            assert served.hooks.calls[0][2] == {"debug": True}

        run(main)

    @given(st.binary(max_size=30))
    def test_any_query_is_parsed_without_an_exception(self, query: bytes) -> None:
        assert is_debug(query) in {True, False}
        assert not is_debug(b"debug=false&debug=true&" + query)


class TestOtherPaths:
    @pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS"])
    @pytest.mark.parametrize("path", ["/", "/iris", "/iris/m/", "/iris/m/signatures", "/v1", "/%ff"])
    def test_an_unknown_path_is_answered_with_the_not_found_error_of_cortex(self, path: str, method: str) -> None:
        async def main() -> None:
            served = Served()
            status, body, headers = await served.one(request_bytes(path, method=method))

            assert (status, body, headers["content-type"]) == (500, NOT_FOUND, "application/json")
            assert served.transport.written.startswith(b"HTTP/1.1 500 INTERNAL SERVER ERROR\r\n")

        run(main)

    @pytest.mark.parametrize(
        ("path", "method"),
        [("/iris/m", "PUT"), ("/iris/m", "DELETE"), ("/iris/m/signature", "POST"), ("/healthz", "POST")],
    )
    def test_an_unsupported_method_is_answered_with_the_not_allowed_error_of_cortex(
        self, path: str, method: str
    ) -> None:
        async def main() -> None:
            status, body, _ = await Served().one(request_bytes(path, method=method))

            assert (status, body) == (500, NOT_ALLOWED)

        run(main)

    @pytest.mark.parametrize(
        ("path", "allowed"), [("/iris/m", "GET, HEAD, OPTIONS, POST"), ("/healthz", "GET, HEAD, OPTIONS")]
    )
    def test_an_options_request_is_answered_with_the_allowed_methods(self, path: str, allowed: str) -> None:
        async def main() -> None:
            fields = "access-control-request-headers: content-type, x-mine"
            status, body, headers = await Served().one(request_bytes(path, b"", fields, method="OPTIONS"))

            assert (status, body, headers["allow"]) == (200, b"", allowed)
            assert headers["content-type"] == "text/html; charset=utf-8"
            assert headers["access-control-allow-headers"] == "*"

        run(main)

    def test_healthz_reports_whether_the_server_is_ready(self) -> None:
        async def main() -> None:
            served = Served()
            assert (await served.one(request_bytes("/healthz", method="GET")))[:2] == (200, b'{"ok":true}\n')
            served.ready = False

            assert (await served.one(request_bytes("/healthz", method="GET")))[0] == 503

        run(main)

    def test_a_head_request_is_answered_without_a_body(self) -> None:
        async def main() -> None:
            served = Served()
            served.feed(request_bytes("/healthz", method="HEAD"))

            assert b"content-length: 12\r\n" in served.transport.written
            assert served.transport.written.endswith(b"\r\n\r\n")

        run(main)

    def test_the_signature_is_served_on_its_own_page_and_in_the_summary(self) -> None:
        async def main() -> None:
            served = Served()
            node = SimpleNamespace(name="input", shape=[None, 4], type="tensor(float)")
            served.engine.loaded = [fake_model()]
            served.engine.loaded[0].node_inputs = [node]
            signature = b'{"input":{"shape":[null,4],"type":"float32"}}'

            for path in ("/iris/m", "/predict"):
                found = (await served.one(request_bytes(path + "/signature", method="GET")))[1]
                assert found == b'{"signature":%b}\n' % signature
                summary = json.loads((await served.one(request_bytes(path, method="GET")))[1])
                assert summary["model_signature"] == json.loads(signature)

        run(main)

    def test_paths_of_penstock_are_passed_to_its_own_service(self) -> None:
        async def main() -> None:
            served = Served()
            await served.fed(
                request_bytes("/v2/own", b"x"), request_bytes("/metrics"), request_bytes("/iris/m", b"1", JSON)
            )

            assert served.bodies == [b"own /v2/own x", b"app /metrics ", b'"iris-setosa"\n']
            served.beside.full = True
            served.feed(request_bytes("/v2/own", b"x" * 100_000))
            assert served.statuses[-1] == 503

        run(main)

    def test_apis_can_be_added_and_removed_while_serving(self) -> None:
        async def main() -> None:
            served = Served()
            assert (await served.one(request_bytes("/iris/n", b"1", JSON)))[0] == 500
            served.repository.apis = {"m": replace(API, endpoint="/iris/n")}

            assert (await served.one(request_bytes("/iris/n", b"1", JSON)))[0] == 200
            assert (await served.one(request_bytes("/iris/m", b"1", JSON)))[0] == 500

        run(main)

    def test_restricted_inference_requires_the_key_except_for_healthz(self) -> None:
        async def main() -> None:
            served = Served()
            served.service.restricted = RestrictedApis.parse(("inference:key=secret",))
            assert (await served.one(request_bytes("/healthz", method="GET")))[0] == 200
            assert (await served.one(request_bytes("/iris/m", b"1", JSON, "key: secret")))[0] == 200
            served.transport.written.clear()
            await served.fed(request_bytes("/iris/m", b"1", JSON))

            assert served.statuses == [403]

        run(main)
