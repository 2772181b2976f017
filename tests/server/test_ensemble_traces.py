"""Traces of ensembles: what a step's trace belongs to, and which stamps there are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.batching.batch import Batch
from penstock.batching.passage import Passage
from penstock.batching.request import InferRequest
from penstock.server.tracing.trace import context_of, stamps_of
from tests.batching.ensembles import ensemble_spec, house, step
from tests.fakes import fake_model, fake_request


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def passage_of(parent: InferRequest) -> Passage:
    passage: Passage = object.__new__(Passage)
    passage.parent = parent
    return passage


def test_a_step_belongs_to_the_trace_of_whoever_called_the_ensemble() -> None:
    outer, inner = fake_request(fake_model("outer")), fake_request(fake_model("inner"))
    outer.context = SimpleNamespace(head=SimpleNamespace(header={b"traceparent": PARENT.encode()}))
    inner.context = passage_of(outer)

    assert context_of(passage_of(inner)) == (PARENT, "")


@pytest.mark.anyio
async def test_an_ensemble_has_no_stamps_of_computing() -> None:
    async with house() as kept:
        await kept.serve("same", lambda inputs: inputs)
        await kept.engine.load(ensemble_spec("e", "in", "out", step("same", "x=in", "y=out")))
        seen: dict[str, list[str]] = {}

        def note(model: object, batch: Batch, end_ns: int) -> None:
            request = batch.requests[0]
            seen[request.model.name] = [name for name, _ in stamps_of(batch, request, end_ns)]

        kept.engine.trace = note
        kept.submit("e", 1)
        await kept.sink.holds(1)

    assert seen["e"] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert "COMPUTE_START" in seen["same"]
