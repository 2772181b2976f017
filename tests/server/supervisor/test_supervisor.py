"""The supervisor with real processes whose roles are fakes: starting, replacing, ending."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from penstock.server.listening.sockets import StartError
from penstock.server.supervisor import fleet as fleet_module
from penstock.server.supervisor import supervisor as supervisor_module
from penstock.server.supervisor.fleet import DRAINING, ENGINE, FRONT, LISTENING, READY, Member
from penstock.server.supervisor.supervisor import Supervisor
from tests.live import settings_for
from tests.processes import children, descriptors

pytestmark = pytest.mark.slow
ROLES = {role: f"tests.server.supervisor.fake_roles:{role.title()}" for role in (ENGINE, FRONT)}
PATIENCE_S = 60.0
PAUSE_S = 0.01
"""The pause of a client after each answer, without which the clients take the cores from processes that start."""


@pytest.fixture(autouse=True)
def no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No spares: a spare imports the roles before it knows their paths, and the fakes are in no installed package."""
    monkeypatch.setattr(supervisor_module, "SPARE_AFTER_S", 1e9)


def run(main: Callable[[], Awaitable[None]]) -> None:
    first = uvloop.new_event_loop()
    first.run_until_complete(asyncio.sleep(0))  # uvloop creates what it keeps until the process ends
    first.close()
    before = children(), descriptors()
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), PATIENCE_S))
    finally:
        loop.close()
    assert (children(), descriptors()) == before


@asynccontextmanager
async def supervised(**settings: Any) -> AsyncIterator[Supervisor]:
    chosen = {"http_workers": 2, "allow_grpc": False, "allow_metrics": False, "exit_timeout_secs": 5.0}
    supervisor = Supervisor(settings_for(**(chosen | settings)), ROLES)
    try:
        await supervisor.open()
        await supervisor.load()
        yield supervisor
    finally:
        await supervisor.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the condition has no event
        await asyncio.sleep(0.005)


def port_of(supervisor: Supervisor) -> int:
    return int(supervisor.urls["HTTP"].rpartition(":")[2])


def pids(supervisor: Supervisor, role: str) -> list[int]:
    fleet = supervisor.fleet
    return [supervisor._children[each.number].pid for each in fleet.members_of(fleet.generation, role)]


async def ask(port: int) -> list[str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"x\n")
    words = (await reader.readline()).decode().split()
    writer.close()
    return words[1:]


async def client(port: int, name: int, ledger: Counter[str], over: asyncio.Event) -> None:
    """Send line after line, on a new connection when the server closes one; each line ends once in the ledger."""
    while not over.is_set():
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return
        with contextlib.closing(writer):
            closing = False
            while not closing and not over.is_set():
                ledger["sent"] += 1
                line = f"{name}.{ledger['sent']}"
                try:
                    writer.write(line.encode() + b"\n")
                    answer = (await reader.readline()).decode().split()
                except OSError:
                    answer = []
                closing = not answer or answer[-1] == "closing"
                good = answer[:1] == [line]
                ledger["lost" if not answer else "503" if answer[1] == "503" else "good" if good else "wrong"] += 1
                await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def load_on(port: int, clients: int = 16) -> AsyncIterator[Counter[str]]:
    ledger: Counter[str] = Counter()
    over = asyncio.Event()
    asking = [asyncio.ensure_future(client(port, number, ledger, over)) for number in range(clients)]
    try:
        yield ledger
        await until(lambda: ledger["good"] > 10 * clients)
    finally:
        over.set()
        await asyncio.gather(*asking)


def test_connections_reach_every_front_end_and_the_only_engine() -> None:
    async def main() -> None:
        async with supervised() as supervisor:
            answers = [await ask(port_of(supervisor)) for _ in range(40)]

            assert {answer[0] for answer in answers} == set(map(str, pids(supervisor, FRONT)))
            assert {answer[1] for answer in answers} == set(map(str, pids(supervisor, ENGINE)))
            assert supervisor.status_line == "ready, start 1"
            assert await supervisor.drain() == 0

    run(main)


@pytest.mark.parametrize(("id_", "message"), [("broken", "it is broken"), ("crash", "engine ended: exit status 3")])
def test_a_process_that_fails_to_start_is_a_start_error_and_leaves_no_process(id_: str, message: str) -> None:
    async def main() -> None:
        with pytest.raises(StartError, match=message):
            async with supervised(id=id_):
                pass

    run(main)


