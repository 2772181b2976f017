"""Faults on the device: memory that runs out, budgets, a sticky error, and no device at all.

Every server here is queried over HTTP, and must answer each request and stay alive, or report that it is not ready.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import numpy as np

from penstock.backends.cuda import CudaError, Runtime, find_runtime
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import LOADERS
from penstock.perf.calls import HOST
from penstock.perf.profiling.control import ControlError

from . import breakable_server, memory_exhausting_model
from .context import GPU, CheckContext
from .models import FP32, Tensor
from .rows import Row, failed
from .server_driver import Server, config_of, serving

LENGTH, SMALL_LENGTH = 65_536, 64
"""Numbers in a row of `hungry`: a gibibyte of device memory, and next to none."""
ROWS = 8
KEPT_BYTES, SCARCE_BYTES = 3 << 30, 96 << 20
"""Memory left free: enough for some rows of a batch, and for none."""
_CHUNKS = (1 << 30, 1 << 28, 1 << 26, 1 << 24)
_REQUEST_TIMEOUT_S, _RECOVERY_TIMEOUT_S = 15.0, 15.0
ALLOWED, REFUSED = {200, 503}, {500, 503}
FRONTS = 2
_DEVICE = 0
_ROW = np.linspace(0, 1, 8, dtype=np.float32)[None]
Answer = tuple[int, str]


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the outcome of each fault."""
    memory_exhausting_model.write(context.folder / "models")
    for check in (_budgets, _out_of_memory, _broken_device, _broken_engine, _no_device):
        try:
            yield from check(context)
        except Exception as error:  # noqa: BLE001 - the other faults are looked at all the same
            yield failed("faults", check.__name__.strip("_").replace("_", " "), error)


def _budgets(context: CheckContext) -> Iterator[Row]:
    """Load with budgets too small for the model."""
    if not context.on_gpu:
        return
    path = context.file(context.variant("mlp", FP32))
    for name, value in (("penstock.gpu_memory_bytes", str(1 << 20)), ("penstock.gpu_limit", "0:0.000001")):
        label = f"a load beyond {name.removeprefix('penstock.')}"
        try:
            backend = LOADERS["onnxruntime"](path, context.device, {name: value})
        except InferError as error:
            passed = error.code is Code.OVERLOADED  # refused for lack of memory
            yield Row("faults", label, "refused", held=passed, note=error.message)
        else:
            backend.close()
            yield Row("faults", label, "loaded", wanted="refused", held=False)


def _out_of_memory(context: CheckContext) -> Iterator[Row]:
    """Request a full batch with memory for a part of it, with memory for none, and with all memory back."""
    row = np.linspace(0, 1, LENGTH if context.on_gpu and not context.quick else SMALL_LENGTH, dtype=np.float32)[None]
    runtime = find_runtime() if context.on_gpu else None
    with serving(context, "memory") as server:
        server.control.load(
            memory_exhausting_model.MODEL_NAME, config_of(context, memory_exhausting_model.MODEL_NAME, ROWS)
        )
        ask(
            server, memory_exhausting_model.MODEL_NAME, row[:, :1]
        )  # libraries allocate what they need in their first run
        for label, kept_bytes in (("memory for nothing", SCARCE_BYTES), ("memory for a part of a batch", KEPT_BYTES)):
            with filled_device(runtime, kept_bytes) as taken_bytes:
                answers = _send_concurrently(server, row)
            note = "" if runtime else "the stand-in was not filled"
            yield _outcome_row(server, label, answers, note or f"{taken_bytes >> 20} MiB taken away")
        answers = _send_concurrently(server, row)
        all_answered = [status for status, _ in answers] == [200] * ROWS
        yield Row("faults", "with its memory back", _count_statuses(answers), wanted="200 for all", held=all_answered)


@contextmanager
def filled_device(runtime: Runtime | None, kept_bytes: int) -> Iterator[int]:
    """Allocate the device's memory except for `kept_bytes`; yield how much was allocated. It is freed at the end."""
    pointers: list[int] = []
    taken_bytes = 0
    try:
        if runtime is not None:
            for chunk in _CHUNKS:
                with suppress(CudaError):  # there may be no free block this large
                    while runtime.memory_info(_DEVICE)[0] - chunk >= kept_bytes:
                        pointers.append(runtime.allocate(chunk, _DEVICE))
                        taken_bytes += chunk
        yield taken_bytes
    finally:
        for pointer in pointers:
            if runtime is not None:
                runtime.free(pointer, _DEVICE)


def _broken_device(context: CheckContext) -> Iterator[Row]:
    """Break the device of a server, which must report it, or answer again."""
    with _breakable_server(context, "broken") as server:
        yield _break_device(context, server, "the request after a kernel has trapped")
        took_s = _wait_until(
            lambda: ask(server, memory_exhausting_model.MODEL_NAME, _ROW)[0] == http.client.OK or not _is_live(server)
        )
        (status, text), live = ask(server, memory_exhausting_model.MODEL_NAME, _ROW), _is_live(server)
        outcome = ("live, " if live else "not live, ") + (f"answers {status}" if status else "no answer")
        passed = server.alive and (status == http.client.OK or (status in REFUSED and not live))
        note = f"after {took_s:.1f} s; {text[:160]}".rstrip("; ")
        yield Row(
            "faults", "the server after that", outcome, wanted="answers, or 503 and not live", held=passed, note=note
        )


