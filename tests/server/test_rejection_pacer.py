"""Clients that retry at once after a rejection: how long the next rejection is held, and what is never held."""

from __future__ import annotations

import math

from penstock.server.grpc.method import Status
from penstock.server.http.fastlane import FastLane
from penstock.server.http.head import Head
from penstock.server.http.service import HttpShared
from penstock.server.http2 import frames
from penstock.server.listening.rejection_pacer import BURST_S, EARLY_RETRY_S, INTERVAL_S, MAX_HOLD_S, RejectionPacer
from tests.server.http.lane import Lane, Own, request, run, turns
from tests.server.http2.wire import ECHO, HOLD, FakeLoop, Wire

STEP_S = 0.001
A_STEP = round(STEP_S / INTERVAL_S)
AT_ONCE = math.ceil((BURST_S + STEP_S / 2) / INTERVAL_S)
"""How many rejections of one moment are due before a timer would fire."""
FULL = request("/own/full", b"x")
OTHER = request("/own/other", b"y")


def pass_by(loop: FakeLoop, seconds: float) -> None:
    """Let time pass, one timer step at a time."""
    for _ in range(round(seconds / STEP_S)):
        loop.pass_time(STEP_S)


class Client:
    """A rejected client, which records when its rejection is sent."""

    def __init__(self, loop: FakeLoop, *, broken: bool = False) -> None:
        self.loop = loop
        self.broken = broken
        self.left_at: list[float] = []

    def send_held(self) -> None:
        self.left_at.append(self.loop.now)
        if self.broken:
            raise RuntimeError("broken")


def held(pacer: RejectionPacer, client: Client) -> bool:
    """Hold a client's rejection if it must wait. Returns: whether it does."""
    return pacer.hold(client, client.loop)  # type: ignore[arg-type]


class TestPace:
    def test_a_burst_of_rejections_is_sent_at_once_and_the_rest_at_a_fixed_rate(self) -> None:
        loop, pacer = FakeLoop(), RejectionPacer()
        clients = [Client(loop) for _ in range(AT_ONCE + 3 * A_STEP)]
        waits = [held(pacer, client) for client in clients]
        began = loop.now
        pass_by(loop, MAX_HOLD_S)

        assert waits == [False] * AT_ONCE + [True] * (3 * A_STEP)
        waited = [round((client.left_at[0] - began) / STEP_S) for client in clients[AT_ONCE:]]
        assert waited == sorted(waited)
        assert [waited.count(ms) for ms in (1, 2, 3)] == [A_STEP] * 3

    def test_no_rejection_is_held_longer_than_the_maximum(self) -> None:
        loop, pacer = FakeLoop(), RejectionPacer()
        clients = [Client(loop) for _ in range(50_000)]
        waiting = [client for client in clients if held(pacer, client)]
        assert len(loop.timers) == 1
        pass_by(loop, MAX_HOLD_S)

        assert [len(client.left_at) for client in waiting] == [1] * (len(clients) - AT_ONCE)
        assert not loop.timers

    def test_rejections_below_the_rate_are_not_held(self) -> None:
        loop, pacer = FakeLoop(), RejectionPacer()
        for _ in range(1000):
            loop.pass_time(1.1 * INTERVAL_S)
            assert not held(pacer, Client(loop))

    def test_rejections_are_sent_at_once_again_after_a_backlog_has_drained(self) -> None:
        loop, pacer = FakeLoop(), RejectionPacer()
        for _ in range(50_000):
            held(pacer, Client(loop))
        pass_by(loop, MAX_HOLD_S + STEP_S)

        assert not held(pacer, Client(loop))

    def test_a_discarded_rejection_is_not_sent(self) -> None:
        loop, pacer = FakeLoop(), RejectionPacer()
        clients = [Client(loop) for _ in range(3 * AT_ONCE)]
        for client in clients:
            held(pacer, client)
        pacer.discard(clients[-1])
        pass_by(loop, MAX_HOLD_S)

        assert [len(client.left_at) for client in clients[AT_ONCE:]] == [1] * (2 * AT_ONCE - 1) + [0]

    def test_a_rejection_that_fails_to_send_does_not_block_other_rejections(self) -> None:
        loop, pacer = FakeLoop(), RejectionPacer()
        clients = [Client(loop, broken=number % 2 == 0) for number in range(3 * AT_ONCE)]
        for client in clients:
            held(pacer, client)
        pass_by(loop, MAX_HOLD_S)

        assert all(client.left_at for client in clients[AT_ONCE:])


def refuse(connection: FastLane) -> None:
    connection.answer(503, b"full", b"text/plain", b"retry-after: 1\r\n")


class Refusing(Own):
    """Rejects requests to /own/full with a Retry-After; answers all others."""

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        if head.path == b"/own/full" and not self.hold:
            refuse(connection)
        else:
            super().begin(connection, head, body)


