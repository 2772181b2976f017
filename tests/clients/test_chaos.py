"""All kinds of models in one server, used by many clients in parallel, some of which cancel or disconnect.

Every answer is correct, the statistics add up, and after all clients have gone nothing of their requests is left.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from penstock.backends.backend import Array
from penstock.batching.model import Model
from tests.backends.onnx_models import FLOAT, INT64, floats, node
from tests.clients import models
from tests.clients.ensembles import step, write_plus
from tests.clients.sequence_models import CONTROLS, STATE, config, write_accumulator
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("CHAOS_S", "3"))
SEED = os.environ.get("CHAOS_SEED", "1")
"""The same clients each time; a longer run, or another one, is a matter of these."""
CLIENTS = 24
CACHE_BYTES = 20_000
PATIENCE_S = 20.0
HALF = 2e-3
"""Some clients wait so long at most, in seconds: about as long as an answer takes."""
GUILTY = 5000.0
SWAPPED = 1000.0
REFUSALS = ("timeout expired", "Exceeds maximum queue size", "timeout of the corresponding sequence has been expired")
TENSORS = """
max_batch_size: %d
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] %s }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] %s }
"""
CACHED = "response_cache { enable: true }"
LEVELS = """
dynamic_batching {
  priority_levels: 3 default_priority_level: 2 max_queue_delay_microseconds: 500 preferred_batch_size: [ 2, 4 ]
  default_queue_policy { allow_timeout_override: true max_queue_size: 6 }
  priority_queue_policy { key: 3 value { timeout_action: DELAY default_timeout_microseconds: 300 } }
}
"""
RAGGED = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }
"""
TWO = 'instance_group { kind: KIND_CPU count: 2 rate_limiter { resources { name: "r" count: %d } priority: %d } }'
ORDERED = "dynamic_batching { preserve_ordering: true } instance_group { kind: KIND_CPU count: 2 }"
IDLE_S = 1.0
IDLE = f"max_sequence_idle_microseconds: {IDLE_S * 1e6:.0f} "
SEVERAL = """
def post_inference(prediction, signature, metadata):
    for number in range(int(prediction[0][0][0]) % 5):
        yield {"y": prediction[0] + number}
"""
PLUS = {
    "plain": TENSORS % (8, "", "") + "dynamic_batching { }",
    "split": TENSORS % (4, "", ""),
    "levels": TENSORS % (8, "", "") + LEVELS,
    "ordered": TENSORS % (8, "", "") + ORDERED,
    "limited": TENSORS % (2, "", "") + TWO % (1, 1),
    "rival": TENSORS % (2, "", "") + TWO % (1, 2),
    "cached": TENSORS % (8, "", "") + CACHED,
    "swapped": TENSORS % (8, "", ""),
    "both": TENSORS % (8, "", "") + ORDERED + CACHED,
}
SPLIT = "split = true\nmax_queue_rows = 24\n"
TOML = {
    "split": SPLIT, "ordered": 'executor = "thread"\n' + SPLIT,
    "limited": 'executor = "thread"\n', "plain": 'executor = "loop"\n', "both": 'executor = "thread"\n',
}  # fmt: skip
ENSEMBLES = {
    "chain": (("plain", "ordered"), ""),
    "nested": (("chain", "cached", "limited"), CACHED),
    "fragile": (("picky", "both", "levels"), ""),
    "mixed": (("swapped", "plain"), CACHED),
}
MORE = dict.fromkeys(PLUS, 1) | {"picky": 1, "reshaped": 1, "padded": 0, "ragged": 0} | {
    "chain": 2, "nested": 4, "fragile": 3, "mixed": 2,
}  # fmt: skip
"""What each model adds to what it is given."""
STEPS = {"plain", "ordered", "cached", "limited", "chain", "picky", "both", "levels"}
WIDE = {"split": 10, "ordered": 10, "limited": 2, "rival": 2}


