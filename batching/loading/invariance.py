"""Invariance: whether the bytes of a row's answer depend on the other rows of its batch, found by running the model.

Kernels are chosen by shape, so rows change with the number of rows; at one fixed number, most models give a row the
same bytes at any position and with any neighbors. `set_invariant_size` finds such a number for a policy that asks for
it (called by opening.py); `probe` also reports what holds without one (`penstock check --invariance`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.backends.backend import Backend, Binding
from penstock.backends.signature import Signature
from penstock.batching.scheduling.costs import KNEE_FACTOR
from penstock.batching.shapes.derived import derived_names
from penstock.batching.spec import ModelSpec

from .random_rows import MAX_INTEGERS, NEIGHBOR_KINDS, Inputs, draw_inputs, make_neighbors, run_rows

logger = logging.getLogger("penstock.batching")

BUDGET_NS = 1_000_000_000
SIZES = (2, 4, 8, 16, 32)
"""The sizes to try, in addition to the largest."""
MIN_TRIALS = 8
"""Trials that a size must pass; as many more follow as its share of the time allows."""
MAX_TRIALS_NS = 4_000_000_000
"""What the required trials of one size may take: the model's load waits for them."""
RowBytes = list[tuple[bytes, ...]]
"""Per row, the bytes of each output."""


@dataclass(slots=True)
class ProbeResult:
    """What was found for one model.

    Units: rows. `fixed_sizes`: the sizes at which a row's bytes depend on nothing but the row, with the ns of a run.
    `natural_sizes`: the sizes, of those `tried_sizes`, at which rows have the same bytes as alone. `reason`: why
    nothing was probed.
    """

    fixed_sizes: dict[int, int]
    natural_sizes: tuple[int, ...] = ()
    tried_sizes: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        """Describe it in one line."""
        if self.reason:
            return f"not probed: {self.reason}"
        if not self.natural_sizes:
            summary = "not invariant"
        elif self.natural_sizes == self.tried_sizes:
            summary = f"invariant in all batches tried: {_format_sizes(self.natural_sizes)}"
        else:
            summary = f"invariant only in batches of {_format_sizes(self.natural_sizes)}"
        if not self.fixed_sizes:
            return f"{summary}, and at no fixed size tried: with strict invariance, each request would run alone"
        return f"{summary}; invariant at a fixed size of {_format_sizes(tuple(sorted(self.fixed_sizes)))}"


def set_invariant_size(spec: ModelSpec, backends: Sequence[Backend]) -> ModelSpec:
    """Complete a policy that requires invariance with the size at which every batch is to run.

    If no size holds, each request runs alone, unpadded. A request of more rows than the size runs in parts.
    """
    policy, signature = spec.policy, spec.signature
    if not policy.invariant or signature is None or not signature.batched:
        return spec
    start_ns = time.monotonic_ns()
    fixed_sizes: dict[int, int] | None = None
    reason = ""
    for backend in backends:
        result = probe(spec, backend, with_natural=False)
        reason = reason or result.reason
        fixed_sizes = (
            result.fixed_sizes
            if fixed_sizes is None
            else {size: ns for size, ns in fixed_sizes.items() if size in result.fixed_sizes}
        )
    elapsed_ms = (time.monotonic_ns() - start_ns) // 1_000_000
    if not fixed_sizes:
        explanation = reason or "no batch size was found in time at which answers do not depend on other requests"
        logger.info("model %s: each request runs alone: %s (probed in %d ms)", spec.name, explanation, elapsed_ms)
        return replace(spec, policy=replace(policy, cap_rows=1, preferred_rows=(), max_queue_delay_us=0))
    size = _best_size(fixed_sizes)
    text = "model %s: every batch runs at %d rows, where answers do not depend on its other requests (probed in %d ms)"
    logger.info(text, spec.name, size, elapsed_ms)
    fixed_policy = replace(
        policy, max_batch_rows=size, cap_rows=size, allowed_rows=(size,), preferred_rows=(), split=True
    )
    return replace(spec, policy=fixed_policy)


