from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from penstock.backends.errors import Code, InferError
from penstock.server.fronts.control_calls import MAX_UNCONFIRMED_PARTS, ControlApp, ControlCalls, control_methods
from penstock.server.fronts.remote_engine import NO_ENGINE
from penstock.server.grpc.method import Call, Method, Status
from penstock.server.grpc.request import SHUTTING_DOWN
from penstock.server.protobuf import service_pb2
from penstock.server.restricted import RestrictedApis
from tests.server.fronts.control_sides import Client, FrontEnd, engine_of, turns
from tests.server.v2.rpc.calls import FakeCall

SERVICE = "/inference.GRPCInferenceService/"
WATCH = "/grpc.health.v1.Health/Watch"
pb = service_pb2()


@asynccontextmanager
async def front_end_of(app: Any, **methods: Any) -> AsyncIterator[FrontEnd]:
    """A front end whose engine is a test's own application and unary methods."""
    paths = {
        "live": SERVICE + "ServerLive",
        "load": SERVICE + "RepositoryModelLoad",
        "watch": WATCH,
    }
    front = FrontEnd(app, {paths[name]: Method(paths[name], method) for name, method in methods.items()})
    try:
        yield front
    finally:
        front.close()


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request should reach the application")


QUESTIONS = [
    ("GET", "/v2", b""),
    ("GET", "/v2/health/live", b""),
    ("GET", "/v2/health/ready", b""),
    ("HEAD", "/v2/health/ready", b""),
    ("GET", "/v2/models/m", b""),
    ("GET", "/v2/models/m/versions/1/config", b""),
    ("GET", "/v2/models/nobody", b""),
    ("GET", "/v2/models/m/ready", b""),
    ("POST", "/v2/repository/index", b'{"ready": true}'),
    ("POST", "/v2/repository/index", b"no JSON"),
    ("POST", "/v2/repository/models/m/load", b""),
    ("GET", "/v2/systemsharedmemory/status", b""),
    ("POST", "/v2/logging", b'{"log_verbose_level": 1}'),
    ("GET", "/v2/trace/setting", b""),
    ("GET", "/metrics?a=b", b""),
    ("GET", "/docs", b""),
    ("DELETE", "/v2", b""),
    ("GET", "/nowhere/%20", b""),
    ("POST", "/v2/systemsharedmemory/region/r/register", bytes(100_000)),
]


def test_every_http_page_is_the_same_through_a_front_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of(tmp_path) as server:
            app = server.app()
            front = FrontEnd(app, {})
            for method, path, body in QUESTIONS:
                direct = await Client(method, path, body).ask(app)
                through = await Client(method, path, body).ask(front.app)
                assert through.status == direct.status, path
                assert through.header == direct.header or path.startswith("/metrics"), path
                assert through.answer == direct.answer or path.startswith("/metrics"), path
                assert through.is_complete
            await front.settled()
            front.close()

    uvloop.run(main())


def test_every_rpc_except_inference_is_the_same_through_a_front_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of(tmp_path) as server:
            methods = server.grpc_methods()
            front = FrontEnd(nothing, methods)
            data_plane = {SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"}
            assert front.methods.keys() == {path for path in methods if "Reflection" not in path} - data_plane
            questions = [
                ("ServerLive", b""),
                ("ServerReady", b""),
                ("ServerMetadata", b""),
                ("ModelReady", pb.ModelReadyRequest(name="m").SerializeToString()),
                ("ModelConfig", pb.ModelConfigRequest(name="m").SerializeToString()),
                ("ModelConfig", pb.ModelConfigRequest(name="nobody").SerializeToString()),
                ("RepositoryIndex", b""),
                ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="m").SerializeToString()),
                ("LogSettings", b""),
                ("TraceSetting", b""),
                ("ModelMetadata", b"\xff\xff"),
                ("CudaSharedMemoryRegister", b""),
            ]
            for name, message in questions:
                calls = FakeCall(), FakeCall()
                for call, served in zip(calls, (methods, front.methods), strict=True):
                    try:
                        served[SERVICE + name].unary(call, message)  # type: ignore[misc]
                    except InferError as error:
                        call.abort(*_as_status(error))
                    await turns(lambda call=call: call.ended)
                direct, through = calls
                assert (through.sent, through.status, through.text) == (direct.sent, direct.status, direct.text), name
            await front.settled()
            front.close()

    uvloop.run(main())


