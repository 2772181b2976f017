"""Parts: chunks of an answer that are there together leave in one write, and are the same bytes."""

from __future__ import annotations

from penstock.server.http.limits import Limits

from .lane import Lane, request, run, turns

PARTS = (b"one", b"0\r\n\r\n", b"a longer one" * 9, b"last")


def made(*, together: bool) -> Lane:
    lane = Lane(Limits())
    lane.app.parts, lane.app.together = PARTS, together
    return lane


def test_they_are_the_bytes_of_one_send_for_each_in_one_write() -> None:
    async def main() -> None:
        lanes = [made(together=together) for together in (False, True)]
        for lane in lanes:
            await lane.fed(request("/app", b""))

        apart, together = (bytes(lane.transport.written) for lane in lanes)
        assert together == apart
        assert [lane.transport.writes for lane in lanes] == [5, 3]
        assert lanes[1].bodies == [b"".join(PARTS)]

    run(main)


def test_they_wait_for_a_client_that_does_not_read() -> None:
    async def main() -> None:
        lane = made(together=True)
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


def test_nothing_is_written_for_one_that_was_refused_meanwhile() -> None:
    async def main() -> None:
        lane = made(together=True)
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


def test_a_client_of_http_1_0_has_no_chunks() -> None:
    async def main() -> None:
        lane = made(together=True)
        lane.feed(request("/app", b"", version="1.0"))
        await turns()

        assert bytes(lane.transport.written).partition(b"\r\n\r\n")[2] == b"".join(PARTS)

    run(main)
