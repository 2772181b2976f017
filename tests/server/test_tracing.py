"""Tracing: the flag, the settings over the network, sampling, and the file in Triton's form."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.server.options.start_checks import start_problems
from penstock.server.settings import SettingError, Settings, resolve
from penstock.server.telemetry.observability import open_sink
from penstock.server.tracing import tracer as tracing
from penstock.server.tracing.config import Sampling, TraceConfig, parse
from penstock.server.tracing.file import TraceFile
from penstock.server.tracing.trace import Trace, context_of, is_sampled
from penstock.server.tracing.tracer import Tracer
from penstock.server.v2.trace_settings import TraceSettings
from tests.fakes import fake_model, fake_request, no_more_threads
from tests.processes import descriptors

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
EVENTS = [
    "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
    "REQUEST_END",
]  # fmt: skip


class RecordedTraces:
    """A TraceSink that keeps the traces written to it."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self.closed = False

    def write(self, traces: Sequence[Trace]) -> None:
        self.traces += traces

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    def __init__(self, *names: str) -> None:
        self.names = names
        self.trace: Any = None

    def model(self, name: str, version: str = "") -> str:
        if name not in self.names:
            raise InferError(Code.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return name


def batch_of(*requests: InferRequest) -> Batch:
    batch = Batch(list(requests), sum(request.rows for request in requests), requests[0].key, 1_030)
    batch.compute_start_ns, batch.compute_end_ns, batch.exec_end_ns = 1_040, 1_050, 1_060
    for request in requests:
        request.start_ns, request.enqueued_ns, request.outputs = 1_010, 1_020, []
    return batch


def tracer_with(*entries: str) -> tuple[Tracer, RecordedTraces, FakeEngine]:
    recorded, engine = RecordedTraces(), FakeEngine("m", "n")
    return Tracer(parse(entries), engine, lambda config: recorded), recorded, engine


def settings_with(*entries: str) -> tuple[TraceSettings, Tracer]:
    config, engine = parse(entries), FakeEngine("m", "n")
    tracer = Tracer(config, engine, lambda config: RecordedTraces())
    return TraceSettings(config, tracer, engine.model), tracer


def traced(tracer: Tracer, recorded: RecordedTraces, model: Model, batches: Sequence[int]) -> list[str]:
    """Record batches of these sizes, with consecutive request IDs; return the IDs of the traced requests."""
    number = 0
    for size in batches:
        requests = [fake_request(model) for _ in range(size)]
        for request in requests:
            number += 1
            request.id = str(number)
        tracer.record(model, batch_of(*requests), 1_070)
    tracer.stop()
    return [trace.request_id for trace in recorded.traces]


# -- the flag --------------------------------------------------------------------------------------------------


def test_the_trace_config_flag_is_parsed_as_in_triton() -> None:
    config = parse(
        ["level=TENSORS", "level=TIMESTAMPS", "rate=7", "count=9", "triton,file=/tmp/t.json", "triton,log-frequency=3"]
    )

    assert config.sampling == Sampling(("TIMESTAMPS", "TENSORS"), 7, 9, 3)
    assert (config.mode, config.file) == ("triton", "/tmp/t.json")


def test_nothing_is_traced_without_the_trace_config_flag() -> None:
    assert parse([]) == TraceConfig()
    assert parse([]).sampling.level == ()


def test_the_trace_config_flag_accepts_opentelemetry_settings() -> None:
    config = parse(
        ["mode=opentelemetry", "opentelemetry,url=https://collector:4318/v1/traces", "level=TIMESTAMPS", "rate=0",
         "opentelemetry,resource=service.name=a", "opentelemetry,bsp_schedule_delay=10"]
    )  # fmt: skip

    assert config.url == "https://collector:4318/v1/traces"
    assert config.resource == (("service.name", "a"),)
    assert dict(config.batching)["bsp_schedule_delay"] == 10


def test_a_collector_url_without_a_scheme_uses_http() -> None:
    config = parse(["opentelemetry,url=collector:4318/v1/traces"])

    assert (config.url, config.endpoint) == ("collector:4318/v1/traces", "http://collector:4318/v1/traces")


@pytest.mark.parametrize(
    ("word", "level"),
    [
        ("timestamps", ("TIMESTAMPS",)), ("Tensors", ("TENSORS",)), ("MIN", ("TIMESTAMPS",)), ("max", ("TIMESTAMPS",)),
        ("on", ("TIMESTAMPS",)), ("true", ("TIMESTAMPS",)), ("off", ()), ("false", ()),
    ],
)  # fmt: skip
def test_trace_levels_and_modes_are_accepted_in_every_spelling_of_triton(word: str, level: tuple[str, ...]) -> None:
    config = parse([f"level={word}", "mode=TRITON", "Triton,file=x", "rate=1"])

    assert (config.sampling.level, config.mode, config.file) == (level, "triton", "x")


def test_the_trace_config_flag_overrides_the_otel_batching_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "x")

    assert parse([]) == TraceConfig()  # the variables are ignored in the other mode
    with pytest.raises(ValueError, match="OTEL_BSP_MAX_QUEUE_SIZE must be a whole number, not 'x'"):
        parse(["mode=opentelemetry"])
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    assert dict(parse(["mode=opentelemetry", "opentelemetry,bsp_max_queue_size=7"]).batching) == {
        "bsp_max_queue_size": 7, "bsp_schedule_delay": 100, "bsp_max_export_batch_size": 512,
    }  # fmt: skip