def write(root: Path) -> None:
    for name, text in PLUS.items():
        write_plus(root, name, 1)
        (root / name / "config.pbtxt").write_text(text)
        (root / name / "penstock.toml").write_text("[batching]\n" + TOML.get(name, ""))
    tensor: models.Tensors = {"x": (FLOAT, ["N", 4])}
    table = {"table": floats(range(1, 1000))}
    look = [node("Cast", ["x"], ["at"], to=INT64), node("Gather", ["table", "at"], ["y"])]
    models.write(root, "picky", look, (tensor, {"y": (FLOAT, ["N", 4])}), table, config=TENSORS % (8, "", ""))
    inside: tuple[int, models.Axes] = (FLOAT, ["N", 2, 2])
    reshape = "reshape { shape: [ 2, 2 ] }"
    models.write(root, "reshaped", [node("Add", ["x", "one"], ["y"])], ({"x": inside}, {"y": inside}),
                 {"one": floats([1])}, config=TENSORS % (8, reshape, reshape))  # fmt: skip
    models.write_identity(root, "padded", "max_batch_size: 8")
    (root / "padded" / "penstock.toml").write_text("[padding.x]\naxis = 0\noutputs = { y = 0 }\n")
    flat: tuple[int, models.Axes] = (FLOAT, ["R"])
    models.write(root, "ragged", [node("Identity", ["x"], ["y"])], ({"x": flat}, {"y": flat}), config=RAGGED)
    write_accumulator(root, "direct", config(2, IDLE + "direct { }" + CONTROLS + STATE % ""))
    oldest = "oldest { max_candidate_sequences: 3 max_queue_delay_microseconds: 300 }"
    write_accumulator(root, "oldest", config(4, IDLE + oldest + CONTROLS + STATE % ""))
    models.write_identity(root, "several", "max_batch_size: 8 model_transaction_policy { decoupled: true }")
    (root / "several" / "answers.py").write_text(SEVERAL)
    (root / "several" / "penstock.toml").write_text('[hooks]\nfile = "answers.py"\n')
    for name, (steps, more) in ENSEMBLES.items():
        ends = ["x", *(f"t{number}" for number in range(1, len(steps))), "y"]
        steps_text = ", ".join(step(each, [("x", ends[i])], [("y", ends[i + 1])]) for i, each in enumerate(steps))
        (root / name / "1").mkdir(parents=True)
        rows = 2 if "limited" in steps else 4
        text = f'platform: "ensemble" {TENSORS % (rows, "", "")} {more} ensemble_scheduling {{ step [ {steps_text} ] }}'
        (root / name / "config.pbtxt").write_text(text)


