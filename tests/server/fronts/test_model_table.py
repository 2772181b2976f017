"""The models of a front end: when each is served, which messages announce them, and when they are freed."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.engine import Engine
from penstock.batching.spec import HookSpec
from penstock.server.fronts.pending_statistics import PendingStatistics
from penstock.server.fronts.remote_engine import RemoteEngine
from tests.server.fronts.pair import SPEC, EngineSide, FrontSide, joined, pair, sides, until

GATE = "the_gate_of_test_placing"
HOOKS = f"""
import sys

sys.modules[{GATE!r}].wait(30)


def pre_inference(sample, signature, metadata):
    return sample
"""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that hooks wait for while they are loaded."""
    opened = threading.Event()
    monkeypatch.setitem(sys.modules, GATE, opened)
    yield opened
    opened.set()


def _why_not(front: FrontSide, name: str) -> Code:
    with pytest.raises(InferError) as caught:
        front.engine.model(name)
    return caught.value.code


def test_a_front_end_serves_loaded_models_while_the_hooks_of_others_load(tmp_path: Path, gate: threading.Event) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS, "utf-8")

    async def main() -> None:
        engine, first, second = EngineSide(), FrontSide(), FrontSide()
        try:
            await engine.load()
            await joined(engine, first)
            gate.set()
            await engine.load(replace(SPEC, name="hooked", hooks=HookSpec(tmp_path / "hooks.py")))
            gate.clear()
            placed = asyncio.ensure_future(joined(engine, second))

            await until(second.engine.models)
            assert second.engine.model("m").name == "m"
            assert not second.placed.is_set()
            assert _why_not(second, "hooked") is _why_not(second, "nowhere") is Code.NOT_READY

            gate.set()
            await placed
            assert second.engine.model("hooked").name == "hooked"
            assert _why_not(second, "nowhere") is Code.NOT_FOUND
        finally:
            gate.set()
            for front in (first, second):
                await front.stop()
            await engine.stop()

    asyncio.run(main())


def _record_messages(front: FrontSide, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list to which each message to a front end is added from now on."""
    messages: list[dict[str, Any]] = []
    model_table = front.model_table
    assert model_table is not None
    take = model_table.receive

    def noted(number: int, body: bytes) -> None:
        messages.append(json.loads(body))
        take(number, body)

    monkeypatch.setattr(model_table, "receive", noted)
    return messages


def test_a_model_that_is_loaded_or_unloaded_is_published_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with sides() as (engine, front):
            for number in range(20):
                await engine.load(replace(SPEC, name=f"m{number}"))
            await joined(engine, front)
            assert len(front.engine.models()) == 20
            messages = _record_messages(front, monkeypatch)
            generation = front.engine.generation

            new = await engine.published.open(replace(SPEC, name="m7"))
            await engine.published.publish("m7", [new])
            await engine.published.publish("m7", ())

            assert [list(message["names"]) for message in messages] == [["m7"], ["m7"]]
            assert [len(message["new"]) for message in messages] == [1, 0]
            assert [len(message["retired"]) for message in messages] == [1, 1]
            assert front.engine.generation - generation == 2
            assert len(front.engine.models()) == 19

    asyncio.run(main())


def test_a_model_that_cannot_be_announced_fails_and_the_others_are_served(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with sides() as (engine, front):
            await engine.load()
            with pytest.raises(InferError, match=r"model 'odd' cannot be announced .*: no snapshot of set$"):
                await engine.load(replace(SPEC, name="odd", hooks=HookSpec(Path(), metadata={"labels": {"a"}})))
            await joined(engine, front)

            assert [model.name for model in front.engine.models()] == ["m"]
            assert _text(front.engine, "odd", "") == _text(engine.engine, "odd", "")

    asyncio.run(main())
    assert "model odd cannot be announced to front ends" in caplog.text


def test_a_front_end_that_joins_later_receives_all_models_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with sides() as (engine, front):
            for number in range(3):
                await engine.load(replace(SPEC, name=f"m{number}"))
            engine.published.publish("m1", (), ["4"])
            here, there = socket.socketpair()
            front.join(there)
            messages = _record_messages(front, monkeypatch)
            engine.join(here)
            async with asyncio.timeout(10):
                await front.placed.wait()

            assert len(messages) == 1
            assert [model.name for model in front.engine.models()] == ["m0", "m2"]
            for name, version in (("m1", ""), ("m1", "1"), ("m1", "4"), ("m1", "9")):
                assert _text(front.engine, name, version) == _text(engine.engine, name, version)

    asyncio.run(main())


def test_reporting_the_statistics_of_one_model_does_not_inspect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with sides() as (engine, front):
            for number in range(20):
                await engine.load(replace(SPEC, name=f"m{number}"))
            await joined(engine, front)
            looked: list[PendingStatistics] = []
            monkeypatch.setattr(PendingStatistics, "has_pending", property(looked.append))
            counted = front.engine.model("m7").statistics

            counted.record_failure("REJECTED", 1, 2)
            counted.record_failure("REJECTED", 2, 3)
            for _ in range(3):
                await asyncio.sleep(0)

            assert looked == [counted]
            monkeypatch.undo()

    asyncio.run(main())


def _text(engine: Engine | RemoteEngine, name: str, version: str) -> str:
    with pytest.raises(InferError) as caught:
        engine.model(name, version)
    return caught.value.message


TABLE = """
import pathlib

class Table:
    def __del__(self, gone=pathlib.Path({!r})):
        gone.touch()

TABLE = Table()

def pre_inference(sample, signature, metadata):
    return sample
"""


def test_objects_held_by_hooks_are_freed_when_their_model_is_unloaded(tmp_path: Path) -> None:
    log_path = tmp_path / "gone"
    (tmp_path / "hooks.py").write_text(TABLE.format(str(log_path)), "utf-8")
    spec = replace(SPEC, name="hooked", hooks=HookSpec(tmp_path / "hooks.py"))

    async def main() -> None:
        async with pair() as (engine, _):
            for _ in range(2):  # the thread of the second one may still be ending
                await engine.published.publish("hooked", [await engine.published.open(spec)])
                await engine.published.publish("hooked", ())
            async with asyncio.timeout(10):
                while not log_path.exists():  # noqa: ASYNC110 - `until` would run the garbage collector
                    await asyncio.sleep(0)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