@pytest.mark.parametrize(
    "entries",
    [
        ["rate"], ["=1"], ["speed=1"], ["rate=x"], ["rate=-1"], ["rate=4294967296"], ["count=-2"], ["level=ALL"],
        ["level=OFF", "level=TIMESTAMPS"], ["mode=file"], ["jaeger,url=http://x"], ["triton,url=http://x"],
        ["triton,file"], ["opentelemetry,url=ftp://collector"], ["opentelemetry,url=http://me:secret@collector/"],
        ["opentelemetry,resource=name"], ["opentelemetry,bsp_max_queue_size=0"],
        ["level=TIMESTAMPS"], ["level=TIMESTAMPS", "triton,file=x", "rate=0"],
        ["mode=opentelemetry", "level=TENSORS"],
    ],
)  # fmt: skip
def test_an_invalid_trace_config_is_a_setting_error(entries: list[str]) -> None:
    with pytest.raises(SettingError, match="--trace-config: "):
        Settings(trace_config=tuple(entries))


def test_an_error_in_the_collector_url_does_not_quote_the_password() -> None:
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_HEADERS") as raised:
        parse(["opentelemetry,url=http://me:hunter2@collector/"])

    assert "hunter2" not in str(raised.value)


def test_trace_rules_in_the_environment_are_separated_by_line_breaks() -> None:
    rules = "level=TIMESTAMPS\nmode=opentelemetry\nopentelemetry,url=http://collector:4318/v1/traces\n"
    settings = resolve({}, {"PENSTOCK_TRACE_CONFIG": rules})

    assert parse(settings.trace_config).url == "http://collector:4318/v1/traces"


# -- sampling --------------------------------------------------------------------------------------------------


def test_every_nth_request_is_traced_regardless_of_the_batches() -> None:
    tracer, recorded, _ = tracer_with("level=TIMESTAMPS", "rate=3", "triton,file=x")

    assert traced(tracer, recorded, fake_model(), [1, 4, 2, 5]) == ["3", "6", "9", "12"]


def test_no_more_requests_than_the_count_are_traced() -> None:
    tracer, recorded, _ = tracer_with("level=TIMESTAMPS", "rate=2", "count=2", "triton,file=x")

    assert traced(tracer, recorded, fake_model(), [9]) == ["2", "4"]
    assert tracer.sampling().count == 0


@given(st.integers(1, 9), st.integers(-1, 5), st.lists(st.integers(1, 9), max_size=9))
def test_sampling_by_batches_selects_the_same_requests_as_sampling_one_by_one(
    rate: int, count: int, batches: list[int]
) -> None:
    tracer, recorded, _ = tracer_with("level=TIMESTAMPS", f"rate={rate}", f"count={count}", "triton,file=x")
    every = [str(number) for number in range(1, sum(batches) + 1) if number % rate == 0]

    assert traced(tracer, recorded, fake_model(), batches) == (every if count < 0 else every[:count])


