"""Sharing: several busy models on one CPU, in turns by cost and all at once. `python -m penstock.perf.cpu_sharing`.

Each model of perf/models.py is kept busy by 16 closed-loop clients, in this process and without a server, so that
little but the models uses the CPU. The ways are measured in turns, several rounds of each. The output is the median
requests/s, the p99 over all rounds, and the fraction of what the model does alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.backends.loading import LOADERS
from penstock.batching.devices.device import Device, make_device
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec

from . import models

BUILDERS = {"iris": models.iris, "mlp": models.mlp, "cnn": models.cnn, "deep": models.deep}
MIXES = ("cnn,deep,mlp", "cnn,deep,mlp,iris", "cnn,deep", "mlp,cnn:4", "mlp,cnn:4,deep")
CLIENTS = range(16)
NO_LIMIT = 1 << 30


@dataclass(slots=True)
class Served:
    """The results of one model: requests/s of each round, and the latency of every request in seconds."""

    per_s: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)

    def rate(self) -> float:
        """Return the median of the rounds."""
        return statistics.median(self.per_s)

    def words(self) -> str:
        """Format requests/s and p99."""
        return f"{self.rate():.0f}/s {np.percentile(self.took, 99) * 1e3:.0f} ms"


class House:
    """An Engine with the models of a mix, on a CPU with the given room."""

    def __init__(self, room: int) -> None:
        self.engine = Engine(asyncio.get_running_loop(), LOADERS)
        self.engine.devices["cpu"] = Device(room, preemptive=True)
        self._models: dict[str, Model] = {}

    async def load(self, folder: Path, mix: Sequence[tuple[str, int]]) -> None:
        """Load models with their numbers of Instances. Models that the loop would run are run by Instances too."""
        for name, count in mix:
            path, groups = folder / name / "1" / "model.onnx", (InstanceGroup(count),)
            spec = ModelSpec(name, 1, path, policy=BatchPolicy(executor="thread"), instances=groups)
            self._models[name] = await self.engine.load(spec)

    async def drive(self, served: dict[str, Served], seconds: float) -> None:
        """Keep the models named in `served` busy for a while."""
        end = time.perf_counter() + seconds
        before = {name: len(each.took) for name, each in served.items()}
        clients = [self._client(self._models[name], each.took, end) for name, each in served.items() for _ in CLIENTS]
        await asyncio.gather(*clients)
        for name, each in served.items():
            each.per_s.append((len(each.took) - before[name]) / seconds)

    async def _client(self, model: Model, latencies: list[float], end: float) -> None:
        row = [np.zeros((1, *tensor.shape[1:]), np.float32) for tensor in model.signature.inputs]
        while (start := time.perf_counter()) < end:
            await self.engine.infer(model, list(row))
            latencies.append(time.perf_counter() - start)


async def compare(folder: Path, mix: Sequence[tuple[str, int]], rooms: Sequence[int], args: argparse.Namespace) -> None:
    """Print a line per model, alone and in each room with the others: requests/s, p99, and the fraction of alone."""
    names = [name for name, _ in mix]
    houses = {room: House(room) for room in rooms}
    for house in houses.values():
        await house.load(folder, mix)
    alone_by_model = {name: Served() for name in names}
    shared = {room: {name: Served() for name in names} for room in rooms}
    for _ in range(args.rounds):
        for room, house in houses.items():
            await house.drive(shared[room], args.seconds)
        for name in names:
            await houses[NO_LIMIT].drive({name: alone_by_model[name]}, args.seconds)
    for house in houses.values():
        await house.engine.stop(5)
    print("\n" + " + ".join(f"{name} x {count}" for name, count in mix))
    print(f"{'':6}{'alone':>20}" + "".join(f"{_word(room):>26}" for room in rooms))
    for name in names:
        line = f"{name:6}{alone_by_model[name].words():>20}"
        for room in rooms:
            each = shared[room][name]
            line += f"{each.words():>20}{each.rate() / alone_by_model[name].rate():>6.2f}"
        print(line, flush=True)
    totals = [sum(shared[room][name].rate() / alone_by_model[name].rate() for name in names) for room in rooms]
    print(f"{'sum of parts':26}" + "".join(f"{total:>26.2f}" for total in totals), flush=True)


def _word(room: int) -> str:
    return "all at once" if room >= NO_LIMIT else f"in turns, room {room}"


def main() -> None:
    """Print a table per mix."""
    parser = argparse.ArgumentParser(description="Compare models in turns by cost with all at once.")
    parser.add_argument("--mix", nargs="*", default=MIXES, help="names, with their Instances: mlp,cnn:4")
    parser.add_argument("--room", type=int, nargs="*", default=(), help="also measure a CPU of so much room")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=models.DEFAULT_FOLDER)
    args = parser.parse_args()
    models.make(args.folder, BUILDERS)
    rooms = (*args.room, make_device("cpu").room, NO_LIMIT)
    for text in args.mix:
        parts = [part.partition(":") for part in text.split(",")]
        asyncio.run(compare(args.folder, [(name, int(count or 1)) for name, _, count in parts], rooms, args))


if __name__ == "__main__":
    main()
