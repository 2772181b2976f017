"""A Python model in a worker process, as the server starts it."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import InferError
from penstock.server.python_models.messages import ANSWER, CALL, CALL_ANSWER, EXECUTE
from penstock.server.workers.kinds import PING
from penstock.server.workers.order import Order
from penstock.server.workers.worker import Worker
from tests.server.python_models.inside_stage import GUARD_S, answer, floats, settings_of

pytestmark = pytest.mark.slow


def order(name: str, **config: Any) -> Order:
    return Order("penstock.server.python_models.inside.service", settings_of(name, config), f"model '{name}'")


def request(number: int, **members: Any) -> dict[str, Any]:
    return {
        "id": "", "number": number, "inputs": ["IN"], "outputs": [], "correlation": 0, "flags": 0, "timeout_us": 0,
        "priority": 0, "parameters": {}, **members,
    }  # fmt: skip


def body(*requests: dict[str, Any]) -> bytes:
    return json.dumps({"requests": requests}).encode()


async def ended(worker: Worker) -> None:
    worker.stop()
    await worker.ended
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_a_model_calls_another_model_during_execute() -> None:
    async def scene() -> None:
        def on_message(kind: int, number: int, body: bytes, arrays: list[Any]) -> None:
            if kind == CALL:
                worker.send_message(CALL_ANSWER, number, json.dumps(answer(["OUT"])).encode(), [arrays[0] * 2])

        worker = Worker(order("caller"), on_message=on_message)
        await worker.ready
        exec_request = request(1, parameters={"do": "exec", "model": "m"})

        _, arrays = await worker.call(EXECUTE, body(exec_request), [floats(1, 2)])

        assert arrays[0] is not None
        assert arrays[0].tolist() == [2, 4]
        await ended(worker)

    asyncio.run(asyncio.wait_for(scene(), GUARD_S))


def test_a_decoupled_model_answers_after_execute_returns() -> None:
    async def scene() -> None:
        result: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        values: list[float] = []

        def on_message(kind: int, number: int, body: bytes, arrays: list[Any]) -> None:
            if kind == ANSWER and arrays:
                values.append(arrays[0].tolist()[0])
            if kind == ANSWER and json.loads(body)["final"]:
                result.set_result(values)

        worker = Worker(order("repeat", model_transaction_policy={"decoupled": True}), on_message=on_message)
        await worker.ready

        replied, _ = await worker.call(EXECUTE, body(request(1)), [floats(*range(100))])

        assert json.loads(replied) == {"answers": [None]}
        assert await result == list(range(100))
        await ended(worker)

    asyncio.run(asyncio.wait_for(scene(), GUARD_S))


def test_the_shared_memory_of_a_request_is_freed_when_it_is_answered() -> None:
    async def scene() -> None:
        worker = Worker(order("identity"))
        await worker.ready
        for number in range(20):
            requests = request(number), request(100 + number)
            _, arrays = await worker.call(EXECUTE, body(*requests), [np.zeros(300_000, np.float32)] * 2)
            assert [array is not None and array.size for array in arrays] == [300_000, 300_000]
        await worker.call(PING)

        assert worker._link.arena.leases == 0
        await ended(worker)

    asyncio.run(asyncio.wait_for(scene(), GUARD_S))


def test_an_import_error_is_reported_with_its_reason(tmp_path: Any) -> None:
    file = tmp_path / "1" / "model.py"
    file.parent.mkdir()
    file.write_text("import no_such_module\n")

    async def scene() -> None:
        settings = settings_of("broken", None, file)
        worker = Worker(Order("penstock.server.python_models.inside.service", settings, "model 'broken'"))
        with pytest.raises(InferError, match="No module named 'no_such_module'"):
            await worker.ready
        worker.kill("it is of no use")
        await worker.ended

    asyncio.run(asyncio.wait_for(scene(), GUARD_S))