def test_the_engine_records_only_while_something_is_traced() -> None:
    tracer, _, engine = tracer_with("triton,file=x", "rate=1")
    recording = [engine.trace is not None]
    tracer.set_sampling("m", Sampling(("TIMESTAMPS",), 1))
    recording.append(engine.trace is not None)
    tracer.set_sampling("m", None)
    recording.append(engine.trace is not None)

    assert recording == [False, True, False]


def test_only_models_with_tracing_turned_on_are_traced() -> None:
    tracer, recorded, _ = tracer_with("triton,file=x", "rate=1")
    tracer.set_sampling("n", Sampling(("TIMESTAMPS",), 1))
    tracer.record(fake_model("m"), batch_of(fake_request(fake_model("m"))), 1_070)
    tracer.record(fake_model("n"), batch_of(fake_request(fake_model("n"))), 1_070)
    tracer.stop()

    assert [trace.model for trace in recorded.traces] == ["n"]


def test_traces_over_the_queue_limit_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.tracing.tracer.MAX_QUEUED_BYTES", 100)
    tracer, recorded, _ = tracer_with("level=TENSORS", "rate=1", "triton,file=x")
    model = fake_model()
    big = fake_request(model, rows=100)
    tracer.record(model, batch_of(big), 1_070)
    tracer.stop()

    assert (tracer.dropped, recorded.traces, recorded.closed) == (1, [], True)


def test_traces_recorded_while_the_writer_dequeues_count_toward_the_queue_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracer, _, _ = tracer_with("level=TENSORS", "rate=1", "triton,file=x")
    monkeypatch.setattr(tracer, "_writer", threading.current_thread())  # this test acts as the writer thread
    monkeypatch.setattr(tracing, "MAX_QUEUED_BYTES", 2000)
    model = fake_model()

    def record() -> None:
        tracer.record(model, batch_of(fake_request(model, rows=100)), 1_070)  # 1600 bytes

    class Slow(Trace):
        @property
        def nbytes(self) -> int:
            record()
            return 0

    tracer._traces.put(Slow(1, "m", "1", "", False, (), (), 0, "", "", ()))
    tracer._dequeue()
    record()

    assert (tracer.dropped, tracer._traces.qsize()) == (1, 1)


def test_a_trace_is_dropped_and_counted_when_no_writer_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer, recorded, _ = tracer_with("level=TIMESTAMPS", "rate=1", "triton,file=x")
    model = fake_model()
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        tracer.record(model, batch_of(fake_request(model)), 1_070)

    assert tracer.dropped == 1
    assert traced(tracer, recorded, model, [1]) == ["1"]


def test_a_failing_sink_does_not_end_the_writer_thread() -> None:
    class Failing(RecordedTraces):
        def write(self, traces: Sequence[Trace]) -> None:
            if not self.traces:
                self.traces += traces
                failed.set()
                raise OSError("the disk is full")
            super().write(traces)

    failing, failed = Failing(), threading.Event()
    tracer = Tracer(parse(["level=TIMESTAMPS", "rate=1", "triton,file=x"]), FakeEngine(), lambda config: failing)
    model = fake_model()
    tracer.record(model, batch_of(fake_request(model)), 1_070)
    assert failed.wait(10)
    tracer.record(model, batch_of(fake_request(model)), 1_070)
    tracer.stop()

    assert len(failing.traces) == 2


def test_a_full_disk_is_logged_once_and_the_lost_traces_when_writing_resumes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(RecordedTraces):
        def write(self, traces: Sequence[Trace]) -> None:
            super().write(traces)
            written.release()
            if len(self.traces) < 4:
                raise OSError("the disk is full")

    full, written = Full(), threading.Semaphore(0)
    tracer = Tracer(parse(["level=TIMESTAMPS", "rate=1", "triton,file=x"]), FakeEngine(), lambda config: full)
    model = fake_model()
    for _ in range(5):
        tracer.record(model, batch_of(fake_request(model)), 1_070)
        assert written.acquire(timeout=10)
    tracer.stop()

    assert caplog.messages == ["traces cannot be written: the disk is full", "traces are written again; 3 were lost"]


