"""Parts: chunks of an answer that are ready together leave in one write, with the same bytes."""

from __future__ import annotations

from penstock.server.http.limits import Limits

from .lane import Lane, request, run, turns

PARTS = (b"one", b"0\r\n\r\n", b"a longer one" * 9, b"last")


def make_lane(*, together: bool) -> Lane:
    lane = Lane(Limits())
    lane.app.parts, lane.app.together = PARTS, together
    return lane


def test_parts_leave_in_one_write_with_the_same_bytes_as_separate_sends() -> None:
    async def main() -> None:
        lanes = [make_lane(together=together) for together in (False, True)]
        for lane in lanes:
            await lane.fed(request("/app", b""))

        apart, together = (bytes(lane.transport.written) for lane in lanes)
        assert together == apart
        assert [lane.transport.writes for lane in lanes] == [5, 3]
        assert lanes[1].bodies == [b"".join(PARTS)]

    run(main)


def test_parts_wait_while_the_client_does_not_read() -> None:
    async def main() -> None:
        lane = make_lane(together=True)
        lane.app.open.clear()
        lane.feed(request("/app", b""))
        await turns()
        lane.protocol.pause_writing()
        lane.app.open.set()
        await turns()
        assert lane.transport.written == b""

        lane.protocol.resume_writing()
        await turns()
        assert lane.bodies == [b"".join(PARTS)]

    run(main)


def test_parts_are_not_written_after_the_request_is_disconnected() -> None:
    async def main() -> None:
        lane = make_lane(together=True)
        lane.app.open.clear()
        lane.feed(request("/app", b""))
        await turns()
        cycle = lane.protocol.cycle
        assert cycle is not None
        cycle.disconnected = True
        lane.app.open.set()
        await turns()

        assert lane.transport.written == b""

    run(main)


def test_parts_are_not_chunked_for_an_http_1_0_client() -> None:
    async def main() -> None:
        lane = make_lane(together=True)
        lane.feed(request("/app", b"", version="1.0"))
        await turns()

        assert bytes(lane.transport.written).partition(b"\r\n\r\n")[2] == b"".join(PARTS)

    run(main)
