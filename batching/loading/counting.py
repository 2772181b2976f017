"""Counting: how many Instances a model gets on a device, chosen by measuring (`InstanceGroup.count` 0, "auto").

Called by opening.py while a model is loaded. Why so, with figures: docs/adr/0010-sharing-a-device.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from penstock.backends.backend import overlaps
from penstock.backends.cpus import usable_cpus
from penstock.batching.devices.memory import free_bytes, give_back, resident_bytes
from penstock.batching.scheduling.costs import CostModel

from .completion import complete
from .rehearsal import rehearsal, smallest_tails

if TYPE_CHECKING:
    from penstock.backends.backend import Backend, Binding, Overlapping
    from penstock.backends.signature import Signature
    from penstock.batching.spec import ModelSpec

logger = logging.getLogger("penstock.batching")

WORTH = 1.1
"""More Instances are kept if they do so many times the rows of fewer."""
TRIAL_NS = 250_000_000
SWEEP_NS = 400_000_000
BUDGET_NS = 2_000_000_000
RUNS = 3
MOST_ON_GPU = 4
GPU_MEMORY = "penstock.gpu_memory_bytes"
"""The option that says what a model may take of a GPU."""


@dataclass(frozen=True, slots=True)
class Split:
    """So many Instances, and the threads of a session, 0: as many as it likes.

    On a CPU they share one session, of whose threads each of them brings one; on other devices each has its own.
    """

    count: int
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """What a Split did: its rows/s together, and what memory has grown by since before the model was loaded."""

    split: Split
    rows_per_s: float
    grown_bytes: int


def splits(device: str, cpus: int, threads: int | None) -> list[Split]:
    """List what is tried on a device, fewest Instances first. `threads`: what the user said of them, None: nothing.

    What is not said is divided: those that the Instances bring themselves are left out of the session's, so that all
    together are as many as there are CPUs. On two CPUs that is one Instance of two threads, or two of one.
    """
    if device != "cpu":
        return [Split(count, threads or 0) for count in range(1, MOST_ON_GPU + 1)]
    counts = [1]
    while counts[-1] < cpus:
        counts.append(min(2 * counts[-1], cpus))
    return [Split(count, cpus - count + 1 if threads is None else threads) for count in counts]


def choose(
    candidates: Iterable[Split], measure: Callable[[Split], Trial | None], budget_bytes: int
) -> tuple[Split, list[Trial]]:
    """Give the last that was worth its memory, and all that were tried. The first is taken if nothing can be measured.

    `measure` gives None for what cannot be run, or not in time.
    """
    best: Split | None = None
    tried: list[Trial] = []
    for split in candidates:
        if best is not None and _grows_to(tried, split) > budget_bytes:
            break
        trial = measure(split)
        best = best or split
        if trial is None:
            break
        tried.append(trial)
        if len(tried) > 1 and (trial.rows_per_s < WORTH * tried[-2].rows_per_s or trial.grown_bytes > budget_bytes):
            break
        best = split
    if best is None:
        raise ValueError("nothing to choose from")
    return best, tried


def _grows_to(tried: Sequence[Trial], split: Split) -> float:
    """Foretell what memory grows by, from what it grew by with each Instance more; 0 while that is not known."""
    if len(tried) < 2:
        return 0
    before, last = tried[-2:]
    each = (last.grown_bytes - before.grown_bytes) / (last.split.count - before.split.count)
    return last.grown_bytes + each * (split.count - last.split.count)


class Trials:
    """Measures Splits of one model on one device, for `choose`. It holds the sessions of the last one.

    `load` opens a session of so many threads, the first one at once; `apart`: each Instance has one. `rows` is the size
    of a batch, found with the first.
    """

    def __init__(self, spec: ModelSpec, load: Callable[[int], Backend], threads: int, *, apart: bool = False) -> None:
        self._name = spec.name
        self._load = load
        self._apart = apart
        self._threads = threads
        self._bindings: list[list[Binding]] = []
        self._end_ns = time.monotonic_ns() + BUDGET_NS
        self._before_bytes = resident_bytes()
        self._backends = [load(threads)]
        self.rows = 0
        try:
            completed = complete(spec, self._backends[0].graph)
        except BaseException:
            self.close()
            raise
        self._spec = completed
        self._signature: Signature = completed.signature  # type: ignore[assignment]
        self._bound = completed.bound or self._signature
        self._policy = completed.policy

    def __call__(self, split: Split) -> Trial | None:
        """Let a Split run for a while; None when that fails, or the time for all is spent."""
        if time.monotonic_ns() > self._end_ns:
            return None
        try:
            self.session(split.threads)
            while len(self._bindings) < split.count:
                self._bindings.append(self._bind())
            if not self.rows:
                self.rows = self._knee(self._bindings[0][0])
            under_way: list[deque[Overlapping]] = [deque() for _ in self._bindings]
            try:
                rates = together(list(map(self._in_turn, self._bindings, under_way)))
            finally:
                for begun in under_way:
                    while begun:
                        begun.popleft().end()
        except Exception as error:  # noqa: BLE001 - what zeros provoke, or what does not fit, requests may not
            logger.info("model %s: %d instances cannot be measured: %s", self._name, split.count, error)
            return None
        return Trial(split, self.rows * sum(rates), self._grown_bytes())

    def _grown_bytes(self) -> int:
        """Tell what memory has grown by: the device's, where that is known, else this process's."""
        on_device = sum(getattr(backend, "device_bytes", 0) for backend in self._backends)
        return on_device or max(resident_bytes() - self._before_bytes, 0)

    def session(self, threads: int) -> Backend:
        """Give the first session of so many threads, opened now unless the last had as many."""
        if not self._backends or self._threads != threads:
            self.close()
            self._before_bytes = resident_bytes()
            self._backends, self._threads = [self._load(threads)], threads
        return self._backends[0]

    def _bind(self) -> list[Binding]:
        """Give one more Instance's Bindings, in a session of its own where that is so."""
        if self._apart and self._bindings:
            self._backends.append(self._load(self._threads))
        bindings = [self._backends[-1].bind(self._bound, self._policy.max_batch_rows or 1)]
        if overlaps(bindings[0]):
            bindings.append(self._backends[-1].bind(self._bound, self._policy.max_batch_rows or 1))
        return bindings

    def keep(self, split: Split) -> list[Backend]:
        """Give the sessions of what was chosen, as far as they are open, which are the caller's from then on."""
        self.session(split.threads)
        kept = split.count if self._apart else 1
        backends, self._backends = self._backends[:kept], self._backends[kept:]
        return backends

    def close(self) -> None:
        """Free what is held."""
        self._bindings.clear()
        while self._backends:
            self._backends.pop().close()
            give_back()

    def _runner(self, binding: Binding, rows: int = 0) -> Callable[[], None]:
        """Make a function that runs a batch of zeros once, gathered and scattered as a batch is. Free axes are 1."""
        fill = rehearsal(self._spec, binding, rows or self.rows, smallest_tails(self._spec))
        wanted = tuple(i for i, output in enumerate(self._signature.outputs) if output.is_tensor)

        def run() -> None:
            fill()
            binding.run(wanted)

        return run

    def _in_turn(self, bindings: Sequence[Binding], begun: deque[Overlapping]) -> Callable[[], None]:
        """Make a function that runs a batch; where they can be begun it ends the one before, on the other Binding."""
        if not overlaps(bindings[0]):
            return self._runner(bindings[0])
        fills = [rehearsal(self._spec, each, self.rows, smallest_tails(self._spec)) for each in bindings]
        turns = cycle(zip(bindings, fills, strict=True))
        wanted = tuple(i for i, output in enumerate(self._signature.outputs) if output.is_tensor)

        def run() -> None:
            binding, fill = next(turns)
            fill()
            binding.begin(wanted)  # type: ignore[attr-defined]
            begun.append(binding)  # type: ignore[arg-type]
            if len(begun) > 1:
                begun.popleft().end()

        return run

    def _knee(self, binding: Binding) -> int:
        """Find the size of a batch that the model will mostly run in: the smallest of nearly the best time per row."""
        if not self._signature.batched:
            return 1
        costs, most, said = CostModel(), self._policy.max_batch_rows or 1, self._policy.allowed_rows
        end_ns = time.monotonic_ns() + SWEEP_NS
        for rows in said or [1 << power for power in range(most.bit_length())]:
            run = self._runner(binding, rows)
            for _ in range(RUNS):
                start_ns = time.monotonic_ns()
                run()
                now_ns = time.monotonic_ns()
                costs.observe((), rows, max(now_ns - start_ns, 1), now_ns)
            if now_ns + 2 * RUNS * (now_ns - start_ns) > end_ns:
                break
        return costs.knee_rows(())


