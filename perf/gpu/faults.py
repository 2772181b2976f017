"""Faults on the device: memory that runs out, budgets, an error that stays, and no device at all.

Every server here is asked over HTTP, and must answer each request, and live on, or say that it is not ready.
"""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import numpy as np

from penstock.backends.cuda import CudaError, Runtime, find_runtime
from penstock.backends.errors import Code, InferError
from penstock.backends.loading import LOADERS
from penstock.perf.load import HOST
from penstock.perf.profiling.control import ControlError

from . import hungry
from .models import FP32, Tensor
from .rows import Row, failed
from .servers import Server, config_of, serving
from .world import GPU, World

LENGTH, SMALL_LENGTH = 65_536, 64
"""Numbers of a row of `hungry`: a gibibyte of device memory, and next to none."""
ROWS = 8
KEPT_BYTES, SCARCE_BYTES = 3 << 30, 96 << 20
"""What is left free: for some rows of a batch, and for none."""
_CHUNKS = (1 << 30, 1 << 28, 1 << 26, 1 << 24)
_ASK_S, _BACK_S = 15.0, 10.0
ALLOWED = {200, 503}
Answer = tuple[int, str]


def report(world: World) -> Iterator[Row]:
    """Give what became of each fault."""
    hungry.write(world.folder / "models")
    for check in (_budgets, _out_of_memory, _staying_error, _no_device):
        try:
            yield from check(world)
        except Exception as error:  # noqa: BLE001 - the other faults are looked at all the same
            yield failed("faults", check.__name__.strip("_").replace("_", " "), error)


def _budgets(world: World) -> Iterator[Row]:
    """Load with budgets that cannot hold the model."""
    if not world.on_gpu:
        return
    path = world.file(world.variant("mlp", FP32))
    for name, value in (("penstock.gpu_memory_bytes", str(1 << 20)), ("penstock.gpu_limit", "0:0.000001")):
        what = f"a load beyond {name.removeprefix('penstock.')}"
        try:
            backend = LOADERS["onnxruntime"](path, world.device, {name: value})
        except InferError as error:
            held = error.code is Code.OVERLOADED  # it is memory that is the reason
            yield Row("faults", what, "refused", held=held, note=error.message)
        else:
            backend.close()
            yield Row("faults", what, "loaded", wanted="refused", held=False)


def _out_of_memory(world: World) -> Iterator[Row]:
    """Ask for a full batch with memory for a part of it, for none, and with all of it again."""
    row = np.linspace(0, 1, LENGTH if world.on_gpu and not world.quick else SMALL_LENGTH, dtype=np.float32)[None]
    runtime = find_runtime() if world.on_gpu else None
    with serving(world, "memory") as server:
        server.control.load(hungry.HUNGRY, config_of(world, hungry.HUNGRY, ROWS))
        ask(server, hungry.HUNGRY, row[:, :1])  # libraries take what they need with their first run
        for what, kept in (("memory for nothing", SCARCE_BYTES), ("memory for a part of a batch", KEPT_BYTES)):
            with filled(runtime, kept) as taken:
                answers = _at_once(server, row)
            note = "" if runtime else "the stand-in was not filled"
            yield _judged(server, what, answers, note or f"{taken >> 20} MiB taken away")
        answers = _at_once(server, row)
        whole = [status for status, _ in answers] == [200] * ROWS
        yield Row("faults", "with its memory back", _counted(answers), wanted="200 for all", held=whole)


@contextmanager
def filled(runtime: Runtime | None, kept_bytes: int, device: int = 0) -> Iterator[int]:
    """Take the device's memory away but for so much; give how much was taken. It is given back at the end."""
    pointers: list[int] = []
    taken = 0
    try:
        if runtime is not None:
            for chunk in _CHUNKS:
                with suppress(CudaError):  # in pieces that are large there may be none
                    while runtime.memory(device)[0] - chunk >= kept_bytes:
                        pointers.append(runtime.allocate(chunk, device))
                        taken += chunk
        yield taken
    finally:
        for pointer in pointers:
            if runtime is not None:
                runtime.free(pointer, device)


