"""Sampling: what is seen of a server beside its load, and that nothing of it can hold a run up."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.generator.orders import Target
from penstock.perf.profiling import sampling
from penstock.perf.profiling.control import ControlError
from penstock.perf.profiling.model import ModelDescription
from penstock.perf.profiling.options import Options
from penstock.perf.profiling.sampling_metrics import MetricsPage, MetricsPageError, metric_lines, parse_page
from penstock.perf.profiling.sampling_processes import (
    NotFoundError,
    ServerProcesses,
    addresses,
    is_local_host,
    listening,
)
from penstock.perf.profiling.sampling_readers import SourceReader, read_within
from penstock.perf.profiling.sampling_series import Reading, gpus, samples
from penstock.perf.reports.document import Client, Level, Offered
from penstock.server.gpus import nvml

TICK = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# -- series


def test_counters_become_rates_between_consecutive_samples() -> None:
    recorded = samples(
        [
            Reading(10, {"server.cpu_s": 5, "cpu.busy_s": 1, "cpu.all_s": 4}),
            Reading(11, {"server.cpu_s": 5.5, "cpu.busy_s": 2, "cpu.all_s": 8, "memory.used_bytes": 7}),
            Reading(13, {"server.cpu_s": 9.5, "memory.used_bytes": 8}),
        ]
    )

    assert recorded.at_s == [1, 3]
    assert recorded.series == {
        "memory.used_bytes": [7, 8],
        "server.cores": [0.5, 2.0],
        "cpu.utilization": [0.25, None],
    }


def test_a_reset_counter_gives_no_rate() -> None:
    recorded = samples([Reading(0, {"server.cpu_s": 5}), Reading(1, {"server.cpu_s": 2})])

    assert recorded.series == {}


def test_gpus_are_summarized_as_in_perf_analyzer() -> None:
    readings = [
        Reading(0, {"gpu.GPU-1.a.utilization": 0.2, "gpu.GPU-1.a.power_w": 100, "gpu.GPU-1.a.memory_bytes": 5}),
        Reading(1, {"gpu.GPU-1.a.utilization": 0.4, "gpu.GPU-1.a.memory_total_bytes": 9, "gpu.b.power_w": 1}),
        Reading(2, {"gpu.GPU-1.a.memory_bytes": 7, "gpu.GPU-1.a.memory_total_bytes": 10}),
    ]

    assert gpus(readings) == {
        "GPU-1.a": {
            "utilization": pytest.approx(0.3),
            "power_w": 100,
            "memory_bytes": 7,
            "memory_total_bytes": 9,
        },
        "b": {"power_w": 1},
    }


names = st.sampled_from(["server.cpu_s", "cpu.busy_s", "cpu.all_s", "memory.used_bytes", "gpu.x.power_w"])
readings = st.lists(st.dictionaries(names, st.floats(0, 1e9)), min_size=1, max_size=6).map(
    lambda rows: [Reading(float(at), values) for at, values in enumerate(rows)]
)


@given(readings)
def test_every_series_has_a_value_or_none_per_sample_and_no_negative_rate(recorded: list[Reading]) -> None:
    sampled = samples(recorded)

    assert all(len(values) == len(sampled.at_s) == len(recorded) - 1 for values in sampled.series.values())
    assert all(value is None or value >= 0 for values in sampled.series.values() for value in values)


# -- the metrics page


PAGE = """\
# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0]
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.37
nv_gpu_power_usage{gpu_uuid="GPU-1",more="a, \\"b\\" }"} 1.23e+2 1395066363000
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 85899345920
nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"}\t85899345921
nv_energy_consumption{gpu_uuid="GPU-2"} 17
nv_gpu_utilization 0.9
nv_cpu_utilization 0.5
nv_cpu_memory_used_bytes NaN
this is no line
nv_inference_count{model="nv_gpu_utilization"} 4
"""


def test_a_metrics_page_is_parsed_for_gpus_and_machine_and_other_lines_are_skipped() -> None:
    assert parse_page(PAGE) == {
        "gpu.GPU-1.utilization": 0.37,
        "gpu.GPU-1.power_w": 123,
        "gpu.GPU-1.memory_bytes": 85899345920,
        "gpu.GPU-1.memory_total_bytes": 85899345921,
        "gpu.GPU-2.energy_j": 17,
        "cpu.utilization": 0.5,
    }


def test_a_metrics_page_without_known_metrics_has_no_series() -> None:
    assert parse_page('up{job="x"} 1\n') == {}


@pytest.mark.parametrize("text", ["", "<html>no</html>", "# only\n# comments\n"], ids=["empty", "html", "comments"])
def test_a_page_that_is_not_metrics_is_rejected(text: str) -> None:
    with pytest.raises(MetricsPageError, match="no metrics"):
        parse_page(text)


labels = st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), st.text(), max_size=3)


def written(name: str, labelled: Mapping[str, str], value: float) -> str:
    escaped = {
        label: text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for label, text in labelled.items()
    }
    inner = ",".join(f'{label}="{text}"' for label, text in escaped.items())
    return f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}"


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]*", fullmatch=True),
            labels,
            st.floats(allow_nan=False).filter(math.isfinite),
        )
    )
)
def test_a_metrics_page_is_parsed_as_it_was_written(rows: list[tuple[str, dict[str, str], float]]) -> None:
    text = "\n".join(written(*row) for row in rows)

    assert list(metric_lines(text)) == rows


@given(st.text() | st.lists(st.sampled_from([*PAGE, "\\", '"', "{", "}"])).map("".join))
def test_no_text_crashes_the_parser(text: str) -> None:
    list(metric_lines(text))


@contextmanager
def served(status: int, content: bytes) -> Iterator[int]:
    """Answer one request; give the port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        try:
            yield server.server_port
        finally:
            thread.join()


