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
from penstock.batching.devices.memory import free_bytes, resident_bytes, trim_heap
from penstock.batching.scheduling.costs import CostModel

from .completion import complete
from .dummy_inputs import dummy_fill, smallest_row_shapes

if TYPE_CHECKING:
    from penstock.backends.backend import Backend, Binding, OverlappingBinding
    from penstock.backends.signature import Signature
    from penstock.batching.spec import ModelSpec

logger = logging.getLogger("penstock.batching")

MIN_SPEEDUP = 1.1
"""More Instances are kept if they process this many times the rows per second of fewer."""
TRIAL_NS = 250_000_000
SWEEP_NS = 400_000_000
BUDGET_NS = 2_000_000_000
RUNS_PER_SIZE = 3
MAX_ON_GPU = 4
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
    memory_growth_bytes: int


def candidate_splits(device: str, cpus: int, threads: int | None) -> list[Split]:
    """List the Splits to try on a device, fewest Instances first. `threads`: as configured, None if unset.

    If unset, the CPUs are divided: the session has fewer threads by those that the Instances bring, so that together
    there are as many as CPUs. On two CPUs that is one Instance of two threads, or two of one.
    """
    if device != "cpu":
        return [Split(count, threads or 0) for count in range(1, MAX_ON_GPU + 1)]
    counts = [1]
    while counts[-1] < cpus:
        counts.append(min(2 * counts[-1], cpus))
    return [Split(count, cpus - count + 1 if threads is None else threads) for count in counts]


def choose_split(
    candidates: Iterable[Split], measure: Callable[[Split], Trial | None], budget_bytes: int
) -> tuple[Split, list[Trial]]:
    """Return the last Split that was worth its memory, and all that were tried; the first if none can be measured.

    `measure` returns None for a Split that cannot be run, or not in time.
    """
    best: Split | None = None
    trials: list[Trial] = []
    for split in candidates:
        if best is not None and _predict_growth(trials, split) > budget_bytes:
            break
        trial = measure(split)
        best = best or split
        if trial is None:
            break
        trials.append(trial)
        if len(trials) > 1 and (
            trial.rows_per_s < MIN_SPEEDUP * trials[-2].rows_per_s or trial.memory_growth_bytes > budget_bytes
        ):
            break
        best = split
    if best is None:
        raise ValueError("there are no candidates to choose from")
    return best, trials


def _predict_growth(trials: Sequence[Trial], split: Split) -> float:
    """Predict the memory growth from that of each Instance added so far; 0 while that is unknown."""
    if len(trials) < 2:
        return 0
    previous, last = trials[-2:]
    growth_bytes, count = last.memory_growth_bytes - previous.memory_growth_bytes, last.split.count
    bytes_per_instance = growth_bytes / (count - previous.split.count)
    return last.memory_growth_bytes + bytes_per_instance * (split.count - last.split.count)


