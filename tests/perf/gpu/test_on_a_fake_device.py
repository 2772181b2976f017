"""Parts that ask for a GPU, on the fake one: two Bindings in flight, graphs, budgets, and memory that comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from penstock.backends.datatypes import DATATYPES
from penstock.perf.gpu import correct, engine_driver, faults, graphs, memory, shared, sizes, truncated_memory
from penstock.perf.gpu.context import GPU, CheckContext
from penstock.perf.gpu.correct import TOLERANCE
from penstock.perf.gpu.models import Variant
from penstock.perf.gpu.server_driver import config_of, serving
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_session import fake_cuda_loader


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime(devices=1)
    loaders = {"onnxruntime": fake_cuda_loader(runtime)}
    monkeypatch.setattr(engine_driver, "LOADERS", loaders)
    monkeypatch.setattr(faults, "LOADERS", loaders)
    for module in (memory, graphs):
        monkeypatch.setattr(module, "find_runtime", lambda: runtime)
    for module in (graphs, sizes):
        monkeypatch.setattr(module, "load_onnx", loaders["onnxruntime"])
    return runtime


def test_answers_of_overlapping_batches_equal_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime
) -> None:
    monkeypatch.setattr(correct, "CHECKED", (("mlp", "fp32"), ("mlp", "fp16")))
    rows = list(correct.report(CheckContext(GPU, tmp_path, quick=True)))

    assert [(row.wanted, row.held, row.note[:7]) for row in rows] == [
        (f"<= {TOLERANCE[precision]}", True, "48 requ") for precision in ("fp32", "fp16") for _ in correct.SETTINGS
    ]
    assert runtime.copies["h2d"] > 0


def test_no_memory_stays_allocated_on_the_device(tmp_path: Path, runtime: FakeRuntime) -> None:
    rows = list(memory.report(CheckContext(GPU, tmp_path, quick=True)))

    assert [row.what for row in rows] == ["device memory, each load", "process memory, each load"]
    assert rows[0].held is True


def test_a_budget_that_is_too_small_rejects_the_load(tmp_path: Path, runtime: FakeRuntime) -> None:
    runtime.take(1 << 20, 0)  # as a context would
    context = CheckContext(GPU, tmp_path)
    rows = {row.what: row for row in faults._budgets(context)}

    assert [row.value for row in rows.values()] == ["refused", "refused"]
    assert all(row.held for row in rows.values()), rows


def test_graphs_are_captured_before_their_memory_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime
) -> None:
    monkeypatch.setattr(graphs, "KINDS", ("mlp",))
    monkeypatch.setattr(graphs, "_SECONDS", 0.02)
    rows = list(graphs.report(CheckContext(GPU, tmp_path, quick=True)))
    truncated_memory, *loads = rows[:3]

    assert (truncated_memory.what, truncated_memory.held) == ("mlp_fp16: memory of the graphs", True)
    assert truncated_memory.note.startswith(f"{len(graphs.CAPTURED)} graphs of one Binding")
    assert [row.what for row in loads] == ["mlp_fp16: load, without graphs", "mlp_fp16: load, with graphs"]
    assert len(rows[3:]) == 2 * len(graphs.BATCHES)
    assert {row.held for row in rows[1:]} == {None}


def test_all_sizes_run_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    monkeypatch.setattr(sizes, "SETTINGS", (("encoder", ""),))
    rows = list(sizes.report(CheckContext(GPU, tmp_path, quick=True)))

    assert len(rows) == len(sizes.SIZES) + 2, rows
    assert runtime.copies["h2d"] > 0


class Sharing:
    """A server of one model, which finds its tensors in the fake device's memory; `writes`: it gives an output."""

    def __init__(self, runtime: FakeRuntime, context: CheckContext, variant: Variant, *, writes: bool = True) -> None:
        self.control = self.process = self
        self._runtime, self._writes = runtime, writes
        path = str(context.file(variant))
        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._regions: dict[str, int] = {}

    def register_cuda(self, region: str, handle: bytes, device: int, size: int) -> None:
        self._regions[region] = self._runtime.open_handle(handle, device)

    def unregister_cuda(self, region: str) -> None:
        self._runtime.close_handle(self._regions.pop(region), 0)

    def request(self, method: str, path: str, body: bytes) -> bytes:
        document = json.loads(body)
        feed = {}
        for tensor in document["inputs"]:
            pointer, nbytes = self._place(tensor["parameters"])
            raw = bytearray(nbytes)
            self._runtime.read(pointer, 0, memoryview(raw))
            feed[tensor["name"]] = np.frombuffer(raw, DATATYPES[tensor["datatype"]].dtype).reshape(tensor["shape"])
        (output,) = self._session.run(None, feed)
        pointer, nbytes = self._place(document["outputs"][0]["parameters"])
        assert nbytes == output.nbytes
        if self._writes:
            self._runtime.write(pointer, 0, output.tobytes())
        return b"{}"

    def _place(self, parameters: dict[str, Any]) -> tuple[int, int]:
        offset = self._regions[parameters["shared_memory_region"]] + parameters["shared_memory_offset"]
        return offset, parameters["shared_memory_byte_size"]


@pytest.mark.parametrize("kind", ["mlp", "encoder"])
def test_answers_in_client_device_memory_equal_those_of_the_cpu(
    kind: str, tmp_path: Path, runtime: FakeRuntime
) -> None:
    context = CheckContext(GPU, tmp_path, quick=True)
    variant = context.variant(kind, "fp16")
    expected = correct.on_cpu(context, context.variant(kind, "fp32"))
    server: Any = Sharing(runtime, context, variant)

    assert 0 < shared.max_client_error(server, runtime, variant, expected) < TOLERANCE["fp16"]
    assert set(runtime.alive.values()) == {0}


def test_an_answer_that_was_never_written_fails_the_check(tmp_path: Path, runtime: FakeRuntime) -> None:
    context = CheckContext(GPU, tmp_path, quick=True)
    variant = context.variant("mlp", "fp16")
    server: Any = Sharing(runtime, context, variant, writes=False)

    assert shared.max_client_error(server, runtime, variant, correct.on_cpu(context, variant)) == float("inf")


@pytest.mark.slow
def test_a_client_that_truncates_its_memory_changes_no_other_answer(tmp_path: Path) -> None:
    context = CheckContext("cpu", tmp_path, quick=True)
    variant = context.variant("cnn", "fp16")  # halves come in no JSON
    context.file(variant)
    with serving(context, "shared") as server:
        server.control.load(variant.name, config_of(context, variant.name, 8))
        row = truncated_memory.row(server, variant, correct.on_cpu(context, variant), seconds=0.3)

    assert row.held
    assert not row.note.startswith("0 answers")
