"""Shared memory: answers of a server that reads and writes its clients' device memory, compared with the CPU's.

Several clients send requests at once, repeatedly, each time with different rows in the same region, so that concurrent
requests share batches, and a copy made too late or too early shows. The output memory is poisoned before each request.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Self

import numpy as np

from penstock.backends.cuda import CudaError, Runtime, find_runtime, unavailable_reason
from penstock.perf.profiling.control import ControlError

from . import truncated_memory
from .context import CheckContext
from .correct import POOL, TOLERANCE, max_error, on_cpu
from .models import FP16, FP32, Tensor, Variant, bf16_to_fp32
from .rows import Row, at_most, failed
from .server_driver import Server, config_of, serving

CHECKED = (("mlp", FP32), ("cnn", FP16), ("encoder", FP16))
SIZES = (1, 3, 2, 5, 8, 1)
"""Rows of the clients' requests; one of them fills a batch by itself, and can be run in place."""
_ROWS, _TURNS, _DEVICE, _ALIGNED = 8, 6, 0, 256
_POISON = 0xFF  # NaN in any precision


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the greatest error of the answers."""
    runtime = find_runtime()
    if runtime is None:
        passed = False if context.on_gpu else None
        yield Row("shared", "answers through CUDA shared memory", "not checked", held=passed, note=unavailable_reason())
        return
    with serving(context, "shared") as server:
        for kind, precision in CHECKED:
            variant = context.variant(kind, precision)
            try:
                context.file(variant)
                server.control.load(variant.name, config_of(context, variant.name, _ROWS))
                expected = on_cpu(context, context.variant(kind, FP32))
                deviation = max_client_error(server, runtime, variant, expected)
                server.control.unload(variant.name)
            except Exception as error:  # noqa: BLE001 - the other models may do
                yield failed("shared", variant.name, error)
            else:
                note = f"{_TURNS} turns of {len(SIZES)} clients, {_ROWS} rows a batch at most"
                yield at_most("shared", f"{variant.name}: off by at most", deviation, TOLERANCE[precision], note=note)
        yield _truncation_row(context, server)


def _truncation_row(context: CheckContext, server: Server) -> Row:
    variant = context.variant("cnn", FP16)
    try:
        server.control.load(variant.name, config_of(context, variant.name, _ROWS))
        return truncated_memory.row(server, variant, on_cpu(context, context.variant("cnn", FP32)))
    except Exception as error:  # noqa: BLE001 - as above
        return failed("shared", f"{variant.name}: while memory is taken away", error)


def max_client_error(server: Server, runtime: Runtime, variant: Variant, expected: Tensor) -> float:
    """Have all clients send requests; return the error of the worst answer. Raises: RuntimeError if one is refused."""
    inputs = variant.inputs(POOL)
    with ExitStack() as stack:
        clients = [stack.enter_context(_Client(server, runtime, variant, rows)) for rows in SIZES]
        pool = stack.enter_context(ThreadPoolExecutor(len(clients)))

        def ask(turn: int, number: int) -> float:
            rows = [(7 * turn + 5 * number + index) % POOL for index in range(SIZES[number])]
            answer = clients[number].ask({name: each[rows] for name, each in inputs.items()}, expected[rows].shape)
            return max_error(answer, expected[rows])

        return max(error for turn in range(_TURNS) for error in pool.map(partial(ask, turn), range(len(SIZES))))


class _Client:
    """One region of device memory, with the inputs of a request followed by its output."""

    def __init__(self, server: Server, runtime: Runtime, variant: Variant, rows: int) -> None:
        self._server = server
        self._runtime = runtime
        self._variant = variant
        self._region = f"check_{secrets.token_hex(6)}"
        self._offsets: dict[str, int] = {}
        end = 0
        for name, each in variant.inputs(rows).items():
            self._offsets[name], end = end, _after(end, each.nbytes)
        self._output = end
        self._size = _after(end, rows * _WIDEST_BYTES)
        self._pointer = 0

    def __enter__(self) -> Self:
        self._pointer = self._runtime.allocate(self._size, _DEVICE)
        try:
            handle = self._runtime.export_handle(self._pointer, _DEVICE)
            self._server.control.register_cuda(self._region, handle, _DEVICE, self._size)
        except BaseException:
            self._runtime.free(self._pointer, _DEVICE)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # the server must release it first: the opposite order is undefined
        with suppress(ControlError, CudaError):
            self._server.control.unregister_cuda(self._region)
            self._runtime.free(self._pointer, _DEVICE)

    def ask(self, inputs: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        """Send a request with rows. Returns: the output found in the region afterwards. Raises: RuntimeError."""
        nbytes = int(np.prod(shape)) * np.dtype(self._variant.dtype).itemsize
        for name, each in inputs.items():
            self._runtime.write(self._pointer + self._offsets[name], _DEVICE, each.tobytes())
        self._runtime.write(self._pointer + self._output, _DEVICE, bytes([_POISON]) * nbytes)
        document = {
            "inputs": [
                {"name": name, "datatype": _DATATYPES.get(each.dtype.name, self._variant.datatype),
                 "shape": list(each.shape), "parameters": self._region_parameters(self._offsets[name], each.nbytes)}
                for name, each in inputs.items()
            ],
            "outputs": [{"name": "output", "parameters": self._region_parameters(self._output, nbytes)}],
        }  # fmt: skip
        path = f"/v2/models/{self._variant.name}/infer"
        self._server.process.request("POST", path, json.dumps(document).encode())
        into = bytearray(nbytes)
        self._runtime.read(self._pointer + self._output, _DEVICE, memoryview(into))
        return bf16_to_fp32(np.frombuffer(into, self._variant.dtype).reshape(shape), self._variant.precision)

    def _region_parameters(self, offset: int, nbytes: int) -> dict[str, str | int]:
        return {
            "shared_memory_region": self._region,
            "shared_memory_offset": offset,
            "shared_memory_byte_size": nbytes,
        }


_DATATYPES = {"int64": "INT64"}
_WIDEST_BYTES = 4096
"""The room for a row of output: no model here has a larger one."""


def _after(offset: int, nbytes: int) -> int:
    """Return the next offset that has the alignment of device memory."""
    return -(-(offset + nbytes) // _ALIGNED) * _ALIGNED
