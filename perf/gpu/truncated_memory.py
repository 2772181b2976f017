"""Taken: shared host memory of clients, some of which truncate their files while the server copies from them.

If a device copies out of such memory by itself, only a machine that has one can show that no code of the process
touches a page that has gone, which would kill it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import numpy as np

from penstock.perf.profiling.control import ControlError

from .correct import POOL, TOLERANCE, max_error
from .models import Tensor, Variant
from .rows import Row, at_most
from .server_driver import Server

SECONDS = 2.0
_HONEST, _TRUNCATING = 3, 3
_SHM = Path("/dev/shm")  # noqa: S108 - where the server looks for it
_DATATYPES = {"int64": "INT64"}
_DTYPES = {"FP16": np.float16, "FP32": np.float32}


def row(server: Server, variant: Variant, expected: Tensor, seconds: float = SECONDS) -> Row:
    """Yield the greatest error of answers to honest clients. Raises: RuntimeError, OSError if there are no answers."""
    inputs = variant.inputs(POOL)
    with ExitStack() as stack:
        clients = [stack.enter_context(_Client(server, variant)) for _ in range(_HONEST + _TRUNCATING)]
        pool = stack.enter_context(ThreadPoolExecutor(len(clients) + 1))
        end_s = time.monotonic() + seconds

        def ask(number: int) -> tuple[float, int, int]:
            """Return the error of its answers, how many there were, and how many requests were refused."""
            error, answers, refused_count = 0.0, 0, 0
            while time.monotonic() < end_s:
                rows = [(7 * answers + 5 * number) % POOL]
                try:
                    answer = clients[number].ask({name: each[rows] for name, each in inputs.items()})
                except RuntimeError:
                    if number < _HONEST:
                        raise
                    refused_count += 1
                    continue
                error, answers = max(error, max_error(answer, expected[rows])), answers + 1
            return error, answers, refused_count

        def truncate_memory() -> None:
            while time.monotonic() < end_s:
                for client in clients[_HONEST:]:
                    client.truncate_memory()

        truncating = pool.submit(truncate_memory)
        outcomes = list(pool.map(ask, range(len(clients))))
        truncating.result()
    error = max(each[0] for each in outcomes[:_HONEST])
    answers = sum(each[1] for each in outcomes[:_HONEST])
    sent_count, refused_count = (sum(each[index] for each in outcomes[_HONEST:]) for index in (1, 2))
    label = f"{variant.name}: off by at most, while others' memory is taken away"
    note = f"{answers} answers; of the others' {sent_count + refused_count} requests {refused_count} were refused"
    return at_most("shared", label, error if answers else float("inf"), TOLERANCE[variant.precision], note=note)


class _Client:
    """One region of system shared memory, with the inputs of a request of one row."""

    def __init__(self, server: Server, variant: Variant) -> None:
        self._server = server
        self._variant = variant
        self._file = _SHM / f"check_{secrets.token_hex(6)}"
        self._offsets: dict[str, tuple[int, int]] = {}
        self._size = 0
        for name, each in variant.inputs(1).items():
            self._offsets[name] = self._size, each.nbytes
            self._size += each.nbytes

    def __enter__(self) -> Self:
        self._file.write_bytes(bytes(self._size))
        self._server.control.register(self._file.name, self._file.name, self._size)
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ControlError):
            self._server.control.unregister(self._file.name)
        self._file.unlink()

    def truncate_memory(self) -> None:
        """Truncate the memory, and put other memory in its place."""
        os.truncate(self._file, 0)
        os.truncate(self._file, self._size)

    def ask(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Send a request of one row. Raises: RuntimeError if it is refused."""
        with self._file.open("r+b") as file:
            for name, each in inputs.items():
                file.seek(self._offsets[name][0])
                file.write(each.tobytes())
        tensors = [
            {"name": name, "datatype": _DATATYPES.get(each.dtype.name, self._variant.datatype),
             "shape": list(each.shape), "parameters": self._region_parameters(name)}
            for name, each in inputs.items()
        ]  # fmt: skip
        body = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
        return _output(self._server.process.request("POST", f"/v2/models/{self._variant.name}/infer", body))

    def _region_parameters(self, name: str) -> dict[str, str | int]:
        offset, nbytes = self._offsets[name]
        return {
            "shared_memory_region": self._file.name,
            "shared_memory_offset": offset,
            "shared_memory_byte_size": nbytes,
        }


def _output(answer: bytes) -> Tensor:
    """Read an answer's only tensor, which follows its JSON: half precision has no other form."""
    document, end = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
    (output,) = document["outputs"]
    return np.frombuffer(answer, _DTYPES[output["datatype"]], offset=end).reshape(output["shape"]).astype(np.float64)
