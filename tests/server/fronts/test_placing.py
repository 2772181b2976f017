"""Placing: what a front end serves while the hooks of other models are being loaded there."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import HookSpec
from tests.server.fronts.pair import SPEC, EngineSide, FrontSide, joined, until

GATE = "the_gate_of_test_placing"
HOOKS = f"""
import sys

sys.modules[{GATE!r}].wait(30)


def pre_inference(sample, signature, metadata):
    return sample
"""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What hooks that are loaded wait for."""
    opened = threading.Event()
    monkeypatch.setitem(sys.modules, GATE, opened)
    yield opened
    opened.set()


def _why_not(front: FrontSide, name: str) -> Code:
    with pytest.raises(InferError) as caught:
        front.engine.model(name)
    return caught.value.code


def test_a_front_end_serves_each_model_as_soon_as_it_can(tmp_path: Path, gate: threading.Event) -> None:
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