def test_stop_logs_a_sink_that_accepts_no_traces_within_the_timeout(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(RecordedTraces):
        def write(self, traces: Sequence[Trace]) -> None:
            assert over.wait(10)

    monkeypatch.setattr(tracing, "STOP_TIMEOUT_S", 0.01)
    over = threading.Event()
    tracer = Tracer(parse(["level=TIMESTAMPS", "rate=1", "triton,file=x"]), FakeEngine(), lambda config: Stuck())
    model = fake_model()
    tracer.record(model, batch_of(fake_request(model)), 1_070)
    tracer.stop()

    assert caplog.messages == ["traces are lost: x did not accept them within 0.01 s"]
    over.set()


def test_a_trace_file_that_cannot_be_written_is_reported_at_start(tmp_path: Path) -> None:
    def obstacles_of(file: Path) -> list[str]:
        return [text.partition(": ")[2] for text in start_problems(Settings(trace_config=(f"triton,file={file}",)))]

    (tmp_path / "file").touch()
    failed = "failed to open trace file: "
    assert obstacles_of(tmp_path / ("x" * 300)) == [failed + "File name too long"]
    assert start_problems(Settings(trace_config=("triton,file=/no/such/x.json",))) == [
        f"--trace-config file=/no/such/x.json: {failed}No such file or directory"
    ]
    assert obstacles_of(tmp_path) == [f"{failed}Is a directory"]
    assert obstacles_of(tmp_path / "file" / "x.json") == [f"{failed}Not a directory"]
    assert obstacles_of(tmp_path / "file") == obstacles_of(tmp_path / "new") == []


def test_a_trace_file_that_cannot_be_written_later_is_logged_with_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gone" / "x.json"
    tracer = Tracer(parse(["level=TIMESTAMPS", "rate=1", f"triton,file={file}"]), FakeEngine(), open_sink)
    model = fake_model()
    tracer.record(model, batch_of(fake_request(model)), 1_070)
    tracer.stop()

    assert caplog.messages == [f"traces cannot be written: {file}: No such file or directory"]


# -- W3C context -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PARENT, True), (PARENT[:-1] + "3", True), (PARENT[:-1] + "0", False), (PARENT + "-more", True), ("", False),
        ("ff" + PARENT[2:], False), (PARENT.upper(), False), (PARENT.replace("4bf9", "xxxx"), False),
        ("00-" + "0" * 32 + PARENT[35:], False), (PARENT[:36] + "0" * 16 + "-01", False), (PARENT + "\n", False),
    ],
)  # fmt: skip
def test_a_traceparent_is_parsed_as_specified_by_w3c(text: str, expected: bool) -> None:
    assert is_sampled(text) is expected


def test_the_trace_context_is_found_on_connections_calls_and_streams() -> None:
    head = SimpleNamespace(header={b"traceparent": b"p", b"tracestate": b"s"})
    call = SimpleNamespace(metadata={"traceparent": "p", "tracestate": "s"})

    assert context_of(SimpleNamespace(head=head)) == ("p", "s")
    assert context_of(call) == ("p", "s")
    assert context_of(SimpleNamespace(call=call)) == ("p", "s")
    assert context_of(SimpleNamespace(head=None)) == context_of(None) == ("", "")


def test_a_request_with_a_sampled_traceparent_is_traced_regardless_of_rate_and_count() -> None:
    tracer, recorded, _ = tracer_with("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", "count=0")
    model = fake_model()
    untraced, sampled, unsampled = (fake_request(model) for _ in range(3))
    sampled.context = SimpleNamespace(metadata={"traceparent": PARENT})
    unsampled.context = SimpleNamespace(metadata={"traceparent": PARENT[:-1] + "0"})
    tracer.record(model, batch_of(untraced, sampled, unsampled), 1_070)
    tracer.stop()

    assert [trace.parent for trace in recorded.traces] == [PARENT]


# -- settings over the network ---------------------------------------------------------------------------------

FILED = ("level=TIMESTAMPS", "rate=1", "triton,file=global.json")


def test_trace_settings_have_the_names_order_and_form_of_triton() -> None:
    settings, _ = settings_with(*FILED)

    assert list(settings.read().items()) == [
        ("trace_level", ["TIMESTAMPS"]), ("trace_rate", ["1"]), ("trace_count", ["-1"]), ("log_frequency", ["0"]),
        ("trace_file", ["global.json"]), ("trace_mode", ["triton"]),
    ]  # fmt: skip
    assert settings.read("m") == settings.read()


