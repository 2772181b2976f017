"""Counting: chooses by measurement how many Instances a model gets on a device (`InstanceGroup.count` 0, "auto").

Called by opening.py while a model is loaded. The reasons, with figures, are in docs/adr/0010-sharing-a-device.md.
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

from penstock.backends.backend import supports_overlap
from penstock.backends.cpus import usable_cpus
from penstock.batching.devices.memory import free_bytes, give_back, resident_bytes
from penstock.batching.scheduling.costs import CostModel

from .completion import complete
from .rehearsal import rehearsal, smallest_tails

if TYPE_CHECKING:
    from penstock.backends.backend import Backend, Binding, OverlappingBinding
    from penstock.backends.signature import Signature
    from penstock.batching.spec import ModelSpec

logger = logging.getLogger("penstock.batching")

WORTH = 1.1
"""More Instances are kept if they process this many times the rows per second of fewer."""
TRIAL_NS = 250_000_000
SWEEP_NS = 400_000_000
BUDGET_NS = 2_000_000_000
RUNS = 3
MOST_ON_GPU = 4
GPU_MEMORY = "penstock.gpu_memory_bytes"
"""The option for how much memory a model may use on a GPU."""


@dataclass(frozen=True, slots=True)
class Split:
    """A number of Instances and of threads per session; 0 threads means that the runtime decides.

    On a CPU they share one session, and each brings one of its threads; on other devices each has its own.
    """

    count: int
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a Split: its total rows/s, and the memory growth since before the model was loaded."""

    split: Split
    rows_per_s: float
    grown_bytes: int


def splits(device: str, cpus: int, threads: int | None) -> list[Split]:
    """List the Splits to try on a device, fewest Instances first. `threads`: as configured, None if unset.

    If unset, the CPUs are divided: the session has fewer threads by those that the Instances bring, so that together
    there are as many as CPUs. On two CPUs that is one Instance of two threads, or two of one.
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
    """Return the last Split that was worth its memory, and all that were tried; the first if none can be measured.

    `measure` returns None for a Split that cannot be run, or not in time.
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
        raise ValueError("there are no candidates to choose from")
    return best, tried


def _grows_to(tried: Sequence[Trial], split: Split) -> float:
    """Predict the memory growth from that of each Instance added so far; 0 while that is unknown."""
    if len(tried) < 2:
        return 0
    before, last = tried[-2:]
    each = (last.grown_bytes - before.grown_bytes) / (last.split.count - before.split.count)
    return last.grown_bytes + each * (split.count - last.split.count)