def _best_size(fixed_sizes: dict[int, int]) -> int:
    """Choose the smallest size whose time per row is near the best, as the CostModel does."""
    best_ns = min(ns / size for size, ns in fixed_sizes.items())
    return min(size for size, ns in fixed_sizes.items() if ns / size <= best_ns * KNEE_FACTOR)


def probe(spec: ModelSpec, backend: Backend, *, with_natural: bool = True) -> ProbeResult:
    """Run a model on random rows, at different positions and with different neighbors, for about BUDGET_NS.

    `with_natural`: also compare batches of every size with rows that run alone. Never raises; the result for a model
    that cannot run on random rows has a reason.
    """
    signature, max_rows = spec.binding_signature or spec.signature, spec.policy.max_batch_rows or 1
    max_rows = min(max_rows, spec.policy.cap_rows or max_rows)
    reason = _obstacle(spec, signature) if max_rows > 1 else "no two rows share a batch"
    if reason or signature is None:
        return ProbeResult({}, reason=reason)
    binding = backend.bind(signature, max_rows)
    for max_integer in MAX_INTEGERS:
        rows = draw_inputs(signature, max_rows, max_integer)
        try:
            _run(signature, binding, [array[:2] for array in rows])
        except Exception as error:  # noqa: BLE001 - random numbers may not be valid indices
            reason = f"it does not run on random rows: {error}"
            continue
        run = _RowRunner(signature, binding, max_integer)
        sizes = [size for size in spec.policy.allowed_rows or (*SIZES, max_rows) if 1 < size <= max_rows]
        result = ProbeResult(_find_fixed(run, rows, sorted(set(sizes))))
        if with_natural:
            with contextlib.suppress(Exception):  # a size that it cannot run
                result.tried_sizes, result.natural_sizes = _find_natural(run, rows, max_rows)
        return result
    return ProbeResult({}, reason=reason)


def _obstacle(spec: ModelSpec, signature: Signature | None) -> str:
    if signature is None or not signature.batched:
        return "it has no batch axis, so requests never share a batch"
    if derived_names(spec) or any(each.ragged or each.is_shape for each in (*signature.inputs, *signature.outputs)):
        return "it has inputs that describe the batch, ragged tensors, or values that rows share"
    for each in signature.inputs:
        if each.datatype == "BYTES":
            return f"input '{each.name}' is BYTES, for which no random values can be generated"
        if -1 in each.shape[1:]:
            return f"input '{each.name}' has a free axis, and a result for one length does not hold for another"
    return ""


class _RowRunner:
    """Runs a model and returns the bytes of each row."""

    def __init__(self, signature: Signature, binding: Binding, max_integer: int) -> None:
        self.signature = signature
        self.max_integer = max_integer
        self._binding = binding

    def __call__(self, rows: Inputs) -> RowBytes:
        return _run(self.signature, self._binding, rows)


def _run(signature: Signature, binding: Binding, rows: Inputs) -> RowBytes:
    outputs = run_rows(binding, rows, tuple(range(len(signature.outputs))))
    if any(len(output) != len(rows[0]) for output in outputs):
        raise ValueError("its outputs do not have as many rows as its inputs")
    return list(zip(*[map(_bytes, output) for output in outputs], strict=True))


def _bytes(row: Any) -> bytes:
    numeric = isinstance(row, np.ndarray | np.generic) and not row.dtype.hasobject
    return row.tobytes() if numeric else repr(row).encode()