def test_a_port_used_by_another_penstock_is_an_error_before_any_process_starts() -> None:
    async def main() -> None:
        async with supervised() as supervisor:
            with pytest.raises(StartError, match="already in use"):
                async with supervised(http_port=port_of(supervisor)):
                    pass

    run(main)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_front_end_that_dies_loses_only_its_own_connections(number: signal.Signals) -> None:
    async def main() -> None:
        async with supervised() as supervisor, load_on(port_of(supervisor)) as ledger:
            await until(lambda: ledger["good"] > 100)
            os.kill(pids(supervisor, FRONT)[0], number)
            await until(lambda: supervisor.fleet.restarts[FRONT] == 1 and supervisor.fleet.has_reached(READY))

            assert ledger["wrong"] == ledger["503"] == 0
            assert ledger["lost"] <= 16

    run(main)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_get_503_when_the_engine_dies_and_a_new_engine_restores_its_state(number: signal.Signals) -> None:
    async def main() -> None:
        async with supervised() as supervisor, load_on(port_of(supervisor)) as ledger:
            await until(lambda: ledger["good"] > 100)
            os.kill(pids(supervisor, ENGINE)[0], number)
            await until(lambda: supervisor.fleet.restarts[ENGINE] == 1 and supervisor.fleet.has_reached(READY))

            assert ledger["wrong"] == ledger["lost"] == 0
            assert ledger["503"] > 0
            assert supervisor.status_line == "ready, start 2"
            assert len(set(pids(supervisor, FRONT))) == 2

    run(main)


def test_an_engine_that_loses_its_device_answers_pending_requests_and_is_replaced() -> None:
    async def main() -> None:
        async with supervised(id="spent") as supervisor, load_on(port_of(supervisor)) as ledger:
            (before,) = pids(supervisor, ENGINE)
            await until(lambda: supervisor.fleet.restarts[ENGINE] == 1 and supervisor.fleet.has_reached(READY))

            assert pids(supervisor, ENGINE) != [before]
            assert supervisor.fleet.restarts == {ENGINE: 1, FRONT: 0}
            assert ledger["wrong"] == ledger["lost"] == 0

    run(main)


def test_all_processes_are_replaced_without_a_lost_request() -> None:
    async def main() -> None:
        async with supervised() as supervisor, load_on(port_of(supervisor)) as ledger:
            before = set(pids(supervisor, FRONT) + pids(supervisor, ENGINE))
            await until(lambda: ledger["good"] > 100)
            supervisor.handle_hangup()
            await until(lambda: supervisor.fleet.next_generation is None and len(supervisor.fleet.members) == 3)

            assert not before & set(pids(supervisor, FRONT) + pids(supervisor, ENGINE))
            assert ledger["wrong"] == ledger["lost"] == ledger["503"] == 0

    run(main)


def test_state_saved_by_an_old_engine_reaches_its_successor() -> None:
    async def main() -> None:
        async with supervised() as supervisor:
            supervisor.fleet.members[999] = Member(999, ENGINE, 0, supervisor.fleet.generation - 1, DRAINING)
            supervisor._save(999, json.dumps(["late", 1]).encode(), [])

            await until(lambda: "heard late" in dict(supervisor._journal))
            del supervisor.fleet.members[999]

    run(main)


def test_a_drain_answers_every_accepted_request() -> None:
    async def main() -> None:
        async with supervised() as supervisor:
            async with load_on(port_of(supervisor)) as ledger:
                await until(lambda: ledger["good"] > 200)
                assert await supervisor.drain() == 0
            assert ledger["good"] == ledger["sent"]

    run(main)


def test_a_front_end_that_receives_sigterm_loses_no_request_and_is_replaced() -> None:
    async def main() -> None:
        async with supervised() as supervisor, load_on(port_of(supervisor)) as ledger:
            await until(lambda: ledger["good"] > 100)
            os.kill(pids(supervisor, FRONT)[0], signal.SIGTERM)
            await until(lambda: supervisor.fleet.restarts[FRONT] == 1 and supervisor.fleet.has_reached(READY))

            assert ledger["lost"] == ledger["wrong"] == ledger["503"] == 0

    run(main)


def test_an_engine_that_receives_sigterm_is_replaced_and_front_ends_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "ENGINE_WAIT_S", 0.1)

    async def main() -> None:
        async with supervised() as supervisor, load_on(port_of(supervisor)) as ledger:
            await until(lambda: ledger["good"] > 100)
            fronts = pids(supervisor, FRONT)
            os.kill(pids(supervisor, ENGINE)[0], signal.SIGTERM)
            await until(lambda: supervisor.fleet.restarts[ENGINE] == 1 and supervisor.fleet.has_reached(READY))

            assert pids(supervisor, FRONT) == fronts
            assert ledger["lost"] == ledger["wrong"] == 0

    run(main)