def _staying_error(world: World) -> Iterator[Row]:
    """Have the device read from an address that there is not, and see what the server makes of it."""
    near, far = np.array([[3]], np.int64), np.array([[hungry.FAR]], np.int64)
    with serving(world, "error") as server:
        server.control.load(hungry.CLIFF, config_of(world, hungry.CLIFF, ROWS))
        before = ask(server, hungry.CLIFF, near)
        answer = ask(server, hungry.CLIFF, far)
        again, took_s = _until_answered(lambda: ask(server, hungry.CLIFF, near))
        note = answer[1][:160]
        if answer[0] == http.client.OK:
            yield Row("faults", "an error that stays", "not provoked", note="the device gave an answer for no address")
            return
        yield Row("faults", "the request that breaks the device", answer[0], wanted="an error", held=True, note=note)
        what = "the model after that"
        held = server.alive and before[0] == http.client.OK and again[0] in ALLOWED
        words = "answers again" if again[0] == http.client.OK else f"{again[0]}: {again[1][:120]}"
        yield Row("faults", what, words, wanted="answers, or 503", held=held, note=f"after {took_s:.1f} s")


def _no_device(world: World) -> Iterator[Row]:
    """Start without any GPU to be seen, and ask for one."""
    name = world.variant("mlp", FP32).name
    world.file(world.variant("mlp", FP32))
    config = config_of(World(GPU, world.folder), name, ROWS)
    with serving(world, "gone", environ={"CUDA_VISIBLE_DEVICES": ""}) as server:
        try:
            server.control.load(name, config)
            yield Row("faults", "asked for a GPU where there is none", "loaded", wanted="UNAVAILABLE", held=False)
        except ControlError as error:
            state, reason = server.states().get(name, ("", ""))
            held = state == "UNAVAILABLE" and bool(reason) and server.alive
            note = reason or str(error)
            yield Row(
                "faults", "asked for a GPU where there is none", state, wanted="UNAVAILABLE", held=held, note=note
            )


def _at_once(server: Server, row: Tensor) -> list[Answer]:
    with ThreadPoolExecutor(ROWS) as pool:
        return list(pool.map(lambda _: ask(server, hungry.HUNGRY, row), range(ROWS)))


def _judged(server: Server, what: str, answers: list[Answer], note: str) -> Row:
    held = server.alive and all(status in ALLOWED for status, _ in answers)
    said = next((text for status, text in answers if status != http.client.OK), "")
    note = "; ".join(filter(None, (note, said[:120])))
    return Row("faults", what, _counted(answers), wanted="200 or 503, and alive", held=held, note=note)


def _counted(answers: list[Answer]) -> str:
    counts = Counter(status for status, _ in answers)
    return ", ".join(f"{count} of {status}" for status, count in sorted(counts.items()))


def ask(server: Server, model: str, x: Tensor) -> Answer:
    """Ask a model once; give the status, 0 where there was no answer, and the words of a refusal."""
    datatype = {"float32": "FP32", "int64": "INT64"}[x.dtype.name]
    tensor = {"name": "x", "datatype": datatype, "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    try:
        with closing(http.client.HTTPConnection(HOST, server.process.port, timeout=_ASK_S)) as connection:
            connection.request("POST", f"/v2/models/{model}/infer", head + x.tobytes(), headers)
            answer = connection.getresponse()
            return answer.status, "" if answer.status == http.client.OK else answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"


def _until_answered(asked: Callable[[], Answer]) -> tuple[Answer, float]:
    """Ask until it is answered well, but not for long."""
    begin = time.monotonic()
    while True:
        answer = asked()
        took_s = time.monotonic() - begin
        if answer[0] == http.client.OK or took_s > _BACK_S:
            return answer, took_s
        time.sleep(0.25)