@pytest.mark.parametrize("scheme", ["", "http://"], ids=["bare", "http"])
def test_a_metrics_page_is_fetched_with_or_without_a_url_scheme(scheme: str) -> None:
    with served(200, PAGE.encode()) as port:
        assert MetricsPage(f"{scheme}127.0.0.1:{port}/metrics").read()["gpu.GPU-1.utilization"] == 0.37


def test_a_missing_metrics_page_is_an_error() -> None:
    with served(404, b"no") as port, pytest.raises(MetricsPageError, match="404 Not Found"):
        MetricsPage(f"127.0.0.1:{port}").read()


@pytest.mark.parametrize("url", ["127.0.0.1:1/metrics", "http://[", "localhost:port/x", "", "http://"])
def test_an_invalid_metrics_url_is_an_error(url: str) -> None:
    with pytest.raises(MetricsPageError):
        MetricsPage(url).read()


# -- looking


def test_a_hanging_source_is_skipped_until_it_has_answered() -> None:
    requested, hang = [], threading.Event()

    def hanging() -> Mapping[str, float]:
        requested.append(1)
        hang.wait()
        return {"late": 1}

    looker = SourceReader({"driver": hanging, "machine": lambda: {"quick": 2}})

    assert looker.read_all(0.01).values == {"quick": 2}
    assert looker.reasons == {"driver": "no answer within 0.01 s"}
    assert looker.read_all(0.01).values == {"quick": 2}
    assert len(requested) == 1
    hang.set()
    while len(requested) == 1:
        recorded = looker.read_all(10).values
    assert recorded == {"late": 1, "quick": 2}
    assert looker.reasons == {}


def test_a_failing_source_states_its_reason_and_the_others_are_read() -> None:
    def failing() -> Mapping[str, float]:
        raise OSError("no such driver")

    looker = SourceReader({"a": failing, "b": lambda: {"x": 1}})

    assert looker.read_all().values == {"x": 1}
    assert looker.reasons == {"a": "no such driver"}


def test_a_read_that_takes_too_long_returns_nothing() -> None:
    hang = threading.Event()

    assert read_within(0.01, hang.wait) is None
    assert read_within(10, lambda: 5) == 5
    hang.set()


# -- the server's processes

LOOPBACK = "0100007F"