class Crowd:
    """A connection to a server that has rejected as many retries as it does without holding them."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.lane = Lane(own=Refusing())
        self.lane.protocol.loop = self.loop  # type: ignore[assignment]
        self.shared: HttpShared = self.lane.shared
        self.crowd()

    def crowd(self) -> None:
        while not held(self.shared.pacer, Client(self.loop)):
            pass

    @property
    def statuses(self) -> list[int]:
        return self.lane.statuses


class TestConnection:
    def test_the_rejection_of_an_immediate_retry_is_held_and_then_sent_whole(self) -> None:
        async def main() -> None:
            crowd = Crowd()
            crowd.lane.feed(FULL)
            assert crowd.statuses == [503]
            crowd.lane.feed(FULL)
            assert crowd.statuses == [503]
            pass_by(crowd.loop, 2 * STEP_S)

            first, second = crowd.lane.answers
            assert first == second
            assert second.headers["retry-after"] == "1"

        run(main)

    def test_a_retry_after_the_advised_delay_is_rejected_at_once(self) -> None:
        async def main() -> None:
            crowd = Crowd()
            crowd.lane.feed(FULL)
            pass_by(crowd.loop, EARLY_RETRY_S + STEP_S)
            crowd.crowd()
            crowd.lane.feed(FULL)

            assert crowd.statuses == [503, 503]

        run(main)

    def test_another_request_of_a_rejected_client_is_answered_at_once(self) -> None:
        async def main() -> None:
            crowd = Crowd()
            crowd.lane.feed(FULL, OTHER)

            assert crowd.statuses == [503, 200]

        run(main)

    def test_a_request_after_a_held_rejection_releases_the_rejection_at_once(self) -> None:
        async def main() -> None:
            crowd = Crowd()
            crowd.lane.feed(FULL, FULL)
            crowd.lane.feed(OTHER)
            assert crowd.statuses == [503, 503, 200]
            pass_by(crowd.loop, MAX_HOLD_S)

            assert crowd.statuses == [503, 503, 200]

        run(main)

    def test_a_rejection_is_not_held_when_another_request_has_already_arrived(self) -> None:
        async def main() -> None:
            crowd = Crowd()
            crowd.lane.feed(FULL)
            crowd.lane.own.hold = True
            crowd.lane.feed(FULL + OTHER)
            crowd.lane.own.hold = False
            refuse(crowd.lane.own.waiting.pop())

            assert crowd.statuses == [503, 503, 200]

        run(main)

    def test_further_answers_to_a_request_with_a_held_rejection_are_ignored(self) -> None:
        async def main() -> None:
            crowd = Crowd()
            crowd.lane.feed(FULL, FULL)
            crowd.lane.protocol.answer_ok(b"{}")
            crowd.lane.protocol.answer(500, b"", b"text/plain")
            pass_by(crowd.loop, MAX_HOLD_S)

            assert crowd.statuses == [503, 503]

        run(main)

    def test_the_held_rejection_of_a_disconnected_client_is_discarded(self) -> None:
        async def main() -> None:
            crowd = Crowd()
            crowd.lane.feed(FULL, FULL)
            crowd.lane.transport.lose(None)
            await turns()
            pass_by(crowd.loop, MAX_HOLD_S)

            assert crowd.statuses == [503]
            assert crowd.lane.own.abandoned == 0

        run(main)

    def test_a_half_closed_client_still_receives_its_held_rejection(self) -> None:
        async def main() -> None:
            crowd = Crowd()
            crowd.lane.feed(FULL, FULL)
            assert crowd.lane.protocol.eof_received()
            pass_by(crowd.loop, 2 * STEP_S)

            assert crowd.statuses == [503, 503]
            assert crowd.lane.answers[-1].closes

        run(main)


class Calls:
    """A gRPC connection to such a server: calls of HOLD are rejected when a test says so."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.loop = self.wire.loop
        while not held(self.wire.shared.pacer, Client(self.loop)):
            pass

    def refuse(self, stream: int, status: Status = Status.UNAVAILABLE) -> None:
        self.wire.feed(self.wire.call(HOLD, stream=stream))
        self.wire.held.pop().abort(status, "full", 2)
        self.loop.turn()

    def statuses(self) -> dict[int, int]:
        """Return the statuses of the streams answered since the last call."""
        return {stream: status for stream, (_, status, _) in self.wire.answers().items()}


class TestCall:
    def test_the_rejection_of_an_immediate_retry_is_held_and_other_calls_are_not(self) -> None:
        calls = Calls()
        calls.refuse(1)
        assert calls.statuses() == {1: Status.UNAVAILABLE}
        calls.refuse(3)
        calls.wire.feed(calls.wire.call(ECHO, stream=5))
        assert calls.statuses() == {5: Status.OK}
        pass_by(calls.loop, 2 * STEP_S)

        assert calls.statuses() == {3: Status.UNAVAILABLE}

    def test_a_retry_after_the_advised_delay_is_rejected_at_once(self) -> None:
        calls = Calls()
        calls.refuse(1)
        pass_by(calls.loop, EARLY_RETRY_S + STEP_S)
        while not held(calls.wire.shared.pacer, Client(calls.loop)):
            pass
        calls.refuse(3)

        assert calls.statuses() == {1: Status.UNAVAILABLE, 3: Status.UNAVAILABLE}

    def test_an_invalid_argument_error_is_never_held(self) -> None:
        calls = Calls()
        calls.refuse(1)
        calls.refuse(3, Status.INVALID_ARGUMENT)

        assert calls.statuses() == {1: Status.UNAVAILABLE, 3: Status.INVALID_ARGUMENT}

    def test_a_call_cancelled_while_its_rejection_is_held_is_not_answered(self) -> None:
        calls = Calls()
        calls.refuse(1)
        calls.refuse(3)
        calls.wire.feed(frames.reset(3, frames.ErrorCode.CANCEL))
        pass_by(calls.loop, MAX_HOLD_S)

        assert calls.statuses() == {1: Status.UNAVAILABLE}
        assert not calls.wire.connection.streams
        assert [*calls.wire.shared.tally.totals.values()] == [1]

    def test_the_held_rejections_of_a_lost_connection_are_discarded(self) -> None:
        calls = Calls()
        calls.refuse(1)
        calls.refuse(3)
        calls.wire.connection.connection_lost(None)
        pass_by(calls.loop, MAX_HOLD_S)

        assert calls.statuses() == {1: Status.UNAVAILABLE}