def _find_fixed(run: _RowRunner, rows: Inputs, sizes: Sequence[int]) -> dict[int, int]:
    """Find the sizes that hold, in ascending order; time that small ones leave goes to the larger."""
    end_ns = time.monotonic_ns() + BUDGET_NS
    passed = {}
    for remaining, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        now_ns = time.monotonic_ns()
        if now_ns > end_ns:
            break
        run_ns = _probe_size(run, [array[:size] for array in rows], now_ns + (end_ns - now_ns) // remaining)
        if run_ns:
            passed[size] = run_ns
    return passed


def _probe_size(run: _RowRunner, rows: Inputs, deadline_ns: int) -> int:
    """Return the ns of the fastest run if rows keep their bytes at all positions and neighbors tried, else 0."""
    start_ns = time.monotonic_ns()
    try:
        answers = run(rows)
    except Exception:  # noqa: BLE001 - it cannot run this size
        return 0
    best_ns = time.monotonic_ns() - start_ns
    if best_ns * MIN_TRIALS > MAX_TRIALS_NS:
        return 0
    passed_count = 0
    for trial, origin in _trials(rows, run.max_integer, run.signature):
        start_ns = time.monotonic_ns()
        if passed_count >= MIN_TRIALS and start_ns > deadline_ns:
            break
        try:
            moved = run(trial)
        except Exception:  # noqa: BLE001, S112 - an error caused by a neighbor changes no bytes
            continue
        best_ns = min(best_ns, time.monotonic_ns() - start_ns)
        if any(moved[position] != answers[row] for position, row in origin):
            return 0
        passed_count += 1
    return best_ns if passed_count >= MIN_TRIALS else 0


def _trials(rows: Inputs, max_integer: int, signature: Signature) -> Iterator[tuple[Inputs, list[tuple[int, int]]]]:
    """Yield batches of known rows moved or among other neighbors, with the position and the number of each known row.

    The most revealing ones come first.
    """
    size = len(rows[0])
    halves = [range(0, size, 2), range(1, size, 2)]
    shifts = list(dict.fromkeys((0, 1, size // 2, size - 1, *range(size))))
    for shift in shifts[:4]:
        yield _rotated(rows, shift)
    for number in range(2):
        for index, kind in enumerate(NEIGHBOR_KINDS):
            known_rows = halves[(index + number) % 2]
            others = [
                make_neighbors(spec, array, kind, max_integer)
                for spec, array in zip(signature.inputs, rows, strict=True)
            ]
            for array, known in zip(others, rows, strict=True):
                array[known_rows] = known[known_rows]
            yield others, [(position, position) for position in known_rows]
    for shift in shifts[4:]:
        yield _rotated(rows, shift)


def _rotated(rows: Inputs, shift: int) -> tuple[Inputs, list[tuple[int, int]]]:
    size = len(rows[0])
    return [np.roll(array, shift, axis=0) for array in rows], [((row + shift) % size, row) for row in range(size)]


def _find_natural(run: _RowRunner, rows: Inputs, max_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compare batches of different sizes with their rows alone. Returns: the sizes tried, and those that held."""
    end_ns = time.monotonic_ns() + BUDGET_NS
    single_answers: RowBytes = []
    while len(single_answers) < max_rows and (len(single_answers) < SIZES[-1] // 2 or time.monotonic_ns() < end_ns):
        single_answers += run([array[len(single_answers) : len(single_answers) + 1] for array in rows])
    end_ns = time.monotonic_ns() + BUDGET_NS
    is_same_by_size: dict[int, bool] = {}
    for size in dict.fromkeys((*SIZES, *range(2, max_rows + 1))):
        if size <= max_rows and (not is_same_by_size or time.monotonic_ns() < end_ns):
            answers = run([array[:size] for array in rows])
            is_same_by_size[size] = all(one == other for one, other in zip(answers, single_answers, strict=False))
    return tuple(sorted(is_same_by_size)), tuple(sorted(size for size, is_same in is_same_by_size.items() if is_same))


def _format_sizes(sizes: Sequence[int]) -> str:
    if len(sizes) > 2 and list(sizes) == list(range(sizes[0], sizes[-1] + 1)):
        return f"{sizes[0]} to {sizes[-1]} rows"
    return f"{', '.join(map(str, sizes))} rows"
