"""Closed-loop clients in step: the default beside static caps and delays. `python -m penstock.perf.lockstep`.

Each client sends again once it is answered, as perf_analyzer's and wrk's do. The best batch depends on the number of
clients: half of them, so that the front end has work meanwhile, or all, which needs a delay. A static setting suits one
number of clients; the default must find it out. One server has the model once for each setting and number of clients;
all run in turns, round after round, and the table holds medians. The default takes part twice: the difference between
the two is the noise of the machine.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from penstock.backends.cpus import usable_cpus
from penstock.batching.spec import BatchPolicy

from . import models
from .bench import CNN, MLP, Case, CaseRounds, make_call
from .claims import verdict
from .model_variants import Variant, write
from .server_process import Process, penstock
from .static_policies import DEFAULT_POLICY

CLIENTS = (2, 8, 16, 32, 64)
DELAYS_US = (0, 4000)
SHAPES = {"mlp": MLP, "cnn": CNN}
DEFAULT, TWIN = "default", "the default again"
RATE = "requests_per_s"
MIN_RATIO = 0.95
"""The least ratio of the default's requests per second to the best static setting's."""


def settings(clients: int) -> dict[str, BatchPolicy]:
    """Return the static settings to try for a number of clients, by name."""
    caps = sorted({max(clients // 2, 1), clients})
    return {
        f"cap {cap}, {delay_us / 1000:g} ms": BatchPolicy(cap_rows=cap, max_queue_delay_us=delay_us)
        for cap in caps
        for delay_us in DELAYS_US
        if cap > 1 or not delay_us
    }


def variant(model: str, clients: int, name: str) -> Variant:
    """Return the model on the server for a setting and a number of clients."""
    return Variant(model, f"{model}-{clients}-{name}".translate(str.maketrans(" .", "-_", ",")))


class Lockstep:
    """The results of each setting for each number of clients."""

    def __init__(self, model: str, clients: list[int], threads: int) -> None:
        self.model = model
        self._threads = threads
        self.cells: dict[int, dict[str, CaseRounds]] = {}
        for count in sorted(set(clients)):
            self.cells[count] = {name: CaseRounds() for name in [DEFAULT, *settings(count), TWIN]}

    def write(self, folder: Path) -> None:
        """Write the model into a repository once for each setting and number of clients."""
        for count in self.cells:
            policies = {DEFAULT: DEFAULT_POLICY, TWIN: DEFAULT_POLICY} | settings(count)
            for name, policy in policies.items():
                write(folder, variant(self.model, count, name), policy, self._threads)

    def measure(self, server: Process, seconds: int) -> None:
        """Measure every setting once, in turn."""
        for count, lines in self.cells.items():
            sent = make_call(Case(self.model, "binary", count, SHAPES[self.model]))
            for name, line in lines.items():
                model_name = variant(self.model, count, name).name
                line.drive(server, model_name, replace(sent, path=f"/v2/models/{model_name}/infer"), count, seconds)

    def discard_warm_up(self) -> None:
        """Drop the results of the warm-up."""
        for lines in self.cells.values():
            for name in lines:
                lines[name] = CaseRounds()

    def table(self) -> str:
        """Format the medians: the default, the best static setting, and the default's target."""
        rows = [f"{'clients':>7}  {'setting':<16} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'CPU us':>8} {'rows':>6}"]
        verdicts = []
        for count, lines in self.cells.items():
            for name, line in lines.items():
                row = f"{count:>7}  {name:<16} {line.median('requests_per_s'):>8,.0f} {line.median('p50_ms'):>8.2f}"
                row += f" {line.median('p99_ms'):>8.2f} {line.median('cpu_us'):>8.1f} {line.rows:>6.1f}"
                failed = sum(load.refused + load.broken for load in line.loads)
                rows.append(row + (f"  {failed} FAILED" if failed else ""))
            best = max(settings(count), key=lambda name: lines[name].median(RATE))
            ratio, twin_ratio = (lines[DEFAULT].ratio_to(lines[name], RATE) for name in (best, TWIN))
            text = verdict(f"{ratio:.2f} times '{best}', at least {MIN_RATIO}", ratio >= MIN_RATIO)
            verdicts.append(f"{count} clients: {text} ({twin_ratio:.2f} times itself)")
        return "\n".join([*rows, *verdicts])


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="mlp")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--threads", type=int, default=usable_cpus(), help="of a run; silent: all cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2, help="of load per setting and round")
    args = parser.parse_args()
    models.make(models.DEFAULT_FOLDER)
    lockstep = Lockstep(args.model, args.clients, args.threads)
    with tempfile.TemporaryDirectory() as folder:
        lockstep.write(Path(folder))
        with penstock(Path(folder)) as server:
            lockstep.measure(server, 1)
            lockstep.discard_warm_up()
            for number in range(args.rounds):
                lockstep.measure(server, args.seconds)
                print(f"round {number + 1} of {args.rounds} done", flush=True)
    print(lockstep.table())


if __name__ == "__main__":
    main()