def test_the_trace_level_reads_off_if_tracing_is_off() -> None:
    assert settings_with()[0].read()["trace_level"] == ["OFF"]


def test_trace_settings_in_opentelemetry_mode_show_its_settings_and_not_the_file() -> None:
    settings, _ = settings_with("mode=opentelemetry", "level=TIMESTAMPS", "opentelemetry,resource=a=b")
    read = settings.read()

    assert read["trace_mode"] == ["opentelemetry"]
    assert read["url"] == ["http://localhost:4318/v1/traces"]
    assert (read["resource"], read["bsp_max_queue_size"]) == (["a=b"], ["2048"])
    assert not {"trace_file", "log_frequency"} & read.keys()


def test_trace_settings_that_a_model_does_not_set_follow_the_global_settings() -> None:
    settings, _ = settings_with(*FILED)
    settings.update("m", {"trace_rate": ["12"], "log_frequency": ["34"]})
    settings.update("", {"trace_rate": ["56"], "trace_count": ["78"], "trace_level": ["OFF"]})

    assert (settings.read("m")["trace_rate"], settings.read("m")["trace_count"]) == (["12"], ["78"])
    assert (settings.read("m")["trace_level"], settings.read("n")["trace_rate"]) == (["OFF"], ["56"])


def test_null_resets_model_settings_to_global_values_and_global_settings_to_the_flag() -> None:
    settings, _ = settings_with(*FILED)
    settings.update("m", {"trace_rate": ["12"], "log_frequency": ["34"]})
    settings.update("", {"trace_rate": ["56"], "trace_count": ["78"]})
    settings.update("", {"trace_rate": None, "trace_count": []})
    assert (settings.read()["trace_rate"], settings.read()["trace_count"]) == (["1"], ["-1"])
    assert settings.read("m")["trace_rate"] == ["12"]

    settings.update("m", {"trace_rate": None, "trace_level": None})
    assert (settings.read("m")["trace_rate"], settings.read("m")["log_frequency"]) == (["1"], ["34"])

    settings.update("m", {"log_frequency": None})
    assert settings.read("m") == settings.read()


def test_models_without_trace_settings_of_their_own_share_the_global_count() -> None:
    settings, tracer = settings_with(*FILED, "count=5")
    for name in ("m", "n"):
        model = fake_model(name)
        tracer.record(model, batch_of(fake_request(model)), 1_070)
    tracer.stop()

    assert settings.read("m")["trace_count"] == settings.read()["trace_count"] == ["3"]


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"trace_file": ["x"]}, Code.UNSUPPORTED, "trace file location can not be updated through network protocol"),
        ({"trace_file": None}, Code.UNSUPPORTED, "trace file location can not be updated through network protocol"),
        ({"trace_mode": ["triton"]}, Code.UNSUPPORTED, "trace mode can not be updated through network protocol"),
        ({"trace_level": ["OFF", "TENSORS"]}, Code.INVALID, "Expect only one trace level 'OFF' is specified"),
        ({"trace_level": ["MAX"]}, Code.INVALID, "unknown trace level 'MAX', known: OFF, TIMESTAMPS, TENSORS"),
        ({"trace_rate": ["x"]}, Code.INVALID, "Unable to parse 'trace_rate', got: x"),
        (
            {"trace_rate": ["99999999999"]}, Code.INVALID,
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 99999999999",
        ),
        (
            {"trace_rate": ["9" * 5000]}, Code.INVALID,
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: " + "9" * 5000,
        ),
        ({"trace_count": ["-2"]}, Code.INVALID, "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
        ({"log_frequency": ["1", "2"]}, Code.INVALID, "expect only 1 value for 'log_frequency'"),
        ({"trace_rate": ["0"]}, Code.INVALID, "Attempting to set invalid trace setting :sample rate must be non-zero"),
        ({"speed": ["1"]}, Code.INVALID, "unknown trace setting 'speed'"),
    ],
)  # fmt: skip
def test_an_invalid_trace_setting_is_rejected_and_changes_nothing(changes: Any, code: Code, text: str) -> None:
    settings, _ = settings_with(*FILED)
    before = settings.read()

    with pytest.raises(InferError) as raised:
        settings.update("", {"trace_count": ["3"], **changes})

    assert (raised.value.code, raised.value.message) == (code, text)
    assert settings.read() == before