def test_a_front_end_is_replaced_without_backoff_after_every_sigterm() -> None:
    async def main() -> None:
        async with supervised() as supervisor:
            for number in range(1, 4):
                os.kill(pids(supervisor, FRONT)[0], signal.SIGTERM)
                await until(lambda number=number: supervisor.fleet.restarts[FRONT] == number)  # type: ignore[misc]
                await until(lambda: supervisor.fleet.has_reached(READY))

            assert [each.failures for each in supervisor.fleet._backoffs.values() if each.failures] == []

    run(main)


def test_a_front_end_that_listens_but_is_not_ready_is_reported_as_listening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with supervised() as supervisor:
            monkeypatch.setitem(ROLES, FRONT, "tests.server.supervisor.fake_roles:Held")
            before = set(supervisor.fleet.members)
            os.kill(pids(supervisor, FRONT)[0], signal.SIGKILL)
            await until(lambda: bool(set(supervisor.fleet.members) - before))
            (held,) = set(supervisor.fleet.members) - before

            await until(lambda: supervisor.fleet.members[held].state == LISTENING)

    run(main)


@asynccontextmanager
async def connected(port: int, number: int) -> AsyncIterator[Counter[int]]:
    """Connect one client after another. Gives the number of connections of each front end by process id."""
    found: Counter[int] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(number):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.enter_context(contextlib.closing(writer))
            writer.write(b"x\n")
            found[int((await reader.readline()).split()[1])] += 1
        yield found


@pytest.mark.parametrize("fronts", [2, 4])
def test_connections_of_one_client_are_spread_evenly_over_front_ends(fronts: int) -> None:
    async def main() -> None:
        async with supervised(http_workers=fronts) as supervisor:
            for number in (16, 64, 256):
                async with connected(port_of(supervisor), number) as found:
                    assert max(found.values()) <= number / fronts + 1

    run(main)


def test_a_new_front_end_gets_all_new_connections_until_the_counts_are_equal() -> None:
    async def main() -> None:
        async with supervised() as supervisor, connected(port_of(supervisor), 32) as before:
            os.kill(pids(supervisor, FRONT)[0], signal.SIGKILL)
            await until(lambda: supervisor.fleet.restarts[FRONT] == 1 and supervisor.fleet.has_reached(READY))
            stayed, new = sorted(pids(supervisor, FRONT), key=lambda pid: pid not in before)

            async with connected(port_of(supervisor), before[stayed]) as found:
                assert found == {new: before[stayed]}

    run(main)


@pytest.mark.parametrize("step", ["place", "pair"])
def test_starting_a_front_end_is_retried_when_file_descriptors_run_out(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def main() -> None:
        async with supervised() as supervisor:
            failing = [OSError(errno.EMFILE, "Too many open files")] * 2

            def unless_failing(work: Callable[..., Any], *words: Any) -> Any:
                if failing:
                    raise failing.pop()
                return work(*words)

            if step == "place":
                neighbors = supervisor._neighbors
                monkeypatch.setattr(neighbors, "add", partial(unless_failing, neighbors.add))
            else:
                fake_socket = SimpleNamespace(socketpair=partial(unless_failing, socket.socketpair))
                monkeypatch.setattr(supervisor_module, "socket", fake_socket)
            old = pids(supervisor, FRONT)
            os.kill(old[0], signal.SIGKILL)

            await until(lambda: not failing and old[0] not in pids(supervisor, FRONT))
            await until(lambda: supervisor.fleet.has_reached(READY))
            assert await ask(port_of(supervisor))
            assert len(supervisor._children) == 3

    run(main)


def test_a_pairing_retry_does_nothing_if_the_front_end_has_been_paired_since(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with supervised() as supervisor:
            (engine,), (front, _) = (supervisor.fleet.members_of(0, role) for role in (ENGINE, FRONT))
            later: list[Callable[[], None]] = []

            def unable() -> None:
                raise OSError(errno.EMFILE, "Too many open files")

            with monkeypatch.context() as patched:
                patched.setattr(supervisor_module, "socket", SimpleNamespace(socketpair=unable))
                clock = SimpleNamespace(call_later=lambda _, work, *words: later.append(partial(work, *words)))
                patched.setattr(supervisor, "_loop", clock)
                supervisor._pair(front, engine)
            supervisor._pair(front, engine)
            pairing = supervisor._pairings[front.number]
            (try_again,) = later
            try_again()

            assert supervisor._pairings[front.number] == pairing

    run(main)