def _as_status(error: InferError) -> Any:
    from penstock.server.errors import GRPC_STATUS

    return GRPC_STATUS[error.code], error.message


def test_an_answer_is_streamed_part_by_part() -> None:
    step = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/events", b"a=%20")
        assert dict(scope["headers"]) == {b"x": b"\xff"}
        assert scope["client"] == ("127.0.0.1", 1)
        assert (await receive())["body"] == b"question"
        await send({"type": "http.response.start", "status": 207, "headers": [(b"content-type", b"text/event-stream")]})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"event %d" % number, "more_body": True})
            step.clear()
            await step.wait()
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        async with front_end_of(app) as front:
            client = Client("POST", "/events?a=%20", b"question", [(b"x", b"\xff")])
            control = asyncio.ensure_future(client.ask(front.app))
            for number in range(3):
                await turns(lambda number=number: client.answer.endswith(b"event %d" % number))
                assert not client.is_complete
                step.set()
            await control
            assert client.status == 207
            assert client.is_complete

    uvloop.run(main())


def test_the_engine_pauses_an_answer_that_the_client_does_not_read() -> None:
    chunk_count = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal chunk_count
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            chunk_count += 1
            await send({"type": "http.response.body", "body": bytes(50_000), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        async with front_end_of(app) as front:
            client = Client()
            client.reads.clear()
            control = asyncio.ensure_future(client.ask(front.app))
            await turns(lambda: client.sent)
            for _ in range(200):
                await asyncio.sleep(0)
            assert chunk_count <= MAX_UNCONFIRMED_PARTS + 1
            client.reads.set()
            await control
            assert len(client.answer) == 5_000_000

    uvloop.run(main())


def test_a_client_that_disconnects_is_disconnected_in_the_engine() -> None:
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.disconnect"
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"to nobody", "more_body": True})
        ended.append(True)

    async def main() -> None:
        async with front_end_of(app) as front:
            for _ in range(2):
                client = Client()
                control = asyncio.ensure_future(client.ask(front.app))
                await turns(lambda client=client: client.sent)
                client.closed.set()
                await control
                assert not client.is_complete
            await front.settled()
            assert ended == [True, True]

            client = Client()
            control = asyncio.ensure_future(client.ask(front.app))
            await turns(lambda: client.sent)
            front.link.close()  # a front end that dies
            await turns(lambda: len(ended) == 3)
            front.control.detach()
            await control

    uvloop.run(main())


def test_a_client_that_disconnects_before_its_body_is_complete_sends_no_request() -> None:
    async def main() -> None:
        async with front_end_of(nothing) as front:
            client = Client("POST", "/", b"half")
            client._parts = []
            client.closed.set()
            await client.ask(front.app)
            assert client.sent == []

    uvloop.run(main())


def test_a_body_over_the_size_limit_is_rejected() -> None:
    async def main() -> None:
        async with front_end_of(nothing) as front:
            client = await Client("POST", "/v2/x", bytes((1 << 20) + 1)).ask(front.app)
            assert client.status == 400
            assert json.loads(client.answer) == {
                "error": "request body exceeds the maximum of 1048576 bytes for '/v2/x'"
            }

    uvloop.run(main())