@dataclass
class Chaos:
    """The clients, and their counts for each model: requests sent, answered, rejected and canceled."""

    live: Live
    http: httpx.AsyncClient
    grpc: triton.InferenceServerClient
    end_s: float
    sent: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    sequences: int = 0

    async def ask(self, rng: Random, model: str, x: Array, **options: Any) -> Array | str | None:
        """Send one request. Returns: the answer, or the error's text, or None if the client canceled."""
        self.sent[model] += 1
        work = self._by_http(model, x, options) if rng.random() < 0.5 else self._by_grpc(model, x, options)
        patience_s = rng.random() * HALF if rng.random() < 0.15 else PATIENCE_S
        try:
            answer = await asyncio.wait_for(work, patience_s)
        except TimeoutError:
            assert patience_s < PATIENCE_S, f"no answer from {model}"
            self.lost[model] += 1
            return None
        except InferenceServerException as error:
            self.refused[model] += 1
            return str(error.message())
        self.answered[model] += 1
        return answer

    async def _by_grpc(self, model: str, x: Array, options: dict[str, Any]) -> Array:
        tensor = triton.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)
        result = await self.grpc.infer(model, [tensor], **options)
        answer: Array = result.as_numpy("y")
        return answer

    async def _by_http(self, model: str, x: Array, options: dict[str, Any]) -> Array:
        tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}
        body = {"inputs": [tensor], "parameters": options}
        answer = await self.http.post(f"/v2/models/{model}/infer", json=body)
        if answer.status_code != 200:
            raise InferenceServerException(answer.json()["error"])
        (output,) = answer.json()["outputs"]
        return np.array(output["data"], np.float32).reshape(output["shape"])

    async def one(self, rng: Random) -> None:
        """Send one request after another to a model."""
        model = rng.choice([*MORE])
        width = rng.randint(1, 20) if model in {"padded", "ragged"} else 4
        rows = 1 if model == "ragged" else rng.randint(1, WIDE.get(model, 2 if model in ENSEMBLES else 4))
        bad, guilty = rng.random() < 0.05, rng.random() < 0.1 and model in {"picky", "fragile"}
        few = model in {"cached", "nested", "both", "mixed"}
        x = np.full((rows, width), GUILTY if guilty else rng.randint(0, 1 if few else 40), np.float32)
        x[0, 0] += 0 if guilty else rng.randint(0, 1 if few else 40)
        options: dict[str, Any] = {}
        if rng.random() < 0.2:
            options["timeout"] = rng.randint(1, 3000)
        if rng.random() < 0.5 and model in {"levels", "fragile"}:
            options["priority"] = rng.randint(0, 3)
        answer = await self.ask(rng, model, x[:, :, None] if bad else x, **options)
        if answer is None:
            return
        if isinstance(answer, str):
            fine = bad or any(text in answer for text in REFUSALS) or (guilty and "out of data bounds" in answer)
            assert fine, f"{model}: {answer}"
            return
        assert not bad
        assert not guilty
        more = answer - x
        ends = {MORE[model], MORE[model] + SWAPPED} if model in {"swapped", "mixed"} else {MORE[model]}
        assert answer.shape == x.shape
        assert {*more.ravel().tolist()} in [{end} for end in ends], f"{model}: {x} {answer}"

    async def sequence(self, rng: Random) -> None:
        """Start a sequence, and perhaps end it."""
        self.sequences += 1
        identity, model, total = self.sequences, rng.choice(["direct", "oldest"]), 0.0
        count = rng.randint(1, 6)
        loop = asyncio.get_running_loop()
        for number in range(count):
            since_s = loop.time()
            options: dict[str, Any] = {"timeout": 500} if rng.random() < 0.1 else {}
            options |= {"sequence_start": True} if not number else {}
            options |= {"sequence_end": True} if number == count - 1 and rng.random() < 0.8 else {}
            value = float(rng.randint(0, 100))
            x = np.full((1, 1), value, np.float32)
            answer = await self.ask(rng, model, x, sequence_id=identity, **options)
            if isinstance(answer, str):
                # on a busy machine a client may leave its sequence alone for too long
                forgotten = "must specify the START flag" in answer and loop.time() - since_s >= IDLE_S
                assert forgotten or any(text in answer for text in REFUSALS), f"{model}: {answer}"
            if not isinstance(answer, np.ndarray):
                return
            total += value
            assert answer.item() == total, f"{model}: {identity} {number}"

    async def piped(self, rng: Random) -> None:
        """Send a sequence on one stream without waiting for its answers, and perhaps disconnect before they arrive."""
        self.sequences += 1
        identity, model = self.sequences, rng.choice(["direct", "oldest"])
        values = [float(rng.randint(0, 100)) for _ in range(rng.randint(1, 8))]
        takes = rng.randint(1, len(values)) if rng.random() < 0.3 else len(values)

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number, value in enumerate(values):
                tensor = triton.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.full((1, 1), value, np.float32))
                yield {
                    "model_name": model, "inputs": [tensor], "sequence_id": identity, "sequence_start": not number,
                    "sequence_end": number == len(values) - 1,
                }  # fmt: skip

        self.sent[model] += len(values)
        answers, answer_count = self.grpc.stream_infer(requests()), 0
        async for result, error in answers:
            assert error is None, error
            answer_count += 1
            assert result.as_numpy("y").item() == sum(values[:answer_count])
            if answer_count == takes:
                answers.cancel()
                break
        self.answered[model] += answer_count
        self.lost[model] += len(values) - answer_count

    async def several(self, rng: Random) -> None:
        """Read all answers to a request to the decoupled model, or disconnect early."""
        value = rng.randint(0, 100)
        x = np.full((1, 2), value, np.float32)
        tensor = triton.InferInput("x", [1, 2], "FP32").set_data_from_numpy(x)
        leaves = rng.randint(0, 2) if rng.random() < 0.3 else 10

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "several", "inputs": [tensor], "enable_empty_final_response": True}

        answers, results = self.grpc.stream_infer(requests()), []
        async for result, error in answers:
            assert error is None, error
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
            results.append(result.as_numpy("y").ravel().tolist())
            if len(results) > leaves:
                answers.cancel()
                break
        assert results == [[value + number] * 2 for number in range(min(value % 5, leaves + 1))]

    async def swap(self, root: Path) -> None:
        """Reload models repeatedly."""
        number = 1.0
        while asyncio.get_running_loop().time() < self.end_s:
            number = SWAPPED + 2 - number
            work = root.parent / "next"
            write_plus(work, f"n{number}", number)
            path = root / "swapped" / "1" / "model.onnx"
            await asyncio.to_thread(os.replace, work / f"n{number}" / "1" / "model.onnx", path)
            await asyncio.to_thread((work / f"n{number}" / "1").rmdir)
            await asyncio.to_thread((work / f"n{number}").rmdir)
            answer = await self.http.post("/v2/repository/models/swapped/load", json={})
            assert answer.status_code == 200, answer.text
            x = np.zeros((1, 4), np.float32)
            self.sent["mixed"] += 1
            self.answered["mixed"] += 1
            assert (await self._by_http("mixed", x, {}) == number + 1).all()

    async def client(self, number: int) -> None:
        """Act as one client."""
        rng = Random(f"{SEED}/{number}")
        kinds: Sequence[Callable[[Random], Awaitable[None]]] = (
            *[self.one] * 6, self.sequence, self.piped, self.several,
        )  # fmt: skip
        while asyncio.get_running_loop().time() < self.end_s:
            await rng.choice(kinds)(rng)