def together(runs: Sequence[Callable[[], None]]) -> list[float]:
    """Repeat each on a thread of its own, at the same time and at least once. Returns: how often a second each ran.

    Raises: what one of them raised, or RuntimeError where there are not so many threads; none runs any more then.
    """
    rates = [0.0] * len(runs)
    errors: list[Exception] = []
    ready = threading.Barrier(len(runs))

    def repeat(place: int) -> None:
        count = 0
        try:
            runs[place]()
        except Exception as error:  # noqa: BLE001 - raised again by who waits for the thread
            errors.append(error)
            ready.abort()
            return
        try:
            ready.wait()
        except threading.BrokenBarrierError:
            return
        start_ns = now_ns = time.monotonic_ns()
        longest_ns = 0
        try:
            while not count or (now_ns - start_ns < TRIAL_NS and not errors):
                before_ns = now_ns
                runs[place]()
                now_ns = time.monotonic_ns()
                longest_ns = max(longest_ns, now_ns - before_ns)
                count += 1
        except Exception as error:  # noqa: BLE001
            errors.append(error)
            return
        if count > 1:
            # the machine may have stood still in the longest
            count, start_ns = count - 1, start_ns + longest_ns
        rates[place] = count / max((now_ns - start_ns) / 1e9, 1e-9)

    _await([threading.Thread(target=repeat, args=(place,), daemon=True) for place in range(len(runs))], ready)
    if errors:
        raise errors[0]
    return rates