class Trials:
    """Measures Splits of one model on one device, for `choose_split`. Holds the sessions of the last one.

    `load` opens a session with a number of threads; the first is opened at once. `own_sessions`: each Instance has its
    own. `rows` is the batch size, determined with the first Split.
    """

    def __init__(
        self, spec: ModelSpec, load: Callable[[int], Backend], threads: int, *, own_sessions: bool = False
    ) -> None:
        self._name = spec.name
        self._load = load
        self._own_sessions = own_sessions
        self._threads = threads
        self._bindings: list[list[Binding]] = []
        self._deadline_ns = time.monotonic_ns() + BUDGET_NS
        self._baseline_bytes = resident_bytes()
        self._backends = [load(threads)]
        self.rows = 0
        try:
            completed = complete(spec, self._backends[0].graph)
        except BaseException:
            self.close()
            raise
        self._spec = completed
        self._signature: Signature = completed.signature  # type: ignore[assignment]
        self._bound = completed.binding_signature or self._signature
        self._policy = completed.policy

    def __call__(self, split: Split) -> Trial | None:
        """Run a Split for a while; None if that fails or the total time is used up."""
        if time.monotonic_ns() > self._deadline_ns:
            return None
        try:
            self.session(split.threads)
            while len(self._bindings) < split.count:
                self._bindings.append(self._bind())
            if not self.rows:
                self.rows = self._find_knee(self._bindings[0][0])
            in_flight: list[deque[OverlappingBinding]] = [deque() for _ in self._bindings]
            try:
                rates = run_concurrently(list(map(self._pipelined_runner, self._bindings, in_flight)))
            finally:
                for queue in in_flight:
                    while queue:
                        queue.popleft().end()
        except Exception as error:  # noqa: BLE001 - fails on zeros or for lack of memory, which requests may not
            logger.info("model %s: %d instances cannot be measured: %s", self._name, split.count, error)
            return None
        return Trial(split, self.rows * sum(rates), self._memory_growth_bytes())

    def _memory_growth_bytes(self) -> int:
        """Return the growth of the device's memory if known, otherwise of this process's."""
        on_device = sum(getattr(backend, "device_bytes", 0) for backend in self._backends)
        return on_device or max(resident_bytes() - self._baseline_bytes, 0)

    def session(self, threads: int) -> Backend:
        """Return the first session with this many threads, opening it unless the current one has as many."""
        if not self._backends or self._threads != threads:
            self.close()
            self._baseline_bytes = resident_bytes()
            self._backends, self._threads = [self._load(threads)], threads
        return self._backends[0]

    def _bind(self) -> list[Binding]:
        """Allocate one more Instance's Bindings, in its own session if `own_sessions`."""
        if self._own_sessions and self._bindings:
            self._backends.append(self._load(self._threads))
        bindings = [self._backends[-1].bind(self._bound, self._policy.max_batch_rows or 1)]
        if supports_overlap(bindings[0]):
            bindings.append(self._backends[-1].bind(self._bound, self._policy.max_batch_rows or 1))
        return bindings

    def take_backends(self, split: Split) -> list[Backend]:
        """Return those sessions of the chosen Split that are open; the caller owns them from then on."""
        self.session(split.threads)
        session_count = split.count if self._own_sessions else 1
        backends, self._backends = self._backends[:session_count], self._backends[session_count:]
        return backends

    def close(self) -> None:
        """Free everything held."""
        self._bindings.clear()
        while self._backends:
            self._backends.pop().close()
            trim_heap()

    def _runner(self, binding: Binding, rows: int = 0) -> Callable[[], None]:
        """Make a function that runs a batch of zeros once, gathered and scattered like a batch. Free axes are 1."""
        fill = dummy_fill(self._spec, binding, rows or self.rows, smallest_row_shapes(self._spec))
        wanted = tuple(i for i, output in enumerate(self._signature.outputs) if output.is_tensor)

        def run() -> None:
            fill()
            binding.run(wanted)

        return run

    def _pipelined_runner(
        self, bindings: Sequence[Binding], in_flight: deque[OverlappingBinding]
    ) -> Callable[[], None]:
        """Make a function that runs a batch; if Bindings overlap, it begins one and ends the previous on the other."""
        if not supports_overlap(bindings[0]):
            return self._runner(bindings[0])
        fills = [dummy_fill(self._spec, each, self.rows, smallest_row_shapes(self._spec)) for each in bindings]
        turns = cycle(zip(bindings, fills, strict=True))
        wanted = tuple(i for i, output in enumerate(self._signature.outputs) if output.is_tensor)

        def run() -> None:
            binding, fill = next(turns)
            fill()
            binding.begin(wanted)  # type: ignore[attr-defined]
            in_flight.append(binding)  # type: ignore[arg-type]
            if len(in_flight) > 1:
                in_flight.popleft().end()

        return run

    def _find_knee(self, binding: Binding) -> int:
        """Find the batch size that the model will mostly run with: the smallest of nearly the best time per row."""
        if not self._signature.batched:
            return 1
        costs, max_rows, allowed_rows = CostModel(), self._policy.max_batch_rows or 1, self._policy.allowed_rows
        end_ns = time.monotonic_ns() + SWEEP_NS
        for rows in allowed_rows or [1 << power for power in range(max_rows.bit_length())]:
            run = self._runner(binding, rows)
            for _ in range(RUNS_PER_SIZE):
                start_ns = time.monotonic_ns()
                run()
                now_ns = time.monotonic_ns()
                costs.observe((), rows, max(now_ns - start_ns, 1), now_ns)
            if now_ns + 2 * RUNS_PER_SIZE * (now_ns - start_ns) > end_ns:
                break
        return costs.knee_rows(())


def run_concurrently(runs: Sequence[Callable[[], None]]) -> list[float]:
    """Repeat each in its own thread, concurrently and at least once. Returns: runs per second of each.

    Raises: what one of them raised, or RuntimeError if threads cannot be started; none is running any more then.
    """
    rates = [0.0] * len(runs)
    errors: list[Exception] = []
    ready = threading.Barrier(len(runs))

    def repeat(index: int) -> None:
        run_count = 0
        try:
            runs[index]()
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
            while not run_count or (now_ns - start_ns < TRIAL_NS and not errors):
                before_ns = now_ns
                runs[index]()
                now_ns = time.monotonic_ns()
                longest_ns = max(longest_ns, now_ns - before_ns)
                run_count += 1
        except Exception as error:  # noqa: BLE001
            errors.append(error)
            return
        if run_count > 1:
            # the machine may have stood still during the longest run
            run_count, start_ns = run_count - 1, start_ns + longest_ns
        rates[index] = run_count / max((now_ns - start_ns) / 1e9, 1e-9)

    _run_threads([threading.Thread(target=repeat, args=(index,), daemon=True) for index in range(len(runs))], ready)
    if errors:
        raise errors[0]
    return rates


def _run_threads(threads: Sequence[threading.Thread], ready: threading.Barrier) -> None:
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

    `load` opens a session with a number of threads; `threads` as in `candidate_splits`.
    Raises: what `load` raises.
    """
    candidates = candidate_splits(device, usable_cpus(), threads)
    budget = budget_bytes(spec, device)
    trials = Trials(spec, load, candidates[0].threads, own_sessions=device != "cpu")
    try:
        split, tried_splits = choose_split(candidates, trials, budget)
        backends = trials.take_backends(split)
    finally:
        trials.close()
    logger.info("model %s on %s: %s", spec.name, device, describe_choice(split, tried_splits, trials.rows))
    return split, backends, tried_splits


def describe_choice(split: Split, trials: Sequence[Trial], rows: int) -> str:
    """Say in one line what was chosen and why."""
    if not trials:
        return f"{_describe(split)} (throughput could not be measured)"
    results = ", ".join(f"{_describe(trial.split)} {trial.rows_per_s:.0f} rows/s" for trial in trials)
    return f"{_describe(split)}, chosen from {results}, in batches of {rows}"


def _describe(split: Split) -> str:
    instances = f"{split.count} instance" + "s" * (split.count > 1)
    return f"{instances} x {split.threads} thread" + "s" * (split.threads > 1) if split.threads else instances