class Proc:
    """A made-up /proc."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net").mkdir()

    def listen(self, *sockets: tuple[str, int, int], table: str = "tcp", state: str = "0A") -> None:
        """Write sockets: address in hexadecimal, port, inode."""
        rows = [
            f"   {at}: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1"
            for at, (address, port, inode) in enumerate(sockets)
        ]
        (self.folder / "net" / table).write_text("\n".join(["  sl  local_address ...", *rows, ""]))

    def run(
        self, pid: int, parent: int, name: str = "python", *, sockets: tuple[int, ...] = (), ticks: int = 0
    ) -> None:
        folder = self.folder / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        (folder / "comm").write_text(f"{name}\n")
        for number, inode in enumerate(sockets):
            link = folder / "fd" / str(number)
            if not link.is_symlink():
                link.symlink_to(f"socket:[{inode}]")
        words = ["S", str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 6, f"{pid}00", "0"]
        (folder / "stat").write_text(f"{pid} (a) b)) {' '.join(words)}\n")
        (folder / "statm").write_text("100 10 5 1 0 1 0\n")

    def end(self, pid: int) -> None:
        for name in ("stat", "statm"):
            (self.folder / str(pid) / name).unlink()

    def family(self, port: int = 8000, own: int = 900) -> ServerProcesses:
        return ServerProcesses(port, {"127.0.0.1"}, self.folder, own)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    recorded = Proc(tmp_path)
    recorded.run(1, 0, "init")
    recorded.run(800, 1, "bash")
    recorded.run(900, 800, "penstock")
    return recorded


def test_the_server_is_the_listening_process_its_ancestors_and_all_their_descendants(proc: Proc) -> None:
    proc.listen((LOOPBACK, 8000, 77), (LOOPBACK, 8001, 78))
    proc.run(10, 1, "bash")
    proc.run(11, 10, "timeout")
    proc.run(12, 11)
    proc.run(13, 12, "front", sockets=(5, 77))
    proc.run(14, 12, "engine")
    proc.run(15, 14, "stub")
    proc.run(20, 10, "other", sockets=(78,))

    assert proc.family().pids() == [12, 13, 14, 15]


def test_processes_that_share_a_port_are_one_server(proc: Proc) -> None:
    proc.listen((LOOPBACK, 8000, 77), (LOOPBACK, 8000, 78))
    proc.listen(("0" * 32, 8000, 79), table="tcp6")
    for pid, inode in ((30, 77), (31, 78)):
        proc.run(pid, 1, sockets=(inode,))

    assert proc.family().pids() == [30, 31]


def test_a_server_started_by_the_caller_does_not_include_the_caller(proc: Proc) -> None:
    proc.listen((LOOPBACK, 8000, 77))
    proc.run(901, 900, sockets=(77,))
    proc.run(902, 900, "generator")

    assert proc.family().pids() == [901]


def test_a_specific_address_takes_precedence_over_any_address(proc: Proc) -> None:
    proc.listen((LOOPBACK, 8000, 1), ("00000000", 8000, 2), ("0200A8C0", 8000, 3))
    proc.listen(("0" * 32, 8000, 4), table="tcp6")

    assert listening(proc.folder, 8000, {"127.0.0.1"}) == {"1"}
    assert listening(proc.folder, 8000, {"192.168.0.2"}) == {"3"}
    assert listening(proc.folder, 8000, {"10.0.0.1"}) == {"1", "2", "3", "4"}


def test_cpu_time_includes_ended_processes_and_memory_only_live_ones(proc: Proc) -> None:
    proc.listen((LOOPBACK, 8000, 77))
    proc.run(40, 1, sockets=(77,), ticks=TICK)
    proc.run(41, 40, ticks=2 * TICK)
    family = proc.family()

    assert family.read() == {"server.cpu_s": 3, "server.rss_bytes": 20 * PAGE_BYTES}
    proc.end(41)
    proc.run(42, 40, ticks=TICK)
    assert family.read() == {"server.cpu_s": 4, "server.rss_bytes": 20 * PAGE_BYTES}
    proc.end(40)
    with pytest.raises(NotFoundError, match="have ended"):
        family.read()


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (lambda proc: proc.listen(), "nobody on this machine listens on port 8000"),
        (lambda proc: proc.listen((LOOPBACK, 8000, 77), state="01"), "nobody"),
        (lambda proc: proc.listen((LOOPBACK, 8000, 77)), "another user's"),
        (lambda proc: (proc.listen((LOOPBACK, 8000, 77)), proc.run(50, 1, "docker-proxy", sockets=(77,))), "behind it"),
        (lambda proc: (proc.listen((LOOPBACK, 8000, 77)), proc.run(900, 800, sockets=(77,))), "this very process"),
    ],
    ids=["nobody", "connected", "another user's", "forwarded", "this process"],
)
def test_a_server_whose_processes_cannot_be_read_is_reported(proc: Proc, arrange: Any, reason: str) -> None:
    arrange(proc)

    with pytest.raises(NotFoundError, match=reason):
        proc.family()


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ServerProcesses(8000, {"127.0.0.1"}, tmp_path)


def test_this_machine_is_recognized_by_its_addresses() -> None:
    assert addresses("127.0.0.1") == {"127.0.0.1"}
    assert is_local_host("localhost")
    assert not is_local_host("192.0.2.1")
    assert not is_local_host("no.such.host.invalid")


def test_a_real_server_is_found_by_its_port() -> None:
    program = (
        "import socket, sys\ns = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        family = ServerProcesses(int(child.stdout.readline()), {"127.0.0.1"})

        assert family.pids() == [child.pid]
        assert family.read()["server.rss_bytes"] > 1 << 20
        assert family.cores() == os.sched_getaffinity(0)
        child.communicate("")


# -- the watch


class FakeControl:
    """Answers with statistics that grow by ten requests at each call."""

    def __init__(self) -> None:
        self.count = 0

    def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        self.count += 10
        timed = {"count": self.count, "ns": self.count * 1000}
        return [{"version": "1", "inference_stats": {"success": timed, "queue": timed}}]


def level() -> Level:
    return Level(Offered("concurrency", 1), True, Client(500, 1000, 1.0, 500.0, 1000.0, {}, ""))


def watch(proc: Proc, host: str = "127.0.0.1", port: int = 8000, **options: Any) -> sampling.Watch:
    described = ModelDescription("m", "", "", (), ())
    requested = Options("m", metrics_url="127.0.0.1:1", metrics_interval_ms=3_600_000, **options)
    return sampling.Watch(FakeControl(), described, Target(host, port), requested, proc.folder)  # type: ignore[arg-type]


def machine(proc: Proc, busy_s: int, idle_s: int) -> None:
    (proc.folder / "stat").write_text(f"cpu  {busy_s * TICK} 0 0 {idle_s * TICK} 0 0 0 0 0 0\ncpu0 1 2 3 4\n")
    (proc.folder / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\nHuge: 0\n")


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> Any:
        raise ImportError("no pynvml")

    monkeypatch.setattr(nvml, "_start_nvml", start)


@pytest.mark.usefixtures("no_nvml")
def test_a_level_records_what_the_server_did_between_two_marks(proc: Proc) -> None:
    machine(proc, 1, 1)
    proc.listen((LOOPBACK, 8000, 77))
    proc.run(60, 1, sockets=(77,), ticks=TICK)
    recorded = level()

    with watch(proc) as watching:
        watching.begin()
        watching.mark()
        first = watching.mark()
        proc.run(60, 1, sockets=(77,), ticks=3 * TICK)
        watching.mark()
        last = watching.mark()
        watching.record_in(recorded, first, last)

    assert recorded.server is not None
    assert recorded.server.requests == 20
    assert recorded.server_cpu_s_per_1000 == pytest.approx(4.0)
    assert recorded.server_rss_bytes == 10 * PAGE_BYTES
    assert (recorded.energy_j_per_1000, recorded.gpus, recorded.notes) == (None, {}, [])


@pytest.mark.usefixtures("no_nvml")
def test_a_server_that_does_not_answer_is_noted(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: str) -> Any:
        raise ControlError("timed out")

    monkeypatch.setattr(FakeControl, "statistics", refused)
    recorded = level()
    with watch(proc) as watching:
        watching.begin()
        watching.record_in(recorded, watching.mark(), watching.mark())

    assert recorded.server is None
    assert recorded.notes[0] == "m: the server gives no statistics"


@pytest.mark.usefixtures("no_nvml")
def test_samples_start_with_the_level_and_include_the_figures_of_the_caller(proc: Proc) -> None:
    machine(proc, 1, 1)
    recorded, empty = level(), level()
    with watch(proc) as watching:
        watching.begin()
        watching.set_figure("throughput", 123)
        watching.sample()
        watching.record_in(recorded, watching.mark(), watching.mark())
        watching.begin()
        watching.record_in(empty, watching.mark(), watching.mark())

    assert recorded.samples is not None
    assert len(recorded.samples.at_s) == 1
    assert recorded.samples.series["throughput"] == [123]
    assert recorded.samples.series["memory.used_bytes"] == [400 * 1024]
    assert empty.samples is None


@pytest.mark.usefixtures("no_nvml")
def test_a_remote_server_has_no_cpu_figures_and_the_machine_is_the_clients(proc: Proc) -> None:
    machine(proc, 1, 1)
    recorded = level()
    with watch(proc, "192.0.2.1") as watching:
        watching.begin()
        watching.sample()
        watching.record_in(recorded, watching.mark(), watching.mark())
        sharing = watching.sharing()

    assert recorded.samples is not None
    assert "client.memory.used_bytes" in recorded.samples.series
    assert (recorded.server_cpu_s_per_1000, recorded.server_rss_bytes, sharing) == (None, None, "")
    assert recorded.notes == ["CPU and memory of the server are not known: 192.0.2.1 is another machine"]


@pytest.mark.usefixtures("no_nvml")
def test_a_requested_metrics_page_that_is_unavailable_is_noted(proc: Proc) -> None:
    machine(proc, 1, 1)
    recorded = level()
    with watch(proc, collect_metrics=True) as watching:
        watching.begin()
        watching.record_in(recorded, watching.mark(), watching.mark())

    assert any(note.startswith("metrics page: 127.0.0.1:1: ") for note in recorded.notes)


def test_a_port_of_this_process_is_not_mistaken_for_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(NotFoundError, match="this very process"):
        ServerProcesses(listener.getsockname()[1], {"127.0.0.1"})


def test_a_unix_socket_is_found_by_its_path(proc: Proc) -> None:
    (proc.folder / "net" / "unix").write_text(
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0000: 00000002 00000000 00010000 0001 01 77 /run/a b.sock\n"
        "0000: 00000003 00000000 00000000 0001 03 78 /run/a b.sock\n"
        "0000: 00000002 00000000 00010000 0001 01 79\n"
    )
    proc.run(70, 1, sockets=(77,))

    assert ServerProcesses(0, addresses("/run/a b.sock"), proc.folder, 900).pids() == [70]