def test_tracing_without_a_file_cannot_be_turned_on_over_the_network() -> None:
    settings, _ = settings_with()

    with pytest.raises(InferError, match="invalid trace setting :trace file name is not given"):
        settings.update("", {"trace_level": ["TIMESTAMPS"]})


def test_a_global_change_that_conflicts_with_model_settings_changes_nothing() -> None:
    settings, _ = settings_with("triton,file=x")
    settings.update("m", {"trace_rate": ["0"]})

    with pytest.raises(InferError, match="sample rate"):
        settings.update("", {"trace_level": ["TIMESTAMPS"]})

    assert settings.read()["trace_level"] == ["OFF"]


def test_an_unknown_model_has_no_trace_settings() -> None:
    settings, _ = settings_with(*FILED)

    for ask in (lambda: settings.read("x"), lambda: settings.update("x", {"trace_rate": ["2"]})):
        with pytest.raises(InferError) as raised:
            ask()
        assert (raised.value.code, raised.value.message) == (Code.INVALID, "Request for unknown model : x")


# -- the file --------------------------------------------------------------------------------------------------


def trace_of(number: int, log_frequency: int = 0) -> Trace:
    model = fake_model("m", 3)
    request = fake_request(model)
    request.id = f"id {number}"
    recorded = RecordedTraces()
    entries = ("level=TIMESTAMPS", "rate=1", "triton,file=x", f"triton,log-frequency={log_frequency}")
    tracer = Tracer(parse(entries), FakeEngine(), lambda config: recorded)
    tracer.record(model, batch_of(request), 1_070)
    tracer.stop()
    return recorded.traces[0]._replace(number=number)


def test_a_trace_in_the_file_has_the_entries_of_triton(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.write([trace_of(1)])
    file.close()

    whose, *stamps = json.loads((tmp_path / "trace.json").read_text())
    assert list(whose.items()) == [("id", 1), ("model_name", "m"), ("model_version", 3), ("request_id", "id 1")]
    assert [entry["id"] for entry in stamps] == [1] * 7
    assert [entry["timestamps"][0]["name"] for entry in stamps] == EVENTS
    assert [entry["timestamps"][0]["ns"] for entry in stamps] == [1_010, 1_020, 1_030, 1_040, 1_050, 1_060, 1_070]


def test_the_trace_file_is_valid_json_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("what was there before")
    file = TraceFile(path)
    for number in range(1, 4):
        file.write([trace_of(number)])
        found = json.loads(path.read_text())
        assert {entry["id"] for entry in found} == set(range(1, number + 1))
    file.close()


def test_a_trace_file_on_a_full_disk_stays_valid_and_continues_when_space_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 100

    class OnSmallDisk(FileIO):
        def write(self, text: Any) -> int:
            room_left = room - self.tell()
            if len(text) and room_left <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text[:room_left])

    monkeypatch.setattr("penstock.server.tracing.file.FileIO", OnSmallDisk)
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    for number, grown, expected in [(1, 100, b""), (2, 700, {2}), (3, 800, {2}), (4, 10_000, {2, 4})]:
        room = grown
        with pytest.raises(OSError, match="No space left") if number in {1, 3} else nullcontext():
            file.write([trace_of(number)])
        content = path.read_bytes()
        assert (content and {entry["id"] for entry in json.loads(content)}) == expected
    file.close()