async def run(live: Live, root: Path) -> Chaos:
    """Run all clients for a while."""
    limits = httpx.Limits(max_connections=CLIENTS + 2)
    async with (
        httpx.AsyncClient(base_url=live.url, limits=limits, timeout=PATIENCE_S) as client,
        triton.InferenceServerClient(live.grpc_address) as grpc,
        asyncio.timeout(SECONDS + 2 * PATIENCE_S),
    ):
        chaos = Chaos(live, client, grpc, asyncio.get_running_loop().time() + SECONDS)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(chaos.swap(root))
            for number in range(CLIENTS):
                tasks.create_task(chaos.client(number))
        for _ in range(2):  # on a busy machine no client may have had the time to ask for what is remembered
            await chaos._by_http("cached", np.zeros((1, 4), np.float32), {})
    return chaos


def resources_of(live: Live) -> dict[str, Any]:
    """List what is left of requests; runs on the server's event loop."""
    engine = live.server.engine
    found: dict[str, Any] = {}
    links: Counter[Model] = Counter()
    for model in engine.models():
        if model.ensemble is not None:
            links.update(model.ensemble.links().models)
    for model in engine.models():
        scheduler, ordering = model.scheduler, model.scheduler.ordering
        there: dict[str, Any] = {
            "inflight": model.inflight, "waiting": scheduler.request_count, "rows": scheduler.rows,
            "nbytes": scheduler.nbytes, "expired": scheduler.expired, "orphaned": scheduler.orphaned,
            "sequences": len(scheduler.sequences or ()),
            "queue": ordering._queue if ordering is not None else (), "holds": model.hold_count - links[model],
            "states": ordering._states if ordering is not None else (),
            "passages": model.ensemble.passages if model.ensemble is not None else (),
            "levels": scheduler.levels._totals if scheduler.levels is not None else (),
        }  # fmt: skip
        if model.spec.hooks is None or not os.environ.get("PENSTOCK_TEST_FRONTS"):  # otherwise they run in front ends
            hooks = live.server._models.hooks_of(model)
            there |= {"hooked": hooks._in_flight, "turns": len(hooks.sequence_turns)}
        found |= {f"{model.name} {name}": value for name, value in there.items() if value}
    return found


async def at_rest(live: Live) -> dict[str, Any]:
    """Wait until nothing is left, or for long enough. Returns: what is left."""
    end_s = asyncio.get_running_loop().time() + 8
    while (found := resources_of(live)) and asyncio.get_running_loop().time() < end_s:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.02)
    return found


async def counts(live: Live) -> dict[str, tuple[int, int, int]]:
    """Return the successes, failures and cache hits of each model."""
    snapshots = {model.name: model.statistics.snapshot() for model in live.server.engine.models()}
    return {name: (each.success.count, each.fail.count, each.cache_hit.count) for name, each in snapshots.items()}


def test_all_answers_are_correct_and_all_resources_are_freed_whatever_clients_do(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    write(root)
    before = set(threading.enumerate())
    options: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",), "rate_limit": "execution_count"}
    with live_server(root, cache_config=(f"local,size={CACHE_BYTES}",), **options) as live:
        chaos = asyncio.run(run(live, root))
        assert live.call(at_rest(live)) == {}
        cache, counted = live.server.engine.cache, live.call(counts(live))

    assert cache is not None
    assert cache.used_bytes == sum(entry.nbytes for entry in cache._entries.values())
    assert 0 < cache.used_bytes <= CACHE_BYTES
    assert sum(hits for _, _, hits in counted.values()) > 0
    for name in {*MORE, "direct", "oldest"} - {"swapped", "split", "ordered"}:
        succeeded, failed, _ = counted[name]
        assert chaos.answered[name] <= succeeded, name
        if name not in STEPS:
            assert succeeded <= chaos.answered[name] + chaos.lost[name], name
            assert succeeded + failed <= chaos.sent[name], name
    # the other threads belong to the event loop and to the clients
    after = [thread.name for thread in set(threading.enumerate()) - before if "/" in thread.name]
    assert after == []
