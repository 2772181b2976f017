"""Traces of ensembles contain their steps, each under the ensemble that it belongs to, as in Triton."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.backends.errors import Code, InferError
from penstock.server.tracing.config import Sampling, parse
from penstock.server.tracing.file import TraceFile
from penstock.server.tracing.nesting import SampledRequest, SpanNode, TracedStep, with_steps
from penstock.server.tracing.otlp import OtlpSpans
from penstock.server.tracing.trace import Trace
from penstock.server.tracing.tracer import Tracer
from tests.batching.ensembles import House, ensemble_spec, house, step

pytestmark = pytest.mark.anyio

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
FILED = ("level=TIMESTAMPS", "rate=1", "triton,file=x")
COLLECTED = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1")
GUILTY = 13.0
COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]

INNER = ensemble_spec("inner", "in", "out", step("same", "x=in", "y=out"))
OUTER = ensemble_spec("outer", "in", "out", step("inner", "in=in", "out=mid"), step("more", "x=mid", "y=out"))
FORK = ensemble_spec("fork", "in", "a b", step("same", "x=in", "y=a"), step("more", "x=in", "y=b"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Served:
    """The models of a test, and their traces."""

    house: House
    tracer: Tracer
    traces: list[Trace]

    def write(self, traces: Sequence[Trace]) -> None:
        self.traces += traces

    def close(self) -> None:
        pass

    async def ask(self, name: str, value: float = 1, **headers: str) -> None:
        """Send a request to a model as a client does, and wait for the answer."""
        request = self.house.request(name, value)
        request.context = SimpleNamespace(metadata=headers)
        before = len(self.house.sink.requests)
        self.house.engine.submit(request)
        await self.house.sink.holds(before + 1)

    def written(self) -> list[Trace]:
        """Return the traces when all are written."""
        self.tracer.stop()
        return self.traces


@asynccontextmanager
async def served(*rules: str) -> AsyncIterator[Served]:
    """Serve two models, and three ensembles of them."""

    def same(inputs: list[Any]) -> list[Any]:
        if (inputs[0] == GUILTY).any():
            raise ValueError("a guilty row")
        return inputs

    def more(inputs: list[Any]) -> list[Any]:
        return [inputs[0] + 1]

    async with house() as system:
        await system.serve("same", same)
        await system.serve("more", more)
        for spec in (INNER, OUTER, FORK):
            await system.engine.load(spec)
        servers: list[Served] = []
        servers.append(Served(system, Tracer(parse(rules), system.engine, lambda config: servers[0]), []))
        yield servers[0]
        servers[0].tracer.stop()


def tree(trace: Trace) -> Mapping[str, str]:
    """Return the parent of each model."""
    names = {0: "", trace.number: trace.model} | {each.number: each.model for each in trace.steps}
    return {each.model: names[each.parent_number] for each in (trace, *trace.steps)}


def stamps(trace: Trace) -> list[str]:
    return [name for name, _ in trace.stamps]


def spans_of(traces: Sequence[Trace]) -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    sink = OtlpSpans(parse(COLLECTED), exporter)
    sink.write(traces)
    sink.close()
    return exporter.get_finished_spans()


# -- the content of a trace ------------------------------------------------------------------------------------


async def test_the_trace_of_an_ensemble_contains_its_steps_and_nested_ensembles() -> None:
    async with served(*FILED) as s:
        await s.ask("outer")
        (trace,) = s.written()

    assert tree(trace) == {"outer": "", "inner": "outer", "same": "inner", "more": "outer"}
    assert (trace.number, [each.number for each in trace.steps]) == (1, [2, 3, 4])
    assert [each.model for each in trace.steps] == ["inner", "same", "more"]


async def test_only_steps_that_run_have_compute_stamps() -> None:
    async with served(*FILED) as s:
        await s.ask("outer")
        (trace,) = s.written()

    expected = ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert stamps(trace) == stamps(trace.steps[0]) == expected
    assert [name for name in stamps(trace.steps[1]) if name not in expected] == COMPUTE


def test_an_ensemble_comes_before_a_step_that_began_in_the_same_nanosecond() -> None:
    trace = Trace(0, "root", "1", "", False, (("REQUEST_START", 7),), ("TIMESTAMPS",), 0, "", "", ())
    root = SampledRequest(Sampling())
    inner = SpanNode(root)
    root.steps += [
        TracedStep(SpanNode(inner), trace._replace(model="last")),
        TracedStep(inner, trace._replace(model="inner")),
    ]

    found = with_steps(trace, root, 4)
    assert [(each.model, each.number, each.parent_number) for each in found.steps] == [("inner", 5, 4), ("last", 6, 5)]


async def test_the_trace_file_names_the_parent_of_each_step(tmp_path: Path) -> None:
    async with served(*FILED) as s:
        await s.ask("outer")
        await s.ask("same")
        traces = s.written()
    file = TraceFile(tmp_path / "trace.json")
    file.write(traces)
    file.close()

    whose = [entry for entry in json.loads((tmp_path / "trace.json").read_text()) if "model_name" in entry]
    assert [(entry["id"], entry["model_name"], entry.get("parent_id")) for entry in whose] == [
        (1, "outer", None), (2, "inner", 1), (3, "same", 2), (4, "more", 1), (5, "same", None),
    ]  # fmt: skip


async def test_a_request_and_its_steps_count_as_one_trace_for_the_log_frequency(tmp_path: Path) -> None:
    async with served(*FILED, "triton,log-frequency=1") as s:
        await s.ask("inner")
        await s.ask("inner")
        traces = s.written()
    file = TraceFile(tmp_path / "trace.json")
    file.write(traces)
    file.close()

    found = {path.name: {entry["id"] for entry in json.loads(path.read_text())} for path in tmp_path.iterdir()}
    assert found == {"trace.json.0": {1, 2}, "trace.json.1": {3, 4}}


async def test_tensors_of_steps_are_traced_like_the_tensors_of_their_ensemble() -> None:
    async with served("level=TENSORS", "rate=1", "triton,file=x") as s:
        await s.ask("outer", 5)
        (trace,) = s.written()

    values = {each.model: [tensor.values[0, 0] for tensor in each.tensors] for each in (trace, *trace.steps)}
    assert values == {"outer": [5, 6], "inner": [5, 5], "same": [5, 5], "more": [5, 6]}
    assert trace.nbytes == 4 * 2 * 4 * 4


async def test_spans_of_steps_are_children_of_the_span_of_their_ensemble() -> None:
    async with served(*COLLECTED) as s:
        await s.ask("outer", traceparent=PARENT)
        spans = spans_of(s.written())

    names = {span.context.span_id: span.name for span in spans}
    found = sorted((span.name, names.get(span.parent.span_id, "")) for span in spans if span.parent is not None)
    assert found == [
        ("InferRequest", ""), ("compute", "more"), ("compute", "same"), ("inner", "outer"), ("more", "outer"),
        ("outer", "InferRequest"), ("same", "inner"),
    ]  # fmt: skip
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE_ID}
    ids = {span.name: (span.attributes or {}).get("triton.trace_parent_id") for span in spans}
    assert (ids["outer"], ids["inner"], ids["same"], ids["more"]) == (0, 1, 2, 1)


# -- sampling --------------------------------------------------------------------------------------------------


async def test_steps_are_sampled_and_counted_together_with_their_ensemble() -> None:
    async with served("level=TIMESTAMPS", "rate=2", "count=2", "triton,file=x") as s:
        for _ in range(3):
            await s.ask("outer")
        await s.ask("same")
        await s.ask("same")
        remaining = s.tracer.sampling().count
        traces = s.written()

    assert [(trace.model, len(trace.steps)) for trace in traces] == [("outer", 3), ("same", 0)]
    assert remaining == 0


async def test_a_step_is_traced_regardless_of_the_trace_settings_of_its_model() -> None:
    async with served(*FILED) as s:
        s.tracer.set_sampling("same", Sampling())
        await s.ask("inner")
        await s.ask("same")
        s.tracer.set_sampling("inner", Sampling())
        s.tracer.set_sampling("same", Sampling(("TIMESTAMPS",), 1))
        await s.ask("inner")
        traces = s.written()

    assert [tree(trace) for trace in traces] == [{"inner": "", "same": "inner"}]


async def test_steps_of_a_request_with_a_trace_parent_are_traced_regardless_of_rate_and_count() -> None:
    async with served("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", "count=0") as s:
        await s.ask("outer")
        await s.ask("outer", traceparent=PARENT)
        (trace,) = s.written()

    assert (trace.parent, len(trace.steps)) == (PARENT, 3)


async def test_steps_and_requests_that_share_a_batch_are_each_in_their_own_trace() -> None:
    async with served(*FILED) as s:
        s.house.gates["same"].close()
        s.house.submit("same", 0)
        await s.house.gates["same"].entered()
        for name in ("inner", "same", "outer"):
            s.house.submit(name, 1)
        await asyncio.sleep(0)  # the steps are submitted to their model at the end of the loop's turn
        s.house.gates["same"].open()
        await s.house.sink.holds(4)
        runs, traces = s.house.runs("same"), s.written()

    assert runs == [1, 3]
    assert sorted((trace.model, len(trace.steps)) for trace in traces) == [
        ("inner", 1), ("outer", 3), ("same", 0), ("same", 0),
    ]  # fmt: skip


async def test_a_request_to_an_ensemble_has_no_trace_data_while_tracing_is_off() -> None:
    async with served() as s:
        await s.ask("outer")

        assert not hasattr(s.house.sink.requests[0], "traced")


# -- failures --------------------------------------------------------------------------------------------------


async def test_a_failed_step_is_in_the_trace_of_its_failed_ensemble() -> None:
    async with served(*FILED) as s:
        await s.ask("outer", GUILTY)
        (trace,) = s.written()

    assert [(each.model, each.failed) for each in (trace, *trace.steps)] == [
        ("outer", True), ("inner", True), ("same", True),
    ]  # fmt: skip


async def test_a_step_that_still_runs_when_another_step_has_failed_is_not_traced() -> None:
    async with served(*FILED) as s:
        s.house.gates["more"].close()
        await s.ask("fork", GUILTY)
        s.house.gates["more"].open()
        await s.ask("more")
        traces = s.written()

    assert [tree(trace) for trace in traces] == [{"fork": "", "same": "fork"}, {"more": ""}]


async def test_steps_of_a_cancelled_nested_ensemble_are_traced_under_the_outer_ensemble() -> None:
    deep = ensemble_spec("deep", "in", "out", step("same", "x=in", "y=mid"), step("more", "x=mid", "y=out"))
    spec = ensemble_spec("both", "in other", "a b", step("deep", "in=in", "out=a"), step("last", "x=other", "y=b"))

    async with served(*FILED) as s:
        await s.house.serve("last", s.house.gates["same"])
        await s.house.engine.load(deep)
        await s.house.engine.load(spec)
        s.house.gates["more"].close()
        s.house.gates["last"].close()
        s.house.submit("both", 1, GUILTY)
        await s.house.gates["more"].entered()
        s.house.gates["last"].open()
        await s.house.sink.holds(1)
        s.house.gates["more"].open()
        (trace,) = s.written()

    assert tree(trace) == {"both": "", "same": "both", "last": "both"}


async def test_a_cancelled_ensemble_is_not_traced_and_later_requests_are() -> None:
    async with served(*FILED) as s:
        s.house.gates["more"].close()
        cancelled = s.house.submit("outer", 1)
        await s.house.gates["more"].entered()
        s.house.engine.cancel(cancelled)
        s.house.gates["more"].open()
        await s.ask("outer")
        (trace,) = s.written()

    assert (trace.number, len(trace.steps)) == (1, 3)


async def test_an_ensemble_that_expires_before_its_first_step_runs_is_traced_without_steps() -> None:
    async with served(*FILED) as s:
        s.house.gates["same"].close()
        s.house.submit("same", 0)
        await s.house.gates["same"].entered()
        late = s.house.submit("inner", 1, timeout_ns=5_000_000)
        await s.house.sink.holds(1)
        s.house.gates["same"].open()
        await s.house.sink.holds(2)
        traces = s.written()

    assert isinstance(late.error, InferError)
    assert late.error.code == Code.EXPIRED
    assert sorted((trace.model, trace.failed, len(trace.steps)) for trace in traces) == [
        ("inner", True, 0), ("same", False, 0),
    ]  # fmt: skip