def _await(threads: Sequence[threading.Thread], ready: threading.Barrier) -> None:
    """Start threads that meet, and wait until all have ended. Raises: RuntimeError where there are not so many."""
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        ready.abort()  # or those that have begun would wait for the others
        raise
    finally:
        for thread in (thread for thread in threads if thread.ident):
            thread.join()


def budget_bytes(spec: ModelSpec, device: str = "cpu") -> int:
    """Tell what a model may take with all its Instances: what the user said, or half of what is free.

    On a GPU a session beyond what there is is refused when it is loaded.
    """
    if device != "cpu":
        return int(spec.options.get(GPU_MEMORY, 0)) or 1 << 62
    if spec.memory_budget_bytes:
        return spec.memory_budget_bytes
    free = free_bytes()
    return 1 << 62 if free is None else free // 2


def count_instances(
    spec: ModelSpec, device: str, load: Callable[[int], Backend], threads: int | None
) -> tuple[Split, list[Backend], list[Trial]]:
    """Choose a Split for a model. Returns: that, its sessions, and what was tried.

    `load` opens a session of so many threads; `threads` as in `splits`.
    Raises: what `load` raises.
    """
    candidates = splits(device, usable_cpus(), threads)
    budget = budget_bytes(spec, device)
    trials = Trials(spec, load, candidates[0].threads, apart=device != "cpu")
    try:
        split, tried = choose(candidates, trials, budget)
        backends = trials.keep(split)
    finally:
        trials.close()
    logger.info("model %s on %s: %s", spec.name, device, evidence(split, tried, trials.rows))
    return split, backends, tried


def evidence(split: Split, tried: Sequence[Trial], rows: int) -> str:
    """Say in one line what was chosen and why."""
    if not tried:
        return f"{_words(split)}, since it cannot be measured"
    seen = ", ".join(f"{_words(trial.split)} {trial.rows_per_s:.0f} rows/s" for trial in tried)
    return f"{_words(split)}, of {seen}, in batches of {rows}"


def _words(split: Split) -> str:
    instances = f"{split.count} instance" + "s" * (split.count > 1)
    return f"{instances} x {split.threads} thread" + "s" * (split.threads > 1) if split.threads else instances