def test_a_log_frequency_is_the_number_of_traces_in_each_numbered_file(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.write([trace_of(number, log_frequency=2) for number in range(1, 6)])
    file.close()

    found = {path.name: sorted({entry["id"] for entry in json.loads(path.read_text())}) for path in tmp_path.iterdir()}
    assert found == {"trace.json.0": [1, 2], "trace.json.1": [3, 4], "trace.json.2": [5]}


def test_a_numbered_trace_file_that_is_only_partly_written_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path, text: bytes) -> int:
        with path.open("wb") as opened:
            opened.write(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    file = TraceFile(tmp_path / "trace.json")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        with pytest.raises(OSError, match="No space left"):
            file.write([trace_of(1, log_frequency=1)])
    file.write([trace_of(2, log_frequency=1)])
    file.close()

    assert ids_in(tmp_path) == {"trace.json.1": [2]}


def ids_in(folder: Path) -> dict[str, list[int]]:
    return {path.name: sorted({entry["id"] for entry in json.loads(path.read_text())}) for path in folder.iterdir()}


def test_a_completed_count_has_a_numbered_file_and_an_unfinished_count_the_common_file(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    counted = [trace_of(number)._replace(count_number=1) for number in (2, 3)]
    other = [trace_of(number)._replace(count_number=2) for number in (4, 5)]
    file.write([trace_of(1), counted[0], other[0]])
    file.write([counted[1]._replace(last=True), other[1]])
    assert ids_in(tmp_path) == {"trace.json": [1], "trace.json.0": [2, 3], "trace.json.1": [4, 5]}
    file.close()

    assert ids_in(tmp_path) == {"trace.json": [1, 4, 5], "trace.json.0": [2, 3]}


def test_the_number_of_open_trace_files_is_limited(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    before = descriptors()
    for number in range(1, 20):
        file.write([trace_of(number)._replace(count_number=number)])
    # the common file, and eight others
    assert descriptors() == before + 9
    file.close()

    assert ids_in(tmp_path) == {"trace.json": list(range(1, 20))}
    assert descriptors() == before


def test_the_last_trace_of_a_count_also_completes_the_file_of_the_log_frequency(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.write([trace_of(1, log_frequency=5), trace_of(2, log_frequency=5)._replace(count_number=1, last=True)])

    assert ids_in(tmp_path) == {"trace.json.0": [1, 2]}


def test_traces_of_a_count_have_its_number_and_mark_the_last() -> None:
    tracer, recorded, _ = tracer_with(*FILED, "count=3")
    model = fake_model()
    for rows in (2, 2):
        tracer.record(model, batch_of(*[fake_request(model) for _ in range(rows)]), 1_070)
    tracer.set_sampling("", replace(tracer.sampling(), count=-1))
    tracer.record(model, batch_of(fake_request(model)), 1_070)
    tracer.stop()

    found = [(trace.count_number, trace.last) for trace in recorded.traces]
    assert found == [(1, False), (1, False), (1, True), (0, False)]


def test_a_failed_request_has_no_compute_stamps() -> None:
    tracer, recorded, _ = tracer_with(*FILED)
    model = fake_model()
    request = fake_request(model)
    batch = batch_of(request)
    request.error = InferError(Code.INTERNAL, "broken")
    tracer.record(model, batch, 1_070)
    tracer.stop()

    assert [name for name, _ in recorded.traces[0].stamps] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]


def test_tensors_are_traced_with_the_values_at_delivery(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(parse(["level=TENSORS", "rate=1", f"triton,file={path}"]), FakeEngine(), open_sink)
    model = fake_model()
    request = fake_request(model, value=0.5)
    batch = batch_of(request)
    output = np.arange(4, dtype=np.float32).reshape(1, 4)
    request.outputs = [output]
    tracer.record(model, batch, 1_070)
    output[...] = 9
    tracer.stop()

    _, input_record, output_record = json.loads(path.read_text())
    assert input_record == {
        "id": 1,
        "activity": "TENSOR_QUEUE_INPUT",
        "tensor": {"name": "x", "data": "0.5,0.5,0.5,0.5", "shape": "1,4", "dtype": "FP32"},
    }
    assert (output_record["activity"], output_record["tensor"]["data"]) == ("TENSOR_BACKEND_OUTPUT", "0.0,1.0,2.0,3.0")


def test_request_ids_cannot_break_the_trace_file(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.write([trace_of(1)._replace(request_id='"},\n{"id":99,"x":"\ud800')])
    file.close()

    found = json.loads((tmp_path / "trace.json").read_text())
    assert {entry["id"] for entry in found} == {1}


# -- the documentation -----------------------------------------------------------------------------------------


def test_every_trace_rule_and_stamp_has_its_line_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text("utf-8")
    rules = [
        "level=", "rate=", "count=", "mode=", "triton,file=", "triton,log-frequency=", "opentelemetry,url=",
        "opentelemetry,resource=", *(f"opentelemetry,{name}=" for name, _ in TraceConfig().batching),
    ]  # fmt: skip

    assert [rule for rule in rules if f"| `{rule}" not in docs] == []
    assert [event for event in EVENTS if f"| `{event}` |" not in docs] == []
