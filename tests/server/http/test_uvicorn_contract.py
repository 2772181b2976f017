"""The internals of uvicorn that the fast lane relies on, in the pinned version range."""

from __future__ import annotations

import asyncio
import inspect
import tomllib
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.server.listening.listener import make_config
from tests.server.http.lane import App, FakeTransport, read_answers, run, turns

ROOT = Path(__file__).parents[3]
GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"


class Watched(HttpToolsProtocol):
    """uvicorn's protocol, counting the calls of `on_response_complete`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.completed = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.completed += 1


class Plain:
    """One plain uvicorn connection without a socket."""

    def __init__(self) -> None:
        self.app = App()
        self.state = ServerState()
        config = make_config(self.app, Watched, idle_s=5, access_log=False)
        config.load()
        self.protocol_class = config.http_protocol_class
        self.protocol = Watched(config=config, server_state=self.state, app_state={})
        self.transport = FakeTransport(self.protocol)
        self.protocol.connection_made(self.transport)

    async def fed(self, *pieces: bytes) -> list[bytes]:
        for piece in pieces:
            self.protocol.data_received(piece)
            await turns()
        return [answer.body for answer in read_answers(bytes(self.transport.written))]


def test_the_installed_uvicorn_version_is_in_the_pinned_range() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    [pin] = [line for line in dependencies if line.startswith("uvicorn")]

    assert pin == "uvicorn>=0.54,<0.55"
    assert uvicorn.__version__.split(".")[:2] == ["0", "54"]


def test_the_protocol_class_takes_its_known_keyword_arguments() -> None:
    assert list(inspect.signature(HttpToolsProtocol).parameters) == ["config", "server_state", "app_state", "_loop"]


def test_the_http_option_accepts_a_protocol_class() -> None:
    async def main() -> None:
        assert Plain().protocol_class is Watched

    run(main)


def test_a_connection_has_the_attributes_that_the_fast_lane_reads() -> None:
    async def main() -> None:
        server = Plain()
        protocol = server.protocol

        assert protocol.transport is server.transport
        assert protocol.loop is asyncio.get_running_loop()
        assert protocol.server_state is server.state
        assert isinstance(protocol.flow, FlowControl)
        assert server.state.connections == {protocol}
        assert protocol.cycle is None

    run(main)


def test_flow_control_has_two_flags_and_may_be_paused_and_resumed_twice() -> None:
    async def main() -> None:
        server = Plain()
        flow = server.protocol.flow
        assert (flow.read_paused, flow.write_paused) == (False, False)
        for _ in range(2):
            flow.pause_reading()
            server.protocol.pause_writing()
        assert (flow.read_paused, flow.write_paused, server.transport.reading) == (True, True, False)
        for _ in range(2):
            flow.resume_reading()
            server.protocol.resume_writing()

        assert (flow.read_paused, flow.write_paused, server.transport.reading) == (False, False, True)

    run(main)


def test_on_response_complete_is_called_once_per_request_after_the_response_is_written() -> None:
    async def main() -> None:
        server = Plain()
        assert server.protocol.completed == 0
        assert await server.fed(GET) == [b"app /a "]
        assert server.protocol.completed == 1
        assert await server.fed(POST, b"o", b"k") == [b"app /a ", b"app /b ok"]

        assert server.protocol.completed == 2

    run(main)


def test_a_cycle_is_marked_complete_when_its_response_is_complete() -> None:
    async def main() -> None:
        server = Plain()
        server.app.open.clear()
        await server.fed(GET)
        cycle = server.protocol.cycle
        assert (cycle.response_started, cycle.response_complete, cycle.disconnected) == (False, False, False)
        server.app.open.set()
        await turns()

        assert cycle.response_complete

    run(main)


def test_the_keep_alive_timer_is_set_after_an_answer_and_can_be_unset() -> None:
    async def main() -> None:
        server = Plain()
        await server.fed(GET)
        timer = server.protocol.timeout_keep_alive_task
        assert timer is not None
        server.protocol._unset_keepalive_if_required()
        server.protocol._unset_keepalive_if_required()

        assert timer.cancelled()
        assert server.protocol.timeout_keep_alive_task is None

    run(main)


def test_a_disconnected_cycle_writes_nothing_more() -> None:
    async def main() -> None:
        server = Plain()
        server.app.open.clear()
        await server.fed(POST)
        cycle = server.protocol.cycle
        cycle.disconnected = True
        cycle.message_event.set()
        server.app.open.set()
        await turns()

        assert server.app.disconnects == 1
        assert server.transport.written == b""

    run(main)


def test_the_default_fields_are_read_from_the_state_for_each_answer() -> None:
    async def main() -> None:
        server = Plain()
        for number in (b"1", b"2"):
            server.state.default_headers = [(b"x", number)]
            await server.fed(GET)

        answers = read_answers(bytes(server.transport.written))
        assert [answer.headers["x"] for answer in answers] == ["1", "2"]

    run(main)


def test_the_server_replaces_the_list_of_default_fields_and_never_changes_it() -> None:
    async def main() -> None:
        server = uvicorn.Server(Config(App(), log_config=None))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        before = server.server_state.default_headers
        copy = list(before)
        await server.on_tick(0)
        after = server.server_state.default_headers
        await server.on_tick(10)

        assert before == copy
        assert after is not before
        assert server.server_state.default_headers is not after

    run(main)


def test_shutdown_closes_an_idle_connection_and_a_busy_connection_after_its_answer() -> None:
    async def main() -> None:
        idle, busy = Plain(), Plain()
        busy.app.open.clear()
        await busy.fed(GET)
        for server in (idle, busy):
            server.protocol.shutdown()
        assert (idle.transport.closed, busy.transport.closed) == (True, False)
        busy.app.open.set()
        await turns()

        [answer] = read_answers(bytes(busy.transport.written))
        assert answer.closes
        assert busy.transport.closed

    run(main)


def test_a_lost_connection_leaves_the_set_and_disconnects_the_application() -> None:
    async def main() -> None:
        server = Plain()
        await server.fed(POST)
        server.transport.lose(ConnectionResetError())
        await turns()

        assert server.state.connections == set()
        assert server.app.disconnects == 1

    run(main)


def test_invalid_http_is_answered_with_400_and_closes_the_connection() -> None:
    async def main() -> None:
        server = Plain()
        await server.fed(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")

        [answer] = read_answers(bytes(server.transport.written))
        assert (answer.status, answer.closes, server.transport.closed) == (400, True, True)

    run(main)


def test_the_request_response_cycle_takes_the_parameters_that_the_fast_lane_uses() -> None:
    names = set(inspect.signature(RequestResponseCycle).parameters)

    assert {"transport", "flow", "default_headers", "keep_alive", "on_response", "message_event"} <= names


def test_httptools_rejects_headers_that_two_parsers_could_read_differently() -> None:
    for lines in ("Content-Length: 1\r\nContent-Length: 1", "Content-Length: 1\r\nTransfer-Encoding: chunked", "A : b"):
        parser = httptools.HttpRequestParser(object())
        with pytest.raises(httptools.HttpParserError):
            parser.feed_data(f"POST / HTTP/1.1\r\n{lines}\r\n\r\n".encode())
