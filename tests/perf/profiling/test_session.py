from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.perf.generator.orders import GrpcCall, Load, Target, Tls
from penstock.perf.profiling import session
from penstock.perf.profiling.options import Input, Options, Range, Rule, hidden
from penstock.perf.profiling.session import Listener, Listeners, SessionError, load_of, target

INFER, STREAM = "/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.mark.parametrize(
    ("options", "aimed"),
    [
        (Options("m"), Target("localhost", 8000, v2=True)),
        (Options("m", url="here:1"), Target("here", 1, v2=True)),
        (Options("m", url="here"), Target("here", 8000, v2=True)),
        (Options("m", url="http://here:1/"), Target("here", 1, v2=True)),
        (Options("m", url="[::1]:5"), Target("::1", 5, v2=True)),
        (Options("m", url="here:1", tls=Tls()), Target("here", 1, v2=True)),  # how, and the URL does not say https
        (
            Options("m", url="https://here:1", tls=Tls(verify_peer=False)),
            Target("here", 1, Tls(verify_peer=False), v2=True),
        ),
        (Options("m", url="https://here:1"), Target("here", 1, Tls(), v2=True)),
        (Options("m", grpc=True), Target("localhost", 8001, grpc=GrpcCall(INFER))),
        (Options("m", grpc=True, tls=Tls(), url="here:1"), Target("here", 1, Tls(), GrpcCall(INFER))),
        (
            Options("m", grpc=True, streaming=True, compression="gzip", headers=(("a", "b"),)),
            Target("localhost", 8001, None, GrpcCall(STREAM, (("a", "b"),), True, "gzip")),
        ),
    ],
)
def test_the_url_and_the_protocol_determine_the_target(options: Options, aimed: Target) -> None:
    assert target(options) == aimed


@pytest.mark.parametrize("url", ["here:port", "here:99999", "here:1/v2", ":1", "[::1"])
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(SessionError, match="-u "):
        target(Options("m", url=url))


def test_a_level_is_converted_to_a_load(tmp_path: Path) -> None:
    intervals = tmp_path / "intervals"
    intervals.write_text("1000\n2500.5\n", "utf-8")
    counted = Options("m", rule=Rule(total_requests=9), connections=3, input=Input(seed=4))
    open_loop = Options("m", concurrency=None, rate=Range(), poisson=True, sequences=7)

    assert load_of(counted, 5) == Load(concurrency=5, requests=9, connections=3, seed=4)
    assert load_of(open_loop, 2.5) == Load(rate_per_s=2.5, poisson=True)
    assert load_of(open_loop, 2.5, sequences=True) == Load(rate_per_s=2.5, poisson=True, sequences=7)
    assert load_of(Options("m", concurrency=None, intervals=intervals), 0) == Load(intervals_us=(1000.0, 2500.5))


@pytest.mark.parametrize("text", ["", "0\n0\n", "-1\n", "soon\n", "nan\n"])
def test_invalid_intervals_are_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "intervals"
    file.write_text(text, "utf-8")

    with pytest.raises(SessionError, match="--request-intervals"):
        session.intervals_us(Options("m", concurrency=None, intervals=file))


def test_the_number_of_slots_is_the_most_requests_in_flight() -> None:
    assert session.slots(Options("m", concurrency=Range(2, 9, 1))) == 9
    assert session.slots(Options("m", concurrency=Range(5, 1, 1))) == 5
    assert session.slots(Options("m", concurrency=Range(5, 0, 1))) == 0
    assert session.slots(Options("m", concurrency=None, rate=Range(), sequences=6)) == 6


@pytest.mark.parametrize(
    ("header", "events"),
    [
        (("Authorization", "x"), "..."),
        (("X-Api-Key", "x"), "..."),
        (("set-cookie", "x"), "..."),
        (("accept", "x"), "x"),
    ],
)
def test_likely_secrets_are_hidden(header: tuple[str, str], events: str) -> None:
    assert hidden(header) == (header[0], events)


def test_every_listener_receives_every_event() -> None:
    events: list[str] = []

    class Noting(Listener):
        def on_message(self, line: str) -> None:
            events.append(line)

        def on_start(self) -> None:
            events.append("began")

        def is_interrupted(self) -> bool:
            return bool(events)

    several = Listeners(Noting(), Listener(), Noting())
    assert not several.is_interrupted()
    several.on_message("line")
    several.on_start()

    assert events == ["line", "line", "began", "began"]
    assert several.is_interrupted()


@pytest.mark.parametrize(
    ("options", "server", "events"),
    [
        (Options("m"), {"extensions": []}, True),
        (Options("m"), {"extensions": ["binary_tensor_data"]}, False),
        (Options("m"), {}, False),  # it says nothing at all
        (Options("m", grpc=True), {"extensions": []}, False),
        (Options("m", input=Input(binary_input=False)), {"extensions": []}, False),
    ],
)
def test_a_server_that_may_not_accept_binary_tensors_causes_a_warning(
    options: Options, server: dict[str, Any], events: bool
) -> None:
    assert bool(session._warnings(options, server)) == events