def test_large_bodies_are_passed_in_both_directions() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body[::-1]})

    async def main() -> None:
        async with front_end_of(app) as front:
            for size in (0, 1, 32_767, 32_768, 1 << 20):
                body = bytes(range(256)) * (size // 256) + b"\n" * (size % 256)
                assert (await Client("POST", "/", body).ask(front.app)).answer == body[::-1]
            await front.settled()
            await turns(lambda: front.link.arena.leases == front.engine_link.arena.leases == 0)

    uvloop.run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_an_exception_in_the_application_is_answered_with_503_or_ends_the_answer(
    begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("on purpose")

    async def main() -> None:
        async with front_end_of(app) as front:
            client = await Client("GET", "/v2").ask(front.app)
            assert "on purpose" in caplog.text
            if begun:
                assert not client.is_complete  # uvicorn ends the connection
            else:
                assert client.status == 503

    uvloop.run(main())


def test_a_front_end_without_an_engine_is_live_and_not_ready() -> None:
    async def main() -> None:
        control = ControlCalls()
        app = ControlApp(control, 1000)
        assert (await Client(path="/v2/health/live").ask(app)).status == 200
        assert (await Client(path="/v2/health/ready").ask(app)).status == 400
        client = await Client("POST", "/v2/repository/index", b"{}").ask(app)
        assert client.status == 503
        assert json.loads(client.answer) == {"error": NO_ENGINE}
        assert client.header[b"retry-after"] == b"1"

        methods = control_methods(control)
        live, ready, check, index = FakeCall(), FakeCall(), FakeCall(), FakeCall()
        methods[SERVICE + "ServerLive"].unary(live, b"")  # type: ignore[misc]
        methods[SERVICE + "ServerReady"].unary(ready, b"")  # type: ignore[misc]
        methods["/grpc.health.v1.Health/Check"].unary(check, b"")  # type: ignore[misc]
        assert pb.ServerLiveResponse.FromString(live.sent[0]).live
        assert not pb.ServerReadyResponse.FromString(ready.sent[0]).ready
        assert check.sent == [b"\x08\x02"]
        with pytest.raises(InferError) as refused:
            methods[SERVICE + "RepositoryIndex"].unary(index, b"")  # type: ignore[misc]
        assert refused.value.code is Code.NOT_READY

    uvloop.run(main())


def test_a_draining_front_end_is_not_live_and_not_ready() -> None:
    async def main() -> None:
        async with front_end_of(nothing) as front:
            front.control.drain()
            for path in ("/v2/health/live", "/v2/health/ready"):
                client = await Client(path=path).ask(front.app)
                assert (client.status, json.loads(client.answer)) == (503, {"error": "Server exiting"})
            live = FakeCall()
            front.methods[SERVICE + "ServerLive"].unary(live, b"")  # type: ignore[misc]
            assert not pb.ServerLiveResponse.FromString(live.sent[0]).live

    uvloop.run(main())


def test_a_front_end_being_replaced_reports_the_health_of_its_engine() -> None:
    async def ready(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        async with front_end_of(ready, live=lambda call, _: call.answer(b"\x08\x01"), watch=lambda *_: None) as front:
            watched, late, live = FakeCall(), FakeCall(), FakeCall()
            front.methods[WATCH].unary(watched, b"")  # type: ignore[misc]
            front.control.drain(server_stopping=False)
            front.methods[WATCH].unary(late, b"")  # type: ignore[misc]
            for call in (watched, late):
                assert (call.sent, call.status, call.text) == ([], Status.UNAVAILABLE, SHUTTING_DOWN)
            for path in ("/v2/health/live", "/v2/health/ready"):
                assert (await Client(path=path).ask(front.app)).status == 200
            front.methods[SERVICE + "ServerLive"].unary(live, b"")  # type: ignore[misc]
            await turns(lambda: live.ended)
            assert pb.ServerLiveResponse.FromString(live.sent[0]).live

    uvloop.run(main())


def test_restricted_paths_require_their_header_without_an_engine() -> None:
    async def main() -> None:
        app = ControlApp(ControlCalls(), 1000, RestrictedApis.parse(["health:key=secret"]))
        client = await Client(path="/v2/health/live").ask(app)
        assert client.status == 403
        client = await Client(path="/v2/health/live", headers=[(b"key", b"secret")]).ask(app)
        assert client.status == 200

    uvloop.run(main())


def test_calls_in_progress_end_at_once_when_the_engine_dies() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        await receive()

    def never(call: Call, message: bytes) -> None:
        """Never answer."""

    async def main() -> None:
        async with front_end_of(app, load=never) as front:
            begun, waiting, call = Client(path="/begun"), Client(), FakeCall()
            control = [asyncio.ensure_future(client.ask(front.app)) for client in (begun, waiting)]
            front.methods[SERVICE + "RepositoryModelLoad"].unary(call, b"")  # type: ignore[misc]
            await turns(lambda: begun.sent and len(front.answers._calls) == 3)
            front.engine_link.close()
            await asyncio.gather(*control)
            assert waiting.status == 503
            assert json.loads(waiting.answer) == {"error": NO_ENGINE}
            assert not begun.is_complete
            assert (call.status, call.text) == (Status.UNAVAILABLE, NO_ENGINE)
            assert front.lost == ["the process is gone"]
            assert not front.control.connected

    uvloop.run(main())


def test_a_stream_is_passed_on_with_backpressure_final_status_and_pushback() -> None:
    calls: list[Call] = []

    def watch(call: Call, message: bytes) -> None:
        assert call.metadata == {"authorization": "x"}
        assert call.deadline_ns == 77
        calls.append(call)
        call.send(b"first " + message)

    async def main() -> None:
        async with front_end_of(nothing, watch=watch) as front:
            call = FakeCall(metadata={"authorization": "x"}, deadline_ns=77)
            front.methods[WATCH].unary(call, b"message")  # type: ignore[misc]
            await turns(lambda: call.sent == [b"first message"])
            call.writable = False
            for _ in range(MAX_UNCONFIRMED_PARTS):
                calls[0].send(b"more")
            while_full = calls[0].writable
            await turns(lambda: len(call.sent) == MAX_UNCONFIRMED_PARTS + 1)
            waiting = asyncio.ensure_future(calls[0].drain())
            call.writable = True
            call.reads.set()
            await waiting
            assert (while_full, calls[0].writable) == (False, True)
            calls[0].abort(Status.RESOURCE_EXHAUSTED, "enough", 5)
            await turns(lambda: call.ended)
            assert (call.status, call.text, call.pushback_ms) == (Status.RESOURCE_EXHAUSTED, "enough", 5)

    uvloop.run(main())


def test_a_call_that_ends_in_the_front_end_is_cancelled_in_the_engine() -> None:
    cancelled = []

    def watch(call: Call, message: bytes) -> None:
        call.on_cancel = lambda: cancelled.append(message)

    async def main() -> None:
        async with front_end_of(nothing, watch=watch) as front:
            lost, drained = FakeCall(), FakeCall()
            for call in (lost, drained):
                front.methods[WATCH].unary(call, b"m")  # type: ignore[misc]
            await turns(lambda: len(front.answers._calls) == 2)
            lost.lose()
            await turns(lambda: cancelled == [b"m"])
            front.control.drain()
            await turns(lambda: cancelled == [b"m", b"m"])
            assert drained.sent == [b"\x08\x02"]  # NOT_SERVING
            assert (drained.status, drained.text) == (Status.UNAVAILABLE, SHUTTING_DOWN)
            await front.settled()
            assert not front.control.watches

    uvloop.run(main())


def test_an_exception_in_a_method_is_answered_with_a_request_id(caplog: pytest.LogCaptureFixture) -> None:
    def load(call: Call, message: bytes) -> None:
        raise RuntimeError("on purpose")

    async def main() -> None:
        async with front_end_of(nothing, load=load) as front:
            call = FakeCall()
            front.methods[SERVICE + "RepositoryModelLoad"].unary(call, b"")  # type: ignore[misc]
            await turns(lambda: call.ended)
            assert call.status is Status.INTERNAL
            assert call.text.startswith("internal error, request id ")
            assert "on purpose" in caplog.text
            other = FakeCall()
            front.methods[SERVICE + "ServerReady"].unary(other, b"")  # type: ignore[misc]
            await turns(lambda: other.ended)
            assert other.status is Status.UNIMPLEMENTED

    uvloop.run(main())