def _broken_engine(context: CheckContext) -> Iterator[Row]:
    """Break the device of the engine behind front ends, which the spare engine must replace."""
    with _breakable_server(context, "spare", f"--http-workers={FRONTS}") as server:
        first_pid = server.engine
        yield _break_device(context, server, "the request after a kernel has trapped in an engine")
        took_s = _wait_until(
            lambda: ask(server, memory_exhausting_model.MODEL_NAME, _ROW)[0] == http.client.OK and _is_live(server)
        )
        status, text = ask(server, memory_exhausting_model.MODEL_NAME, _ROW)
        which_process = "by the same process" if server.engine == first_pid else "by another process"
        passed = status == http.client.OK and _is_live(server)
        note = f"{which_process} after {took_s:.1f} s; {text[:160]}".rstrip("; ")
        yield Row("faults", "the model after that", f"answers {status}", wanted="answers 200", held=passed, note=note)


@contextmanager
def _breakable_server(context: CheckContext, name: str, *options: str) -> Iterator[Server]:
    """Run a server that can be broken, and that has answered once."""
    with serving(context, name, *options, program=breakable_server.PROGRAM) as server:
        server.control.load(
            memory_exhausting_model.MODEL_NAME, config_of(context, memory_exhausting_model.MODEL_NAME, ROWS)
        )
        status, text = ask(server, memory_exhausting_model.MODEL_NAME, _ROW)
        if status != http.client.OK:
            raise RuntimeError(f"it did not answer before: {status} {text}")
        yield server


def _break_device(context: CheckContext, server: Server, label: str) -> Row:
    """Break the device, and send a request: the answer must be an error. A stand-in has nothing to break."""
    pid = server.engine
    os.kill(pid, breakable_server.SIGNAL)
    _wait_until(
        lambda: breakable_server.BREAK_REPORT in server.log_tail() or server.engine != pid
    )  # or the error ended the process
    outcome = server.log_tail().rpartition(breakable_server.BREAK_REPORT)[2].partition("\n")[0]
    status, text = ask(server, memory_exhausting_model.MODEL_NAME, _ROW)
    note = f"{outcome}; {text[:160]}".rstrip("; ")
    return Row(
        "faults", label, status, wanted="an error", held=status in REFUSED if context.on_gpu else None, note=note
    )


def _is_live(server: Server) -> bool:
    try:
        server.process.request("GET", "/v2/health/live")
    except (OSError, RuntimeError, http.client.HTTPException):
        return False
    return True


def _no_device(context: CheckContext) -> Iterator[Row]:
    """Start a server that sees no GPU, and request one."""
    name = context.variant("mlp", FP32).name
    context.file(context.variant("mlp", FP32))
    config = config_of(CheckContext(GPU, context.folder), name, ROWS)
    with serving(context, "gone", environ={"CUDA_VISIBLE_DEVICES": ""}) as server:
        try:
            server.control.load(name, config)
            yield Row("faults", "asked for a GPU where there is none", "loaded", wanted="UNAVAILABLE", held=False)
        except ControlError as error:
            state, reason = server.states().get(name, ("", ""))
            passed = state == "UNAVAILABLE" and bool(reason) and server.alive
            note = reason or str(error)
            yield Row(
                "faults", "asked for a GPU where there is none", state, wanted="UNAVAILABLE", held=passed, note=note
            )


def _send_concurrently(server: Server, row: Tensor) -> list[Answer]:
    with ThreadPoolExecutor(ROWS) as pool:
        return list(pool.map(lambda _: ask(server, memory_exhausting_model.MODEL_NAME, row), range(ROWS)))


def _outcome_row(server: Server, label: str, answers: list[Answer], note: str) -> Row:
    passed = server.alive and all(status in ALLOWED for status, _ in answers)
    refusal = next((text for status, text in answers if status != http.client.OK), "")
    note = "; ".join(filter(None, (note, refusal[:120])))
    return Row("faults", label, _count_statuses(answers), wanted="200 or 503, and alive", held=passed, note=note)


def _count_statuses(answers: list[Answer]) -> str:
    counts = Counter(status for status, _ in answers)
    return ", ".join(f"{count} of {status}" for status, count in sorted(counts.items()))


def ask(server: Server, model: str, x: Tensor) -> Answer:
    """Query a model once; return the status, 0 if there was no answer, and the text of a refusal."""
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    try:
        with closing(http.client.HTTPConnection(HOST, server.process.port, timeout=_REQUEST_TIMEOUT_S)) as connection:
            connection.request("POST", f"/v2/models/{model}/infer", head + x.tobytes(), headers)
            answer = connection.getresponse()
            return answer.status, "" if answer.status == http.client.OK else answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"


def _wait_until(is_done: Callable[[], bool]) -> float:
    """Poll until `is_done`, for a limited time; return the seconds that it took."""
    begin_s = time.monotonic()
    while not is_done() and time.monotonic() - begin_s < _RECOVERY_TIMEOUT_S:
        time.sleep(0.1)
    return time.monotonic() - begin_s