class Trials:
    """Measures Splits of one model on one device, for `choose`. Holds the sessions of the last one.

    `load` opens a session with a number of threads; the first is opened at once. `apart`: each Instance has its own.
    `rows` is the batch size, determined with the first Split.
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
        """Run a Split for a while; None if that fails or the total time is used up."""
        if time.monotonic_ns() > self._end_ns:
            return None
        try:
            self.session(split.threads)
            while len(self._bindings) < split.count:
                self._bindings.append(self._bind())
            if not self.rows:
                self.rows = self._knee(self._bindings[0][0])
            under_way: list[deque[OverlappingBinding]] = [deque() for _ in self._bindings]
            try:
                rates = together(list(map(self._in_turn, self._bindings, under_way)))
            finally:
                for begun in under_way:
                    while begun:
                        begun.popleft().end()
        except Exception as error:  # noqa: BLE001 - fails on zeros or for lack of memory, which requests may not
            logger.info("model %s: %d instances cannot be measured: %s", self._name, split.count, error)
            return None
        return Trial(split, self.rows * sum(rates), self._grown_bytes())

    def _grown_bytes(self) -> int:
        """Return the growth of the device's memory if known, otherwise of this process's."""
        on_device = sum(getattr(backend, "device_bytes", 0) for backend in self._backends)
        return on_device or max(resident_bytes() - self._before_bytes, 0)

    def session(self, threads: int) -> Backend:
        """Return the first session with this many threads, opening it unless the current one has as many."""
        if not self._backends or self._threads != threads:
            self.close()
            self._before_bytes = resident_bytes()
            self._backends, self._threads = [self._load(threads)], threads
        return self._backends[0]

    def _bind(self) -> list[Binding]:
        """Allocate one more Instance's Bindings, in its own session if `apart`."""
        if self._apart and self._bindings:
            self._backends.append(self._load(self._threads))
        bindings = [self._backends[-1].bind(self._bound, self._policy.max_batch_rows or 1)]
        if supports_overlap(bindings[0]):
            bindings.append(self._backends[-1].bind(self._bound, self._policy.max_batch_rows or 1))
        return bindings

    def keep(self, split: Split) -> list[Backend]:
        """Return those sessions of the chosen Split that are open; the caller owns them from then on."""
        self.session(split.threads)
        kept = split.count if self._apart else 1
        backends, self._backends = self._backends[:kept], self._backends[kept:]
        return backends

    def close(self) -> None:
        """Free everything held."""
        self._bindings.clear()
        while self._backends:
            self._backends.pop().close()
            give_back()

    def _runner(self, binding: Binding, rows: int = 0) -> Callable[[], None]:
        """Make a function that runs a batch of zeros once, gathered and scattered like a batch. Free axes are 1."""
        fill = rehearsal(self._spec, binding, rows or self.rows, smallest_tails(self._spec))
        wanted = tuple(i for i, output in enumerate(self._signature.outputs) if output.is_tensor)

        def run() -> None:
            fill()
            binding.run(wanted)

        return run

    def _in_turn(self, bindings: Sequence[Binding], begun: deque[OverlappingBinding]) -> Callable[[], None]:
        """Make a function that runs a batch; if Bindings overlap, it begins one and ends the previous on the other."""
        if not supports_overlap(bindings[0]):
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
        """Find the batch size that the model will mostly run with: the smallest of nearly the best time per row."""
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
    """Repeat each in its own thread, concurrently and at least once. Returns: runs per second of each.

    Raises: what one of them raised, or RuntimeError if threads cannot be started; none is running any more then.
    """
    rates = [0.0] * len(runs)
    errors: list[Exception] = []
    ready = threading.Barrier(len(runs))

    def repeat(place: int) -> None:
        count = 0
        try:
            runs[place]()
        except Exception as error:  # noqa: BLE001 - raised again by the waiting thread
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
            # the machine may have stood still during the longest run
            count, start_ns = count - 1, start_ns + longest_ns
        rates[place] = count / max((now_ns - start_ns) / 1e9, 1e-9)

    _await([threading.Thread(target=repeat, args=(place,), daemon=True) for place in range(len(runs))], ready)
    if errors:
        raise errors[0]
    return rates


def _await(threads: Sequence[threading.Thread], ready: threading.Barrier) -> None:
    """Start threads that meet at a barrier, and wait until all have ended. Raises: RuntimeError if one cannot start."""
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:
        ready.abort()  # otherwise those that have started would wait for the others
        raise
    finally:
        for thread in (thread for thread in threads if thread.ident):
            thread.join()


def budget_bytes(spec: ModelSpec, device: str = "cpu") -> int:
    """Return the memory for all Instances of a model: as configured, or half of what is free.

    On a GPU, loading a session that exceeds free memory fails.
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
    """Choose a Split for a model. Returns: the Split, its sessions, and what was tried.

    `load` opens a session with a number of threads; `threads` as in `splits`.
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
        return f"{_words(split)} (throughput could not be measured)"
    seen = ", ".join(f"{_words(trial.split)} {trial.rows_per_s:.0f} rows/s" for trial in tried)
    return f"{_words(split)}, chosen from {seen}, in batches of {rows}"


def _words(split: Split) -> str:
    instances = f"{split.count} instance" + "s" * (split.count > 1)
    return f"{instances} x {split.threads} thread" + "s" * (split.threads > 1) if split.threads else instances
